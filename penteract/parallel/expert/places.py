"""Which experts are where: the expert grid seen from one rank."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from penteract import compat
from penteract.collectives import start_all_gather
from penteract.mesh import Axis, Mesh, single
from penteract.parallel.turns import Turns


@dataclass(frozen=True)
class ExpertParallel:
    """Experts dealt over `ep`, each cut over `etp`; tokens travel inside `group`, which is both.

    Tokens of one micro-batch lie on the ranks of `parts`, in the dense grid.
    """

    ep: Axis
    etp: Axis
    group: Axis  # "etp-ep"
    homes: tuple[int, ...]  # the ep coordinate of every rank of the group
    parts: Axis  # "tp-cp"
    micro_batches: int = 1  # of how many the group has tokens
    turns: Turns = field(default_factory=Turns, compare=False)  # of what waits for tokens

    @classmethod
    def of(cls, mesh: Mesh) -> ExpertParallel:
        group = mesh.axis("etp-ep")
        at = [mesh.grid.coordinates(rank) for rank in group.ranks]
        homes, batches = tuple(place["ep"] for place in at), len({place["dp"] for place in at})
        ep, etp, parts = mesh.axis("ep"), mesh.axis("etp"), mesh.axis("tp-cp")
        return cls(ep, etp, group, homes, parts, batches)

    @classmethod
    def alone(cls) -> ExpertParallel:
        """All experts, whole, on one rank."""
        ep, etp, group, parts = map(single, ("ep", "etp", "etp-ep", "tp-cp"))
        return cls(ep, etp, group, (0,), parts)

    def held(self, experts: int) -> range:
        """The global numbers of the experts that this rank has a part of; `ep` divides them."""
        n = experts // self.ep.size
        return range(n * self.ep.rank, n * (self.ep.rank + 1))


def lengths_over(x: Tensor, axis: Axis) -> list[int]:
    """How many rows every rank of `axis` has."""
    if axis.size == 1 or not compat.has_values(x):
        return [len(x)] * axis.size
    mine = torch.tensor([len(x)], device=x.device)
    lengths: list[int] = start_all_gather(mine, axis).wait().tolist()
    return lengths


def tally(numbers: Tensor, n: int) -> Tensor:
    """How often each of 0 … n-1 is among `numbers`, [n]; others count nowhere.

    As `bincount`, but its size does not depend on values, so that a device is not waited for.
    """
    flat = numbers.flatten()
    inside = (flat >= 0) & (flat < n)
    return inside.new_zeros(n, dtype=torch.int64).scatter_add_(
        0, flat.clamp(0, n - 1), inside.to(torch.int64)
    )
