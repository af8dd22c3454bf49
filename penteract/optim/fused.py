"""AdamW and SGD: torch's fused kernels over the slices that a rank owns.

AdamW (arXiv:1711.05101) decays weights apart from the gradient. SGD with momentum is torch's: decay
is added to the gradient, so it goes into the momentum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from penteract.config import OptimConfig
from penteract.optim.groups import weight_decay
from penteract.parallel.buckets import Bucket, Kind

MOMENTS = ("exp_avg", "exp_avg_sq")


class Fused:
    """A rule that is one of torch's optimizers, over flat slices as its parameters."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, kinds: Sequence[Kind], names: Mapping[str, str]
    ) -> None:
        self.torch, self.kinds, self.names = optimizer, kinds, names  # ours -> torch's
        self.flats: list[tuple[Bucket, Tensor]] = []
        for kind, group in zip(kinds, optimizer.param_groups, strict=True):
            self.flats += zip(kind.buckets, group["params"], strict=True)
        self.exact = any(kind.wide == torch.float64 for kind in kinds)
        for bucket, flat in self.flats:
            flat.grad = bucket.own_gradient
            # As torch would at the first step; here so that they can be loaded.
            for theirs in names.values():
                optimizer.state[flat][theirs] = torch.zeros_like(flat)
            if isinstance(optimizer, torch.optim.AdamW):
                step = torch.zeros((), dtype=torch.float32, device=flat.device)
                optimizer.state[flat]["step"] = step

    def update(self, lr: float, coefficient: Tensor, skip: Tensor) -> None:
        """One update with gradients times `coefficient`; none where `skip` is true."""
        for kind, group in zip(self.kinds, self.torch.param_groups, strict=True):
            group["lr"] = lr * kind.group.lr
        # The fused kernel divides gradients by grad_scale and does nothing where found_inf is set.
        # The scale is a float32 number, which would cost a float64 run half of its digits.
        scale = coefficient.reciprocal()
        if self.exact:
            scale = torch.ones_like(coefficient)
            for bucket, _ in self.flats:
                bucket.own_gradient.mul_(coefficient)
        self.torch.grad_scale = scale.float()  # type: ignore[attr-defined]
        self.torch.found_inf = skip.float()  # type: ignore[attr-defined]
        self.torch.step()

    def state(self) -> Iterator[tuple[str, Bucket, Tensor]]:
        """(moment name, bucket, that moment of the bucket's own slice)."""
        for bucket, flat in self.flats:
            for ours, theirs in self.names.items():
                yield ours, bucket, self.torch.state[flat][theirs]

    def restore(self, updates: int) -> None:
        """Count from `updates` on, for Adam's bias correction."""
        for _, flat in self.flats:
            if "step" in self.torch.state[flat]:
                self.torch.state[flat]["step"].fill_(updates)


def adamw(kinds: Sequence[Kind], optim: OptimConfig) -> Fused:
    """AdamW; moments exp_avg and exp_avg_sq."""
    groups = _groups(kinds, optim)
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
    return Fused(optimizer, kinds, {name: name for name in MOMENTS})


def sgd(kinds: Sequence[Kind], optim: OptimConfig) -> Fused:
    """SGD; its momentum, where it has one."""
    assert optim.momentum is not None, "an unresolved configuration"
    groups = _groups(kinds, optim)
    optimizer = torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, fused=True)
    return Fused(optimizer, kinds, {"momentum": "momentum_buffer"} if optim.momentum else {})


def _groups(kinds: Sequence[Kind], optim: OptimConfig) -> list[dict[str, object]]:
    return [
        {
            "params": [torch.nn.Parameter(bucket.master) for bucket in kind.buckets],
            "weight_decay": weight_decay(kind, optim),
        }
        for kind in kinds
    ]
