"""Lion: the sign of an average of gradients. Chen et al., arXiv:2302.06675.

    W ← W - lr (sign(b1 M + (1-b1) G) + weight_decay W),   M ← b2 M + (1-b2) G

Below `optim.eps` the sign goes over into a slope: the sign of a gradient that is zero but for its
rounding would be another in every layout.
Elementwise, on the slices that a rank owns. Its learning rate is usually a third to a tenth of
AdamW's, with the decay as many times larger.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from penteract.config import OptimConfig
from penteract.optim.groups import weight_decay
from penteract.parallel.buckets import Bucket, Kind


class Lion:
    """The rule for kinds of any shape."""

    def __init__(self, kinds: Sequence[Kind], optim: OptimConfig) -> None:
        self.optim = optim
        buckets = (bucket for kind in kinds for bucket in kind.buckets)
        self.momentum = [(bucket, torch.zeros_like(bucket.master)) for bucket in buckets]

    def update(self, lr: float, coefficient: Tensor, skip: Tensor) -> None:
        """One update with gradients times `coefficient`; none where `skip` is true."""
        first, second = self.optim.betas
        for bucket, momentum in self.momentum:
            gradient = bucket.own_gradient * coefficient
            rate = lr * bucket.kind.group.lr
            kept = 1 - rate * weight_decay(bucket.kind, self.optim)
            direction = momentum.lerp(gradient, 1 - first).div_(self.optim.eps).clamp_(-1, 1)
            new = (bucket.master * kept).sub_(direction, alpha=rate)
            bucket.master.copy_(torch.where(skip, bucket.master, new))
            momentum.copy_(torch.where(skip, momentum, momentum.lerp(gradient, 1 - second)))

    def state(self) -> Iterator[tuple[str, Bucket, Tensor]]:
        """(moment name, bucket, that moment of the bucket's own slice)."""
        for bucket, momentum in self.momentum:
            yield "momentum", bucket, momentum

    def restore(self, updates: int) -> None:
        """Nothing here depends on the number of updates."""
