"""The head and its cross-entropy over a vocabulary that is split over the tensor ranks.

The logits [t, v/tp] are never gathered. Two messages of [t] numbers each, in at least float32,
take their place: their maximum; then, side by side, the sum of their exponentials, the label's
logit, and, with label smoothing, their sum. With ε the smoothing and Z = log Σ_j exp z_j:

    loss   = scale · Σ_i w_i (Z_i − (1−ε) z_i,label − ε/v Σ_j z_ij)
    z_loss = scale · Σ_i w_i ζ Z_i²
    dz_ij  = scale · w_i ((1 + 2ζ Z_i) softmax(z_i)_j − (1−ε) [j = label] − ε/v)

v is the real vocabulary: columns that only pad a rank's part are −∞, so they have no share in any
of these. The sums over tokens are multiplied by scale = 1 / (global number of counted tokens) in
the forward, so no rank ever divides by a local count. Sources: Shoeybi et al., arXiv:1909.08053,
section 3; Szegedy et al., arXiv:1512.00567, section 7; Chowdhery et al., arXiv:2204.02311,
section 5, for the z-loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penteract.collectives import I, Kinds, Operation, S, all_reduce_, gather
from penteract.nn.build import Build
from penteract.nn.embedding import Embedding, vocabulary_rows
from penteract.nn.sequences import MicroBatch
from penteract.parallel.parameters import Layer
from penteract.parallel.tensor import input_gradient, linear, write_product
from penteract.placement import even_sizes

# Logits are widened so many at a time: what keeps a GPU busy, or what a cache holds.
CUDA_BLOCK_ELEMENTS = 1 << 26
BLOCK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Objective:
    """What is made small besides the cross-entropy of the labels: ε and ζ above."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0


CROSS_ENTROPY = Objective()


@dataclass(frozen=True)
class _Labels:
    """Where the labels' logits are on this rank."""

    rows: Tensor  # [t]
    columns: Tensor  # [t], of the local logits
    mine: Tensor  # [t] whether this rank has them

    @classmethod
    def of(cls, labels: Tensor, start: int, columns: int) -> _Labels:
        local = labels - start
        mine = (local >= 0) & (local < columns)
        rows = torch.arange(len(labels), device=labels.device)
        return cls(rows, local.clamp(0, max(0, columns - 1)), mine)


class _HeadLoss(Operation):
    """Head product and losses in one: the logits are overwritten by their gradient."""

    @staticmethod
    def kinds(args: Sequence[Any]) -> Kinds | None:
        tp = args[2].tp
        return tp.axis, (tp.stream_kind, S(0)), I

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        head: Head,
        batch: MicroBatch,
        scale: Tensor,
        objective: Objective,
    ) -> Tensor:
        tp, sizes = head.tp, batch.sequences.part(head.tp.stream).sizes
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(tp.start_gather(x, sizes).wait(), weight)  # [t, v'/tp]
        logits[:, head.columns :] = float("-inf")
        labels = _Labels.of(batch.labels, head.start, head.columns)
        top = all_reduce_(logits.amax(-1).to(wide), tp.axis, "max")  # [t]
        sums = _sums(logits, top, labels, head.columns if objective.label_smoothing else 0)
        total, target, every = all_reduce_(sums, tp.axis)  # [t] each, relative to top
        log_total = total.log()
        lse = top + log_total
        smoothing = objective.label_smoothing
        losses = log_total - (1 - smoothing) * target - smoothing / head.vocab * every
        factor = batch.sequences.weights.to(wide) * scale  # [t]
        ctx.save_for_backward(x, weight, logits, lse, factor)
        ctx.parameter, ctx.head, ctx.labels = weight, head, labels
        ctx.sizes, ctx.objective = sizes, objective
        z_loss = objective.z_loss * torch.dot(factor, lse.square())
        return torch.stack([torch.dot(factor, losses), z_loss])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, logits, lse, factor = ctx.saved_tensors
        _to_gradient(ctx, logits, lse, factor * gradient[0], factor * gradient[1])
        gradients = ctx.head.gradients
        dx, rows = input_gradient(logits, weight, x, ctx.head.tp, ctx.sizes)
        if gradients is None:
            return dx.wait(), logits.t() @ rows, None, None, None, None
        gradients.accumulate(
            ctx.parameter, lambda out, overwrite: write_product(logits.t(), rows, out, overwrite)
        )
        return dx.wait(), None, None, None, None, None


def _sums(logits: Tensor, top: Tensor, labels: _Labels, summed: int) -> Tensor:
    """[3, t]: Σ exp(z − top); the label's z − top; Σ (z − top) over the first `summed` columns."""
    sums = top.new_zeros(3, len(top))
    chosen = logits[labels.rows, labels.columns].to(top.dtype) - top
    sums[1] = torch.where(labels.mine, chosen, 0)
    for block in _blocks(logits):
        shifted = logits[block].to(top.dtype) - top[block, None]
        sums[2, block] = shifted[:, :summed].sum(-1)
        sums[0, block] = shifted.exp_().sum(-1)
    return sums


def _to_gradient(ctx: Any, logits: Tensor, lse: Tensor, factor: Tensor, z_factor: Tensor) -> None:
    """Overwrite the logits [t, v'/tp] by their gradients."""
    labels, head, objective = ctx.labels, ctx.head, ctx.objective
    slope = factor + 2 * objective.z_loss * lse * z_factor  # of Z, [t]
    smoothing = objective.label_smoothing
    for block in _blocks(logits):
        dz = logits[block].to(lse.dtype)  # the logits' own memory unless they are narrower
        dz.sub_(lse[block, None]).exp_().mul_(slope[block, None])  # slope · softmax
        rows = labels.rows[: len(dz)]
        dz[rows, labels.columns[block]] -= (1 - smoothing) * factor[block] * labels.mine[block]
        if smoothing:
            dz[:, : head.columns] -= (smoothing / head.vocab) * factor[block, None]
        if dz.dtype != logits.dtype:
            logits[block] = dz


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Row ranges that cut [t, v] into blocks of that many elements."""
    t, v = logits.shape
    elements = CUDA_BLOCK_ELEMENTS if logits.is_cuda else BLOCK_ELEMENTS
    step = max(1, elements // max(v, 1))
    return (slice(i, min(t, i + step)) for i in range(0, t, step))


class Head(Layer):
    """The stream → losses, or logits [t, v]. Tied to an embedding where one is given."""

    weight: nn.Parameter

    def __init__(
        self, name: str, vocab: int, hidden: int, build: Build, *, tied_to: Embedding | None
    ) -> None:
        super().__init__()
        self.tp, self.vocab = build.tp, vocab
        self.sizes = even_sizes(vocab, build.tp.axis.size)  # rows of each rank, without padding
        self.start = sum(self.sizes[: build.tp.axis.rank])
        self.columns = self.sizes[build.tp.axis.rank]
        if tied_to is not None:
            self.share("weight", tied_to, "weight")
        else:
            placement = vocabulary_rows(f"{name}.weight", vocab, hidden, build)
            self.declare("weight", placement, build.dtype)

    def loss(
        self,
        x: Tensor,
        batch: MicroBatch,
        scale: Tensor,
        objective: Objective = CROSS_ENTROPY,
    ) -> dict[str, Tensor]:
        """Scaled sums of the losses of the micro-batch's labels, scalars, I(tp)."""
        losses = _HeadLoss.apply(x, self.weight, self, batch, scale, objective)
        terms = {"loss": losses[0]}
        return {**terms, "z_loss": losses[1]} if objective.z_loss else terms

    def logits(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """The stream → [t, v], whole on every rank."""
        z = linear(x, self.weight, None, None, tp=self.tp, sizes=sizes)  # [t, v'/tp] S(tp)
        return gather(z[:, : self.columns], self.tp.axis, dim=1, sizes=self.sizes)
