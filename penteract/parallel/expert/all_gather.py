"""Every rank of the group gets all its tokens, and keeps what its experts are chosen for."""

from __future__ import annotations

import torch
from torch import Tensor

from penteract.collectives import start_all_gather, start_reduce_scatter
from penteract.parallel.expert.dispatch import Arrived
from penteract.parallel.expert.places import ExpertParallel, lengths_over
from penteract.parallel.expert.travel import Travel


class AllGather:
    """See `dispatch`."""

    def __init__(self, experts: int, places: ExpertParallel) -> None:
        self.held, self.axis, self.turns = places.held(experts), places.group, places.turns

    def send(self, x: Tensor, weights: Tensor, experts: Tensor) -> _Gathered:
        return _Gathered(self, x, weights, experts)


class _Gathered:
    def __init__(self, ways: AllGather, x: Tensor, weights: Tensor, experts: Tensor) -> None:
        axis, self.held, self.turns = ways.axis, ways.held, ways.turns
        sizes = lengths_over(x, axis)
        self.numbers = start_all_gather(experts, axis, sizes=sizes)
        self.gather = lambda x: start_all_gather(x, axis, sizes=sizes)
        self.scatter = lambda y: start_reduce_scatter(y, axis, sizes=sizes)
        self.travel = Travel(self.turns, self.gather, self.scatter, x, weights)

    def arrive(self) -> Arrived:
        x, weights = self.travel.wait()
        local = self.numbers.wait() - self.held.start
        here = (local >= 0) & (local < len(self.held))
        return Arrived(x, weights, torch.where(here, local, -1))

    def leave(self, y: Tensor) -> Tensor:
        (back,) = Travel(self.turns, self.scatter, self.gather, y).wait()
        return back
