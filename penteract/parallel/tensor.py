"""Tensor parallelism: weight matrices cut by output features, then by input features.

A column-parallel layer `y = x Aᵀ` holds some rows of A, so each rank makes some features of y; the
row-parallel layer that follows holds the matching columns of its matrix, so each rank makes a
partial sum of the whole output, and one all-reduce adds them up. Nothing is sent between the two.

    x [t, h] I ── replicate ── R ── column ──> [t, f/tp] S ── row ──> [t, h] P ── all_reduce ──> I

| what                             | axis | bytes a rank      | when     | hidden behind |
|----------------------------------|------|-------------------|----------|---------------|
| output of a row layer            | tp   | 2 (tp-1)/tp · t·h | forward  | nothing       |
| input gradient of a column layer | tp   | 2 (tp-1)/tp · t·h | backward | nothing       |

What must hold: the bias of a row layer is added once, after the reduction; every gradient of a
weight lies on the rank that holds it. Source: Shoeybi et al., arXiv:1909.08053, section 3.

A linear layer's backward hands its weight gradient over as a closure that writes straight into the
gradient buffer (`WeightGradients`), which decides when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penteract.collectives import Operation, P, all_reduce, declare, replicate
from penteract.mesh import Axis
from penteract.parallel.parameters import Layer, WeightGradients, data_partial, replicated
from penteract.placement import Box, Init, Piece, Placement, split_range


def write_product(a: Tensor, b: Tensor, out: Tensor, overwrite: bool) -> None:
    """out = a b, or out += a b; a product of a narrower type is added in the type of `out`."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=0.0 if overwrite else 1.0, out=out)
    elif overwrite:
        out.copy_(a @ b)
    else:
        out.add_(a @ b)


class _Linear(Operation):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gradients: WeightGradients | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gradients, ctx.parameter = gradients, weight
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1] and ctx.gradients is None:
            dw = dy.t() @ x
        elif ctx.needs_input_grad[1]:
            ctx.gradients.accumulate(
                ctx.parameter, lambda out, overwrite: write_product(dy.t(), x, out, overwrite)
            )
        db = dy.sum(0) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, gradients: WeightGradients | None
) -> Tensor:
    """x [t, i] · weightᵀ [i, o] + bias [o] → [t, o]; the weight's gradient goes to `gradients`."""
    result: Tensor = _Linear.apply(x, weight, bias, gradients)
    return result


@dataclass(frozen=True)
class Features:
    """Output features of a column layer that are one logical matrix, cut in whole units (heads)."""

    name: str  # logical name, without .weight or .bias
    units: int
    unit: int = 1

    def local(self, axis: Axis) -> tuple[int, int]:
        """This rank's feature range (start, stop)."""
        start, stop = split_range(self.units, axis.size, axis.rank)
        return start * self.unit, stop * self.unit


class ColumnLinear(Layer):
    """[t, i] I(tp) → [t, o/tp] S(tp), with several logical matrices one below the other."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        inputs: int,
        outputs: Sequence[Features],
        axis: Axis,
        *,
        bias: bool,
        dtype: torch.dtype,
        init: Init,
    ) -> None:
        super().__init__()
        self.axis = axis
        ranges = [f.local(axis) for f in outputs]
        self.sizes = [stop - start for start, stop in ranges]  # local features of each output
        weights, biases, at = [], [], 0
        for f, (start, stop) in zip(outputs, ranges, strict=True):
            total, n = f.units * f.unit, stop - start
            box = Box((start, 0), (n, inputs))
            weights.append(Piece(f"{f.name}.weight", (total, inputs), box, (at, 0)))
            biases.append(Piece(f"{f.name}.bias", (total,), Box((start,), (n,)), (at,)))
            at += n
        axes = data_partial("split")
        weight = Placement((at, inputs), tuple(weights), axes, init, decay=True)
        self.declare("weight", weight, dtype)
        if bias:
            zeros = Init("zeros")
            self.declare("bias", Placement((at,), tuple(biases), axes, zeros, decay=False), dtype)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        x = replicate(x, self.axis)  # [t, i] R(tp)
        return linear(x, self.weight, self.bias, self.gradients)  # [t, o/tp] S(tp)


class RowLinear(Layer):
    """[t, i/tp] S(tp) → [t, o] I(tp): partial products, one all-reduce, then the bias once."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        inputs: Features,
        outputs: int,
        axis: Axis,
        *,
        bias: bool,
        dtype: torch.dtype,
        init: Init,
    ) -> None:
        super().__init__()
        self.axis = axis
        start, stop = inputs.local(axis)
        box = Box((0, start), (outputs, stop - start))
        piece = Piece(f"{inputs.name}.weight", (outputs, inputs.units * inputs.unit), box, (0, 0))
        split = data_partial("split")
        weight = Placement((outputs, stop - start), (piece,), split, init, decay=True)
        self.declare("weight", weight, dtype)
        if bias:
            self.declare(
                "bias", replicated(f"{inputs.name}.bias", (outputs,), Init("zeros")), dtype
            )
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.weight, None, self.gradients)
        y = all_reduce(declare(y, self.axis, P), self.axis)  # [t, o] P(tp) -> I(tp)
        return y if self.bias is None else y + self.bias
