"""Grouped-query self-attention between column- and row-parallel projections, with a cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penteract.mesh import Axis
from penteract.nn.attention_kernels import Backend, attend, attend_cached
from penteract.nn.build import Build
from penteract.nn.norm import Norm, NormSpec
from penteract.nn.rope import apply_rotary
from penteract.nn.sequences import Sequences
from penteract.parallel.parameters import Boundary
from penteract.parallel.tensor import ColumnLinear, Features, RowLinear
from penteract.placement import split_range


@dataclass(frozen=True)
class AttentionSpec:
    """Heads, and what is done to queries and keys before attention."""

    heads: int
    kv_heads: int
    head_size: int
    rope_theta: float | None  # None: positions are not rotary
    bias: bool
    qk_norm: NormSpec | None


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

    def spread(self, x: Tensor) -> Tensor:
        """Keys or values [t, g', d], repeated where the heads do not serve equally many."""
        if len(set(self.served)) <= 1:
            return x
        parts = zip(x.split(1, dim=-2), self.served, strict=True)
        sizes = [-1] * (x.ndim - 2)
        return torch.cat([head.expand(*sizes, n, -1) for head, n in parts], dim=-2)


class Attention(nn.Module):
    """The stream → the stream: q, k, v side by side in one projection, attention, output."""

    def __init__(
        self,
        name: str,
        hidden: int,
        spec: AttentionSpec,
        build: Build,
        *,
        backend: Backend = "flash",
    ) -> None:
        super().__init__()
        self.spec, self.backend, self.recompute = spec, backend, build.recompute
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

    def forward(self, x: Tensor, sequences: Sequences, cache: Cache | None = None) -> Tensor:
        qkv = self.qkv(x, sequences.part(self.stream).sizes)  # [t, (a+2g)d/tp]
        out = self.recompute("core", self._core, qkv, sequences, cache)  # [t, a·d/tp]
        result: Tensor = self.o(out)
        return result

    def _core(self, qkv: Tensor, sequences: Sequences, cache: Cache | None) -> Tensor:
        d = self.spec.head_size
        q, k, v = (y.unflatten(1, (-1, d)) for y in qkv.split(self.qkv.sizes, dim=1))
        # q [t, a/tp, d], k and v [t, g/tp, d]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.spec.rope_theta is not None:
            wide = torch.promote_types(q.dtype, torch.float32)
            cos, sin = sequences.rotary(d, self.spec.rope_theta, wide)
            q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        return self._attend(q, k, v, sequences, cache).flatten(1)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, cache: Cache | None
    ) -> Tensor:
        lengths, spread = sequences.lengths, self.heads.spread
        if cache is None:
            return attend(q, spread(k), spread(v), lengths, backend=self.backend)[0]
        n = len(lengths)
        q, k, v = (x.unflatten(0, (n, -1)) for x in (q, k, v))
        k, v = (spread(x) for x in cache.append(k, v))
        if sequences.past == 0:
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
            return attend(q, k, v, lengths, backend=self.backend)[0]
        assert q.shape[1] == 1, "after the prompt, tokens come one at a time"
        return attend_cached(q, k, v, backend=self.backend)
