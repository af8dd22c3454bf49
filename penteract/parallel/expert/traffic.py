"""What a dispatcher sends, to the byte: the table of `dispatch`, as a sum (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penteract.parallel.buckets import at_least_float32
from penteract.parallel.expert.dispatchers import Name

INTEGER = 8  # bytes of an expert's number, and of a count of rows


@dataclass(frozen=True)
class Sizes:
    """What a rank gives to `send`: `t` of the `t_all` tokens of its group of g ranks, those of
    padding too, of h numbers and k experts each.
    """

    g: int
    t: int
    t_all: int
    h: int
    k: int
    dtype: torch.dtype


class Routed(NamedTuple):
    """Where the tokens of one layer and micro-batch go, as one rank sees it."""

    u: int  # pairs of a token of this rank and another rank that it goes to
    v: int  # rows of other ranks' tokens that come


class Sent(NamedTuple):
    """Bytes that leave one rank for one layer and micro-batch."""

    there: int  # tokens, with their weights and experts' numbers
    back: int  # results
    backward: int  # gradients of both


def dispatched_bytes(dispatcher: Name, sizes: Sizes, routed: Routed | None = None) -> Sent | None:
    """What this rank of the group sends. None where it follows from a routing that is not said.

    Where recomputation runs forward again, that is sent again. What a library sends is not counted.
    """
    if sizes.g == 1 or dispatcher == "fused":
        return Sent(0, 0, 0)
    row = sizes.h * sizes.dtype.itemsize
    weights, numbers = sizes.k * at_least_float32(sizes.dtype).itemsize, sizes.k * INTEGER
    lengths = (sizes.g - 1) * INTEGER
    if dispatcher == "all_gather":
        to_others, of_others = (sizes.g - 1) * sizes.t, sizes.t_all - sizes.t
    elif routed is None:
        return None
    else:
        to_others, of_others = routed
    return Sent(
        there=lengths + to_others * (row + weights + numbers),
        back=of_others * row,
        backward=to_others * row + of_others * (row + weights),
    )


def routed(experts: Sequence[Tensor], homes: Sequence[int], each: int, rank: int) -> Routed:
    """u and v of `rank` from `experts`, [t, k] of every rank of the group, −1 for none.

    Expert e is on all ranks whose home is e // `each`.
    """
    going = [_destinations(chosen, homes, each) for chosen in experts]
    others = [r for r in range(len(homes)) if r != rank]
    return Routed(sum(going[rank][r] for r in others), sum(going[r][rank] for r in others))


def _destinations(experts: Tensor, homes: Sequence[int], each: int) -> list[int]:
    """How many tokens go to each rank, once each."""
    wanted = [{e // each for e in row if e >= 0} for row in experts.tolist()]
    return [sum(home in found for found in wanted) for home in homes]
