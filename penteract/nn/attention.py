"""Grouped-query self-attention between column- and row-parallel projections, with a cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penteract.mesh import Axis
from penteract.nn.build import Build
from penteract.nn.norm import Norm, NormSpec
from penteract.nn.rope import apply_rotary
from penteract.nn.sequences import Sequences, Training
from penteract.parallel.context.blocks import newest
from penteract.parallel.context.exchange import attend
from penteract.parallel.context.kernels import Backend, Kernel, dropping, kernel_of
from penteract.parallel.context.score_dropout import Drop
from penteract.parallel.parameters import Boundary, Layer, data_partial
from penteract.parallel.tensor import ColumnLinear, Features, RowLinear
from penteract.placement import Box, Init, Piece, Placement, split_range


@dataclass(frozen=True)
class AttentionSpec:
    """Heads, what is done to queries and keys before attention, and what a query sees."""

    heads: int
    kv_heads: int
    head_size: int
    rope_theta: float | None  # None: positions are not rotary
    bias: bool
    qk_norm: NormSpec | None
    window: int | None = None  # tokens that a token attends to, itself included; None: all before
    sinks: bool = False  # a learned score in each head that takes a share and gives nothing
    softcap: float | None = None  # c of c·tanh(score/c)
    backend: Backend = "flash"
    dropout: float = 0.0  # of probabilities


class Cache:
    """Keys and values of one layer during generation: n sequences of up to `capacity` tokens."""

    def __init__(self, n: int, capacity: int) -> None:
        self.shape = (n, capacity)
        self.length = 0
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add [n, s, g, d] and return all keys and values so far, [n, length, g, d]."""
        if self.k is None or self.v is None:
            self.k, self.v = (x.new_empty(*self.shape, *x.shape[2:]) for x in (k, v))
        start, self.length = self.length, self.length + k.shape[1]
        assert self.length <= self.shape[1], "the cache is full"
        self.k[:, start : self.length], self.v[:, start : self.length] = k, v
        return self.k[:, : self.length], self.v[:, : self.length]


@dataclass(frozen=True)
class Heads:
    """The query heads of one tensor rank, and the key/value heads that they need.

    Where kv_heads is a multiple of tp, each rank holds the key/value heads of its query heads.
    Otherwise it holds all of them and computes those it needs; its gradient is a part of the sum.
    """

    q: tuple[int, int]  # (start, stop)
    kv: tuple[int, int]
    whole: bool
    served: tuple[int, ...]  # query heads that each of the kv heads serves here

    @classmethod
    def of(cls, spec: AttentionSpec, axis: Axis) -> Heads:
        start, stop = split_range(spec.heads, axis.size, axis.rank)
        group = spec.heads // spec.kv_heads
        first, last = (start // group, -(-stop // group)) if stop > start else (0, 0)
        served = [min(stop, (j + 1) * group) - max(start, j * group) for j in range(first, last)]
        return cls((start, stop), (first, last), spec.kv_heads % axis.size != 0, tuple(served))

    @property
    def attended(self) -> tuple[int, int]:
        """Query heads and key/value heads that attention gets here, the latter after `spread`."""
        a = self.q[1] - self.q[0]
        return a, (len(self.served) if self._even else a)

    @property
    def _even(self) -> bool:
        """Whether the key/value heads serve equally many query heads."""
        return len(set(self.served)) <= 1

    def spread(self, x: Tensor) -> Tensor:
        """Keys or values [t, g', d], repeated where the heads do not serve equally many."""
        if self._even:
            return x
        parts = zip(x.split(1, dim=-2), self.served, strict=True)
        sizes = [-1] * (x.ndim - 2)
        return torch.cat([head.expand(*sizes, n, -1) for head, n in parts], dim=-2)


class Attention(Layer):
    """The stream → the stream: q, k, v side by side in one projection, attention, output."""

    def __init__(
        self,
        name: str,
        hidden: int,
        spec: AttentionSpec,
        build: Build,
    ) -> None:
        super().__init__()
        self.spec, self.recompute, self.exchange = spec, build.recompute, build.exchange
        self.kernel, self.name = kernel_of(spec.backend, spec.softcap), name
        self.stream = build.tp.stream
        self.boundary = Boundary.of(name, hidden, self.stream)
        self.heads = heads = Heads.of(spec, build.tp.axis)
        d, bias, dtype = spec.head_size, spec.bias, build.dtype
        computed = heads.kv if heads.whole else None
        q = Features(f"{name}.q", spec.heads, d)
        k, v = (Features(f"{name}.{x}", spec.kv_heads, d, computed) for x in "kv")
        o = Features(f"{name}.o", spec.heads, d)
        self.qkv = ColumnLinear(
            hidden, (q, k, v), build.tp, bias=bias, dtype=dtype, init=build.init
        )
        self.o = RowLinear(o, hidden, build.tp, bias=bias, dtype=dtype, init=build.output_init)
        self.q_norm = self.k_norm = None
        if spec.qk_norm is not None:
            self.q_norm, self.k_norm = (
                Norm(f"{name}.{x}_norm", d, spec.qk_norm, build, heads=heads_of)
                for x, heads_of in (("q", q), ("k", k))
            )
        self.sinks: nn.Parameter | None
        if spec.sinks:
            start, stop = heads.q
            box = Box((start,), (stop - start,))
            piece = Piece(f"{name}.sinks", (spec.heads,), box, (0,))
            placement = Placement(
                box.size, (piece,), data_partial("split"), Init("zeros"), decay=False
            )
            self.declare("sinks", placement, dtype)
        else:
            self.register_parameter("sinks", None)

    def forward(
        self,
        x: Tensor,
        sequences: Sequences,
        training: Training | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        qkv = self.qkv(x, sequences.part(self.stream).sizes)  # [t, (a+2g)d/tp]
        out = self.recompute("core", self._core, qkv, sequences, training, cache)  # [t, a·d/tp]
        result: Tensor = self.o(out)
        return result

    def _core(
        self, qkv: Tensor, sequences: Sequences, training: Training | None, cache: Cache | None
    ) -> Tensor:
        d = self.spec.head_size
        q, k, v = (y.unflatten(1, (-1, d)) for y in qkv.split(self.qkv.sizes, dim=1))
        # q [t, a/tp, d], k and v [t, g/tp, d]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.spec.rope_theta is not None:
            wide = torch.promote_types(q.dtype, torch.float32)
            cos, sin = sequences.rotary(d, self.spec.rope_theta, wide)
            q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        if cache is not None:
            return self._cached(q, k, v, sequences, cache).flatten(1)
        return self._attend(q, k, v, sequences, self._kernel(training)).flatten(1)

    def _kernel(self, training: Training | None) -> Kernel:
        rate = self.spec.dropout
        if training is None or rate == 0.0:
            return self.kernel
        heads = tuple(range(*self.heads.q))
        return dropping(
            self.kernel, Drop(rate, training.seed, training.stream(f"{self.name}.scores"), heads)
        )

    def _cached(
        self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, cache: Cache
    ) -> Tensor:
        n, window = len(sequences.lengths), self.spec.window
        k, v = (x.unflatten(0, (n, -1)) for x in (k, v))
        k, v = cache.append(k, v)  # [n, s, g/tp, d] of all tokens so far
        if sequences.past == 0:
            return self._attend(q, k.flatten(0, 1), v.flatten(0, 1), sequences, self.kernel)
        assert len(q) == n, "after the prompt, tokens come one at a time"
        k, v = (self.heads.spread(x[:, -(window or 0) :]) for x in (k, v))
        return newest(q, k, v, self.sinks, self.kernel)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, kernel: Kernel
    ) -> Tensor:
        return attend(
            q,
            self.heads.spread(k),
            self.heads.spread(v),
            exchange=self.exchange,
            plan=sequences.plan(self.exchange, self.spec.window),
            kernel=kernel,
            sinks=self.sinks,
        )
