"""The head and its cross-entropy over a vocabulary that is split over the tensor ranks.

The logits [t, v/tp] are never gathered. Two messages of [t] numbers each, in at least float32,
take their place: their maximum; then, side by side, the sum of their exponentials, the label's
logit, and, with label smoothing, their sum. With ε the smoothing and Z = log Σ_j exp z_j:

    l_i = Z_i − (1−ε) z_i,label − ε/v Σ_j z_ij       loss = scale · Σ_i w_i l_i
                                                   z_loss = scale · Σ_i w_i ζ Z_i²
    dz_ij = (dl_i + dZ_i) softmax(z_i)_j − dl_i ((1−ε) [j = label] + ε/v)

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

from penteract.collectives import I, Kinds, Operation, S, all_reduce_, gather
from penteract.nn.build import Build
from penteract.nn.embedding import Embedding, padded_rows, vocabulary_rows
from penteract.nn.sequences import MicroBatch
from penteract.parallel.parameters import Layer
from penteract.parallel.products import affine, product, write_product
from penteract.parallel.tensor import input_gradient, linear
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
    """Head product, and each token's loss and log-sum-exp, [t] both, from its logits.

    In backward the logits are overwritten by their gradient.
    """

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
        labels: Tensor,
        sizes: Sequence[int],
        smoothing: float,
    ) -> tuple[Tensor, Tensor]:
        head.check_rows(weight)
        logits = affine(head.tp.start_gather(x, sizes).wait(), weight)  # [t, v'/tp]
        logits[:, head.columns :] = float("-inf")
        wide = torch.promote_types(x.dtype, torch.float32)
        top = all_reduce_(logits.amax(-1).to(wide), head.tp.axis, "max")  # [t]
        places = _Labels.of(labels, head.start, head.columns)
        sums = _sums(logits, top, places, head.columns if smoothing else 0)
        total, target, every = all_reduce_(sums, head.tp.axis)  # [t] each, relative to top
        log_total = total.log()
        lse = top + log_total
        ctx.save_for_backward(x, weight, logits, lse)
        ctx.parameter, ctx.head, ctx.sizes = weight, head, sizes
        ctx.labels, ctx.smoothing = places, smoothing
        return log_total - (1 - smoothing) * target - smoothing / head.vocab * every, lse

    @staticmethod
    def backward(ctx: Any, d_losses: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, logits, lse = ctx.saved_tensors
        _to_gradient(ctx, logits, lse, d_losses, d_lse)
        dx, rows = input_gradient(logits, weight, x, ctx.head.tp, ctx.sizes)
        dw = None
        if ctx.needs_input_grad[1] and ctx.head.gradients is None:
            dw = product(logits.t(), rows)
        elif ctx.needs_input_grad[1]:
            ctx.head.gradients.accumulate(
                ctx.parameter,
                lambda out, overwrite: write_product(logits.t(), rows, out, overwrite),
            )
        return dx.wait(), dw, None, None, None, None


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


def _to_gradient(ctx: Any, logits: Tensor, lse: Tensor, d_losses: Tensor, d_lse: Tensor) -> None:
    """Overwrite the logits [t, v'/tp] by their gradients."""
    labels, head, smoothing = ctx.labels, ctx.head, ctx.smoothing
    for block in _blocks(logits):
        dz = logits[block].to(lse.dtype)  # the logits' own memory unless they are narrower
        dz.sub_(lse[block, None]).exp_().mul_((d_losses + d_lse)[block, None])
        at_label = (1 - smoothing) * d_losses[block] * labels.mine[block]
        dz[labels.rows[: len(dz)], labels.columns[block]] -= at_label
        if smoothing:
            dz[:, : head.columns] -= (smoothing / head.vocab) * d_losses[block, None]
        if dz.dtype != logits.dtype:
            logits[block] = dz


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Row ranges that cut [t, v] into blocks of that many elements."""
    t, v = logits.shape
    elements = CUDA_BLOCK_ELEMENTS if logits.is_cuda else BLOCK_ELEMENTS
    step = max(1, elements // max(v, 1))
    return (slice(i, min(t, i + step)) for i in range(0, t, step))


class Head(Layer):
    """The stream → losses, or logits [t, v].

    Tied to an embedding it uses that one's weight; without `tied_to` that lies on another pipeline
    rank, and this is a copy of it.
    """

    weight: nn.Parameter

    def __init__(
        self, name: str, vocab: int, hidden: int, build: Build, *, tied_to: Embedding | None
    ) -> None:
        super().__init__()
        self.tp, self.vocab = build.tp, vocab
        self.sizes = even_sizes(vocab, build.tp.axis.size)  # rows of each rank, without padding
        self.start = sum(self.sizes[: build.tp.axis.rank])
        self.columns = self.sizes[build.tp.axis.rank]
        self.rows = padded_rows(self.columns, build.vocab_multiple)  # of the stored weight
        if tied_to is not None:
            self.share("weight", tied_to, "weight")
        else:
            logical = "embed.weight" if build.tied else f"{name}.weight"
            placement = vocabulary_rows(logical, vocab, hidden, build)
            self.declare("weight", placement, build.dtype)

    def check_rows(self, weight: Tensor) -> None:
        """Refuse a weight that is not this rank's part, such as a gathered one."""
        if len(weight) != self.rows:
            raise ValueError(
                f"the loss over {self.tp.axis.name!r} takes this rank's {self.rows} rows of the "
                f"head's {self.vocab}, not {len(weight)}: it sums over the other ranks' itself"
            )

    def forward(
        self,
        x: Tensor,
        batch: MicroBatch,
        scale: Tensor,
        objective: Objective = CROSS_ENTROPY,
    ) -> dict[str, Tensor]:
        """Scaled sums of the losses of the micro-batch's labels, scalars, I(tp)."""
        sizes = batch.sequences.part(self.tp.stream).sizes
        losses, lse = _HeadLoss.apply(
            x, self.weight, self, batch.labels, sizes, objective.label_smoothing
        )
        factor = batch.sequences.weights.to(lse.dtype) * scale  # [t]
        terms = {"loss": torch.dot(factor, losses)}
        if objective.z_loss:
            terms["z_loss"] = objective.z_loss * torch.dot(factor, lse.square())
        return terms

    def log_probabilities(
        self, x: Tensor, labels: Tensor, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """The stream and labels [t] → log p(label) [t], I(tp)."""
        losses, _ = _HeadLoss.apply(x, self.weight, self, labels, sizes, 0.0)
        return -losses

    def logits(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """The stream → [t, v], whole on every rank."""
        z = linear(x, self.weight, None, None, tp=self.tp, sizes=sizes)  # [t, v'/tp] S(tp)
        return gather(z[:, : self.columns], self.tp.axis, dim=1, sizes=self.sizes)
