"""Every schedule on a grid of sizes: complete, in order, and as short and as small as it says."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest

from penteract.errors import UserError
from penteract.parallel.pipeline.schedules import (
    SCHEDULES,
    Action,
    Pair,
    Schedule,
    actions,
    schedule,
)
from penteract.parallel.pipeline.timeline import Timeline, timeline

SPLIT = {"zb-h1", "zb-v", "dualpipe-v"}


def grid(kind: str, ranks: range = range(1, 9)) -> Iterator[Schedule]:
    """Up to 4p micro-batches: all of them for few ranks, those around multiples for more."""
    allowed = SCHEDULES[kind].chunks
    for p in ranks:
        for v in [allowed] if allowed else range(1, 5):
            around = {k * p + d for k in range(5) for d in (-1, 0, 1, 2)}
            for m in range(1, 4 * p + 1):
                if p <= 4 or m in around:
                    yield schedule(kind, ranks=p, chunks=v, micro_batches=m)


def chunks_of(planned: Schedule) -> int:
    return len(planned.placement) // planned.ranks


def idle(found: Timeline) -> set[float]:
    """Idle time of each rank, as a set: every rank has the same work in all schedules here."""
    return {found.makespan - sum(s.end - s.start for s in spans) for spans in found.spans}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_action_is_there_once_on_its_rank(kind: str) -> None:
    for planned in grid(kind):
        p, v = planned.ranks, chunks_of(planned)
        if SCHEDULES[kind].chunks == 2:
            assert planned.placement == (*range(p), *range(p - 1, -1, -1))
        else:
            assert planned.placement == tuple(s % p for s in range(p * v))
        counts: Counter[Action] = Counter()
        for rank, program in enumerate(planned.programs):
            counts.update(actions(program))
            assert {planned.placement[a.stage] for a in actions(program)} == {rank}
            listed = list(actions(program))
            place = {a: k for k, a in enumerate(listed)}
            for a in listed:
                if a.kind == "W":
                    assert place[Action("I", a.stage, a.micro_batch)] < place[a]
        for s, i in itertools.product(range(p * v), range(planned.micro_batches)):
            here = [counts.pop(Action(kind, s, i), 0) for kind in "FBIW"]
            assert here in ([1, 1, 0, 0], [1, 0, 1, 1] if kind in SPLIT else None), (planned, s, i)
        assert not counts


@pytest.mark.parametrize("kind", SCHEDULES)
def test_forward_only_keeps_the_order_of_the_forwards(kind: str) -> None:
    planned = schedule(kind, ranks=3, chunks=SCHEDULES[kind].chunks or 2, micro_batches=7)
    bare = planned.forward_only()
    for program, forwards in zip(planned.programs, bare.programs, strict=True):
        assert forwards == tuple(a for a in actions(program) if a.kind == "F")
    assert timeline(bare).makespan > 0


def test_bubbles_are_those_of_the_papers() -> None:
    for kind in ("gpipe", "1f1b", "interleaved"):
        for planned in grid(kind):
            p, m, v = planned.ranks, planned.micro_batches, chunks_of(planned)
            if v == 1 or m >= p:  # fewer micro-batches than ranks wait for their own way through
                assert timeline(planned).bubble_fraction == pytest.approx(
                    (p - 1) / (m * v + p - 1), abs=1e-12
                ), planned


def test_interleaved_takes_the_least_time_there_is() -> None:
    # Bounds: the last rank works 3 m v, from p-1 on, and 2(p-1) follow its last backward; and the
    # last stage works 3 m after the way of p v - 1 stages to it, which is as long again twice back.
    for planned in grid("interleaved"):
        p, m, v = planned.ranks, planned.micro_batches, chunks_of(planned)
        found = timeline(planned)
        assert found.makespan == 3 * max(m * v + p - 1, p * v - 1 + m), planned
        # It holds no more for it where micro-batches are no multiple of the ranks.
        limits = [min(m * v, most_alive(r, p, v)) for r in range(p)]
        assert all(x <= y for x, y in zip(found.peak_activations, limits, strict=True)), planned
        assert m % p or list(found.peak_activations) == limits


def most_alive(r: int, p: int, v: int) -> int:
    """What interleaved 1F1B holds on a rank where micro-batches are a multiple of the ranks."""
    return 2 * (p - 1 - r) + (v - 1) * p + 1 if v > 1 else p - r


def search(p: int, v: int, m: int, width: int = 40) -> int:
    """The shortest makespan that a beam search over list schedules finds, F 1 and B 2.

    At every unit of time each free rank may begin any forward that is ready while it holds less
    than interleaved 1F1B does, or any backward that is ready, of any of its chunks, or wait; the
    search varies nothing else. A stage takes its micro-batches in order, which costs nothing as
    they are all alike. Kept are the `width` states with the least time still needed.
    """
    stages = p * v
    State = tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[str, int] | None, ...]]
    beam: list[State] = [((0,) * stages, (0,) * stages, (None,) * p)]  # F, B done; B half done
    for time in itertools.count(1):
        found: dict[State, tuple[int, ...]] = {}
        for forwards, backwards, halves in beam:
            choices: list[list[tuple[str, int] | None]] = []
            for r, half in enumerate(halves):
                mine = range(r, stages, p)
                alive = sum(forwards[s] - backwards[s] for s in mine)
                f = [("F", s) for s in mine if forwards[s] < (forwards[s - 1] if s else m)]
                above = (*backwards[1:], forwards[-1])
                b = [("B", s) for s in mine if backwards[s] < min(above[s], forwards[s])]
                ready = [None, *b, *(f if alive < most_alive(r, p, v) else [])]
                choices.append([half] if half else ready)
            for chosen in itertools.product(*choices):
                done_f, done_b = list(forwards), list(backwards)
                for half, one in zip(halves, chosen, strict=True):
                    if one is not None and (one[0] == "F" or half is not None):
                        (done_f if one[0] == "F" else done_b)[one[1]] += 1
                left = tuple(
                    one if one is not None and one[0] == "B" and half is None else None
                    for half, one in zip(halves, chosen, strict=True)
                )
                work = [
                    sum(m - done_f[s] + 2 * (m - done_b[s]) for s in range(r, stages, p))
                    - (left[r] is not None)
                    for r in range(p)
                ]
                after = max(w + 2 * r for r, w in enumerate(work))
                depth = sum(s * n for s, n in enumerate(done_f))
                found[tuple(done_f), tuple(done_b), left] = (after, sum(work), depth)
        if any(min(b) == m for _, b, _ in found):
            return time
        beam = sorted(found, key=found.__getitem__)[:width]
    raise AssertionError


@pytest.mark.parametrize(
    ("p", "v", "most"), [(2, 2, 9), (2, 3, 7), (3, 2, 8), (3, 3, 5), (4, 2, 9), (4, 3, 5)]
)
def test_no_search_finds_a_shorter_interleaved_schedule(p: int, v: int, most: int) -> None:
    for m in range(1, most + 1):
        planned = schedule("interleaved", ranks=p, chunks=v, micro_batches=m)
        assert timeline(planned).makespan <= 1.01 * search(p, v, m), m


def test_the_search_sees_what_a_short_last_group_costs() -> None:
    # The fixed turns for 12 micro-batches, without the last three.
    whole = schedule("interleaved", ranks=4, chunks=2, micro_batches=12)
    programs = (tuple(a for a in actions(p) if a.micro_batch < 9) for p in whole.programs)
    short = Schedule("short", 4, 9, whole.placement, tuple(programs))
    assert timeline(short).makespan == 69 > 1.01 * search(4, 2, 9)


def test_pairs_of_1f1b_are_idle_as_long_as_it_and_hold_about_twice_as_much() -> None:
    for planned in grid("1f1b-pairs"):
        p, m = planned.ranks, planned.micro_batches
        found = timeline(planned)
        one = timeline(schedule("1f1b", ranks=p, micro_batches=m))
        assert found.makespan == one.makespan
        assert found.peak_activations == tuple(min(m, 2 * (p - r)) for r in range(p))
        for r, program in enumerate(planned.programs):
            pairs = [step for step in program if isinstance(step, Pair)]
            assert len(pairs) == max(0, m - 2 * (p - 1 - r) - 1)
            assert all(x.forward.micro_batch > x.backward.micro_batch for x in pairs)


def test_zb_h1_idles_a_third_of_1f1b() -> None:
    for planned in grid("zb-h1"):
        p, m = planned.ranks, planned.micro_batches
        found = timeline(planned)
        one = timeline(schedule("1f1b", ranks=p, micro_batches=m))
        assert max(found.peak_activations) <= max(one.peak_activations)
        if m >= p:
            assert idle(found) == {p - 1}
            assert idle(one) == {3 * (p - 1)}


def test_zb_v_idles_less_than_zb_h1_and_holds_no_more() -> None:
    for planned in grid("zb-v"):
        p, m = planned.ranks, planned.micro_batches
        found = timeline(planned)
        assert max(found.peak_activations) <= 2 * min(p, m)  # halves of a rank's layers
        if m >= 2 * p - 1:
            assert idle(found) == {p - 1}
            h1 = timeline(schedule("zb-h1", ranks=p, micro_batches=m))
            assert found.bubble_fraction < h1.bubble_fraction or p == 1


def test_dualpipe_v_pairs_its_steady_state() -> None:
    for planned in grid("dualpipe-v"):
        p, m = planned.ranks, planned.micro_batches
        found = timeline(planned)
        assert max(found.peak_activations) <= 2 * p + 1
        if m >= 2 * p:
            assert idle(found) == {2 * (p - 1)}
            for r, program in enumerate(planned.programs):
                pairs = [step for step in program if isinstance(step, Pair)]
                assert len(pairs) == 2 * (m - 2 * p + r + 1) + p - 1 - r - (r == p - 1)
                assert all(x.forward.stage != x.backward.stage for x in pairs)


def signed(planned: Schedule, rank: int) -> str:
    """+c forward of chunk c, -c backward, chunks from 1."""
    return " ".join(
        f"{'' if a.kind == 'F' else '-'}{a.stage // planned.ranks + 1}"
        for a in actions(planned.programs[rank])
    )


def test_order_known_from_another_implementation() -> None:
    planned = schedule("interleaved", ranks=2, chunks=2, micro_batches=4)
    assert signed(planned, 0) == "1 1 2 2 1 -2 1 -2 2 -1 2 -1 -2 -2 -1 -1"
    assert signed(planned, 1) == "1 1 2 -2 2 -2 1 -1 1 -1 2 -2 2 -2 -1 -1"


@pytest.mark.parametrize(
    ("kind", "chunks", "expected"),
    [
        ("1f1b", 1, [3, 2, 1, 0]),
        ("1f1b-pairs", 1, [7, 5, 3, 1]),
        ("interleaved", 1, [3, 2, 1, 0]),
        ("interleaved", 2, [10, 8, 6, 4]),
    ],
)
def test_warm_up_forwards(kind: str, chunks: int, expected: list[int]) -> None:
    planned = schedule(kind, ranks=4, chunks=chunks, micro_batches=8)
    # The forward before the first backward is already half of a turn.
    first = [[a.kind for a in actions(p)].index("B") - 1 for p in planned.programs]
    assert first == expected


def test_interleaved_with_one_chunk_is_1f1b() -> None:
    for planned in grid("interleaved"):
        if chunks_of(planned) == 1:
            p, m = planned.ranks, planned.micro_batches
            assert planned.programs == schedule("1f1b", ranks=p, micro_batches=m).programs


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("m", [1, 2, 5])
def test_one_rank_is_never_idle(kind: str, m: int) -> None:
    v = SCHEDULES[kind].chunks or 1
    planned = schedule(kind, ranks=1, chunks=v, micro_batches=m)
    assert timeline(planned).makespan == 3 * v * m
    if kind == "1f1b":
        each = (Action(kind, 0, i) for i in range(m) for kind in ("F", "B"))
        assert planned.programs == (tuple(each),)


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("1f1B", (2, 1, 4), "'1f1B'; near names: 1f1b"),
        ("nonsense", (2, 1, 4), "near names: gpipe, 1f1b, 1f1b-pairs, interleaved"),
        ("1f1b", (2, 2, 4), r"1 chunk\(s\) on a rank, not 2; with 2: gpipe, interleaved, zb-v"),
        ("zb-v", (2, 1, 4), r"2 chunk\(s\) on a rank, not 1; with 1: gpipe, 1f1b"),
        ("zb-h1", (2, 3, 4), r"not 3; with 3: gpipe, interleaved$"),
        ("gpipe", (0, 1, 4), "ranks must be at least 1, not 0"),
        ("gpipe", (2, -1, 4), "chunks must be at least 1, not -1"),
        ("gpipe", (2, 1, 0), "micro-batches must be at least 1, not 0"),
    ],
)
def test_sizes_that_have_no_schedule(kind: str, sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        schedule(kind, ranks=sizes[0], chunks=sizes[1], micro_batches=sizes[2])
