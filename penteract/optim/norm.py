"""What is measured of all gradients at once: every logical element once, whatever the layout.

Own gradients are complete after `Buffers.finish`. A bucket's measure is reduced over the ranks that
share out its ownership and over the axes that split its parameters, then all over the pipeline's
stages; replicas, and the copies of a tied weight, count once. Gaps between parameters and padding
hold zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from penteract.collectives import all_reduce_
from penteract.mesh import Axis, single
from penteract.parallel.buckets import Bucket
from penteract.parallel.buffers import Buffers

RUN = 1 << 12  # elements
ALONE = single("pp")  # where nothing is said of a pipeline


def gradient_norm(buffers: Buffers, axes: Mapping[str, Axis], *, order: float = 2.0) -> Tensor:
    """The norm of all gradients, a float64 scalar, the same on every rank; before clipping.

    `order` is 2, or infinity for the largest magnitude. Not finite where a gradient is not.
    """
    if order == 2:
        return _over_owners(buffers, axes, _square, "sum").sqrt()
    assert order == float("inf"), f"no norm of order {order}"
    return _over_owners(buffers, axes, _largest, "max")


def count_zeros(buffers: Buffers, axes: Mapping[str, Axis]) -> Tensor:
    """How many elements of all logical tensors have a gradient of exactly 0; an int64 scalar."""
    slots = (slot for slot in buffers.slots() if _counts(slot.bucket, buffers))
    pieces = (piece for slot in slots for piece in slot.entry.placement.pieces)
    shapes = {piece.tensor: piece.shape for piece in pieces}
    here = sum(torch.Size(shape).numel() for shape in shapes.values())
    total = all_reduce_(torch.tensor(here, device=buffers.device), axes.get("pp", ALONE))
    return total - _over_owners(buffers, axes, torch.count_nonzero, "sum")


def _square(flat: Tensor) -> Tensor:
    """The sum of squares in float64, from norms of short runs.

    One long float32 sum loses digits on a CPU: 7e-4 of 2^24 elements, 4 % of 2^28.
    """
    whole = len(flat) // RUN * RUN
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, RUN), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:])
    return norms.double().square().sum() + rest.double().square()


def clip_coefficient(norm: Tensor, limit: float) -> Tensor:
    """What gradients are multiplied by: min(1, limit / (norm + 1e-6)); 1 where `limit` is 0."""
    return torch.ones_like(norm) if limit == 0 else (limit / (norm + 1e-6)).clamp(max=1.0)


def _largest(x: Tensor) -> Tensor:
    if len(x) == 0:  # a tensor rank may hold nothing of a kind
        return x.new_zeros((), dtype=torch.float64)
    largest = torch.linalg.vector_norm(x, float("inf")).double()
    # Of a NaN and a number a reduction may keep the number; infinity wins everywhere.
    return torch.where(largest.isnan(), float("inf"), largest)


def _over_owners(
    buffers: Buffers, axes: Mapping[str, Axis], measure: Callable[[Tensor], Tensor], op: str
) -> Tensor:
    """Sum or largest of every bucket's measure over all owners of something else."""
    found: dict[tuple[str, ...], list[Tensor]] = {}
    for bucket in buffers.buckets:
        if _counts(bucket, buffers):
            found.setdefault(bucket.kind.split_axes, []).append(measure(bucket.own_gradient))
    parts = []
    for split_axes, values in sorted(found.items()):
        value = _joined(values, op)
        for name in split_axes:
            all_reduce_(value, axes[name], op)
        parts.append(all_reduce_(value, buffers.sharding.shard, op))
    whole = (
        _joined(parts, op) if parts else torch.zeros((), dtype=torch.float64, device=buffers.device)
    )
    return all_reduce_(whole, axes.get("pp", ALONE), op)


def _counts(bucket: Bucket, buffers: Buffers) -> bool:
    """Of the copies of a tied weight one counts."""
    holders = buffers.more_axes.get("tied", ALONE)
    return "tied" not in bucket.kind.more_axes or holders.rank == 0


def _joined(values: Sequence[Tensor], op: str) -> Tensor:
    stacked = torch.stack(list(values))
    return stacked.sum(0) if op == "sum" else stacked.amax(0)
