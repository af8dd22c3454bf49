"""Context parallelism by gathering: each rank gets the keys and values of all.

A rank attends to its own rows while those of the others come, then to these. Backward gathers them
again, and sends the gradients home by one reduce-scatter, in at least float32, while it goes back
through its own rows. What is sent and held stands in `exchange`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from penteract.collectives import Pending, start_all_gather, start_reduce_scatter
from penteract.mesh import Axis
from penteract.parallel.context.blocks import Blocks, Gradient, Merged
from penteract.parallel.context.cut import Block, Cut
from penteract.parallel.context.exchange import Found, begun
from penteract.parallel.context.kernels import Kernel
from penteract.parallel.context.score_dropout import Places


class Plan(NamedTuple):
    own: Blocks  # of this rank's keys
    outside: Blocks  # of the micro-batch's keys
    restore: Tensor  # [t] the micro-batch's rows in those of all ranks


@dataclass(frozen=True)
class AllGather:
    """Over `axis`; without `overlap` every message is awaited at once, to the same result."""

    axis: Axis
    overlap: bool = True

    def plan(self, cut: Cut, window: int | None, like: Tensor) -> Plan:
        rank, device = self.axis.rank, like.device

        def blocks(found: list[Block], owner: int | None) -> Blocks:
            places = partial(Places.of_ranks, cut, rank, owner, device)
            segments = device if like.is_cuda else None
            return Blocks.of(found, cut.t_local, window, places=places, segments=segments)

        return Plan(
            blocks(cut.blocks(rank, rank, window=window), rank),
            blocks(cut.outside(rank, window=window), None),
            torch.from_numpy(cut.restore()).to(device),
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: Plan, kernel: Kernel
    ) -> tuple[Tensor, Sequence[Tensor]]:
        coming = self._start_gather(k, v)
        merged = Merged(q, kernel)
        merged.add(k, v, plan.own)
        every = coming.wait().index_select(0, plan.restore)  # [t, 2, g, d]
        del coming  # and what was gathered
        merged.add(every[:, 0], every[:, 1], plan.outside)
        out, lse = merged.result(sinks)
        return out, (q, k, v, out, lse)

    def backward(
        self,
        d_out: Tensor,
        saved: Sequence[Tensor],
        sinks: Tensor | None,
        plan: Plan,
        kernel: Kernel,
    ) -> Found:
        q, k, v, out, lse = saved
        gradient = Gradient(d_out, q, out, lse, kernel)
        every = self._start_gather(k, v).wait().index_select(0, plan.restore)  # [t, 2, g, d]
        share = torch.zeros_like(every, dtype=gradient.wide)
        gradient.add(every[:, 0], every[:, 1], plan.outside, share.transpose(0, 1))
        del every
        by_rank = share.new_zeros((self.axis.size * len(k), *share.shape[1:]))
        by_rank.index_copy_(0, plan.restore, share)
        del share
        coming = begun(start_reduce_scatter(by_rank, self.axis), overlap=self.overlap)
        own = torch.zeros((2, *k.shape), dtype=gradient.wide, device=k.device)
        gradient.add(k, v, plan.own, own)
        own += coming.wait().transpose(0, 1)
        d_sinks = None if sinks is None else gradient.sinks(sinks)
        return gradient.dq.to(q.dtype), own[0].to(k.dtype), own[1].to(v.dtype), d_sinks

    def _start_gather(self, k: Tensor, v: Tensor) -> Pending:
        return begun(start_all_gather(torch.stack([k, v], 1), self.axis), overlap=self.overlap)
