"""Token embedding with its rows split over the tensor ranks, and learned positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penteract.collectives import Operation
from penteract.nn.build import Build
from penteract.nn.dropout import dropout
from penteract.nn.sequences import Sequences, Training
from penteract.parallel.parameters import (
    Boundary,
    Layer,
    WeightGradients,
    data_partial,
    replicated,
)
from penteract.placement import Box, Piece, Placement, split_range


class _Lookup(Operation):
    """Rows of `weight` [v', h] by index; the gradient is added straight into the buffer's rows."""

    @staticmethod
    def forward(
        ctx: Any, index: Tensor, weight: Tensor, gradients: WeightGradients | None
    ) -> Tensor:
        ctx.save_for_backward(index)
        ctx.parameter, ctx.gradients = weight, gradients
        return weight.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, None]:
        (index,) = ctx.saved_tensors

        def write(out: Tensor, overwrite: bool) -> None:
            if overwrite:
                out.zero_()
            out.index_add_(0, index, dy.to(out.dtype))

        if ctx.gradients is not None:
            ctx.gradients.accumulate(ctx.parameter, write)
            return None, None, None
        dw = torch.empty_like(ctx.parameter)
        write(dw, True)
        return None, dw, None


class Embedding(Layer):
    """tokens [t] → the stream: each tensor rank looks up its own rows, then they are summed."""

    weight: nn.Parameter
    positions: nn.Parameter | None

    def __init__(
        self,
        name: str,
        vocab: int,
        hidden: int,
        build: Build,
        *,
        positions: int | None,
        dropout: float,
    ) -> None:
        super().__init__()
        self.tp, init, dtype = build.tp, build.init, build.dtype
        self.name, self.dropout = name, dropout
        self.boundary = Boundary.of(name, hidden, build.tp.stream)
        self.start, self.stop = split_range(vocab, self.tp.axis.size, self.tp.axis.rank)
        self.declare("weight", vocabulary_rows(f"{name}.weight", vocab, hidden, build), dtype)
        if positions is not None:
            shape, use = (positions, hidden), build.tp.stream_use
            placement = replicated(f"{name}.positions", shape, init, decay=True, tp=use)
            self.declare("positions", placement, dtype)
        else:
            self.register_parameter("positions", None)

    def forward(self, tokens: Tensor, sequences: Sequences, training: Training | None) -> Tensor:
        axis, part = self.tp.axis, sequences.part(self.tp.stream)
        mine = (tokens >= self.start) & (tokens < self.stop)
        # Another rank's tokens look up row 0, which is masked; alone, a bad token is an error.
        index = tokens if axis.size == 1 else (tokens - self.start) * mine
        x = _Lookup.apply(index, self.weight, self.gradients)
        if axis.size > 1:
            x = x * mine[:, None]
        x = self.tp.sum(x)  # [t, h] P(tp) -> the stream
        if self.positions is not None:
            x = x + _Lookup.apply(part.positions, self.positions, self.gradients)
        return dropout(x, self.dropout, name=self.name, rows=part.rows, training=training)


def vocabulary_rows(name: str, vocab: int, hidden: int, build: Build) -> Placement:
    """Placement of this rank's rows of a [vocab, hidden] matrix, as many as `padded_rows`.

    Where embedding and head are tied, each holds a part of the gradient's sum.
    """
    start, stop = split_range(vocab, build.tp.axis.size, build.tp.axis.rank)
    piece = Piece(name, (vocab, hidden), Box((start, 0), (stop - start, hidden)), (0, 0))
    shape = (padded_rows(stop - start, build.vocab_multiple), hidden)
    axes = {**data_partial("split"), "tied": "partial"} if build.tied else data_partial("split")
    return Placement(shape, (piece,), axes, build.init, decay=True)


def padded_rows(rows: int, multiple: int) -> int:
    """Rows stored for `rows` of the vocabulary: a multiple, and one where there is none.

    What is added belongs to no piece: it stays 0, and is neither counted, saved nor converted.
    """
    return max(1, -(-rows // multiple)) * multiple
