"""Grouped-query self-attention between column- and row-parallel projections, with a cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penteract.nn.attention_kernels import Backend, attend, attend_cached
from penteract.nn.build import Build
from penteract.nn.norm import Norm, NormSpec
from penteract.nn.rope import apply_rotary
from penteract.nn.sequences import Sequences
from penteract.parallel.tensor import ColumnLinear, Features, RowLinear


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


class Attention(nn.Module):
    """[t, h] → [t, h]: q, k, v side by side in one projection, attention, output projection."""

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
        self.spec, self.backend = spec, backend
        d, bias, dtype = spec.head_size, spec.bias, build.dtype
        q = Features(f"{name}.q", spec.heads, d)
        k, v = (Features(f"{name}.{x}", spec.kv_heads, d) for x in "kv")
        o = Features(f"{name}.o", spec.heads, d)
        self.qkv = ColumnLinear(
            hidden, (q, k, v), build.tp, bias=bias, dtype=dtype, init=build.init
        )
        self.o = RowLinear(o, hidden, build.tp, bias=bias, dtype=dtype, init=build.output_init)
        self.q_norm = self.k_norm = None
        if spec.qk_norm is not None:
            self.q_norm, self.k_norm = (
                Norm(f"{name}.{x}_norm", d, spec.qk_norm, dtype=dtype, over_heads=True)
                for x in "qk"
            )

    def forward(self, x: Tensor, sequences: Sequences, cache: Cache | None = None) -> Tensor:
        d = self.spec.head_size
        q, k, v = (y.unflatten(1, (-1, d)) for y in self.qkv(x).split(self.qkv.sizes, dim=1))
        # q [t, a/tp, d], k and v [t, g/tp, d]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.spec.rope_theta is not None:
            wide = torch.promote_types(q.dtype, torch.float32)
            cos, sin = sequences.rotary(d, self.spec.rope_theta, wide)
            q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        out = self._attend(q, k, v, sequences, cache)  # [t, a/tp, d]
        return self.o(out.flatten(1))

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, cache: Cache | None
    ) -> Tensor:
        lengths = sequences.lengths
        if cache is None:
            return attend(q, k, v, lengths, backend=self.backend)[0]
        n = len(lengths)
        q, k, v = (x.unflatten(0, (n, -1)) for x in (q, k, v))
        k, v = cache.append(k, v)
        if sequences.past == 0:
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
            return attend(q, k, v, lengths, backend=self.backend)[0]
        assert q.shape[1] == 1, "after the prompt, tokens come one at a time"
        return attend_cached(q, k, v, backend=self.backend)
