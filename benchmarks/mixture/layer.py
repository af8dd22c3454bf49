"""One layer of experts of ours, with given weights, and tokens that go where they are told.

Experts are SwiGLU; the router is softmax over each token's two. Its rows are orthonormal, so that
tokens can be made for logits: those of the chosen are far above all others, and every type and
every peer chooses alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from timing.turns import Call
from torch import Tensor, nn

from penteract.mesh import Mesh, single
from penteract.nn.build import Build
from penteract.nn.mlp import MLPSpec
from penteract.nn.moe import MoE, MoESpec
from penteract.nn.router import RouterSpec
from penteract.nn.sequences import Sequences
from penteract.parallel.buckets import Sharding
from penteract.parallel.buffers import Buffers
from penteract.parallel.expert.places import ExpertParallel
from penteract.parallel.parameters import materialise
from penteract.parallel.tensor import TensorParallel
from penteract.placement import Init

TOPK = 2
CHOSEN, OTHERS = (5.0, 4.0), 0.3  # logits of a token's experts; deviation of all others
Load = Literal["equal", "uniform", "skewed"]


@dataclass(frozen=True)
class Shape:
    experts: int
    tokens: int  # of all ranks together
    hidden: int
    ffn: int
    dtype: torch.dtype
    load: Load = "uniform"
    shared: int = 0

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{self.experts} experts, {self.load} load, {name}"


def title(part: str, shape: Shape) -> str:
    return f"{part}, {shape}, {shape.tokens} tokens, hidden {shape.hidden}, width {shape.ffn}"


class Given(NamedTuple):
    """Weights and tokens, the same on every rank, rounded to the type of the shape."""

    router: Tensor  # [E, h]
    inner: Tensor  # [E, 2f, h], gate above up
    down: Tensor  # [E, h, f]
    shared_inner: Tensor  # [2s, h]
    shared_down: Tensor  # [h, s]
    x: Tensor  # [t, h]
    dy: Tensor  # [t, h]
    chosen: Tensor  # [t, k]


def chosen_experts(shape: Shape) -> Tensor:
    """Two experts of each token, [t, 2].

    Every expert equally often; drawn alike; or drawn by 1/(1 + its number): with two ranks, most
    go to the first.
    """
    e, t, generator = shape.experts, shape.tokens, torch.Generator().manual_seed(2)
    if shape.load == "equal":
        i = torch.arange(t)[torch.randperm(t, generator=generator)]
        return torch.stack([i % e, (i + 1 + i // e % (e - 1)) % e], dim=1)
    p = 1 / torch.arange(1, e + 1) if shape.load == "skewed" else torch.ones(e)
    return torch.multinomial(p.expand(t, e), TOPK, generator=generator)


def given(shape: Shape) -> Given:
    e, h, f, s, t = shape.experts, shape.hidden, shape.ffn, shape.shared, shape.tokens
    generator = torch.Generator().manual_seed(1)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    router = torch.linalg.qr(normal(h, e)).Q.t().contiguous()
    chosen = chosen_experts(shape)
    logits = OTHERS * normal(t, e)
    logits.scatter_(1, chosen, torch.tensor(CHOSEN).expand(t, TOPK))
    free = normal(t, h)
    x = logits @ router + free - free @ router.t() @ router
    inner, down = normal(e, 2 * f, h) / h**0.5, normal(e, h, f) / f**0.5
    shared = normal(2 * s, h) / h**0.5, normal(h, s) / max(s, 1) ** 0.5
    values = (router, inner, down, *shared, x, normal(t, h))
    return Given(*(value.to(shape.dtype) for value in values), chosen)


class Ours:
    """Our layer as this rank of a mesh, or alone; its weight gradients as training keeps them.

    In buffers, in at least float32, written without a copy; or `plain`, each in the weight's type
    where autograd puts it, as other layers do it.
    """

    def __init__(
        self, shape: Shape, values: Given, mesh: Mesh | None = None, *, plain: bool = False
    ) -> None:
        places = ExpertParallel.alone() if mesh is None else ExpertParallel.of(mesh)
        tp, zeros = TensorParallel(single("tp")), Init("zeros")
        build = Build(tp, shape.dtype, zeros, zeros, experts=places)
        width = MLPSpec(shape.ffn, "swiglu", False)
        shared = MLPSpec(shape.shared, "swiglu", False) if shape.shared else None
        spec = MoESpec(RouterSpec(shape.experts, TOPK), width, shared)
        self.layer = MoE("moe", shape.hidden, spec, build)
        self.places, self.held = places, places.held(shape.experts)
        self.buffers: Buffers | None = None
        if plain:
            materialise(self.layer, seed=0)
        else:
            whole = Sharding.whole(single("dp-cp")), Sharding.whole(single("edp"))
            more = [single("tp"), single("etp")]
            self.buffers = Buffers(self.layer, whole[0], experts=whole[1], seed=0, more_axes=more)
        self.parameters = list(self.layer.parameters())
        self._fill(values)

    @torch.no_grad()
    def _fill(self, values: Given) -> None:
        layer, part = self.layer, slice(self.held.start, self.held.stop)
        layer.router.weight.copy_(values.router)
        layer.experts.inner.copy_(values.inner[part])
        layer.experts.down.copy_(values.down[part])
        if layer.shared is not None:
            layer.shared.inner.weight.copy_(values.shared_inner)
            layer.shared.down.weight.copy_(values.shared_down)

    def begin(self) -> None:
        """Forget gradients."""
        self.layer.zero_grad()
        if self.buffers is not None:
            self.buffers.begin()

    def gradients(self) -> list[Tensor]:
        """Of router, inner and down; then of the shared experts."""
        if self.buffers is None:
            return [x for p in self.parameters if (x := p.grad) is not None]
        slots = {id(slot.entry.parameter): slot for slot in self.buffers.slots()}
        found = [slots[id(p)] for p in self.parameters]
        return [slot.view(x) for slot in found if (x := slot.bucket.gradient) is not None]

    def spoil(self) -> None:
        """Gradients that the next call does not write are seen to be wrong."""
        for gradient in self.gradients():
            gradient.fill_(torch.nan)

    def calling(self, values: Given, rows: slice, module: nn.Module | None = None) -> Call:
        """Forward and backward of these rows: output, and gradients of them and of weights.

        Of the layer, or of its shared experts alone where they are the `module`.
        """
        sequences = Sequences.of((len(values.x[rows]),))
        layer = self.layer

        def forward(x: Tensor) -> Tensor:
            y: Tensor = layer(x, sequences, None) if module is None else module(x)
            return y

        return calling(forward, values.x[rows], values.dy[rows], self.begin, self.gradients)


def calling(
    forward: Callable[[Tensor], Tensor],
    x: Tensor,
    dy: Tensor,
    begin: Callable[[], None],
    gradients: Callable[[], list[Tensor]],
) -> Call:
    x = x.clone().requires_grad_()

    def call() -> list[Tensor]:
        begin()
        x.grad = None
        y = forward(x)
        y.backward(dy)
        assert x.grad is not None
        return [y.detach(), x.grad, *gradients()]

    return call
