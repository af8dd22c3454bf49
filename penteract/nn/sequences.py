"""Which rows of the residual stream `[t, h]` belong to which sequence, and what they are for.

`Sequences` is the only source of positions, masks and loss weights. A micro-batch of equal lengths
and a row of packed documents are the same thing: rows of one stream, cut into sequences. With
context parallelism a rank has the rows of its `Cut`: tokens, labels, positions and weights are cut
here, by that alone, and attention follows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from penteract.mesh import Axis
from penteract.parallel.context.cut import Cut
from penteract.parallel.context.exchange import Exchange
from penteract.placement import even_sizes


@dataclass(frozen=True)
class Rows:
    """The rows of the stream that one rank holds, where they are split over ranks."""

    sizes: tuple[int, ...]  # rows of each rank
    positions: Tensor  # of this rank's
    rows: Tensor  # of this rank's
    real: Tensor  # of this rank's


@dataclass(frozen=True)
class Sequences:
    """The cut on the host; this rank's positions, row numbers and loss weights on the device.

    Attention is causal inside each sequence and never crosses from one to another.
    """

    cut: Cut
    positions: Tensor  # [t/cp] int64: place in its sequence; 0 where a row is padding
    rows: Tensor  # [t/cp] int64: number of the token in the whole micro-batch; −1 where padding
    weights: Tensor  # [t/cp] loss weights, 0 where a token does not count
    real: Tensor  # [t/cp] bool: whether a row is no padding
    past: int = 0  # tokens of each sequence already in a key/value cache
    _tables: dict[tuple[int, float, torch.dtype], tuple[Tensor, Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _parts: dict[tuple[int, int], Rows] = field(default_factory=dict, repr=False, compare=False)
    _plans: dict[tuple[Exchange, int | None], Any] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def of(
        cls,
        lengths: tuple[int, ...],
        *,
        weights: Tensor | None = None,
        real: NDArray[Any] | None = None,
        past: int = 0,
        device: torch.device | str = "cpu",
        cp: Axis | None = None,
    ) -> Sequences:
        """Sequences one behind the other, cut over `cp`; every token counts 1 unless `weights` [t]
        are given, and is real unless `real` [t] says otherwise.
        """
        size, rank = (1, 0) if cp is None else (cp.size, cp.rank)
        cut = Cut.of(lengths, size)
        every = torch.ones(cut.tokens) if weights is None else weights
        if every.shape != (cut.tokens,):
            raise ValueError(
                f"{cut.tokens} tokens in sequences, but weights of shape {tuple(every.shape)}"
            )
        mine = torch.from_numpy(cut.take(every.numpy(), rank, fill=0))
        positions = torch.from_numpy(cut.positions(rank)) + past
        rows = torch.from_numpy(cut.rows(rank))
        there = rows >= 0
        if real is not None:
            there = torch.from_numpy(cut.take(real, rank, fill=False))
        return cls(cut, positions, rows, mine, there, past).moved(lambda x: x.to(device))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the whole sequences."""
        return self.cut.lengths

    def plan(self, exchange: Exchange, window: int | None) -> Any:
        """The exchange's plan of this micro-batch, made once."""
        key = (exchange, window)
        if key not in self._plans:
            self._plans[key] = exchange.plan(self.cut, window, self.rows)
        return self._plans[key]

    def moved(self, move: Callable[[Tensor], Tensor]) -> Sequences:
        """The same with its tensors as `move` makes them."""
        return Sequences(
            self.cut,
            move(self.positions),
            move(self.rows),
            move(self.weights),
            move(self.real),
            self.past,
        )

    def part(self, axis: Axis) -> Rows:
        """This rank's rows of a stream that is split over `axis`; all where its size is 1."""
        key = (axis.size, axis.rank)
        if key not in self._parts:
            sizes = tuple(even_sizes(len(self.rows), axis.size))
            start = sum(sizes[: axis.rank])
            mine = slice(start, start + sizes[axis.rank])
            self._parts[key] = Rows(sizes, self.positions[mine], self.rows[mine], self.real[mine])
        return self._parts[key]

    def numbers(self, rows: Tensor) -> Tensor:
        """Which sequence each of these rows belongs to; the first where it is padding."""
        ends = torch.tensor(self.lengths, device=rows.device).cumsum(0)
        return torch.searchsorted(ends, rows.clamp(min=0), right=True)

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

    tokens: Tensor  # [t/cp] int64
    labels: Tensor  # [t/cp] int64
    sequences: Sequences

    @classmethod
    def of(
        cls,
        tokens: NDArray[Any],
        labels: NDArray[Any],
        lengths: tuple[int, ...],
        *,
        weights: NDArray[Any] | None = None,
        real: NDArray[Any] | None = None,
        cp: Axis | None = None,
    ) -> MicroBatch:
        """This rank's rows, on the host, of what is given for whole sequences, [t] each."""
        given = None if weights is None else torch.from_numpy(weights)
        sequences = Sequences.of(lengths, weights=given, real=real, cp=cp)
        rank = 0 if cp is None else cp.rank
        tokens, labels = (sequences.cut.take(x, rank, fill=0) for x in (tokens, labels))
        return cls(torch.from_numpy(tokens), torch.from_numpy(labels), sequences)

    def moved(self, move: Callable[[Tensor], Tensor]) -> MicroBatch:
        """The same with its tensors as `move` makes them."""
        return MicroBatch(move(self.tokens), move(self.labels), self.sequences.moved(move))


@dataclass(frozen=True)
class Training:
    """What layers must know of the update that a forward is part of; evaluation has none."""

    seed: int
    step: int
    micro_batch: int  # number in the step, over all ranks
    share: Tensor | float = 0.0  # what sums over tokens are multiplied by for their step's mean

    def stream(self, name: str) -> str:
        """Of the one global dropout mask of layer `name`."""
        return f"dropout/{self.step}/{self.micro_batch}/{name}"
