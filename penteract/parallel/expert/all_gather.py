"""Every rank of the group gets all its tokens, and keeps what its experts are chosen for."""

from __future__ import annotations

import torch
from torch import Tensor

from penteract.collectives import reduce_scatter, start_all_gather, start_reduce_scatter
from penteract.parallel.expert.dispatch import Arrived
from penteract.parallel.expert.places import ExpertParallel, lengths_over
from penteract.parallel.expert.travel import Travel


class AllGather:
    """See `dispatch`."""

    def __init__(self, experts: int, places: ExpertParallel) -> None:
        self.held, self.axis = places.held(experts), places.group

    def send(self, x: Tensor, weights: Tensor, experts: Tensor) -> _Gathered:
        return _Gathered(self, x, weights, experts)


class _Gathered:
    def __init__(self, ways: AllGather, x: Tensor, weights: Tensor, experts: Tensor) -> None:
        axis = self.axis = ways.axis
        self.held = ways.held
        self.sizes = sizes = lengths_over(x, axis)
        self.numbers = start_all_gather(experts, axis, sizes=sizes)
        self.travel = Travel(
            lambda x: start_all_gather(x, axis, sizes=sizes),
            lambda g: start_reduce_scatter(g, axis, sizes=sizes),
            x,
            weights,
        )

    def arrive(self) -> Arrived:
        x, weights = self.travel.wait()
        local = self.numbers.wait() - self.held.start
        here = (local >= 0) & (local < len(self.held))
        return Arrived(x, weights, torch.where(here, local, -1))

    def leave(self, y: Tensor) -> Tensor:
        return reduce_scatter(y, self.axis, sizes=self.sizes)
