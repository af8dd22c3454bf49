"""Schedules that split the backward and put weight gradients where a rank would be idle.

Letters as in `schedules`: p ranks, r one of them, v chunks, m micro-batches, i one of them. With
F, I and W of a stage costing 1 each, in units of the schedule's own stages:

| schedule            | idle on each rank | for m of at least | peak of live activations |
|---------------------|-------------------|-------------------|--------------------------|
| 1f1b, to compare    | 3(p-1)            | any               | p                        |
| zb-h1               | p-1               | p                 | p                        |
| zb-v, half stages   | p-1               | 2p-1              | 2p                       |
| dualpipe-v, half    | 2(p-1)            | 2p                | 2p+1                     |
"""

from __future__ import annotations

from collections import Counter, deque

from penteract.parallel.pipeline.actions import Action, Kind, Pair, Program, Step, actions


def zb_h1(p: int, v: int, m: int) -> list[Program]:
    """1F1B with split backwards; rank r puts r weight gradients off to when it would be idle.

    So each rank holds as much as the first does in 1F1B. Qi et al., arXiv:2401.10241 (ZB-H1).
    """
    programs: list[Program] = []
    for r in range(p):
        ahead = min(p - 1 - r, m)
        program: list[Step] = [Action("F", r, i) for i in range(ahead)]
        for i in range(m):
            program += [Action("F", r, i + ahead)] if i + ahead < m else []
            program += [Action("I", r, i)]
            program += [Action("W", r, i - r)] if i >= r else []
        program += [Action("W", r, i) for i in range(max(m - r, 0), m)]
        programs.append(tuple(program))
    return programs


class _Writer:
    """Writes a program of a V: chunk 0 is stage r, chunk 1 stage 2p-1-r; micro-batches in order."""

    def __init__(self, r: int, p: int) -> None:
        self.stages = (r, 2 * p - 1 - r)
        self.done: Counter[tuple[Kind, int]] = Counter()
        self.steps: list[Step] = []
        self.owed: deque[Action] = deque()  # weight gradients that are put off

    def next(self, kind: Kind, chunk: int) -> Action:
        i = self.done[kind, chunk]
        self.done[kind, chunk] += 1
        return Action(kind, self.stages[chunk], i)

    def do(self, times: int, *what: tuple[Kind, int]) -> None:
        """`times` times the (kind, chunk) one after another, each of its next micro-batch."""
        self.steps += [self.next(*one) for _ in range(times) for one in what]

    def pair(self, chunk: int) -> None:
        """The forward of the chunk with the backward of the other."""
        self.steps.append(Pair(self.next("F", chunk), self.next("B", 1 - chunk)))

    def split(self, chunk: int) -> None:
        """The input gradient now, the weight gradient when `pay` is called."""
        whole = self.next("B", chunk)
        self.steps.append(Action("I", whole.stage, whole.micro_batch))
        self.owed.append(Action("W", whole.stage, whole.micro_batch))

    def pay(self) -> None:
        self.steps.append(self.owed.popleft())

    def program(self, m: int) -> Program:
        """Micro-batches from m on are left out.

        What is left of a valid table when micro-batches are taken out of it whole is valid, so a
        schedule that is written for at least 2p micro-batches serves fewer.
        """
        kept: list[Step] = []
        for step in self.steps:
            inside = list(actions([step]))
            left = [a for a in inside if a.micro_batch < m]
            kept += [step] if left == inside else left
        return tuple(kept)


def zb_v(p: int, v: int, m: int) -> list[Program]:
    """All backwards are split; each W follows its I but for the last r of both chunks.

    Qi et al., arXiv:2405.15362 (ZB-V). The last stage lies on rank 0 beside the first, so that
    every rank holds about as much, and no rank waits long for the first gradient.
    """
    return [_zb_v(r, p, m) for r in range(p)]


def _zb_v(r: int, p: int, m: int) -> Program:
    one, n = _Writer(r, p), max(m, 2 * p - 1)
    one.do(2 * (p - r) - 1, ("F", 0))
    one.do(r, ("F", 1), ("F", 0))
    one.do(p - r, ("F", 1), ("I", 1), ("W", 1))
    one.do(n - one.done["F", 0], ("F", 0), ("I", 0), ("W", 0), ("F", 1), ("I", 1), ("W", 1))
    one.do(n - one.done["F", 1], ("I", 0), ("W", 0), ("F", 1), ("I", 1), ("W", 1))
    one.do(r, ("I", 0), ("I", 1))
    one.do(p - r, ("I", 0), ("W", 0))
    one.do(n - one.done["W", 1], ("W", 1))
    one.do(n - one.done["W", 0], ("W", 0))
    return one.program(m)


def dualpipe_v(p: int, v: int, m: int) -> list[Program]:
    """In the steady state, a forward of one chunk and a backward of the other run as one pair.

    DualPipe's two directions of micro-batches (DeepSeek-V3, arXiv:2412.19437, section 3.2.1) cut
    in half: the two arms of the V take their place. Backwards at both ends are split.
    """
    return [_dualpipe_v(r, p, m) for r in range(p)]


def _dualpipe_v(r: int, p: int, m: int) -> Program:
    one, n, later = _Writer(r, p), max(m, 2 * p), p - 1 - r
    one.do(2 * later, ("F", 0))
    one.do(r + 1, ("F", 0), ("F", 1))
    for _ in range(later):
        one.split(1)
        one.pay()
        one.do(1, ("F", 1))
    for turn in range(n - 2 * p + r + 1):
        if turn == 0 and later == 0:  # apart, so that the other ranks have this forward sooner
            one.do(1, ("F", 0), ("B", 1))
        else:
            one.pair(0)
        one.pair(1)
    for _ in range(later):
        one.do(1, ("B", 1))
        one.pair(1)
    for turn in range(2 * (r + 1)):
        if turn <= r:
            one.do(1, ("B", 1 - turn % 2))
        else:
            one.split(1 - turn % 2)
    for _ in range(later):
        one.pay()
        one.split(0)
    while one.owed:
        one.pay()
    return one.program(m)
