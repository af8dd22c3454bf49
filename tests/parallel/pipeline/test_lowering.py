"""Sends and receives of every schedule, and damage that is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from parallel.pipeline.table_run import runs

from penteract.errors import UserError
from penteract.parallel.pipeline.lowering import Lowered, Lowering, channels, check, lower
from penteract.parallel.pipeline.schedules import (
    SCHEDULES,
    Action,
    Pair,
    Schedule,
    Step,
    schedule,
)


def sizes() -> list[tuple[int, int]]:
    """(ranks, micro-batches) around those where other systems hang."""
    around = [(p, k * p + d) for p in (1, 2, 3, 4, 6) for k in (0, 1, 2) for d in (-1, 0, 1)]
    return [(p, m) for p, m in around if m > 0]


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_every_schedule_runs_under_blocking_sends(kind: str, chunks: int) -> None:
    if SCHEDULES[kind].chunks not in (None, chunks):
        return
    for p, m in sizes():
        planned = schedule(kind, ranks=p, chunks=chunks, micro_batches=m)
        lowered = lower(planned)
        check(planned, lowered)
        assert runs(planned, lowered), planned
        forwards = planned.forward_only()
        check(forwards)
        assert runs(forwards, lower(forwards))


def test_receives_are_posted_before_the_compute_that_precedes_them() -> None:
    lowered = lower(schedule("1f1b", ranks=2, micro_batches=4))
    for program in lowered:
        taken = {m: k for k, low in enumerate(program) for m in low.take}
        for k, low in enumerate(program):
            assert all(k <= max(taken[m] - 1, 0) for m in low.post)


def test_activations_and_gradients_share_a_channel_in_the_order_sent() -> None:
    # Rank 0 → 1 carries outputs of stages 0 and 2, and gradients of stage 2's input.
    planned = schedule("interleaved", ranks=2, chunks=2, micro_batches=4)
    lowered = lower(planned)
    assert channels(lowered) == ((0, 1), (1, 0))
    sent = [m for low in lowered[0] for m in low.send]
    assert {(m.kind, m.stage) for m in sent} == {("F", 0), ("F", 2), ("B", 2)}
    assert [m for low in lowered[1] for m in low.post] == sent


def test_channels_are_only_those_in_use() -> None:
    loop = lower(schedule("1f1b", ranks=3, micro_batches=2))
    assert channels(loop) == ((0, 1), (1, 0), (1, 2), (2, 1))
    ring = lower(schedule("interleaved", ranks=3, chunks=2, micro_batches=3))
    assert (2, 0) in channels(ring)
    assert (0, 2) in channels(ring)
    assert channels(lower(schedule("gpipe", ranks=1, chunks=2, micro_batches=2))) == ()


def edited(
    lowered: Lowering, rank: int, edit: Callable[[list[Lowered]], None]
) -> tuple[tuple[Lowered, ...], ...]:
    program = list(lowered[rank])
    edit(program)
    return (*lowered[:rank], tuple(program), *lowered[rank + 1 :])


PLANNED = schedule("1f1b", ranks=2, micro_batches=4)


def refused(lowered: Lowering, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(PLANNED, lowered)


def test_a_dropped_send_is_named() -> None:
    def drop(program: list[Lowered]) -> None:
        program[1] = replace(program[1], send=())

    refused(
        edited(lower(PLANNED), 0, drop),
        r"rank 0, step 1 \(F of stage 0, micro-batch 1\) does not send .*from rank 0 to rank 1",
    )


def test_a_dropped_receive_is_named() -> None:
    lowered = lower(PLANNED)
    last = lowered[1][-2].take[0]

    def drop(program: list[Lowered]) -> None:
        for k, low in enumerate(program):
            program[k] = replace(low, post=tuple(m for m in low.post if m != last))

    refused(
        edited(lowered, 1, drop), r"rank 1, step 6 waits for .*micro-batch 3.* before its receive"
    )


def test_swapped_receives_are_named() -> None:
    def swap(program: list[Lowered]) -> None:
        posts = [m for low in program for m in low.post]
        posts[:2] = reversed(posts[:2])
        program[:] = [replace(low, post=()) for low in program]
        program[0] = replace(program[0], post=tuple(posts))

    refused(
        edited(lower(PLANNED), 1, swap),
        r"rank 1: receive 0 from rank 0 is .*micro-batch 1\).* but sent is .*micro-batch 0\)",
    )


def test_a_lost_step_is_named() -> None:
    refused(
        edited(lower(PLANNED), 0, lambda program: program.pop(2) and None),
        "rank 0, step 2: the table has B of stage 0, micro-batch 0, lowered is F of stage 0",
    )
    refused(lower(PLANNED)[:1], "1 lowered programs for 2 ranks")


def test_receives_that_come_too_late_block_both_senders() -> None:
    # Rank 0 sends a forward while rank 1 sends a gradient, each with its receive after its send.
    late = tuple(
        tuple(replace(low, post=low.take) for low in program) for program in lower(PLANNED)
    )
    assert not runs(PLANNED, late)
    refused(late, "wait for each other: rank 0 at step 1 cannot send .*; rank 1 at step 1 cannot")


def own(*programs: list[Step], placement: tuple[int, ...], m: int) -> Schedule:
    return Schedule("mine", len(programs), m, placement, tuple(map(tuple, programs)))


def each(stage: int, kinds: str, m: int = 2) -> list[Step]:
    return [Action(kind, stage, i) for kind in kinds for i in range(m)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("planned", "message"),
    [
        (
            own(each(0, "FB"), [], placement=(0, 1), m=2),
            "rank 1: stage 1 has no forward F of .*0, 1",
        ),
        (
            own(each(0, "FIW")[:-1], placement=(0,), m=2),
            "rank 0: stage 0 has no weight gradient W after its I of micro-batch 1",
        ),
        (
            own(each(0, "FB")[:-1], placement=(0,), m=2),
            r"rank 0: stage 0 has no backward \(B, or I and W\) of micro-batch 1",
        ),
        (own(each(0, "FBW"), placement=(0,), m=2), "action 4: W of .* has no I"),
        (own(each(0, "FBI"), placement=(0,), m=2), "action 4: I of .* is done before"),
        (own(each(0, "FFB"), placement=(0,), m=2), "action 2: F of .* is done before"),
        (
            own(each(0, "FWI"), placement=(0,), m=2),
            "action 2: W of .* needs B of .* come before it",
        ),
        (own(each(0, "BF"), placement=(0,), m=2), "action 0: B of stage 0.* needs F of stage 0"),
        (own(each(0, "FB", 3), placement=(0,), m=2), "action 2: F.*micro-batches are 0 to 1"),
        (own(each(1, "FB"), placement=(0,), m=2), "action 0: F of stage 1.*stages are 0 to 0"),
        (own(each(0, "FX"), placement=(0,), m=2), "action 2: an action is F, B, I or W, not 'X'"),
        (
            own(each(1, "FB"), each(0, "FB"), placement=(0, 1), m=2),
            "rank 0, action 0: F of stage 1, micro-batch 0 belongs to rank 1",
        ),
        (own(each(0, "FB"), [], placement=(0,), m=2), r"on ranks \[0\]; each rank from 0 to 1"),
        (
            own([Pair(Action("F", 0, 0), Action("B", 0, 0))], placement=(0,), m=1),
            "rank 0, action 0: B of stage 0, micro-batch 0 needs F",
        ),
        (
            own(
                [*each(0, "F", 1), Pair(Action("B", 0, 0), Action("F", 0, 1))], placement=(0,), m=2
            ),
            "rank 0, action 1: a pair is a forward F and a backward",
        ),
        (
            own(
                [*each(0, "F"), *each(2, "F"), *each(2, "B"), *each(0, "B")],
                [Action("F", 1, 1), *each(1, "B"), Action("F", 1, 0)],
                placement=(0, 1, 0),
                m=2,
            ),
            "rank 1, action 1: B of stage 1, micro-batch 0 needs F of stage 1, micro-batch 0",
        ),
        (
            own([*each(2, "F", 1), *each(0, "F", 1)], each(1, "F", 1), placement=(0, 1, 0), m=1),
            "wait for each other: rank 0 at step 0 waits for .*F of stage 1.*; rank 1 at step 0",
        ),
    ],
)
def test_a_wrong_table_is_refused_by_name(planned: Schedule, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(planned)


def test_a_large_table_is_proved() -> None:
    """In about two seconds: quadratic in its steps it would be minutes."""
    check(schedule("interleaved", ranks=16, chunks=4, micro_batches=128))
