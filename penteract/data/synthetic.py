"""Samples made from a seed: what `train --dry-run` and tests train on without any file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from penteract.data.indexed import Ints
from penteract.random import bits_range


class SyntheticSource:
    """Sample i is `seq` inputs and labels of uniform tokens, a function of (seed, i)."""

    def __init__(self, *, seq: int, vocab: int, seed: int) -> None:
        self.seq, self.vocab, self.seed = seq, vocab, seed

    def samples(self, indices: Sequence[int] | range | Ints) -> tuple[Ints, Ints]:
        """Inputs and labels [n, seq] of samples `indices` [n]."""
        rows = [bits_range(self.seed, f"tokens/{int(i)}", 0, self.seq + 1) for i in indices]
        empty = torch.zeros((0, self.seq + 1), dtype=torch.int64)
        tokens: Ints = (torch.stack(rows) if rows else empty).numpy() % self.vocab
        return tokens[:, :-1].astype(np.int64), tokens[:, 1:].astype(np.int64)
