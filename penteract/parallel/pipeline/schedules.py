"""Schedules: pure functions from sizes to what each pipeline rank executes, in order.

A schedule is data. The same table feeds the checker (`lowering`), the time simulator (`timeline`),
the picture and the executor. A new one is a function and a row in `SCHEDULES`. Letters here: p
ranks, r one of them, v chunks (stages a rank), m micro-batches, i one of them, s a stage.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import MappingProxyType

from penteract.errors import UserError
from penteract.parallel.pipeline.actions import (
    Action,
    Kind,
    Pair,
    Program,
    Schedule,
    Step,
    actions,
)
from penteract.parallel.pipeline.tables import from_json, to_json
from penteract.parallel.pipeline.zero_bubble import dualpipe_v, zb_h1, zb_v

__all__ = [
    "SCHEDULES",
    "Action",
    "Kind",
    "Pair",
    "Program",
    "Row",
    "Schedule",
    "Step",
    "actions",
    "from_json",
    "schedule",
    "to_json",
]


def gpipe(p: int, v: int, m: int) -> list[Program]:
    """All forwards, then all backwards. Huang et al., arXiv:1811.06965."""
    return [
        (
            *(Action("F", c * p + r, i) for c in range(v) for i in range(m)),
            *(Action("B", c * p + r, i) for c in reversed(range(v)) for i in range(m)),
        )
        for r in range(p)
    ]


def interleaved(p: int, v: int, m: int) -> Sequence[Program]:
    """Warm-up forwards, then one forward and one backward in turn, then the backwards left.

    Groups of p micro-batches pass all chunks one after another. Narayanan et al.,
    arXiv:2104.04473; with one chunk it is their 1F1B with flush. Each rank is idle for 3(p-1)
    forwards' time, the least there can be, for every m of at least p.
    """
    if v > 1 and m > p and m % p:
        return _ragged(p, v, m)
    groups = [range(first, min(first + p, m)) for first in range(0, m, p)]
    programs = []
    for r in range(p):
        forwards = [Action("F", c * p + r, i) for g in groups for c in range(v) for i in g]
        backwards = [
            Action("B", c * p + r, i) for g in groups for c in reversed(range(v)) for i in g
        ]
        ahead = _ahead(r, p, v)
        turns = zip_longest(forwards[ahead:], backwards)
        programs.append((*forwards[:ahead], *(a for turn in turns for a in turn if a)))
    return programs


def paired(p: int, v: int, m: int) -> list[Program]:
    """1F1B whose forward and backward of a turn are of different micro-batches, and a pair.

    A gradient comes back to rank r 2(p-1-r)+1 turns after its micro-batch has passed, and so many
    forwards run before the first pair: about twice as many as in 1F1B.
    """
    programs: list[Program] = []
    for r in range(p):
        ahead = min(m, 2 * (p - 1 - r) + 1)
        forwards = [Action("F", r, i) for i in range(m)]
        backwards = [Action("B", r, i) for i in range(m)]
        pairs = map(Pair, forwards[ahead:], backwards)
        programs.append((*forwards[:ahead], *pairs, *backwards[m - ahead :]))
    return programs


def _ahead(r: int, p: int, v: int) -> int:
    """Forwards that rank r runs before its first pair of forward and backward.

    The first gradient comes back after all chunks (v-1 groups of p) and the ranks behind r. With
    chunks, two forwards for each of those keep the ranks before r busy too.
    """
    return (p - 1 - r) * (2 if v > 1 else 1) + (v - 1) * p


def _ragged(p: int, v: int, m: int) -> list[Program]:
    """Interleaved where m > p is no multiple of p: list scheduling, forward 1 and backward 2.

    A rank that is free does a forward and a backward in turn, of what is ready: the forward of
    the earliest group and chunk, the backward of the latest chunk. It holds no more than the
    schedule for multiples of p. Fixed turns would leave a rank idle wherever a group is short.

    The first group is made shorter where the last would have less than p/3 micro-batches: at the
    end each takes a rank 3 units, and its next forward comes after p, the way through the ranks.
    """
    short = max(0, -(-p // 3) - m % p)
    begun: Counter[tuple[Kind, int]] = Counter()  # micro-batches that have begun (kind, stage)
    done: Counter[tuple[Kind, int]] = Counter()
    programs: list[list[Action]] = [[] for _ in range(p)]

    def ready(r: int) -> tuple[Kind, int] | None:
        """What rank r does if it is free now, None if nothing can be done."""
        mine, program = range(r, p * v, p), programs[r]
        room = sum(begun["F", s] - begun["B", s] for s in mine) <= _ahead(r, p, v)
        forwards = [s for s in mine if begun["F", s] < (done["F", s - 1] if s else m)]
        last = p * v - 1
        above = {s: done["B", s + 1] if s < last else done["F", last] for s in mine}
        backwards = [s for s in mine if begun["B", s] < above[s]]
        if backwards and not (room and forwards and program[-1].kind == "B"):
            return "B", max(backwards)
        if room and forwards:
            return "F", min(forwards, key=lambda s: ((begun["F", s] + short) // p, s))
        return None

    free, time, ends = [0] * p, 0, {0: list[tuple[Kind, int]]()}
    while ends:
        done.update(ends.pop(time, ()))
        for r in range(p):
            chosen = ready(r) if free[r] <= time else None
            if chosen is not None:
                programs[r].append(Action(*chosen, begun[chosen]))
                begun[chosen] += 1
                free[r] = time + (1 if chosen[0] == "F" else 2)
                ends.setdefault(free[r], []).append(chosen)
        time += 1
    assert all(len(program) == 2 * v * m for program in programs)
    return list(map(tuple, programs))


def _loop(p: int, v: int) -> tuple[int, ...]:
    """Stage c·p + r is on rank r."""
    return tuple(range(p)) * v


def _vee(p: int, v: int) -> tuple[int, ...]:
    """Stages r and 2p-1-r are on rank r."""
    return (*range(p), *reversed(range(p)))


@dataclass(frozen=True)
class Row:
    """The function of a schedule, how many chunks it takes, and the ranks of its stages."""

    programs: Callable[[int, int, int], Sequence[Program]]  # (p, v, m) → one program a rank
    chunks: int | None = None  # None: any number
    placement: Callable[[int, int], tuple[int, ...]] = _loop  # (p, v) → the rank of each stage


SCHEDULES: Mapping[str, Row] = MappingProxyType(
    {
        "gpipe": Row(gpipe),
        "1f1b": Row(interleaved, chunks=1),
        "1f1b-pairs": Row(paired, chunks=1),
        "interleaved": Row(interleaved),
        "zb-h1": Row(zb_h1, chunks=1),
        "zb-v": Row(zb_v, chunks=2, placement=_vee),
        "dualpipe-v": Row(dualpipe_v, chunks=2, placement=_vee),
    }
)


def schedule(kind: str, *, ranks: int, chunks: int = 1, micro_batches: int) -> Schedule:
    """The schedule of that name for these sizes; UserError where there is none."""
    row = SCHEDULES.get(kind)
    if row is None:
        near = difflib.get_close_matches(kind, SCHEDULES, n=3, cutoff=0.4) or list(SCHEDULES)
        raise UserError(f"no schedule is called {kind!r}; near names: {', '.join(near)}")
    sizes = {"ranks": ranks, "chunks": chunks, "micro-batches": micro_batches}
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"schedule {kind}: {name} must be at least 1, not {size}")
    if row.chunks not in (None, chunks):
        others = [name for name, other in SCHEDULES.items() if other.chunks in (None, chunks)]
        raise UserError(
            f"schedule {kind} has {row.chunks} chunk(s) on a rank, not {chunks}; "
            f"with {chunks}: {', '.join(others)}"
        )
    return Schedule(
        kind=kind,
        ranks=ranks,
        micro_batches=micro_batches,
        placement=row.placement(ranks, chunks),
        programs=tuple(row.programs(ranks, chunks, micro_batches)),
    )
