"""AdamW and SGD: torch's fused kernels over the slices that a rank owns.

AdamW (arXiv:1711.05101) decays weights apart from the gradient. SGD with momentum is torch's: decay
is added to the gradient, so it goes into the momentum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import adamw as torch_adamw
from torch.optim import sgd as torch_sgd

from penteract.config import OptimConfig
from penteract.optim.elementwise import Apply, Update
from penteract.optim.groups import weight_decay
from penteract.parallel.buckets import Bucket


def adamw(optim: OptimConfig) -> Apply:
    """AdamW; moments exp_avg and exp_avg_sq."""

    def apply(bucket: Bucket, gradient: Tensor, moments: Sequence[Tensor], update: Update) -> None:
        first, second = moments
        torch_adamw.adamw(
            [bucket.master],
            [gradient],
            [first],
            [second],
            [],
            [update.done.float()],
            fused=True,
            grad_scale=_scale(gradient, update.coefficient),
            found_inf=update.skip.float(),
            amsgrad=False,
            beta1=optim.betas[0],
            beta2=optim.betas[1],
            lr=update.rate(bucket),
            weight_decay=weight_decay(bucket.kind, optim),
            eps=optim.eps,
            maximize=False,
        )

    return apply


def sgd(optim: OptimConfig) -> Apply:
    """SGD; its momentum, where it has one."""
    assert optim.momentum is not None, "an unresolved configuration"
    factor = optim.momentum

    def apply(bucket: Bucket, gradient: Tensor, moments: Sequence[Tensor], update: Update) -> None:
        torch_sgd.sgd(
            [bucket.master],
            [gradient],
            [*moments] or [None],
            fused=True,
            grad_scale=_scale(gradient, update.coefficient),
            found_inf=update.skip.float(),
            weight_decay=weight_decay(bucket.kind, optim),
            momentum=factor,
            lr=update.rate(bucket),
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )

    return apply


def _scale(gradient: Tensor, coefficient: Tensor) -> Tensor:
    """What the fused kernels are to divide gradients by.

    It is a float32 number, which would cost a float64 run half of its digits: there the gradient is
    multiplied here.
    """
    if gradient.dtype != torch.float64:
        return coefficient.reciprocal().float()
    gradient.mul_(coefficient)
    return torch.ones_like(coefficient, dtype=torch.float32)
