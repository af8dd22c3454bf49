"""What tables and lowered programs do, found by running them on values: to hold `check` against."""

from __future__ import annotations

from collections import Counter, defaultdict

from penteract.parallel.pipeline.lowering import Lowered, Lowering, Message
from penteract.parallel.pipeline.schedules import Action, Schedule, actions


def inputs(a: Action, stages: int) -> list[tuple[str, int, int]]:
    """Values that an action reads: (name, stage that makes it, micro-batch)."""
    s, i = a.stage, a.micro_batch
    if a.kind == "F":
        return [("out", s - 1, i)] if s else []
    if a.kind == "W":
        return [("kept", s, i)]
    return [("out", s, i)] + ([("grad", s + 1, i)] if s + 1 < stages else [])


def outputs(a: Action) -> list[tuple[str, int, int]]:
    names = {"F": ["out"], "B": ["grad", "whole"], "I": ["grad", "kept"], "W": ["whole"]}[a.kind]
    return [(name, a.stage, a.micro_batch) for name in names]


def complete(planned: Schedule) -> bool:
    """Every action once on its rank, backwards of all or none: by counting alone."""
    found = Counter(a for program in planned.programs for a in actions(program))
    for rank, program in enumerate(planned.programs):
        if any(planned.placement[a.stage] != rank for a in actions(program)):
            return False
    kinds = set()
    for s in range(len(planned.placement)):
        for i in range(planned.micro_batches):
            kinds.add(tuple(found.pop(Action(kind, s, i), 0) for kind in "FBIW"))  # type: ignore[arg-type]
    return not found and (kinds <= {(1, 1, 0, 0), (1, 0, 1, 1)} or kinds == {(1, 0, 0, 0)})


def runs(planned: Schedule, lowered: Lowering) -> bool:
    """Do as the programs say, on values, under blocking sends; False if anything is amiss.

    A channel is two lists: payloads sent and places of receives. The k-th of one meets the k-th of
    the other, whatever they are called.
    """
    name = {"F": "out", "B": "grad"}
    stages = len(planned.placement)
    jobs = [
        [(what, x) for low in program for what, xs in parts(low) for x in xs] for program in lowered
    ]
    at = [0] * len(jobs)
    sent: dict[tuple[int, int], list[tuple[str, int, int]]] = defaultdict(list)
    posted: dict[tuple[int, int], list[Message]] = defaultdict(list)
    values: list[set[tuple[str, int, int]]] = [set() for _ in jobs]
    moved = True
    while moved:
        moved = False
        for rank, mine in enumerate(jobs):
            while at[rank] < len(mine):
                what, x = mine[at[rank]]
                if what == "step":
                    needed = [v for a in actions([x]) for v in inputs(a, stages)]
                    made = [v for a in actions([x]) for v in outputs(a)]
                    if not values[rank].issuperset(needed) or values[rank].intersection(made):
                        return False
                    values[rank].update(made)
                else:
                    channel = x.source, x.target
                    value = name[x.kind], x.stage, x.micro_batch
                    if what == "post":
                        posted[channel].append(x)
                    elif what == "send":
                        if len(posted[channel]) <= len(sent[channel]):
                            break
                        if value not in values[rank]:
                            return False
                        sent[channel].append(value)
                    else:
                        if x not in posted[channel]:
                            return False
                        k = posted[channel].index(x)
                        if k >= len(sent[channel]):
                            break
                        values[rank].add(sent[channel][k])
                at[rank] += 1
                moved = True
    done = all(a == len(mine) for a, mine in zip(at, jobs, strict=True))
    return done and all(len(posted[c]) == len(sent[c]) for c in posted.keys() | sent.keys())


def parts(low: Lowered) -> list[tuple[str, tuple[object, ...]]]:
    return [("post", low.post), ("take", low.take), ("step", (low.step,)), ("send", low.send)]


def progresses(planned: Schedule) -> bool:
    """The table alone, messages aside: every action can be done in the order of its rank."""
    stages, values = len(planned.placement), set[tuple[str, int, int]]()
    at, moved = [0] * planned.ranks, True
    while moved:
        moved = False
        for rank, program in enumerate(planned.programs):
            while at[rank] < len(program):
                inside = list(actions([program[at[rank]]]))
                if not values.issuperset(v for a in inside for v in inputs(a, stages)):
                    break
                values.update(v for a in inside for v in outputs(a))
                at[rank] += 1
                moved = True
    return at == [len(program) for program in planned.programs]
