"""Blocks of several lengths in one call: the variable-length form of attention.

Packed documents are many small blocks. Where the device has a kernel that takes the ends of
segments, blocks of one mask lie one behind the other and are one call; elsewhere, and for kernels
without it, one call each, to the same result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from penteract.parallel.context.cut import Block
from penteract.parallel.context.kernels import Flash, Gradients, Kernel, Mask, for_cuda, summed


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of segments, one segment behind the other."""

    sizes: tuple[int, ...]  # of each segment
    index: Tensor  # [Σ sizes] their rows
    ends: Tensor  # [n + 1] int32: 0, and where each segment ends

    @classmethod
    def of_slices(cls, slices: Sequence[slice], device: torch.device) -> Rows:
        sizes = tuple(s.stop - s.start for s in slices)
        index = torch.cat([torch.arange(s.start, s.stop) for s in slices])
        ends = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32)
        return cls(sizes, index.to(device), ends.to(device))

    def of(self, x: Tensor) -> Tensor:
        """Those rows of x [t, heads, …]: a copy [1, heads, Σ sizes, …]."""
        return x.index_select(0, self.index).transpose(0, 1)[None]

    def put(self, x: Tensor, values: Tensor) -> None:
        """Overwrite those rows of `x` with what is as `of` gives it; no row may be there twice."""
        x.index_copy_(0, self.index, values[0].transpose(0, 1))

    def add(self, x: Tensor, values: Tensor) -> None:
        """Add to them."""
        x.index_add_(0, self.index, values[0].transpose(0, 1).to(x.dtype))


@dataclass(frozen=True, eq=False)
class Segments:
    """Queries of each segment attend to the keys of the same one, all with one mask."""

    query: Rows
    key: Rows
    mask: Mask

    def forward(self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As the kernel's, of q [1, a, Σ queries, d] and k, v [1, g, Σ keys, d]."""
        if not _in_one_call(kernel, q):
            parts = [
                kernel.forward(q[:, :, i], k[:, :, j], v[:, :, j], self._mask(i, j))
                for i, j in self._pairs()
            ]
            outs, lses = zip(*parts, strict=True)
            return torch.cat(outs, 2), torch.cat(lses, 2)
        d = q.shape[-1]
        q, k, v = (x[0].transpose(0, 1) for x in for_cuda(q, k, v))  # [Σ rows, a, d]
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *self._ends(), 0.0, self.mask.kind == "causal", False, scale=d**-0.5
        )
        return out[..., :d].transpose(0, 1)[None], lse[None]

    def backward(
        self,
        kernel: Kernel,
        d_out: Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
    ) -> Gradients:
        """As the kernel's."""
        q, k, v = qkv
        if not _in_one_call(kernel, q):
            parts = [
                kernel.backward(
                    d_out[:, :, i], q[:, :, i], k[:, :, j], v[:, :, j],
                    out[:, :, i], lse[:, :, i], self._mask(i, j),
                )
                for i, j in self._pairs()
            ]  # fmt: skip
            dq, dk, dv = (torch.cat(x, 2) for x in zip(*parts, strict=True))
            return dq, dk, dv
        g, d, dtype = k.shape[1], q.shape[-1], q.dtype
        padded = for_cuda(d_out.to(dtype), q, k, v, out.to(dtype))
        rows = (x[0].transpose(0, 1).contiguous() for x in padded)  # [Σ rows, a, d]
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout: there is none
        found = torch.ops.aten._flash_attention_backward(
            *rows, lse[0].contiguous(), *self._ends(), 0.0, self.mask.kind == "causal",
            state, torch.empty(0, device=q.device), scale=d**-0.5,
        )  # fmt: skip
        dq, dk, dv = (x[..., :d].transpose(0, 1)[None] for x in found)
        return dq, summed(dk, g), summed(dv, g)

    def _ends(self) -> tuple[Tensor, Tensor, int, int]:
        query, key = self.query, self.key
        return query.ends, key.ends, max(query.sizes), max(key.sizes)

    def _mask(self, queries: slice, keys: slice) -> Mask:
        places = self.mask.places
        return (
            self.mask
            if places is None
            else Mask(self.mask.kind, places=places.within(queries, keys))
        )

    def _pairs(self) -> Iterator[tuple[slice, slice]]:
        q = k = 0
        for queries, keys in zip(self.query.sizes, self.key.sizes, strict=True):
            yield slice(q, q + queries), slice(k, k + keys)
            q, k = q + queries, k + keys


def _in_one_call(kernel: Kernel, q: Tensor) -> bool:
    return isinstance(kernel, Flash) and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


def packed(blocks: Sequence[Block], device: torch.device) -> list[Segments]:
    """Blocks without a window as few segments; no query is twice in one of them."""
    found: list[list[Block]] = []
    for block in blocks:
        fits = (
            part
            for part in found
            if part[0].mask == block.mask and part[-1].query.stop <= block.query.start
        )
        into = next(fits, None)
        if into is None:
            found.append([block])
        else:
            into.append(block)
    return [
        Segments(
            Rows.of_slices([block.query for block in part], device),
            Rows.of_slices([block.key for block in part], device),
            Mask(part[0].mask),
        )
        for part in found
    ]
