"""A mixture of experts in place of a block's feed-forward layer.

    stream [t/tp, h] S ─ router ─> weights, experts ─ dispatcher ─> experts ─> back ─> [t/tp, h] S

Tokens are split over tp inside: with sequence parallelism they are already, else the stream is
split before and gathered after. Every rank routes tokens of its own, so the router's gradient is
partial over tp, cp and dp. Shared experts are an ordinary feed-forward layer on the stream, and are
computed while tokens travel.

| what                     | axis   | bytes a rank                              | hidden behind   |
|--------------------------|--------|-------------------------------------------|-----------------|
| the block's output       | tp     | (tp-1) t h e, without sp only             | nothing         |
| gradient of its input    | tp     | the same                                  | nothing         |
| shared experts           | tp     | see `parallel.tensor`                     | see there       |
| tokens, results          | etp-ep | see `parallel.expert.dispatch`            | shared experts  |
| loads, for aux           | tp-cp  | 2 (n-1)/n 8 E                             | nothing         |
| loads, for seq_aux       | tp-cp  | 2 (n-1)/n 8 E a sequence of the whole     | nothing         |
| logits, with sinkhorn    | tp-cp  | (n-1) (8 + t' (E w + 8))                  | nothing         |
| choices, with a capacity | tp-cp  | (n-1) (8 + t' (2 k w + 8))                | nothing         |

n = tp·cp; t are a rank's tokens, t' those of them that are no padding; e bytes a number of the
stream, w a weight. Where the block or its second half is recomputed, forward's messages are sent
again: the output only where dropout follows, results as `dispatch` says, the rest always.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penteract.collectives import Operation, gather, split
from penteract.nn.balance import counted, losses
from penteract.nn.build import Build
from penteract.nn.experts import Experts
from penteract.nn.mlp import MLP, MLPSpec
from penteract.nn.router import RouterSpec, Routing, Tokens, capacity, route
from penteract.nn.sequences import Sequences, Training
from penteract.parallel.buckets import at_least_float32
from penteract.parallel.expert.dispatchers import dispatcher_of
from penteract.parallel.parameters import Boundary, Layer, replicated


@dataclass(frozen=True)
class MoESpec:
    """Router and experts; `shared` is the feed-forward layer that every token passes."""

    router: RouterSpec
    expert: MLPSpec
    shared: MLPSpec | None = None
    shared_gate: bool = False
    pad: bool = False


SUMS = ("tokens", "dropped", "entropy", "balance_loss", "router_z_loss")


@dataclass(frozen=True)
class Seen:
    """What a router made of one micro-batch on one rank, for the step's record."""

    load: Tensor  # [E] int64: how often each expert was chosen
    sums: Tensor  # [5] float64: of `SUMS`; losses as parts of the step's, times its loss scale


class Router(Layer):
    """Logits, in at least float32, and what a router keeps from step to step.

    `seen` is by micro-batch, so that recomputation changes nothing.
    """

    weight: nn.Parameter

    def __init__(self, name: str, hidden: int, spec: RouterSpec, build: Build) -> None:
        super().__init__()
        self.spec, self.seen = spec, dict[int, Seen]()
        shape = (spec.experts, hidden)
        self.declare(
            "weight", replicated(f"{name}.weight", shape, build.init, decay=True, tp="partial"),
            build.dtype,
        )  # fmt: skip
        wide, e = at_least_float32(build.dtype), (spec.experts,)
        self.bias: Tensor | None = None
        self.load: Tensor | None = None
        if spec.balance == "bias":
            self.keep("bias", f"{name}.bias", e, wide)
        if spec.balance == "global_aux":
            self.keep("load", f"load/{name}", e, torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_float32(x.dtype)
        return F.linear(x.to(wide), self.weight.to(wide))  # [t, E]


class _WithLoss(Operation):
    """`x` itself; in backward a scalar, a term of the loss, gets the gradient `factor`."""

    @staticmethod
    def forward(ctx: object, x: Tensor, term: Tensor, factor: Tensor | float) -> Tensor:
        ctx.factor, ctx.like = factor, term  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, g: Tensor) -> tuple[Tensor, Tensor, None]:
        factor = ctx.factor  # type: ignore[attr-defined]
        like = ctx.like  # type: ignore[attr-defined]
        return g, torch.ones_like(like) * factor, None


class MoE(nn.Module):
    """The stream → the stream."""

    def __init__(self, name: str, hidden: int, spec: MoESpec, build: Build) -> None:
        super().__init__()
        self.name, self.spec, self.tp = name, spec, build.tp
        self.boundary = Boundary.of(name, hidden, build.tp.stream)
        self.router = Router(f"{name}.router", hidden, spec.router, build)
        count = spec.router.experts
        self.experts = Experts(f"{name}.experts", hidden, spec.expert, count, build)
        self.shared = (
            None if spec.shared is None else MLP(f"{name}.shared", hidden, spec.shared, build)
        )
        self.shared_gate = _Gate(f"{name}.shared_gate", hidden, build) if spec.shared_gate else None
        self.places = build.experts
        self.dispatcher = dispatcher_of(build.dispatcher, count, build.experts)

    def forward(self, x: Tensor, sequences: Sequences, training: Training | None) -> Tensor:
        mine = sequences.part(self.tp.axis)
        apart = not self.tp.sequence
        own = split(x, self.tp.axis, sizes=mine.sizes) if apart else x  # [t/tp, h]
        tokens = Tokens(mine.rows, mine.real, self.places.parts)
        logits = self.router(own)
        routing = route(self.spec.router, logits, self.router.bias, tokens)
        visit = self.dispatcher.send(own, routing.weights, routing.experts)
        shared = self._shared(x, sequences)
        y = self.experts(visit.arrive(), self._padded(sequences))
        y = visit.leave(y)  # [t/tp, h]
        if training is not None:
            y = self._with_losses(y, logits, routing, tokens, sequences, training)
        y = gather(y, self.tp.axis, sizes=mine.sizes) if apart else y
        return y if shared is None else y + shared

    def _padded(self, sequences: Sequences) -> int:
        """How many rows an expert has at most, by its capacity, where it is to have as many."""
        if not self.spec.pad:
            return 0
        return self.places.micro_batches * capacity(self.spec.router, sequences.cut.tokens)

    def _shared(self, x: Tensor, sequences: Sequences) -> Tensor | None:
        if self.shared is None:
            return None
        y: Tensor = self.shared(x, sequences.part(self.tp.stream).sizes)
        return y if self.shared_gate is None else y * self.shared_gate(x)

    def _with_losses(
        self,
        y: Tensor,
        logits: Tensor,
        routing: Routing,
        tokens: Tokens,
        sequences: Sequences,
        training: Training,
    ) -> Tensor:
        spec = self.spec.router
        found = losses(
            spec,
            logits,
            routing,
            tokens,
            sequence=sequences.numbers(tokens.rows),
            sequences=len(sequences.lengths),
            load=self.router.load,
        )
        with torch.no_grad():
            log_p = logits.log_softmax(-1)
            entropy = -(log_p.exp() * log_p).sum(-1).mul(tokens.real).sum()
            dropped = (routing.chosen >= 0).sum() - (routing.experts >= 0).sum()
            share = training.share
            values = (tokens.real.sum(), dropped, entropy, found.balance * share, found.z * share)
            sums = torch.stack([value.double() for value in values])
        self.router.seen[training.micro_batch] = Seen(counted(spec, routing.chosen)[0], sums)
        result: Tensor = _WithLoss.apply(y, found.balance + found.z, training.share)
        return result


class _Gate(Layer):
    """The stream [t, h] → [t, 1]: how much of the shared experts a token takes."""

    weight: nn.Parameter

    def __init__(self, name: str, hidden: int, build: Build) -> None:
        super().__init__()
        placement = replicated(
            f"{name}.weight", (1, hidden), build.init, decay=True, tp=build.tp.stream_use
        )
        self.declare("weight", placement, build.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).sigmoid()
