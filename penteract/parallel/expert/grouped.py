"""A linear map for each expert in one product: rows of one expert after those of another.

torch has a kernel for it in 16 and 32 bits; elsewhere, and where it is slower, it is a product for
each expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penteract import compat
from penteract.parallel.parameters import WeightGradients
from penteract.parallel.products import fast, write_product


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
    if len(x) and len(set(groups.rows)) == 1 and compat.multiplies(x):
        return torch.bmm(x.view(len(groups.rows), -1, x.shape[1]), weights).flatten(0, 1)
    if len(x) and compat.has_grouped_product(x, weights):
        return compat.grouped_product(x, weights, groups.ends)
    rows = fast(x)
    out = rows.new_empty(len(x), weights.shape[2])
    for part, matrix, own in zip(
        groups.split(out), weights.unbind(0), groups.split(rows), strict=True
    ):
        if len(own):
            torch.mm(own, fast(matrix), out=part)
    return out.to(x.dtype)


def weight_gradient(
    dy: Tensor,
    x: Tensor,
    weight: nn.Parameter,
    groups: Groups,
    gradients: WeightGradients | None,
) -> Tensor | None:
    """For y = x W_eᵀ of the rows of each expert e, dW_e = dy_eᵀ x_e: to `gradients`, else returned.

    None too where the parameter `weight` [e, o, i] wants no gradient.
    """
    if not weight.requires_grad:
        return None

    def write(out: Tensor, overwrite: bool) -> None:
        parts = zip(out.unbind(0), groups.split(dy), groups.split(x), strict=True)
        for own, d_rows, rows in parts:
            write_product(d_rows.t(), rows, own, overwrite)

    if gradients is not None:
        gradients.accumulate(weight, write)
        return None
    dw = torch.empty_like(weight)
    write(dw, True)
    return dw
