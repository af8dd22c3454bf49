"""torch's own ring attention on a CPU, balanced and causal.

The public manager of torch.distributed.tensor.experimental refuses CPU tensors: only CUDA's kernels
are registered. Its templates take any kernel, and are called as its functions for CUDA call them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

ROTATIONS = ("alltoall", "allgather")  # how keys and values are passed on
WAITING = ((theirs._AllToAllRotater, "next_buffer"), (theirs._AllGatherRotater, "next_buffer"))
Watched = Callable[[Callable[..., Any]], Callable[..., Any]]  # a kernel, timed


class TorchRing(torch.autograd.Function):
    """torch's templates with the CPU's kernels; q, k and v [1, heads, t/cp, d]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, watched: Watched) -> Tensor:
        op = watched(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)
        group: Any = dist.group.WORLD
        out, lse = theirs._templated_ring_attention(
            group, 2, op, q, k, v, is_causal=True, dropout_p=0.0
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.watched = watched
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        op = ctx.watched(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward)
        q, k, v, out, lse = ctx.saved_tensors
        group: Any = dist.group.WORLD
        found = theirs._templated_ring_attention_backward(
            group, 2, op, d_out, "grad_out", q, k, v, out, lse, True, dropout_p=0.0
        )
        return (*found[:3], None)


def attend(q: Tensor, k: Tensor, v: Tensor, rotation: str, watched: Watched) -> Tensor:
    """Of this rank's rows: of 2n chunks, its own and the one as far from the end."""
    theirs.set_rotate_method(rotation)
    result: Tensor = TorchRing.apply(q, k, v, watched)
    return result
