"""One update of everything a rank owns: rules for kinds of parameters, and which kind has which.

A rule sees flat slices of masters and gradients (`parallel.buckets`). All but Muon's are
elementwise, so they are the same in every layout by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from penteract.config import OptimConfig
from penteract.mesh import Axis
from penteract.optim.fused import adamw, sgd
from penteract.optim.lion import Lion
from penteract.optim.muon import Muon
from penteract.parallel.buckets import Bucket
from penteract.parallel.buffers import Buffers


class Rule(Protocol):
    """How some kinds of parameters are updated."""

    def update(self, lr: float, coefficient: Tensor, skip: Tensor) -> None:
        """One update with gradients times `coefficient`; nothing changes where `skip` is true."""

    def state(self) -> Iterator[tuple[str, Bucket, Tensor]]:
        """(moment name, bucket, that moment of the bucket's own slice)."""

    def restore(self, updates: int) -> None:
        """Go on as after so many updates."""


class Optimizer:
    """The rules of all parameters that are trained, and the number of updates done."""

    def __init__(self, buffers: Buffers, rules: Sequence[Rule]) -> None:
        self.buffers, self.rules = buffers, rules
        device = buffers.all_buckets[0].master.device if buffers.all_buckets else "cpu"
        self._updates = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def step(self, lr: float, coefficient: Tensor, skip: Tensor) -> None:
        """One update with gradients times `coefficient`; none where `skip` is 1 (both scalars).

        Neither scalar is read on the host. The gradients are used up.
        """
        skip = skip.bool()
        # What no forward waited for is still being gathered into the memory that changes now.
        self.buffers.wait()
        for rule in self.rules:
            rule.update(lr, coefficient, skip)
        self._updates += skip.logical_not()
        self.buffers.publish()

    @property
    def updates(self) -> int:
        """Updates done; skipped steps are none."""
        return int(self._updates.item())

    @updates.setter
    def updates(self, n: int) -> None:
        self._updates.fill_(n)
        for rule in self.rules:
            rule.restore(n)

    def state(self) -> Iterator[tuple[str, Bucket, Tensor]]:
        """(moment name, bucket, that moment of the bucket's own slice)."""
        for rule in self.rules:
            yield from rule.state()


def build(buffers: Buffers, optim: OptimConfig, axes: Mapping[str, Axis]) -> Optimizer:
    """The optimizer that `optim.name` says, for what is not frozen.

    `optim` is resolved. Muon takes kinds of matrices over `axes["tp-dp-cp"]`, AdamW the rest.
    """
    kinds = buffers.kinds
    if optim.name == "muon":
        matrices = [kind for kind in kinds if kind.matrix]
        others = [kind for kind in kinds if not kind.matrix]
        rules: list[Rule] = [Muon(matrices, optim, axes["tp-dp-cp"])] if matrices else []
        rules += [adamw(others, optim)] if others else []
    elif not kinds:
        rules = []
    elif optim.name == "lion":
        rules = [Lion(kinds, optim)]
    else:
        rules = [(sgd if optim.name == "sgd" else adamw)(kinds, optim)]
    return Optimizer(buffers, rules)
