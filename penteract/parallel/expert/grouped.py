"""A linear map for each expert in one product: rows of one expert after those of another.

torch has a kernel for it in 16 and 32 bits; elsewhere, and where it is slower, it is a product for
each expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penteract import compat
from penteract.collectives import Operation
from penteract.parallel.parameters import WeightGradients
from penteract.parallel.tensor import write_product


@dataclass(frozen=True)
class Groups:
    """How many rows each expert has, on the host and, added up, on the device."""

    rows: Sequence[int]
    ends: Tensor  # [e] int32: where each expert's rows end

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """The rows of each expert."""
        return x.split(list(self.rows))


def product(x: Tensor, weights: Tensor, groups: Groups) -> Tensor:
    """Rows x [m, i], of expert after expert, times its matrix of weights [e, i, o] → [m, o]."""
    if len(x) and len(set(groups.rows)) == 1:
        return torch.bmm(x.view(len(groups.rows), -1, x.shape[1]), weights).flatten(0, 1)
    if len(x) and compat.has_grouped_product(x, weights):
        return compat.grouped_product(x, weights, groups.ends)
    out = x.new_empty(len(x), weights.shape[2])
    for part, matrix, rows in zip(
        groups.split(out), weights.unbind(0), groups.split(x), strict=True
    ):
        if len(rows):
            torch.mm(rows, matrix, out=part)
    return out


class _GroupedLinear(Operation):
    """y = x W_eᵀ for the rows of each expert e."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, groups: Groups, gradients: WeightGradients | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter, ctx.groups, ctx.gradients = weight, groups, gradients
        return product(x, weight.mT, groups)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x, dy, groups = x.detach(), dy.contiguous(), ctx.groups

        def write(out: Tensor, overwrite: bool) -> None:
            parts = zip(out.unbind(0), groups.split(dy), groups.split(x), strict=True)
            for own, d_rows, rows in parts:
                write_product(d_rows.t(), rows, own, overwrite)

        dx = product(dy, weight, groups)
        if ctx.needs_input_grad[1] and ctx.gradients is not None:
            ctx.gradients.accumulate(ctx.parameter, write)
            return dx, None, None, None
        dw = None
        if ctx.needs_input_grad[1]:
            dw = torch.empty_like(weight)
            write(dw, True)
        return dx, dw, None, None


def grouped_linear(
    x: Tensor, weight: Tensor, groups: Groups, gradients: WeightGradients | None
) -> Tensor:
    """x [m, i] · weight[e]ᵀ [i, o] → [m, o]; the weight's gradient goes to `gradients`."""
    result: Tensor = _GroupedLinear.apply(x, weight, groups, gradients)
    return result
