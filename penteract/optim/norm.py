"""What is measured of all gradients at once: every logical element once, whatever the layout.

Own gradients are complete after `Buffers.finish`. A bucket's measure is reduced over the axes that
split its parameters and over the ranks that share out its ownership, then all over the pipeline's
stages; replicas, and the copies of a tied weight, count once. Gaps between parameters and padding
hold zero.

| what                         | axes, one after another          | bytes each | when             |
|------------------------------|----------------------------------|------------|------------------|
| of dense parameters          | tp where it splits them, dp-cp   | 8          | once a split     |
| of experts                   | ep and etp where they split, edp | 8          | once a split     |
| of a stage                   | pp                               | 8          | once             |
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
    return _over_owners(buffers, axes, _zeros, "sum").to(torch.int64)


def _zeros(bucket: Bucket) -> Tensor:
    """Of what this rank owns of logical tensors: gaps and padding, zeros too, are none of it."""
    owned = sum(fragment.box.numel for _, fragment, _ in bucket.owned(bucket.own_gradient))
    return owned - torch.count_nonzero(bucket.own_gradient).double()


def _square(bucket: Bucket) -> Tensor:
    """The sum of squares in float64, from norms of short runs.

    One long float32 sum loses digits on a CPU: 7e-4 of 2^24 elements, 4 % of 2^28.
    """
    flat = bucket.own_gradient
    whole = len(flat) // RUN * RUN
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, RUN), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:])
    return norms.double().square().sum() + rest.double().square()


def clip_coefficient(norm: Tensor, limit: float) -> Tensor:
    """What gradients are multiplied by: min(1, limit / (norm + 1e-6)); 1 where `limit` is 0."""
    return torch.ones_like(norm) if limit == 0 else (limit / (norm + 1e-6)).clamp(max=1.0)


def _largest(bucket: Bucket) -> Tensor:
    x = bucket.own_gradient
    if len(x) == 0:  # a tensor rank may hold nothing of a kind
        return x.new_zeros((), dtype=torch.float64)
    largest = torch.linalg.vector_norm(x, float("inf")).double()
    # Of a NaN and a number a reduction may keep the number; infinity wins everywhere.
    return torch.where(largest.isnan(), float("inf"), largest)


def _over_owners(
    buffers: Buffers, axes: Mapping[str, Axis], measure: Callable[[Bucket], Tensor], op: str
) -> Tensor:
    """Sum or largest of every bucket's measure over all owners of something else."""
    found: dict[tuple[tuple[str, ...], str], list[Tensor]] = {}
    shards: dict[str, Axis] = {}
    for bucket in buffers.buckets:
        if _counts(bucket, buffers):
            shard = bucket.kind.sharding.shard
            shards[shard.name] = shard
            found.setdefault((bucket.kind.split_axes, shard.name), []).append(measure(bucket))
    parts = []
    for (split_axes, owners), values in sorted(found.items()):
        value = _joined(values, op)
        for name in split_axes:
            all_reduce_(value, axes[name], op)
        parts.append(all_reduce_(value, shards[owners], op))
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
