"""DeepEP's kernels carry the tokens, where that library is installed.

They send a token to a rank once, with numbers and weights of its experts there, and add up what
comes back, which is what `dispatch` asks. The library numbers experts rank by rank: one that is cut
over etp counts as an expert on each of its ranks. It wants CUDA, bfloat16 tokens and float32
weights. What it sends is not counted. Source: https://github.com/deepseek-ai/DeepEP.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from penteract.collectives import Operation
from penteract.errors import UserError
from penteract.parallel.expert.dispatch import Arrived
from penteract.parallel.expert.places import ExpertParallel


class Library(Protocol):
    """What is used of `deep_ep.Buffer`; results as it documents them, events left out."""

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]: ...

    def dispatch(self, x: Tensor, **how: Any) -> tuple[Any, ...]: ...

    def combine(self, x: Tensor, handle: Any, **how: Any) -> tuple[Any, ...]: ...


class Fused:
    """See `dispatch`. `library` is made at the first use unless it is given."""

    def __init__(
        self, experts: int, places: ExpertParallel, library: Library | None = None
    ) -> None:
        self.on_each, self.group, self.library = experts // places.ep.size, places.group, library
        self.at = torch.tensor(
            [[p for p, home in enumerate(places.homes) if home == e] for e in range(places.ep.size)]
        )  # [ep, etp] places in the group

    def send(self, x: Tensor, weights: Tensor, experts: Tensor) -> _Carried:
        if self.library is None:
            self.library = _library(self.group.group, x.shape[1] * max(2, x.element_size()))
        owner = experts.clamp(min=0).div(self.on_each, rounding_mode="floor")  # [t, k]
        number = self.at.to(x.device)[owner] * self.on_each + (experts % self.on_each)[..., None]
        number = torch.where(experts[..., None] < 0, -1, number).flatten(1)  # [t, k·etp]
        given = weights[..., None].expand(*weights.shape, self.at.shape[1]).flatten(1)
        return _Carried(self.library, x, given, number, self.on_each * self.group.size)


class _Carried:
    def __init__(
        self, library: Library, x: Tensor, weights: Tensor, numbers: Tensor, experts: int
    ) -> None:
        self.library, self.handle = library, list[Any]()
        self.came = _Dispatch.apply(x, weights, numbers, experts, library, self.handle)

    def arrive(self) -> Arrived:
        return Arrived(*self.came)

    def leave(self, y: Tensor) -> Tensor:
        out: Tensor = _Combine.apply(y, self.library, self.handle[0])
        return out


class _Dispatch(Operation):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        numbers: Tensor,
        experts: int,
        library: Library,
        handle: list[Any],
    ) -> tuple[Tensor, Tensor, Tensor]:
        ranks, nodes, each, there, *_ = library.get_dispatch_layout(numbers, experts)
        came, local, came_weights, _, given, *_ = library.dispatch(
            x,
            topk_idx=numbers,
            topk_weights=weights,
            num_tokens_per_rank=ranks,
            num_tokens_per_rdma_rank=nodes,
            is_token_in_rank=there,
            num_tokens_per_expert=each,
        )
        ctx.library, ctx.handle = library, given
        handle.append(given)
        ctx.mark_non_differentiable(local)
        return came, came_weights, local

    @staticmethod
    def backward(ctx: Any, dx: Tensor, d_weights: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        back, back_weights, *_rest = ctx.library.combine(
            dx.contiguous(), ctx.handle, topk_weights=d_weights
        )
        return back, back_weights, None, None, None, None


class _Combine(Operation):
    @staticmethod
    def forward(ctx: Any, y: Tensor, library: Library, handle: Any) -> Tensor:
        ctx.library, ctx.handle = library, handle
        result: Tensor = library.combine(y, handle)[0]
        return result

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return ctx.library.dispatch(g.contiguous(), handle=ctx.handle)[0], None, None


def _library(group: dist.ProcessGroup | None, row_bytes: int) -> Library:
    try:
        from deep_ep import Buffer
    except ImportError:
        raise UserError(
            'moe.dispatcher = "fused" needs DeepEP (the package deep_ep, built for this machine); '
            '"all_to_all" needs nothing'
        ) from None
    assert group is not None
    n = dist.get_world_size(group)
    hints = [Buffer.get_dispatch_config(n), Buffer.get_combine_config(n)]
    near = max(hint.get_nvl_buffer_size_hint(row_bytes, n) for hint in hints)
    far = max(hint.get_rdma_buffer_size_hint(row_bytes, n) for hint in hints)
    buffer: Library = Buffer(group, near, far)
    return buffer
