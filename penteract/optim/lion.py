"""Lion: the sign of an average of gradients. Chen et al., arXiv:2302.06675.

    W ← W - lr (sign(b1 M + (1-b1) G) + weight_decay W),   M ← b2 M + (1-b2) G

Below `optim.eps` the sign goes over into a slope: the sign of a gradient that is zero but for its
rounding would be another in every layout.
Elementwise, on the slices that a rank owns. Its learning rate is usually a third to a tenth of
AdamW's, with the decay as many times larger.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penteract.config import OptimConfig
from penteract.optim.elementwise import Apply, Update
from penteract.optim.groups import weight_decay
from penteract.parallel.buckets import Bucket


def lion(optim: OptimConfig) -> Apply:
    """The rule for kinds of any shape; its moment is the momentum."""
    first, second = optim.betas

    def apply(bucket: Bucket, gradient: Tensor, moments: Sequence[Tensor], update: Update) -> None:
        (momentum,), master, rate = moments, bucket.master, update.rate(bucket)
        gradient = gradient * update.coefficient
        kept = 1 - rate * weight_decay(bucket.kind, optim)
        direction = momentum.lerp(gradient, 1 - first).div_(optim.eps).clamp_(-1, 1)
        new = (master * kept).sub_(direction, alpha=rate)
        master.copy_(torch.where(update.skip, master, new))
        momentum.copy_(torch.where(update.skip, momentum, momentum.lerp(gradient, 1 - second)))

    return apply
