"""The feed-forward layer: SwiGLU or GELU between a column- and a row-parallel projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penteract.collectives import Operation
from penteract.nn.build import Build
from penteract.parallel.parameters import Boundary
from penteract.parallel.tensor import ColumnLinear, Features, RowLinear, Sizes


@dataclass(frozen=True)
class MLPSpec:
    """Width and activation; `gelu` is the tanh form that GPT-2 uses."""

    width: int
    activation: Literal["swiglu", "gelu"]
    bias: bool


class _SwiGLU(Operation):
    """gate|up [t, 2f] → silu(gate)·up [t, f]; keeps its input only. Shazeer, arXiv:2002.05202."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        d_gate, d_up = out.chunk(2, dim=-1)
        # In place in the two halves of the result: a fresh temporary would cost more than its sums.
        torch.mul(dy, up, out=d_gate)
        torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        torch.ops.aten.silu.out(gate, out=d_up).mul_(dy)
        return out


class MLP(nn.Module):
    """The stream → the stream; gate and up stand in one projection."""

    def __init__(self, name: str, hidden: int, spec: MLPSpec, build: Build) -> None:
        super().__init__()
        self.gated = spec.activation == "swiglu"
        tp, bias, dtype = build.tp, spec.bias, build.dtype
        self.boundary = Boundary.of(name, hidden, tp.stream)
        names = ("gate", "up") if self.gated else ("up",)
        inner = [Features(f"{name}.{x}", spec.width) for x in names]
        down = Features(f"{name}.down", spec.width)
        self.inner = ColumnLinear(hidden, inner, tp, bias=bias, dtype=dtype, init=build.init)
        self.down = RowLinear(down, hidden, tp, bias=bias, dtype=dtype, init=build.output_init)

    def forward(self, x: Tensor, sizes: Sizes = None) -> Tensor:
        y = self.inner(x, sizes)  # [t, 2f/tp] or [t, f/tp]
        y = _SwiGLU.apply(y) if self.gated else F.gelu(y, approximate="tanh")
        return self.down(y)
