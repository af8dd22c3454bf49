"""Rules that update every element by itself, bucket by bucket, on the slices that a rank owns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from penteract.optim.moments import Moments
from penteract.optim.offload import on_host
from penteract.parallel.buckets import Bucket


@dataclass(frozen=True)
class Update:
    """What is one for all buckets. The scalars lie where masters and moments do."""

    lr: float
    coefficient: Tensor  # float64: gradients are multiplied by it
    skip: Tensor  # bool: nothing changes where it is true
    done: Tensor  # int64: updates before this one

    def rate(self, bucket: Bucket) -> float:
        return self.lr * bucket.kind.group.lr


# Of a bucket its master and moments from its gradient, all flat and of the slice's length.
Apply = Callable[[Bucket, Tensor, Sequence[Tensor], Update], None]


class Elementwise:
    """One formula for all buckets of some kinds."""

    def __init__(self, moments: Moments, apply: Apply) -> None:
        self.moments, self.apply = moments, apply

    def update(self, update: Update) -> None:
        """Update all buckets. Their gradients are used up."""
        buckets = self.moments.buckets
        for bucket, gradient in on_host((bucket, bucket.own_gradient) for bucket in buckets):
            with self.moments.widened(bucket, update.done) as moments:
                self.apply(bucket, gradient, moments, update)
