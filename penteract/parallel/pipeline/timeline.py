"""Time of a schedule: when each step runs, how long ranks are idle, how much they hold alive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penteract.errors import UserError
from penteract.parallel.pipeline import schedules
from penteract.parallel.pipeline.actions import (
    Action,
    Program,
    Schedule,
    Step,
    actions,
    needs,
    result,
)


def unit_cost(action: Action) -> float:
    """A stage's forward costs 1, its backward 2, half of a split backward 1."""
    return 2.0 if action.kind == "B" else 1.0


@dataclass(frozen=True)
class Span:
    """When a step runs, in the unit of the costs."""

    step: Step
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Spans and peaks are per rank; the bubble is 1 - mean busy time ÷ makespan."""

    spans: tuple[tuple[Span, ...], ...]
    makespan: float
    bubble_fraction: float
    peak_activations: tuple[int, ...]


def timeline(
    schedule: Schedule, cost: Callable[[Action], float] = unit_cost, *, link: float = 0.0
) -> Timeline:
    """Run the programs in order; a step starts when its rank is free and its inputs are there.

    A pair costs the sum of its two. `link` is how long a message takes between ranks; who waits
    for it is delayed, who sends it is not. UserError where the programs can never go on.
    """
    done: dict[Action, float] = {}
    waiting: dict[Action, list[int]] = {}  # ranks that stand before a step which needs the action
    spans: list[list[Span]] = [[] for _ in schedule.programs]
    runnable = list(range(len(schedule.programs)))
    while runnable:
        rank = runnable.pop()
        for step in schedule.programs[rank][len(spans[rank]) :]:
            inputs = [n for a in actions([step]) for n in needs(a, len(schedule.placement))]
            missing = next((n for n in inputs if n not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            start = spans[rank][-1].end if spans[rank] else 0.0
            for n in inputs:
                start = max(start, done[n] + (link if schedule.placement[n.stage] != rank else 0.0))
            end = start + sum(cost(a) for a in actions([step]))
            spans[rank].append(Span(step, start, end))
            for action in map(result, actions([step])):
                done[action] = end
                runnable += waiting.pop(action, [])
    for missing, ranks in waiting.items():
        at = len(spans[ranks[0]])
        raise UserError(
            f"schedule {schedule.kind}: rank {ranks[0]} can never run action {at}, "
            f"{schedule.programs[ranks[0]][at]}: {missing} never comes before it"
        )
    makespan = max((s[-1].end for s in spans if s), default=0.0)
    busy = sum(s.end - s.start for of_rank in spans for s in of_rank)
    return Timeline(
        spans=tuple(map(tuple, spans)),
        makespan=makespan,
        bubble_fraction=1 - busy / (len(spans) * makespan) if makespan else 0.0,
        peak_activations=tuple(map(peak_activations, schedule.programs)),
    )


def peak_activations(program: Program) -> int:
    """Most live (stage, micro-batch) pairs: from F to B, or to W where the backward is split."""
    alive = peak = 0
    for action in actions(program):
        alive += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        peak = max(peak, alive)
    return peak


def warning(schedule: Schedule) -> str | None:
    """What fewer micro-batches than pipeline ranks cost; None where there are enough."""
    p, m = schedule.ranks, schedule.micro_batches
    if m >= p:
        return None
    count = "micro-batch" if m == 1 else "micro-batches"
    text = f"{m} {count} for {p} pipeline ranks: {timeline(schedule).bubble_fraction:.0%} idle"
    chunks, row = len(schedule.placement) // p, schedules.SCHEDULES.get(schedule.kind)
    if row is not None and row.chunks in (None, chunks):
        more = schedules.schedule(schedule.kind, ranks=p, chunks=chunks, micro_batches=2 * p)
        text += f", against {timeline(more).bubble_fraction:.0%} with {2 * p}"
    return f"{text}; a smaller train.micro_batch or a larger train.global_batch gives more of them"
