"""Ring attention: blocks of keys and values travel around while each rank attends to the last one.

In turn i a rank holds the keys and values of the rank i before it, and sends them on while it
computes. Backward sends them around again, and behind them their gradients, in at least float32, to
which each rank adds its share; after the last turn they are at home. Over one rank this is plain
attention. What is sent stands in `exchange`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from penteract.collectives import Pending, start_shift
from penteract.mesh import Axis
from penteract.parallel.context.blocks import Blocks, Gradient, Merged
from penteract.parallel.context.cut import Cut
from penteract.parallel.context.exchange import Found, begun
from penteract.parallel.context.kernels import Kernel
from penteract.parallel.context.score_dropout import Places

Turns = tuple[Blocks, ...]  # what this rank's queries see of the keys that it holds in each turn


@dataclass(frozen=True)
class Ring:
    """Over `axis`; without `overlap` every message is awaited at once, to the same result."""

    axis: Axis
    overlap: bool = True

    def plan(self, cut: Cut, window: int | None, like: Tensor) -> Turns:
        n, rank = self.axis.size, self.axis.rank
        segments = like.device if like.is_cuda else None
        return tuple(
            Blocks.of(
                cut.blocks(rank, owner, window=window),
                cut.t_local,
                window,
                places=partial(Places.of_ranks, cut, rank, owner, like.device),
                segments=segments,
            )
            for owner in ((rank - i) % n for i in range(n))
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: Turns, kernel: Kernel
    ) -> tuple[Tensor, Sequence[Tensor]]:
        merged = Merged(q, kernel)
        if len(plan) == 1:
            merged.add(k, v, plan[0])
        else:
            kv = torch.stack([k, v])  # [2, t/cp, g, d]
            for turn, blocks in enumerate(plan):
                coming = self._start(kv) if turn + 1 < len(plan) else None
                merged.add(kv[0], kv[1], blocks)
                kv = coming.wait() if coming else kv
        out, lse = merged.result(sinks)
        return out, (q, k, v, out, lse)

    def backward(
        self,
        d_out: Tensor,
        saved: Sequence[Tensor],
        sinks: Tensor | None,
        plan: Turns,
        kernel: Kernel,
    ) -> Found:
        q, k, v, out, lse = saved
        gradient = Gradient(d_out, q, out, lse, kernel)
        d_sinks = None if sinks is None else gradient.sinks(sinks)
        if len(plan) == 1 and plan[0].is_whole and q.shape[1]:
            dq, dk, dv = gradient.whole(k, v, plan[0])
            return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sinks
        kv = torch.stack([k, v]) if len(plan) > 1 else None
        own = torch.zeros((2, *k.shape), dtype=gradient.wide, device=k.device)
        behind: Pending | None = None  # gradients of the keys of this turn, from the rank before
        for turn, blocks in enumerate(plan):
            coming = self._start(kv) if kv is not None and turn + 1 < len(plan) else None
            if turn == 0:
                gradient.add(k, v, blocks, own)
            else:
                assert kv is not None
                share = gradient.add(kv[0], kv[1], blocks, torch.zeros_like(own))
                share = share if behind is None else share.add_(behind.wait())
                behind = self._start(share)
            kv = coming.wait() if coming else kv
        if behind is not None:
            own += behind.wait()
        return gradient.dq.to(q.dtype), own[0].to(k.dtype), own[1].to(v.dtype), d_sinks

    def _start(self, x: Tensor) -> Pending:
        return begun(start_shift(x, self.axis), overlap=self.overlap)
