"""Samples made from a seed: what `train --dry-run` and tests train on without any file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from penteract.data.indexed import Ints
from penteract.data.samples import Samples, lengths_of
from penteract.random import bits_range

_WORDS = 2**32  # a word of penteract.random is below this
_DENSITIES = (1 / 32, 1 / 4, 3 / 4)  # share of places at which a document starts, by sample


class SyntheticSource:
    """Sample i is `seq` inputs and labels of uniform tokens, a function of (seed, i).

    With `packing` it is ragged documents, many of one token, by the same weight rule as that of
    token files; of five samples about one has all its labels masked, and one all but one.
    """

    def __init__(self, *, seq: int, vocab: int, seed: int, packing: bool = False) -> None:
        self.seq, self.vocab, self.seed, self.packing = seq, vocab, seed, packing

    def samples(self, indices: Sequence[int] | range | Ints) -> Samples:
        """Samples `indices` [n]."""
        drawn = [bits_range(self.seed, f"tokens/{int(i)}", 0, self.seq + 1) for i in indices]
        empty = torch.zeros((0, self.seq + 1), dtype=torch.int64)
        rows: Ints = (torch.stack(drawn) if drawn else empty).numpy() % self.vocab
        tokens, labels = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
        if not self.packing:
            return Samples.whole(tokens, labels)
        packed = Samples.packed(tokens, labels, [self._starts(int(i)) for i in indices])
        for weights, i in zip(packed.weights, indices, strict=True):
            kept = self._kept(int(i), np.flatnonzero(weights))
            weights[:] = 0
            weights[kept] = 1
        return packed

    def lengths(self, indices: Sequence[int] | range | Ints) -> tuple[int, ...]:
        """Lengths of the documents of samples `indices`, as in `samples`."""
        if not self.packing:
            return (self.seq,) * len(indices)
        return lengths_of([self._starts(int(i)) for i in indices], self.seq)

    def _starts(self, i: int) -> Ints:
        """Where in (0, seq] a document of sample i starts."""
        first, *words = bits_range(self.seed, f"documents/{i}", 0, self.seq + 1).tolist()
        shares = np.full(self.seq, _DENSITIES[first % len(_DENSITIES)])
        shares[-1] = 1 / 2  # the last document ends with the row as often as it goes on
        return 1 + np.flatnonzero(np.array(words) < shares * _WORDS)

    def _kept(self, i: int, counted: Ints) -> Ints:
        """Those of the `counted` places of sample i that the drawn mask leaves."""
        kind, word = bits_range(self.seed, f"weights/{i}", 0, 2).tolist()
        if kind % 5 == 0:
            return counted[:0]
        if kind % 5 == 1 and len(counted):
            return counted[[word % len(counted)]]
        return counted
