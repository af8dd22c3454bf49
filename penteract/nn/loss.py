"""The head and its cross-entropy over a vocabulary that is split over the tensor ranks.

The logits [t, v/tp] are never gathered: their maximum, the sum of their exponentials and the
label's logit are reduced over the ranks instead, [t] numbers each, in at least float32.

    loss = scale · Σ_i w_i (log Σ_j exp z_ij − z_i,label)
    dz_i = scale · w_i (softmax(z_i) − one-hot(label))

The sum over tokens is multiplied by scale = 1 / (global number of counted tokens) in the forward,
so no rank ever divides by a local count. Source: Shoeybi et al., arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penteract.collectives import I, Operation, R, S, all_reduce_, gather, replicate
from penteract.mesh import Axis
from penteract.nn.build import Build
from penteract.nn.embedding import Embedding, vocabulary_rows
from penteract.nn.sequences import MicroBatch
from penteract.parallel.parameters import Layer
from penteract.parallel.tensor import linear, write_product
from penteract.placement import even_sizes

# Logits are widened so many at a time: what keeps a GPU busy, or what a cache holds.
CUDA_BLOCK_ELEMENTS = 1 << 26
BLOCK_ELEMENTS = 1 << 20


class _HeadLoss(Operation):
    """Head product and cross-entropy in one: the logits are overwritten by their gradient."""

    takes, gives = (R, S(0)), I  # x, weight → loss

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        axis: Axis,
        head: Head,
        batch: MicroBatch,
        scale: Tensor,
    ) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x, weight)  # [t, v/tp]
        rows = torch.arange(x.shape[0], device=x.device)
        local = batch.labels - head.start
        mine = (local >= 0) & (local < weight.shape[0])
        local = local.clamp(0, weight.shape[0] - 1)
        top = logits.amax(-1) if logits.numel() else logits.sum(-1)  # [t]
        top = all_reduce_(top.to(wide), axis, "max")
        target = torch.where(mine, logits[rows, local].to(wide) - top, 0)
        target = all_reduce_(target, axis)  # [t]
        parts = [
            (logits[block].to(wide) - top[block, None]).exp_().sum(-1) for block in _blocks(logits)
        ]
        total = all_reduce_(torch.cat(parts) if parts else torch.zeros_like(top), axis)  # [t]
        log_total = total.log()
        factor = batch.sequences.weights.to(wide) * scale  # [t]
        ctx.save_for_backward(x, weight, logits, top + log_total, factor, local, mine)
        ctx.parameter, ctx.gradients = weight, head.gradients
        return torch.dot(factor, log_total - target)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, logits, lse, factor, local, mine = ctx.saved_tensors
        factor = factor * dloss
        for block in _blocks(logits):
            dz = logits[block].to(lse.dtype)  # the logits' own memory unless they are narrower
            dz.sub_(lse[block, None]).exp_().mul_(factor[block, None])  # factor · softmax
            rows = torch.arange(dz.shape[0], device=dz.device)
            dz[rows, local[block]] -= factor[block] * mine[block]
            if dz.dtype != logits.dtype:
                logits[block] = dz
        dz = logits  # [t, v/tp]
        if ctx.gradients is None:
            return dz @ weight, dz.t() @ x, None, None, None, None
        dx = dz @ weight
        ctx.gradients.accumulate(
            ctx.parameter, lambda out, overwrite: write_product(dz.t(), x, out, overwrite)
        )
        return dx, None, None, None, None, None


def _blocks(logits: Tensor) -> list[slice]:
    """Row ranges that cut [t, v] into blocks of that many elements."""
    t, v = logits.shape
    elements = CUDA_BLOCK_ELEMENTS if logits.is_cuda else BLOCK_ELEMENTS
    step = max(1, elements // max(v, 1))
    return [slice(i, i + step) for i in range(0, t, step)]


class Head(Layer):
    """[t, h] I(tp) → loss, or logits [t, v]. Tied to an embedding where one is given."""

    weight: nn.Parameter

    def __init__(
        self, name: str, vocab: int, hidden: int, build: Build, *, tied_to: Embedding | None
    ) -> None:
        super().__init__()
        self.axis = axis = build.tp
        self.sizes = even_sizes(vocab, axis.size)  # rows of each rank
        self.start = sum(self.sizes[: axis.rank])
        if tied_to is not None:
            self.share("weight", tied_to, "weight")
        else:
            placement = vocabulary_rows(f"{name}.weight", vocab, hidden, axis, build.init)
            self.declare("weight", placement, build.dtype)

    def loss(self, x: Tensor, batch: MicroBatch, scale: Tensor) -> Tensor:
        """Scaled sum of the cross-entropies of the micro-batch's labels, a scalar, I(tp)."""
        x = replicate(x, self.axis)  # [t, h] R(tp)
        result: Tensor = _HeadLoss.apply(x, self.weight, self.axis, self, batch, scale)
        return result

    def logits(self, x: Tensor) -> Tensor:
        """[t, h] → [t, v], whole on every rank."""
        z = linear(replicate(x, self.axis), self.weight, None, None)  # [t, v/tp] S(tp)
        return gather(z, self.axis, dim=1, sizes=self.sizes)
