"""One update of everything a rank owns: rules for kinds of parameters, and which kind has which.

A rule sees flat slices of masters, gradients and moments (`parallel.buckets`), bucket by bucket.
All but Muon's are elementwise, so they are the same in every layout by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from penteract.config import OptimConfig
from penteract.mesh import Axis
from penteract.optim.elementwise import Apply, Elementwise, Update
from penteract.optim.fused import adamw, sgd
from penteract.optim.lion import lion
from penteract.optim.moments import Moments
from penteract.optim.muon import Muon
from penteract.parallel.buckets import Bucket, Kind
from penteract.parallel.buffers import Buffers

MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum",), "lion": ("momentum",)}
FORMULAS: dict[str, Callable[[OptimConfig], Apply]] = {"adamw": adamw, "sgd": sgd, "lion": lion}


class Rule(Protocol):
    """How the buckets of some kinds are updated."""

    moments: Moments

    def update(self, update: Update) -> None:
        """Update masters and moments of all buckets; what they are where `update.skip` is true."""


class Optimizer:
    """The rules of all parameters that are trained, and the number of updates done."""

    def __init__(self, buffers: Buffers, rules: Sequence[Rule]) -> None:
        self.buffers, self.rules = buffers, rules
        device = buffers.buckets[0].master.device if buffers.buckets else "cpu"
        self._updates = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def step(self, lr: float, coefficient: Tensor, skip: Tensor) -> None:
        """One update with gradients times `coefficient`; none where `skip` is 1 (both scalars).

        The gradients are used up. Neither scalar is read on the host but under `optim.offload`,
        where the host waits for the device here, once a step, until both are known.
        """
        scalars = torch.stack([coefficient.double(), skip.double()]).to(self._updates.device)
        update = Update(lr, scalars[0], scalars[1].bool(), self._updates)
        # What no forward waited for is still being gathered into the memory that changes now.
        self.buffers.wait()
        for rule in self.rules:
            rule.update(update)
        self._updates += update.skip.logical_not()
        self.buffers.publish()

    @property
    def updates(self) -> int:
        """Updates done; skipped steps are none."""
        return int(self._updates.item())

    @updates.setter
    def updates(self, n: int) -> None:
        self._updates.fill_(n)

    def state(self) -> Iterator[tuple[str, Bucket, Tensor]]:
        """(moment name, bucket, that moment of the bucket's own slice)."""
        for rule in self.rules:
            yield from rule.moments.state()


def build(
    buffers: Buffers, optim: OptimConfig, axes: Mapping[str, Axis], *, seed: int = 0
) -> Optimizer:
    """The optimizer that `optim.name` says, for what is not frozen.

    `optim` is resolved. Muon takes kinds of matrices over `axes["tp-dp-cp"]`, AdamW the rest.
    `seed` is that of moments that are rounded at random.
    """

    def moments(names: Sequence[str], kinds: Sequence[Kind]) -> Moments:
        return Moments(names, kinds, optim, seed=seed)

    rules: list[Rule] = []
    name, rest = optim.name, buffers.kinds
    if name == "muon":
        matrices = [kind for kind in rest if kind.matrix]
        name, rest = "adamw", [kind for kind in rest if not kind.matrix]
        if matrices:
            rules.append(Muon(moments(("momentum",), matrices), optim, axes["tp-dp-cp"]))
    if rest:
        names = () if name == "sgd" and not optim.momentum else MOMENTS[name]
        rules.append(Elementwise(moments(names, rest), FORMULAS[name](optim)))
    return Optimizer(buffers, rules)
