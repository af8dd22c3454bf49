"""The global gradient norm: every logical element once, whatever the layout."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from penteract.collectives import all_reduce_
from penteract.mesh import Axis
from penteract.parallel.buffers import Buffers


def gradient_norm(buffers: Buffers, axes: Mapping[str, Axis]) -> Tensor:
    """The 2-norm of all gradients, a scalar, the same on every rank; before clipping.

    Gradients are whole after `Buffers.finish`: a buffer's squares are summed over the axes that
    split its parameters, and counted once where they are replicated. Gaps between parameters hold
    zero.
    """
    squares: dict[tuple[str, ...], Tensor] = {}
    for buffer in buffers.buffers:
        square = torch.linalg.vector_norm(buffer.gradient).double().square()
        squares[buffer.split_axes] = squares.get(buffer.split_axes, 0) + square
    for split_axes, square in squares.items():
        for name in split_axes:
            all_reduce_(square, axes[name])
    return torch.stack(list(squares.values())).sum().sqrt()


def clip_coefficient(norm: Tensor, limit: float) -> Tensor:
    """What gradients are multiplied by: min(1, limit / (norm + 1e-6)); 1 where `limit` is 0."""
    return torch.ones_like(norm) if limit == 0 else (limit / (norm + 1e-6)).clamp(max=1.0)
