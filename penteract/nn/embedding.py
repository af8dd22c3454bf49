"""Token embedding with its rows split over the tensor ranks, and learned positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penteract.collectives import Operation, P, all_reduce, declare
from penteract.mesh import Axis
from penteract.nn.build import Build
from penteract.nn.dropout import dropout
from penteract.nn.sequences import Noise, Sequences
from penteract.parallel.parameters import Layer, WeightGradients, data_partial, replicated
from penteract.placement import Box, Init, Piece, Placement, split_range


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
    """tokens [t] → [t, h] I(tp): each tensor rank looks up its own rows, then they are summed."""

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
        axis, init, dtype = build.tp, build.init, build.dtype
        self.name, self.axis, self.dropout = name, axis, dropout
        self.start, self.stop = split_range(vocab, axis.size, axis.rank)
        self.declare("weight", vocabulary_rows(f"{name}.weight", vocab, hidden, axis, init), dtype)
        if positions is not None:
            placement = replicated(f"{name}.positions", (positions, hidden), init, decay=True)
            self.declare("positions", placement, dtype)
        else:
            self.register_parameter("positions", None)

    def forward(self, tokens: Tensor, sequences: Sequences, noise: Noise | None) -> Tensor:
        mine = (tokens >= self.start) & (tokens < self.stop)
        # Another rank's tokens look up row 0, which is masked; alone, a bad token is an error.
        index = tokens if self.axis.size == 1 else (tokens - self.start) * mine
        x = _Lookup.apply(index, self.weight, self.gradients)
        if self.axis.size > 1:
            x = x * mine[:, None]
        x = all_reduce(declare(x, self.axis, P), self.axis)  # [t, h] P(tp) -> I(tp)
        if self.positions is not None:
            x = x + _Lookup.apply(sequences.positions, self.positions, self.gradients)
        return dropout(x, self.dropout, name=self.name, rows=sequences.rows, noise=noise)


def vocabulary_rows(name: str, vocab: int, hidden: int, axis: Axis, init: Init) -> Placement:
    """Placement of this rank's rows of a [vocab, hidden] matrix."""
    start, stop = split_range(vocab, axis.size, axis.rank)
    piece = Piece(name, (vocab, hidden), Box((start, 0), (stop - start, hidden)), (0, 0))
    axes = data_partial("split")
    return Placement((stop - start, hidden), (piece,), axes, init, decay=True)
