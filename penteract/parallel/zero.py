"""ZeRO stage 3: parameters live on their owners and are gathered one unit ahead of their use.

A unit is a part of the model that runs at once: a block, the embedding, the head. Before a unit's
forward, and again before its backward, its parameters are gathered into one of a fixed ring of
slots, while those of the unit that follows (in backward: that came before) are on their way into
the next slot. The unit that a slot held before is gone from then on: its parameters are NaN without
memory until they are gathered again, so that a read at the wrong time cannot go unseen.

| what                | axis  | bytes a rank | when                         | hidden behind      |
|---------------------|-------|--------------|------------------------------|--------------------|
| a unit's parameters | shard | (n-1)/n · it | before forward and backward, | the unit that runs |
|                     |       |              | unless they are in the ring  |                    |

Vectors (norms, biases) and tied weights stay whole, as in stage 2: they are small, or used at both
ends of the model. Memory: 1/n of all matrices, and the ring: `SLOTS` of the largest unit.
Source: Rajbhandari et al., arXiv:1910.02054, section 5.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from penteract.collectives import start_all_gather_into
from penteract.parallel.buckets import Bucket, Kind, Slot, Units

SLOTS = 2  # one unit runs, the next one is on its way


def absent(slot: Slot, like: Tensor) -> Tensor:
    """What a parameter is while it is nowhere whole: its shape, all NaN, without memory."""
    nowhere = torch.full((), float("nan"), dtype=like.dtype, device=like.device)
    return nowhere.expand(slot.entry.placement.shape)


class Gathering:
    """The ring: which unit's parameters are whole at present."""

    def __init__(
        self,
        units: Units,
        buckets: Sequence[Bucket],
        *,
        close: Callable[[int], None],
    ) -> None:
        self.close = close
        held: dict[int, list[Bucket]] = {}
        for bucket in buckets:
            if not bucket.kept:
                held.setdefault(bucket.unit, []).append(bucket)
        self.units = [held[i] for i in sorted(held)]  # in the order of forward
        self.stages = [units.stages[i] for i in sorted(held)]
        self.resident: list[int | None] = [None] * SLOTS
        self.memory: dict[int, list[Tensor]] = {}
        for place, i in enumerate(sorted(held)):
            self._install(units.modules[i], place, i)

    def _install(self, unit: nn.Module, place: int, number: int) -> None:
        def before_backward(_: Tensor) -> None:
            self.close(number)
            self.enter(place, place - 1)

        def before(*_: Any) -> None:
            self.enter(place, place + 1)

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            for x in _pytree.tree_leaves(output):
                if isinstance(x, Tensor) and x.requires_grad:
                    x.register_hook(before_backward)

        unit.register_forward_pre_hook(before)
        unit.register_forward_hook(after)

    def enter(self, place: int, following: int) -> None:
        """Unit `place` runs now, unit `following`, if there is one, after it."""
        self._fetch(place)
        for bucket in self.units[place]:
            bucket.wait()
        inside = 0 <= following < len(self.units) and self.stages[following] == self.stages[place]
        if inside and self.units[place][0].kind.sharding.overlap:
            self._fetch(following)

    def drop(self) -> None:
        """Forget all that is whole: the owners have other values now."""
        for slot in range(SLOTS):
            self._evict(slot)

    def _fetch(self, place: int) -> None:
        slot = place % SLOTS
        if self.resident[slot] == place:
            return
        self._evict(slot)
        self.resident[slot] = place
        for bucket in self.units[place]:
            bucket.parameters = self._ring(bucket.kind)[slot][: bucket.numel]
            shard = bucket.kind.sharding.shard
            bucket.gathering = start_all_gather_into(
                bucket.parameters, bucket.own_parameters, shard
            )
            for s in bucket.slots:
                s.entry.parameter.data = s.view(bucket.parameters)

    def _evict(self, slot: int) -> None:
        place, self.resident[slot] = self.resident[slot], None
        for bucket in self.units[place] if place is not None else ():
            bucket.wait()
            bucket.parameters = None
            for s in bucket.slots:
                s.entry.parameter.data = absent(s, bucket.own_parameters)

    def _ring(self, kind: Kind) -> list[Tensor]:
        """Memory for one bucket of a kind in each slot, made when first needed."""
        if id(kind) not in self.memory:
            longest = max(bucket.numel for bucket in kind.buckets if not bucket.kept)
            like = kind.buckets[0].own_parameters
            nan = float("nan")  # what is read before it is gathered cannot go unseen
            self.memory[id(kind)] = [like.new_full((longest,), nan) for _ in range(SLOTS)]
        return self.memory[id(kind)]
