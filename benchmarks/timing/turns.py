"""Cases that take turns in the same processes, and where their time goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensor_parallel import difference
from torch import Tensor

from penteract.testing import world_axis
from penteract.wire import barrier

Call = Callable[[], list[Tensor]]  # what it computed, to be compared


class Watch:
    """Seconds in, and calls of, some methods of this process; a call within a call counts once.

    With `inside`, only those that happen within another watch's calls.
    """

    def __init__(self, *methods: tuple[Any, str], inside: Watch | None = None) -> None:
        self.seconds, self.calls, self.depth, self.inside = 0.0, 0, 0, inside
        for owner, name in methods:
            setattr(owner, name, self.timed(getattr(owner, name)))

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.depth or (self.inside is not None and not self.inside.depth):
                return call(*args, **kwargs)
            self.depth += 1
            began = time.perf_counter()
            result = call(*args, **kwargs)
            self.seconds += time.perf_counter() - began
            self.calls += 1
            self.depth -= 1
            return result

        return counted


@dataclass(frozen=True)
class Case:
    name: str
    call: Call
    rows: Any = ...  # which of one process's rows it computes
    solo: bool = False  # only the first rank calls it
    work: int = 1  # how often the ranks together compute all


def differences(cases: Sequence[Case], reference: Sequence[Tensor] | None = None) -> list[float]:
    """Each case's largest from `reference`, or from the first case."""
    found = [case.call() for case in cases]
    apart = [
        [
            difference(a.double(), b[case.rows].double())
            for a, b in zip(values, reference or found[0], strict=True)
        ]
        for case, values in zip(cases, found, strict=True)
    ]
    return [torch.tensor(x).max().nan_to_num(nan=torch.inf).item() for x in apart]


def in_turn(cases: Sequence[Case], rounds: int, read: Callable[[], Tensor]) -> Tensor:
    """On one rank: seconds of each call, then by how much what is read grew, [rounds, cases, n]."""
    times = torch.zeros(1 + rounds, len(cases), 1 + len(read()), dtype=torch.float64)
    axis = world_axis()
    for i in range(1 + rounds):  # the first one warms up
        for who in range(len(cases))[:: 1 if i % 2 else -1]:
            barrier(axis)
            if cases[who].solo and axis.rank > 0:
                continue
            before, began = read(), time.perf_counter()
            cases[who].call()
            times[i, who, 0] = time.perf_counter() - began
            times[i, who, 1:] = read() - before
    return times[1:]


@dataclass(frozen=True)
class Measured:
    """What a rank answers: times where its results agree."""

    names: list[str]
    work: list[int]
    apart: float
    allowed: float
    times: Tensor  # [rounds, cases, n] as of `in_turn`

    @classmethod
    def of(
        cls,
        cases: Sequence[Case],
        agreement: tuple[float, float],
        rounds: int,
        read: Callable[[], Tensor],
    ) -> Measured:
        apart, allowed = agreement
        times = in_turn(cases, rounds, read) if apart <= allowed else torch.empty(0)
        return cls([c.name for c in cases], [c.work for c in cases], apart, allowed, times)

    def agrees(self, title: str) -> bool:
        """Prints whether the results agree."""
        agree = self.apart <= self.allowed
        warning = "" if agree else f", above {self.allowed:.1e}: not timed"
        print(f"\n{title}: largest difference {self.apart:.1e}{warning}", flush=True)
        return agree
