"""Random tables, whole and damaged: the checker against an independent run of what they say."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from parallel.pipeline.table_run import complete, inputs, outputs, progresses, runs

from penteract.errors import UserError
from penteract.parallel.pipeline.lowering import check, lower
from penteract.parallel.pipeline.schedules import Action, Pair, Schedule, Step

Programs = list[list[Step]]


def accepted(do: Callable[[], object]) -> bool:
    try:
        do()
    except UserError:
        return False
    return True


def random_table(rng: random.Random) -> Schedule:
    """A valid table: random placement, order, and split of each backward; some steps paired."""
    ranks, m = rng.randint(1, 4), rng.randint(1, 4)
    placement = [*range(ranks), *(rng.randrange(ranks) for _ in range(rng.randint(0, 3)))]
    rng.shuffle(placement)
    left: list[Action] = []
    for s in range(len(placement)):
        for i in range(m):
            back = rng.choice([["B"], ["I", "W"]])
            left += [Action(kind, s, i) for kind in ["F", *back]]  # type: ignore[arg-type]
    values: set[tuple[str, int, int]] = set()
    programs: Programs = [[] for _ in range(ranks)]
    while left:
        ready = [a for a in left if values.issuperset(inputs(a, len(placement)))]
        chosen = rng.choice(ready)
        left.remove(chosen)
        values.update(outputs(chosen))
        programs[placement[chosen.stage]].append(chosen)
    found = table(programs, placement, m)
    for _ in range(rng.randint(0, 3)):
        paired = pair_up(programs, rng)
        if progresses(table(paired, placement, m)):
            programs, found = paired, table(paired, placement, m)
    return found


def table(programs: Programs, placement: list[int], m: int) -> Schedule:
    return Schedule("mine", len(programs), m, tuple(placement), tuple(map(tuple, programs)))


def pair_up(programs: Programs, rng: random.Random) -> Programs:
    """One random forward paired with the backward after it, where there is such a place."""
    places = [
        (rank, k)
        for rank, program in enumerate(programs)
        for k, (a, b) in enumerate(pairwise(program))
        if isinstance(a, Action) and isinstance(b, Action) and a.kind == "F" and b.kind in "BI"
    ]
    found = [list(program) for program in programs]
    if places:
        rank, k = rng.choice(places)
        forward, backward = programs[rank][k : k + 2]
        assert isinstance(forward, Action)
        assert isinstance(backward, Action)
        found[rank][k : k + 2] = [Pair(forward, backward)]
    return found


def damage_list(items: list[list[object]], rng: random.Random) -> None:
    """Drop, double, swap or move something in lists of lists, in place."""
    full = [x for x in items if x]
    if not full:
        return
    where = rng.choice(full)
    k = rng.randrange(len(where))
    match rng.choice(["drop", "double", "swap", "move"]):
        case "drop":
            del where[k]
        case "double":
            rng.choice(items).append(where[k])
        case "swap":
            other = rng.choice(full)
            j = rng.randrange(len(other))
            where[k], other[j] = other[j], where[k]
        case _:
            to = rng.choice(items)
            item = where.pop(k)
            to.insert(rng.randint(0, len(to)), item)


SEEDS = st.integers(0, 2**32)
BOUNDED = settings(max_examples=300, deadline=None, derandomize=True)


@BOUNDED
@given(SEEDS)
def test_random_tables_lower_and_run(seed: int) -> None:
    planned = random_table(random.Random(seed))
    lowered = lower(planned)
    check(planned, lowered)
    assert runs(planned, lowered)
    forwards = planned.forward_only()
    assert runs(forwards, lower(forwards))
    check(forwards)


@BOUNDED
@given(SEEDS)
def test_a_damaged_table_is_accepted_only_if_it_is_still_valid(seed: int) -> None:
    rng = random.Random(seed)
    whole = random_table(rng)
    programs: list[list[object]] = [list(program) for program in whole.programs]
    damage_list(programs, rng)
    damaged = replace(whole, programs=tuple(map(tuple, programs)))  # type: ignore[arg-type]
    assert accepted(lambda: check(damaged)) == (complete(damaged) and progresses(damaged))


@BOUNDED
@given(SEEDS, st.sampled_from(["post", "take", "send", "step"]))
def test_damaged_messages_are_refused_unless_they_still_arrive(seed: int, what: str) -> None:
    rng = random.Random(seed)
    planned = random_table(rng)
    lowered = lower(planned)
    rank = rng.randrange(planned.ranks)
    program = list(lowered[rank])
    if what == "step":
        steps: list[list[object]] = [list(program)]
        damage_list(steps, rng)
        program = steps[0]  # type: ignore[assignment]
    else:
        lists: list[list[object]] = [list(getattr(low, what)) for low in program]
        damage_list(lists, rng)
        program = [replace(low, **{what: tuple(x)}) for low, x in zip(program, lists, strict=True)]
    damaged = (*lowered[:rank], tuple(program), *lowered[rank + 1 :])
    valid = complete(planned) and runs(planned, damaged)
    allowed = accepted(lambda: check(planned, damaged))
    assert not allowed or valid
    if what == "post":  # a receive may lie anywhere that works
        assert allowed == valid
