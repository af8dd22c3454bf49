"""The feed-forward layers of a rank's experts as one operation, which keeps what it is told to.

Each row of m is for one expert and comes of one of r tokens, both given by number; it is weighted
between the two products, so that what the second makes is not kept. Kept for backward, in numbers,
of experts of width f (with SwiGLU; with GELU gate is not there):

| `keeps`      | tokens      | gate·up | activation | computed again                   |
|--------------|-------------|---------|------------|----------------------------------|
| "all"        | m·h         | m·2f    | m·f        | nothing                          |
| "expert_act" | min(m, r)·h | m·2f    | 0          | activation, perhaps copying rows |
| "experts"    | min(m, r)·h | 0       | 0          | the first product too            |

Nothing is sent again, unlike where the whole half of a block is recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penteract.collectives import Operation
from penteract.parallel.buckets import at_least_float32
from penteract.parallel.expert.grouped import Groups, product, weight_gradient
from penteract.parallel.parameters import WeightGradients
from penteract.parallel.recompute import Keeps


@dataclass(frozen=True)
class Way:
    """Which row is whose, and how it is treated."""

    token: Tensor  # [m] int64
    expert: Tensor  # [m] int64, ascending
    groups: Groups
    gated: bool  # SwiGLU; else GELU
    keeps: Keeps
    gradients: WeightGradients | None

    def first(self, rows: Tensor, inner: Tensor, bias: Tensor | None) -> Tensor:
        """Rows [m, h] → gate|up [m, 2f], or up [m, f]."""
        y = product(rows, inner.mT, self.groups)
        return y if bias is None else y.add_(bias[self.expert])

    def activate(self, y: Tensor, weights: Tensor) -> Tensor:
        """gate|up, weights [m] → silu(gate)·up·weight [m, f]; or gelu(up)·weight."""
        if not self.gated:
            return F.gelu(y, approximate="tanh").mul_(weights[:, None])
        gate, up = y.chunk(2, dim=-1)
        return F.silu(gate).mul_(up).mul_(weights[:, None])

    def activation_gradients(self, dy: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Of what `activate` took, where its result has the gradient `dy` [m, f]."""
        # In place in parts of the result: a fresh temporary would cost more than its sums.
        out = torch.empty_like(y)
        if not self.gated:
            torch.ops.aten.gelu.out(y, approximate="tanh", out=out)
            d_weights = out.mul_(dy).sum(-1, dtype=weights.dtype)
            torch.mul(dy, weights[:, None], out=out)
            return torch.ops.aten.gelu_backward(out, y, approximate="tanh"), d_weights
        gate, up = y.chunk(2, dim=-1)
        d_gate, d_up = out.chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate, out=d_up)
        d_weights = torch.mul(d_up, up, out=d_gate).mul_(dy).sum(-1, dtype=weights.dtype)
        torch.mul(dy, weights[:, None], out=d_gate)  # the gradient of silu(gate)·up
        d_up.mul_(d_gate)
        torch.ops.aten.silu_backward.grad_input(d_gate.mul_(up), gate, grad_input=d_gate)
        return out, d_weights


def _row_sums(rows: Tensor, groups: Groups) -> Tensor:
    """[m, o] → [e, o]: for each expert the sum of its rows, in one order, in at least float32."""
    wide = at_least_float32(rows.dtype)
    return torch.stack([part.sum(0, dtype=wide) for part in groups.split(rows)]).to(rows.dtype)


class _WeightedBias(Operation):
    """Biases [e, h], shares of rows [m] → each row's expert's bias times its share [m, h]."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, shares: Tensor, way: Way) -> Tensor:
        ctx.save_for_backward(bias, shares)
        ctx.way = way
        return (shares[:, None] * bias[way.expert]).to(bias.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        bias, shares = ctx.saved_tensors
        d_bias = _row_sums(dy * shares[:, None], ctx.way.groups).to(bias.dtype)
        return d_bias, (dy * bias[ctx.way.expert]).sum(-1, dtype=shares.dtype), None


class _GroupedMLP(Operation):
    """Tokens x [r, h], weights [m] → what each row's expert makes of its token, weighted [m, h]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        inner: nn.Parameter,
        inner_bias: nn.Parameter | None,
        down: nn.Parameter,
        way: Way,
    ) -> Tensor:
        rows = x.index_select(0, way.token)  # [m, h]
        between = way.first(rows, inner, inner_bias)  # [m, 2f], with GELU [m, f]
        active = way.activate(between, weights)  # [m, f]
        gathered = way.keeps == "all" or len(rows) < len(x)
        ctx.save_for_backward(
            rows if gathered else x,
            None if way.keeps == "experts" else between,
            active if way.keeps == "all" else None,
            weights, inner, inner_bias, down,
        )  # fmt: skip
        ctx.way, ctx.gathered, ctx.shape, ctx.matrices = way, gathered, x.shape, (inner, down)
        return product(active, down.mT, way.groups)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        way: Way = ctx.way
        of_inner, of_down = ctx.matrices  # as the buffers know them
        x, between, active, weights, inner, inner_bias, down = ctx.saved_tensors
        # A weight gradient that waits must keep no graph alive.
        rows = x.detach() if ctx.gathered else x.detach().index_select(0, way.token)
        if between is None:
            between = way.first(rows, inner, inner_bias)
        if active is None:
            active = way.activate(between, weights)
        dy = dy.contiguous()
        d_active = product(dy, down, way.groups)  # [m, f]
        d_down = weight_gradient(dy, active, of_down, way.groups, way.gradients)
        d_between, d_weights = way.activation_gradients(d_active, between, weights)
        d_bias = None
        if inner_bias is not None and inner_bias.requires_grad:
            d_bias = _row_sums(d_between, way.groups)
        d_rows = product(d_between, inner, way.groups)  # [m, h]
        d_inner = weight_gradient(d_between, rows, of_inner, way.groups, way.gradients)
        dx = d_rows.new_zeros(ctx.shape).index_add_(0, way.token, d_rows)
        return dx, d_weights, d_inner, d_bias, d_down, None


def grouped_mlp(
    x: Tensor,
    weights: Tensor,
    inner: nn.Parameter,
    inner_bias: nn.Parameter | None,
    down: nn.Parameter,
    way: Way,
) -> Tensor:
    """Tokens x [r, h], weights of rows [m], inner [e, 2f or f, h], down [e, h, f] → rows [m, h]."""
    result: Tensor = _GroupedMLP.apply(x, weights, inner, inner_bias, down, way)
    return result


def weighted_bias(bias: nn.Parameter, shares: Tensor, way: Way) -> Tensor:
    """Biases [e, h], shares of rows [m] → [m, h]."""
    result: Tensor = _WeightedBias.apply(bias, shares, way)
    return result
