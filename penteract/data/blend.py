"""Which source the n-th sample of a run comes from: a periodic table, so a function of n (pure).

Weights are whole numbers w with sum P, the period. After any t samples source i has given within
one of `t·w_i/P`. That fixes, for its j-th sample, a first slot `⌊(j-1)·P/w_i⌋ + 1` and a last one
`⌈j·P/w_i⌉`; taking at each slot the open sample with the earliest last slot meets them all (the
chairman assignment, Tijdeman 1980; proportionate fairness, Baruah et al. 1996). Ties go to the
source named first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from penteract.data.indexed import Ints
from penteract.errors import UserError

LARGEST_PERIOD = 2**20


def resolve_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole weights with the same proportions and sum at most 2**20.

    Exact where the decimal weights allow it, else each is rounded to a multiple of 2**-20 of the
    sum, and is at least one of them. Raises UserError for a weight that is not a positive number.
    """
    for i, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight > 0):
            raise UserError(f"the weight of source {i} is {weight}: it must be a positive number")
    # The decimal that was written counts, not its binary neighbour: 0.7 and 0.3 are 7 and 3.
    exact = [Fraction(w) if isinstance(w, int) else Fraction(repr(float(w))) for w in weights]
    shares = [weight / sum(exact) for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= LARGEST_PERIOD:
        return tuple(int(share * period) for share in shares)
    whole = [max(1, int(share * LARGEST_PERIOD)) for share in shares]
    # What rounding down left over goes to the sources that lost most by it, one each; where raising
    # tiny weights to one took too much, the heaviest sources give it back.
    while (left := LARGEST_PERIOD - sum(whole)) != 0:
        loss = [share * LARGEST_PERIOD - have for share, have in zip(shares, whole, strict=True)]
        by_loss = sorted(range(len(whole)), key=lambda i: (-loss[i], i))
        if left > 0:
            for i in by_loss[:left]:
                whole[i] += 1
        else:
            whole[max(range(len(whole)), key=lambda i: whole[i])] -= 1
    divisor = math.gcd(*whole)
    return tuple(weight // divisor for weight in whole)


def _period(weights: tuple[int, ...]) -> NDArray[np.int32]:
    """The source of every slot of one period, [P]."""
    period = sum(weights)
    table = np.empty(period, np.int32)
    taken = [0] * len(weights)
    ready = [(-(-period // weight), i) for i, weight in enumerate(weights)]  # (last slot, source)
    heapq.heapify(ready)
    closed: list[tuple[int, int]] = []  # (first slot, source)
    for slot in range(1, period + 1):
        while closed and closed[0][0] <= slot:
            i = heapq.heappop(closed)[1]
            heapq.heappush(ready, (-(-(taken[i] + 1) * period // weights[i]), i))
        last, i = heapq.heappop(ready)
        assert slot <= last, (slot, last, i)
        table[slot - 1] = i
        taken[i] += 1
        heapq.heappush(closed, (taken[i] * period // weights[i] + 1, i))
    return table


class Blend:
    """Sources mixed by weight; `weights` are the resolved ones, `period` is their sum."""

    def __init__(self, weights: Sequence[float]) -> None:
        if not weights:
            raise UserError("a blend needs at least one source")
        self.weights = resolve_weights(weights)
        self.period = sum(self.weights)
        self._source = _period(self.weights)
        self._ordinal = np.empty(self.period, np.int64)
        for i, weight in enumerate(self.weights):
            self._ordinal[self._source == i] = np.arange(weight)

    def locate(self, indices: Ints) -> tuple[NDArray[np.int32], Ints]:
        """Source [m] of each sample of the run, and how many of that source came before it [m]."""
        rounds, slot = np.divmod(indices, self.period)
        source = self._source[slot]
        weights = np.array(self.weights, np.int64)
        return source, rounds * weights[source] + self._ordinal[slot]
