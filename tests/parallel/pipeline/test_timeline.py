"""Times and peaks of schedules that are worked out by hand."""

from __future__ import annotations

import pytest

from penteract.errors import UserError
from penteract.parallel.pipeline.schedules import Action, Pair, Schedule, schedule
from penteract.parallel.pipeline.timeline import timeline, unit_cost, warning

F0, F1, B0, B1 = Action("F", 0, 0), Action("F", 1, 0), Action("B", 0, 0), Action("B", 1, 0)


def times(planned: Schedule, **options: float) -> list[list[tuple[float, float]]]:
    return [[(s.start, s.end) for s in spans] for spans in timeline(planned, **options).spans]


def test_one_micro_batch_goes_there_and_back() -> None:
    planned = schedule("1f1b", ranks=2, micro_batches=1)
    assert times(planned) == [[(0, 1), (4, 6)], [(1, 2), (2, 4)]]
    found = timeline(planned)
    assert (found.makespan, found.bubble_fraction) == (6, 0.5)
    assert [span.step for span in found.spans[0]] == [F0, B0]


def test_a_link_delays_the_one_that_waits_for_it() -> None:
    planned = schedule("1f1b", ranks=2, micro_batches=2)
    assert times(planned, link=0.5) == [
        [(0, 1), (1, 2), (5, 7), (8, 10)],  # rank 0 does not wait for what it sends
        [(1.5, 2.5), (2.5, 4.5), (4.5, 5.5), (5.5, 7.5)],
    ]
    on_one_rank = schedule("gpipe", ranks=1, chunks=3, micro_batches=2)
    assert timeline(on_one_rank, link=9).makespan == 18


def test_costs_are_those_given() -> None:
    planned = schedule("gpipe", ranks=2, micro_batches=1)
    weight = {0: 1.0, 1: 10.0}
    assert timeline(planned, lambda a: weight[a.stage] * unit_cost(a)).makespan == 33


def test_a_pair_is_one_step_that_needs_the_inputs_of_both() -> None:
    pair = Pair(Action("F", 0, 1), B0)
    last = (F1, B1, Action("F", 1, 1), Action("B", 1, 1))
    planned = Schedule("mine", 2, 2, (0, 1), ((F0, pair, Action("B", 0, 1)), last))
    assert times(planned)[0] == [(0, 1), (4, 7), (10, 12)]  # the pair starts after B of stage 1
    assert timeline(planned).peak_activations == (2, 1)


def test_activations_live_until_the_weight_gradient() -> None:
    split = (F0, Action("I", 0, 0), Action("F", 0, 1), Action("W", 0, 0), Action("B", 0, 1))
    whole = (F0, B0, Action("F", 0, 1), Action("B", 0, 1))
    for program, peak in ((split, 2), (whole, 1)):
        assert timeline(Schedule("mine", 1, 2, (0,), (program,))).peak_activations == (peak,)


def test_programs_that_can_never_go_on() -> None:
    crossed = Schedule("mine", 2, 1, (0, 1, 0), ((F0, Action("F", 2, 0)), ()))
    with pytest.raises(
        UserError, match=r"rank 0 can never run action 1, F of stage 2.*F of stage 1"
    ):
        timeline(crossed)
    inside = Schedule("mine", 1, 1, (0,), ((Pair(F0, B0),),))  # its backward needs its forward
    with pytest.raises(UserError, match="rank 0 can never run action 0"):
        timeline(inside)


def test_nothing_to_do_takes_no_time() -> None:
    found = timeline(Schedule("mine", 1, 0, (0,), ((),)))
    assert (found.makespan, found.bubble_fraction) == (0, 0)


def test_few_micro_batches_are_said_with_what_they_cost() -> None:
    for kind, chunks in (("1f1b", 1), ("interleaved", 2), ("zb-v", 2)):
        few = schedule(kind, ranks=4, chunks=chunks, micro_batches=2)
        more = schedule(kind, ranks=4, chunks=chunks, micro_batches=8)
        text = warning(few)
        assert text is not None
        assert "2 micro-batches for 4 pipeline ranks" in text
        assert f"{timeline(few).bubble_fraction:.0%} idle" in text
        assert f"{timeline(more).bubble_fraction:.0%} with 8" in text
        assert "train.micro_batch" in text
        assert warning(schedule(kind, ranks=4, chunks=chunks, micro_batches=4)) is None
    own = warning(Schedule("mine", 2, 1, (0, 1), ((F0, B0), (F1, B1))))
    assert own is not None
    assert own.startswith("1 micro-batch for 2 pipeline ranks: 50% idle;")
