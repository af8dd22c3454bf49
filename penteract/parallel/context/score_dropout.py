"""Dropout of attention's probabilities, as a function of head, query and key in the micro-batch.

A mask of a block is a part of one global mask, however heads and rows are spread over ranks. With
M the mask over (1 − rate), out = (P ∘ M) v and ds = P ∘ (M ∘ do vᵀ − D): log-sum-exp and D stay
what they are, so blocks are merged as without.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penteract.parallel.context.cut import Cut
from penteract.random import keep_mask


@dataclass(frozen=True, eq=False)
class Places:
    """Numbers of queries and keys in a micro-batch of `tokens` tokens: [t, 1], of blocks [n, 1, t].

    Padding has −1.
    """

    queries: Tensor
    keys: Tensor
    tokens: int

    @classmethod
    def of_ranks(cls, cut: Cut, rank: int, owner: int | None, device: torch.device) -> Places:
        """Queries of one rank and keys of another; with None those of the whole micro-batch."""
        held = np.arange(cut.tokens) if owner is None else cut.rows(owner)
        queries, keys = (torch.from_numpy(x).to(device)[:, None] for x in (cut.rows(rank), held))
        return cls(queries, keys, cut.tokens)

    def within(self, queries: slice, keys: slice) -> Places:
        """Those of a part of a block."""
        return Places(self.queries[..., queries], self.keys[..., keys], self.tokens)


@dataclass(frozen=True)
class Drop:
    """What is dropped at which rate; `heads` says which of the layer's heads a kernel is given."""

    rate: float
    seed: int
    stream: str
    heads: tuple[int, ...]

    def factors(self, places: Places) -> Tensor:
        """M of blocks, [n, a, s, s'], 0 or 1 / (1 − rate), in float64."""
        heads = torch.tensor(self.heads, device=places.queries.device)[:, None, None]
        queries, keys = places.queries[..., None], places.keys[:, :, None, :]
        index = (heads * places.tokens + queries) * places.tokens + keys
        return keep_mask(self.seed, self.stream, index, 1 - self.rate).double() / (1 - self.rate)
