"""Which rows of the residual stream `[t, h]` belong to which sequence, and what they are for.

`Sequences` is the only source of positions, masks and loss weights. A micro-batch of equal lengths
and a row of packed documents are the same thing: rows of one stream, cut into sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from penteract.mesh import Axis
from penteract.placement import even_sizes


@dataclass(frozen=True)
class Rows:
    """The rows of the stream that one rank holds, where they are split over ranks."""

    sizes: tuple[int, ...]  # rows of each rank
    positions: Tensor  # of this rank's
    rows: Tensor  # of this rank's


@dataclass(frozen=True)
class Sequences:
    """Lengths on the host; positions, global row numbers and loss weights on the device.

    Attention is causal inside each sequence and never crosses from one to another.
    """

    lengths: tuple[int, ...]
    positions: Tensor  # [t] int64: place in its sequence
    rows: Tensor  # [t] int64: number of the token in the whole micro-batch; keys dropout
    weights: Tensor  # [t] loss weights, 0 where a token does not count
    past: int = 0  # tokens of each sequence already in a key/value cache
    _tables: dict[tuple[int, float, torch.dtype], tuple[Tensor, Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _parts: dict[tuple[int, int], Rows] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        lengths: tuple[int, ...],
        *,
        weights: Tensor | None = None,
        past: int = 0,
        device: torch.device | str = "cpu",
    ) -> Sequences:
        """Sequences one behind the other; every token counts 1 unless `weights` [t] are given."""
        total = sum(lengths)
        longest = torch.arange(past, past + max(lengths, default=0), device=device)
        if len(set(lengths)) <= 1:
            positions = longest.repeat(len(lengths))
        else:
            positions = torch.cat([longest[:n] for n in lengths])
        if weights is None:
            weights = torch.ones(total, device=device)
        if weights.shape != (total,):
            raise ValueError(f"{total} tokens in sequences, but weights of shape {weights.shape}")
        rows = torch.arange(total, device=device)
        return cls(lengths, positions, rows, weights, past)

    def part(self, axis: Axis) -> Rows:
        """This rank's rows of a stream that is split over `axis`; all where its size is 1."""
        key = (axis.size, axis.rank)
        if key not in self._parts:
            sizes = tuple(even_sizes(len(self.rows), axis.size))
            start = sum(sizes[: axis.rank])
            mine = slice(start, start + sizes[axis.rank])
            self._parts[key] = Rows(sizes, self.positions[mine], self.rows[mine])
        return self._parts[key]

    def rotary(self, head_size: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin) of every row's rotary angles, [t, d/2] each, made once per micro-batch."""
        key = (head_size, theta, dtype)
        if key not in self._tables:
            # float64: an angle at position 10^6 still has 9 digits after the point.
            exponents = torch.arange(
                0, head_size, 2, dtype=torch.float64, device=self.positions.device
            )
            frequencies = theta ** (-exponents / head_size)
            angles = self.positions.double()[:, None] * frequencies  # [t, d/2]
            self._tables[key] = (angles.cos().to(dtype), angles.sin().to(dtype))
        return self._tables[key]


@dataclass(frozen=True)
class MicroBatch:
    """One forward's input: the loss of row i is of predicting labels[i]."""

    tokens: Tensor  # [t] int64
    labels: Tensor  # [t] int64
    sequences: Sequences

    @classmethod
    def of_samples(
        cls,
        tokens: Tensor,
        labels: Tensor,
        device: torch.device | str = "cpu",
    ) -> MicroBatch:
        """Samples of equal length, int64 [n, s], moved to `device` without waiting; n may be 0."""
        n, s = tokens.shape
        x, y = (a.reshape(-1).to(device, non_blocking=True) for a in (tokens, labels))
        return cls(x, y, Sequences.of((s,) * n, device=device))


@dataclass(frozen=True)
class Noise:
    """Where dropout masks come from: with a layer's name, the stream of its one global mask."""

    seed: int
    step: int
    micro_batch: int  # number in the step, over all ranks

    def stream(self, name: str) -> str:
        return f"dropout/{self.step}/{self.micro_batch}/{name}"
