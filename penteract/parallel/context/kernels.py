"""Attention of one block of queries over one block of keys: output, log-sum-exp and gradients.

With scores s = q kᵀ/√d, capped as c·tanh(s/c) where a soft cap is set, and the row's log-sum-exp L,

    P = exp(s − L)      out = P v      D = Σ do ∘ out over a head's features
    dv = Pᵀ do          ds = P ∘ (do vᵀ − D)          dq = ds k/√d        dk = dsᵀ q/√d

The gradients need nothing but L and D of the whole row: given those of all blocks together, and of
an attention sink, a kernel's backward of one block is that block's share of the exact gradient.
That is what all of context parallelism stands on. Source: Dao, arXiv:2307.08691, section 3.

Tensors of a kernel are [n, heads, rows, d], of n blocks alike; log-sum-exps [n, heads, rows] in at
least float32. Query heads are a multiple of key/value heads, and neighbours share one.

| backend | float64 | window                     | soft cap | what                                 |
|---------|---------|----------------------------|----------|--------------------------------------|
| flash   | CPU     | in tiles, CUDA's are plain | no       | torch's fused kernels of the device  |
| flex    | yes     | yes                        | yes      | FlexAttention, CPU's backward plain  |
| plain   | yes     | yes                        | yes      | the formulas above, s in memory      |

Only plain has dropout of P (`score_dropout`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from penteract.parallel.context.score_dropout import Drop, Places

Backend = Literal["flash", "plain", "flex"]
Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k and v
TILE = 128  # rows of a window's tiles at least


@dataclass(frozen=True)
class Mask:
    """Query i attends to key j: all of them, or those up to j = i, or a band.

    A band, of `window` tokens: 0 <= shift + i − j < window. Every query attends to some key.
    """

    kind: Literal["full", "causal", "window"]
    shift: int = 0
    window: int = 0
    places: Places | None = None  # where the kernel drops scores

    def allowed(self, rows: int, columns: int, device: torch.device) -> Tensor | None:
        """[rows, columns], False where masked; None where nothing is."""
        if self.kind == "full":
            return None
        i = torch.arange(rows, device=device)[:, None]
        distance = self.shift + i - torch.arange(columns, device=device)
        band = distance >= 0
        return band if self.kind == "causal" else band & (distance < self.window)

    def tiles(self, rows: int, columns: int) -> Iterator[tuple[slice, slice, Mask]]:
        """A band in pieces that are mostly unmasked: queries, the keys they see, their mask."""
        size = max(TILE, self.window)
        for start in range(0, rows, size):
            stop = min(start + size, rows)
            first = max(0, self.shift + start - self.window + 1)
            keys = slice(first, min(columns, self.shift + stop))
            yield slice(start, stop), keys, Mask("window", self.shift + start - first, self.window)


class Kernel(Protocol):
    """How a backend computes a block."""

    @property
    def drop(self) -> Drop | None:
        """Which probabilities it drops; if any, its masks must have their places."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        """Output, in q's type or wider, and log-sum-exp of these keys alone."""

    def backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask
    ) -> Gradients:
        """The block's share of the gradients, given `out` and `lse` of all keys."""


def kernel_of(backend: Backend, softcap: float | None = None) -> Kernel:
    """The kernel of a backend. ValueError where it has no soft cap."""
    if backend == "flash":
        if softcap is not None:
            raise ValueError(
                f"the flash kernels have no soft cap, which is {softcap}: use plain or flex"
            )
        return Flash()
    return Plain(softcap) if backend == "plain" else Flex(softcap)


def dropping(kernel: Kernel, drop: Drop) -> Kernel:
    """The kernel with dropout. ValueError where it has none."""
    if not isinstance(kernel, Plain):
        raise ValueError(f"only plain attention has dropout, which is {drop.rate}")
    return replace(kernel, drop=drop)


def of_heads(kernel: Kernel, heads: Sequence[int]) -> Kernel:
    """The kernel for some of the heads that it was for."""
    if kernel.drop is None:
        return kernel
    chosen = tuple(kernel.drop.heads[head] for head in heads)
    return dropping(kernel, replace(kernel.drop, heads=chosen))


@dataclass(frozen=True)
class Plain:
    """The definition, in at least float32."""

    softcap: float | None = None
    drop: Drop | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        scores, _ = self._scores(q, k, mask)  # [n, a, s, s']
        lse = scores.logsumexp(-1)
        p = torch.exp(scores - lse[..., None])
        return p * self._kept(mask, p) @ _repeated(v, q), lse

    def backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask
    ) -> Gradients:
        scores, slope = self._scores(q, k, mask)
        wide, scale = scores.dtype, q.shape[-1] ** -0.5
        d_out, out = d_out.to(wide), out.to(wide)
        p = torch.exp(scores - lse[..., None])
        kept = self._kept(mask, p)
        dp = d_out @ _repeated(v, q).mT * kept
        ds = p * (dp - (d_out * out).sum(-1, keepdim=True)) * slope * scale
        dk, dv = (summed(x, k.shape[1]) for x in (ds.mT @ q.to(wide), (p * kept).mT @ d_out))
        return ds @ _repeated(k, q), dk, dv

    def _kept(self, mask: Mask, p: Tensor) -> Tensor | float:
        if self.drop is None:
            return 1.0
        assert mask.places is not None
        return self.drop.factors(mask.places).to(p.dtype)

    def _scores(self, q: Tensor, k: Tensor, mask: Mask) -> tuple[Tensor, Tensor | float]:
        """The scores, −∞ where masked, and the slope of the cap."""
        keys = _repeated(k, q)
        scores = q.to(keys.dtype) @ keys.mT / q.shape[-1] ** 0.5
        slope: Tensor | float = 1.0
        if self.softcap is not None:
            bent = torch.tanh(scores / self.softcap)
            scores, slope = self.softcap * bent, 1 - bent.square()
        allowed = mask.allowed(q.shape[-2], k.shape[-2], q.device)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, float("-inf"))
        return scores, slope


class Flash:
    """The fused kernel of the device; float32 on CUDA takes the memory-efficient one."""

    drop = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        if mask.kind == "window":
            return self._banded(q, k, v, mask)
        causal, aten = mask.kind == "causal", torch.ops.aten
        if q.is_cpu:
            return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        if q.dtype == torch.float64:
            return Plain().forward(q, k, v, mask)
        d, scale = q.shape[-1], q.shape[-1] ** -0.5
        q, k, v = for_cuda(q, k, v)
        if q.dtype == torch.float32:
            out, lse, *_ = aten._scaled_dot_product_efficient_attention(
                q, k, v, None, True, 0.0, causal, scale=scale
            )
            return out[..., :d], lse[..., : q.shape[2]]  # the kernel pads rows
        out, lse, *_ = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
        return out[..., :d], lse

    def backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask
    ) -> Gradients:
        if mask.kind == "window":
            return self._banded_backward(d_out, q, k, v, out, lse, mask)
        causal, aten = mask.kind == "causal", torch.ops.aten
        d_out, out = d_out.to(q.dtype), out.to(q.dtype)
        if q.is_cpu:
            found: Gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                d_out, q, k, v, out, lse, 0.0, causal
            )
            return found
        if q.dtype == torch.float64:
            return Plain().backward(d_out, q, k, v, out, lse, mask)
        return _cuda_backward(d_out, q, k, v, out, lse, causal)

    def _banded(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        parts = []
        for rows, keys, tile in mask.tiles(q.shape[2], k.shape[2]):
            block = q[:, :, rows], k[:, :, keys], v[:, :, keys]
            if q.is_cpu:
                bias = _bias(tile, block[0], block[1])
                op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
                parts.append(op(*block, 0.0, False, attn_mask=bias))
            else:
                parts.append(Plain().forward(*block, tile))
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs, 2), torch.cat(lses, 2)

    def _banded_backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask
    ) -> Gradients:
        wide = torch.promote_types(q.dtype, torch.float32)
        dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
        d_out, out = d_out.to(q.dtype), out.to(q.dtype)
        for rows, keys, tile in mask.tiles(q.shape[2], k.shape[2]):
            first = d_out[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys]
            rest = out[:, :, rows], lse[:, :, rows]
            if q.is_cpu:
                op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
                bias = _bias(tile, first[1], first[2])
                parts = op(*first, *rest, 0.0, False, attn_mask=bias)
            else:
                parts = Plain().backward(*first, *rest, tile)
            dq[:, :, rows] = parts[0]
            dk[:, :, keys] += parts[1]
            dv[:, :, keys] += parts[2]
        return dq, dk, dv


class Flex:
    """torch's FlexAttention, compiled on a GPU; its backward computes the block once more."""

    drop = None

    def __init__(self, softcap: float | None) -> None:
        # Importing it takes a second, since it brings the compiler.
        from torch.nn.attention import flex_attention as flex

        self.softcap, self._flex = softcap, flex
        self._compiled: Any = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        if not torch.is_grad_enabled():
            q, k, v = q.detach(), k.detach(), v.detach()
        s, s2, blocks = q.shape[2], k.shape[2], None
        if mask.kind != "full":
            shift, window = mask.shift, mask.window if mask.kind == "window" else s + s2
            blocks = self._flex.create_block_mask(
                lambda n, h, i, j: (shift + i - j >= 0) & (shift + i - j < window),
                None, None, s, s2, device=q.device,
            )  # fmt: skip
        cap = self.softcap
        bend = None if cap is None else lambda s, n, h, i, j: cap * torch.tanh(s / cap)
        out, aux = self._call(q)(
            q, k, v, bend, blocks, enable_gqa=q.shape[1] != k.shape[1],
            return_aux=self._flex.AuxRequest(lse=True),
        )  # fmt: skip
        return out, aux.lse

    def backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask
    ) -> Gradients:
        if q.is_cpu:  # FlexAttention has no backward there
            return Plain(self.softcap).backward(d_out, q, k, v, out, lse, mask)
        # out = Σ w out_b over the blocks, with w = exp(lse_b − lse): the gradient of each follows.
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            own, own_lse = self.forward(leaves[0], leaves[1], leaves[2], mask)
        weight = torch.exp(own_lse.detach() - lse)
        d_out = d_out.to(weight.dtype)
        d_lse = weight * (d_out * (own.detach() - out)).sum(-1)
        d_own = (weight[..., None] * d_out).to(own.dtype)
        dq, dk, dv = torch.autograd.grad([own, own_lse], leaves, [d_own, d_lse.to(own_lse.dtype)])
        return dq, dk, dv

    def _call(self, q: Tensor) -> Callable[..., Any]:
        if not q.is_cuda:
            return self._flex.flex_attention  # to compile it takes longer than to run it on a CPU
        if self._compiled is None:
            self._compiled = torch.compile(self._flex.flex_attention, dynamic=True)
        compiled: Callable[..., Any] = self._compiled
        return compiled


def _repeated(k: Tensor, q: Tensor) -> Tensor:
    """Keys or values for every query head, in at least float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return k.to(wide).repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def _bias(mask: Mask, q: Tensor, k: Tensor) -> Tensor:
    """What is added to scores: 0, or −∞ where masked, [s, s'] in q's type."""
    rows, columns = q.shape[2], k.shape[2]
    allowed = mask.allowed(rows, columns, q.device)
    assert allowed is not None
    return q.new_zeros(rows, columns).masked_fill_(~allowed, float("-inf"))


def for_cuda(*tensors: Tensor) -> list[Tensor]:
    """q, k, v and more as CUDA's kernels want them: equal heads, 8-fold head sizes."""
    heads, d = tensors[0].shape[1], tensors[0].shape[-1]
    repeated = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in tensors)
    return [functional.pad(x, (0, -d % 8)) for x in repeated]


def _cuda_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> Gradients:
    aten, g, d = torch.ops.aten, k.shape[1], q.shape[-1]
    s, s2, scale = q.shape[2], k.shape[2], d**-0.5
    q, k, v, out, d_out = for_cuda(q, k, v, out, d_out)
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout, which there is none
    if q.dtype == torch.float32:
        lse = functional.pad(lse, (0, -s % 32), value=float("inf"))  # as its forward pads rows
        found = aten._scaled_dot_product_efficient_attention_backward(
            d_out, q, k, v, None, out, lse, seed, seed, 0.0, [True, True, True, False], causal,
            scale=scale,
        )  # fmt: skip
    else:
        found = aten._scaled_dot_product_flash_attention_backward(
            d_out, q, k, v, out, lse.contiguous(), None, None, s, s2, 0.0, causal, seed, seed,
            scale=scale,
        )  # fmt: skip
    dq, dk, dv = (x[..., :d] for x in found[:3])
    return dq, summed(dk, g), summed(dv, g)


def summed(dk: Tensor, g: int) -> Tensor:
    """Gradients of keys or values, for each query head → for each of the g heads these share."""
    wide = torch.promote_types(dk.dtype, torch.float32)
    return dk.unflatten(1, (g, -1)).sum(2, dtype=wide)
