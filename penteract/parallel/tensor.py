"""Tensor and sequence parallelism: matrices cut by output features, then by input features.

A column-parallel layer `y = x Aᵀ` holds some rows of A, so each rank makes some features of y; the
row-parallel layer that follows holds the matching columns of its matrix, so each rank makes a
partial sum of the whole output, and one all-reduce adds them up. Nothing is sent between the two.
With sequence parallelism the stream between such pairs is split by tokens: the all-reduce becomes
a reduce-scatter after the pair and an all-gather before it, and what lies between (norms, dropout,
the residual) is a tp-th of the work and of the memory.

    tp     x [t, h] I ────────────────── column ─> [t, f/tp] S ─ row ─> P ─ all_reduce ─────> I
    tp+sp  x [t/tp, h] S ── all_gather ─ column ─> [t, f/tp] S ─ row ─> P ─ reduce_scatter ─> S

Bytes a rank sends, in units of (tp-1)/tp · t·h elements:

| what                               | tp | tp+sp | when     | hidden behind                     |
|------------------------------------|----|-------|----------|-----------------------------------|
| input of a column layer            | 0  | 1     | forward  | nothing                           |
| output of a row layer              | 2  | 1     | forward  | nothing                           |
| output gradient of a row layer     | 0  | 1     | backward | nothing                           |
| input of a column layer, again     | 0  | 1     | backward | the product for its gradient      |
| input gradient of a column layer   | 2  | 1     | backward | the product for weight gradients  |
| gradients of what is used on the stream's rows (norms, biases, positions): 2 (tp-1)/tp of them,
  with sp only, in one message at the end of the step (`buffers`)                               |

So sequence parallelism sends what plain tensor parallelism sends, and gathers the input of column
layers once more, because the gathered input is not kept for backward.

What must hold: the bias of a row layer is added once, after the sum; every gradient of a weight
lies on the rank that holds it; every rank calls the same collectives in the same order, in
recomputed regions too. Sources: Shoeybi et al., arXiv:1909.08053, section 3; Korthikanti et al.,
arXiv:2205.05198, section 4.

A linear layer's backward hands its weight gradient over as a closure that writes straight into the
gradient buffer (`WeightGradients`), which decides when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penteract.collectives import (
    I,
    Kind,
    Kinds,
    Operation,
    P,
    Pending,
    S,
    all_gather,
    all_reduce,
    declare,
    done,
    reduce_scatter,
    replicate,
    start_all_gather,
    start_all_reduce_,
    start_reduce_scatter,
)
from penteract.mesh import Axis, single
from penteract.parallel.parameters import (
    Boundary,
    Layer,
    WeightGradients,
    data_partial,
    replicated,
)
from penteract.parallel.products import affine, product, write_product
from penteract.placement import AxisUse, Box, Init, Piece, Placement, split_range

Sizes = Sequence[int] | None  # rows of the stream on each rank; None: as many on every rank


@dataclass(frozen=True)
class TensorParallel:
    """How layers are cut over `axis`, and how the stream between them lies on it.

    With `sequence` the stream is split by rows, S(0); otherwise it is whole on every rank, I. With
    `overlap` a backward computes while its messages travel; the results are the same.
    """

    axis: Axis
    sequence: bool = False
    overlap: bool = True

    @property
    def stream(self) -> Axis:
        """The axis over which the stream's rows are split: one of size 1 where they are not."""
        return self.axis if self.sequence else single(self.axis.name, self.axis.ranks[0])

    @property
    def stream_kind(self) -> Kind:
        return S(0) if self.sequence else I

    @property
    def stream_use(self) -> AxisUse:
        """What a parameter is over the axis that is used on rows of the stream."""
        return "partial" if self.sequence else "replicated"

    def gather(self, x: Tensor, sizes: Sizes = None) -> Tensor:
        """Rows of the stream [t/tp, h] or [t, h] → all rows [t, h] R, for a split product."""
        return all_gather(x, self.axis, sizes=sizes) if self.sequence else replicate(x, self.axis)

    def sum(self, y: Tensor) -> Tensor:
        """Partial sums [t, h] → the stream [t/tp, h] or [t, h]; the transpose of `gather`."""
        y = declare(y, self.axis, P)
        return reduce_scatter(y, self.axis) if self.sequence else all_reduce(y, self.axis)

    def start_gather(self, x: Tensor, sizes: Sizes = None) -> Pending:
        """`gather` without autograd, begun."""
        return start_all_gather(x, self.axis, sizes=sizes) if self.sequence else done(x)

    def start_sum(self, y: Tensor, sizes: Sizes = None) -> Pending:
        """`sum` without autograd, begun; `y` is overwritten."""
        if self.sequence:
            return start_reduce_scatter(y, self.axis, sizes=sizes)
        return start_all_reduce_(y, self.axis)


class _Linear(Operation):
    """y = X Wᵀ + b, where X is all rows of x: x itself, or gathered where `tp` says so.

    Backward: dX = dy W; dx is the transpose of the gathering applied to dX, and travels while
    dW = dyᵀ X is computed.
    """

    @staticmethod
    def kinds(args: Sequence[Any]) -> Kinds | None:
        tp = args[4]
        return None if tp is None else (tp.axis, (tp.stream_kind, S(0), S(0)), S(1))

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradients: WeightGradients | None,
        tp: TensorParallel | None,
        sizes: Sizes,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gradients, ctx.parameter = gradients, weight
        ctx.tp, ctx.sizes = tp, sizes
        rows = x if tp is None else tp.start_gather(x, sizes).wait()  # [t, i]
        return affine(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx, rows = input_gradient(dy, weight, x, ctx.tp, ctx.sizes)
        dw = None
        if ctx.needs_input_grad[1] and ctx.gradients is None:
            dw = product(dy.t(), rows)
        elif ctx.needs_input_grad[1]:
            ctx.gradients.accumulate(
                ctx.parameter, lambda out, overwrite: write_product(dy.t(), rows, out, overwrite)
            )
        db = dy.sum(0) if ctx.needs_input_grad[2] else None
        return dx.wait(), dw, db, None, None, None


def input_gradient(
    dy: Tensor, weight: Tensor, x: Tensor, tp: TensorParallel | None, sizes: Sizes
) -> tuple[Pending, Tensor]:
    """For y = X Wᵀ: the gradient of x, on its way, and X [t, i], which the weight's gradient needs.

    Where the stream is split, x is gathered again while dy W is computed.
    """
    x = x.detach()  # a weight gradient that waits must keep no graph alive
    if tp is None:
        return done(product(dy, weight)), x
    gathered = tp.start_gather(x, sizes)
    if not tp.overlap:
        gathered.wait()
    dx = tp.start_sum(product(dy, weight), sizes)  # [t, i] P(tp) -> the stream
    if not tp.overlap:
        dx.wait()
    return dx, gathered.wait()


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradients: WeightGradients | None,
    *,
    tp: TensorParallel | None = None,
    sizes: Sizes = None,
) -> Tensor:
    """x [t, i] · weightᵀ [i, o] + bias [o] → [t, o]; the weight's gradient goes to `gradients`.

    With `tp`, x is the stream and weight this rank's rows of a column-parallel matrix: x is
    gathered first where it is split, its gradient summed over the ranks.
    """
    result: Tensor = _Linear.apply(x, weight, bias, gradients, tp, sizes)
    return result


@dataclass(frozen=True)
class Features:
    """Output features of a column layer that are one logical matrix, cut in whole units (heads).

    `computed` are the units (start, stop) that this rank computes of a matrix that every rank holds
    whole; None: it holds and computes its even part.
    """

    name: str  # logical name, without .weight or .bias
    units: int
    unit: int = 1
    computed: tuple[int, int] | None = None

    def local(self, axis: Axis) -> tuple[int, int]:
        """The range of features that this rank computes (start, stop)."""
        start, stop = self.computed or split_range(self.units, axis.size, axis.rank)
        return start * self.unit, stop * self.unit

    def pieces(self, axis: Axis, inputs: int, at: int) -> tuple[Piece, Piece]:
        """Where weight and bias of what the rank holds lie, in a stored matrix from row `at`."""
        total = self.units * self.unit
        start, stop = self.local(axis) if self.computed is None else (0, total)
        box = Box((start, 0), (stop - start, inputs))
        weight = Piece(f"{self.name}.weight", (total, inputs), box, (at, 0))
        bias = Piece(f"{self.name}.bias", (total,), Box((start,), (stop - start,)), (at,))
        return weight, bias

    def output(self, axis: Axis, at: int = 0) -> Piece:
        """Where the computed features lie in an output, from feature `at` on."""
        start, stop = self.local(axis)
        return Piece(self.name, (self.units * self.unit,), Box((start,), (stop - start,)), (at,))


class ColumnLinear(Layer):
    """The stream → [t, o/tp] S(tp), with several logical matrices one below the other.

    Matrices that are held whole (`Features.computed`) are a second parameter, `whole_weight`; the
    rows that the rank computes are put below its own in each forward, which copies the weight.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    whole_weight: nn.Parameter | None
    whole_bias: nn.Parameter | None

    def __init__(
        self,
        inputs: int,
        outputs: Sequence[Features],
        tp: TensorParallel,
        *,
        bias: bool,
        dtype: torch.dtype,
        init: Init,
    ) -> None:
        super().__init__()
        self.tp, self.inputs = tp, inputs
        ranges = [f.local(tp.axis) for f in outputs]
        self.sizes = [stop - start for start, stop in ranges]  # local features of each output
        self.boundary = Boundary(
            tuple(f.output(tp.axis, sum(self.sizes[:i])) for i, f in enumerate(outputs)),
            single(tp.axis.name),
            partial=tuple(f.name for f in outputs if f.computed is not None),
        )
        whole = [f for f in outputs if f.computed is not None]
        self._declare(
            "weight", "bias", [f for f in outputs if f.computed is None], bias, dtype, init
        )
        self._declare("whole_weight", "whole_bias", whole, bias, dtype, init)
        self.computed: list[slice] = []  # rows of whole_weight
        at = 0
        for f in whole:
            start, stop = f.local(tp.axis)
            self.computed.append(slice(at + start, at + stop))
            at += f.units * f.unit

    def _declare(
        self,
        weight: str,
        bias: str,
        outputs: Sequence[Features],
        has_bias: bool,
        dtype: torch.dtype,
        init: Init,
    ) -> None:
        pieces: list[tuple[Piece, Piece]] = []
        at = 0
        for f in outputs:
            pieces.append(f.pieces(self.tp.axis, self.inputs, at))
            at += pieces[-1][0].box.size[0]
        axes = data_partial("split" if weight == "weight" else "partial")
        if pieces:
            weights, biases = zip(*pieces, strict=True)
            shape = (at, self.inputs)
            self.declare(
                weight, Placement(shape, weights, axes, init, decay=True, matrix=True), dtype
            )
        else:
            self.register_parameter(weight, None)
        if pieces and has_bias:
            zeros = Init("zeros")
            self.declare(bias, Placement((at,), biases, axes, zeros, decay=False), dtype)
        else:
            self.register_parameter(bias, None)

    def forward(self, x: Tensor, sizes: Sizes = None) -> Tensor:
        weight = self._joined(self.weight, self.whole_weight)
        bias = None if self.bias is None else self._joined(self.bias, self.whole_bias)
        # What was joined is taken apart again by autograd.
        gradients = self.gradients if self.whole_weight is None else None
        return linear(x, weight, bias, gradients, tp=self.tp, sizes=sizes)  # [t, o/tp] S(tp)

    def _joined(self, own: Tensor, held_whole: Tensor | None) -> Tensor:
        if held_whole is None:
            return own
        parts = [declare(held_whole[rows], self.tp.axis, S(0)) for rows in self.computed]
        return torch.cat([own, *parts])


class RowLinear(Layer):
    """[t, i/tp] S(tp) → the stream: partial products, their sum over tp, then the bias once."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        inputs: Features,
        outputs: int,
        tp: TensorParallel,
        *,
        bias: bool,
        dtype: torch.dtype,
        init: Init,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.boundary = Boundary.of(inputs.name, outputs, tp.stream)
        start, stop = inputs.local(tp.axis)
        box = Box((0, start), (outputs, stop - start))
        piece = Piece(f"{inputs.name}.weight", (outputs, inputs.units * inputs.unit), box, (0, 0))
        split = data_partial("split")
        weight = Placement((outputs, stop - start), (piece,), split, init, decay=True, matrix=True)
        self.declare("weight", weight, dtype)
        if bias:
            name, zeros = f"{inputs.name}.bias", Init("zeros")
            self.declare("bias", replicated(name, (outputs,), zeros, tp=tp.stream_use), dtype)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.tp.sum(linear(x, self.weight, None, self.gradients))  # [t, o] P(tp) -> the stream
        return y if self.bias is None else y + self.bias
