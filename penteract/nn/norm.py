"""RMSNorm and LayerNorm over the last dim, computed in at least float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penteract.collectives import Operation
from penteract.mesh import single
from penteract.nn.build import Build
from penteract.parallel.parameters import Boundary, Layer, replicated
from penteract.parallel.tensor import Features
from penteract.placement import Init


@dataclass(frozen=True)
class NormSpec:
    """Which norm; `eps` is added to the mean square or the variance."""

    kind: Literal["rms", "layer"]
    eps: float


class _RMSNorm(Operation):
    """y = x·r·w with r = 1/sqrt(mean(x²) + eps); keeps x and r only.

    With x̂ = x·r and g = dy·w: dw = Σ_t dy·x̂ and dx = r·(g − x̂·mean(g·x̂)).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        r = torch.rsqrt(norm.square_().div_(x.shape[-1]).add_(eps))  # [..., 1]
        ctx.save_for_backward(x, weight, r)
        return (wide * r).mul_(weight.to(wide.dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, r = ctx.saved_tensors
        wide_weight = weight.to(r.dtype)
        unit = x.to(r.dtype) * r  # x̂ [..., h]
        products = dy.to(r.dtype) * unit  # dy·x̂ [..., h]
        dw = products.flatten(0, -2).sum(0)
        mean = (products @ wide_weight).div_(x.shape[-1]).unsqueeze(-1)  # [..., 1]
        g = torch.mul(dy, wide_weight, out=products)
        dx = g.addcmul_(unit, mean, value=-1).mul_(r)
        return dx.to(x.dtype), dw.to(weight.dtype), None


class Norm(Layer):
    """A norm over the last dim of width `size`, with weight (and bias for LayerNorm).

    It normalises rows of the stream, or with `heads` those features of a column layer's output.
    """

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(
        self, name: str, size: int, spec: NormSpec, build: Build, *, heads: Features | None = None
    ) -> None:
        super().__init__()
        self.spec = spec
        # Over heads each tensor rank normalises its own; over a split stream its own rows. Then its
        # gradient is a part of the sum.
        use = build.tp.stream_use if heads is None else "partial"
        self.boundary = Boundary.of(name, size, build.tp.stream)
        if heads is not None:
            partial = (heads.name,) if heads.computed is not None else ()
            rows = single(build.tp.axis.name)
            self.boundary = Boundary((heads.output(build.tp.axis),), rows, partial)
        shape = (size,)
        weight = replicated(f"{name}.weight", shape, Init("ones"), tp=use)
        self.declare("weight", weight, build.dtype)
        if spec.kind == "layer":
            bias = replicated(f"{name}.bias", shape, Init("zeros"), tp=use)
            self.declare("bias", bias, build.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.spec.kind == "layer":
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.spec.eps)
        result: Tensor = _RMSNorm.apply(x, self.weight, self.spec.eps)
        return result
