"""A token goes to the ranks that hold its experts, to each of them once."""

from __future__ import annotations

import torch
from torch import Tensor

from penteract import compat
from penteract.collectives import start_all_to_all
from penteract.parallel.expert.dispatch import Arrived
from penteract.parallel.expert.places import ExpertParallel
from penteract.parallel.expert.travel import Travel
from penteract.placement import even_sizes


class AllToAll:
    """See `dispatch`."""

    def __init__(self, experts: int, places: ExpertParallel) -> None:
        self.axis, self.homes, self.ranks = places.group, places.homes, places.ep.size
        self.on_each, self.turns = experts // places.ep.size, places.turns

    def send(self, x: Tensor, weights: Tensor, experts: Tensor) -> _Sent:
        return _Sent(self, x, weights, experts)


class _Sent:
    def __init__(self, ways: AllToAll, x: Tensor, weights: Tensor, experts: Tensor) -> None:
        axis = self.axis = ways.axis
        self.length = len(x)
        homes = torch.tensor(ways.homes, device=x.device)  # [g]
        owner = experts.div(ways.on_each, rounding_mode="floor")  # [t, k] −1 where there is none
        to, self.token, going, coming = self._plan(ways, owner, homes)
        self.turns = ways.turns
        there = owner[self.token] == homes[to, None]
        numbers = experts[self.token] - homes[to, None] * ways.on_each
        self.numbers = start_all_to_all(torch.where(there, numbers, -1), axis, going, coming)
        self.there = lambda x: start_all_to_all(x, axis, going, coming)
        self.back = lambda y: start_all_to_all(y, axis, coming, going)
        tokens = x.index_select(0, self.token), weights.index_select(0, self.token)
        self.travel = Travel(self.turns, self.there, self.back, *tokens)

    def _plan(
        self, ways: AllToAll, owner: Tensor, homes: Tensor
    ) -> tuple[Tensor, Tensor, list[int], list[int]]:
        """Of each row that is sent, by destination, that and its token; rows to and from ranks."""
        t, g = len(owner), self.axis.size
        if not compat.has_values(owner):  # a dry run: as many as there can be, evenly
            going = even_sizes(t * min(owner.shape[1], ways.ranks) * g // ways.ranks, g)
            nowhere = owner.new_zeros(sum(going))
            return nowhere, nowhere, going, going
        at = torch.zeros(t, ways.ranks + 1, dtype=torch.bool, device=owner.device)
        at.scatter_(1, torch.where(owner < 0, ways.ranks, owner), True)
        to, token = at[:, homes].t().nonzero(as_tuple=True)
        sent = at[:, homes].sum(0)
        came = start_all_to_all(sent, self.axis).wait()
        going, coming = torch.stack([sent, came]).tolist()  # the one wait for the device
        return to, token, going, coming

    def arrive(self) -> Arrived:
        x, weights = self.travel.wait()
        return Arrived(x, weights, self.numbers.wait())

    def leave(self, y: Tensor) -> Tensor:
        (back,) = Travel(self.turns, self.back, self.there, y).wait()  # [u, h]
        out = back.new_zeros(self.length, back.shape[1])
        return out.index_add(0, self.token, back)
