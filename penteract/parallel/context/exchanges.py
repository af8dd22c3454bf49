"""The exchanges of context parallelism by their names in `parallel.cp_comm`."""

from __future__ import annotations

from math import isqrt
from typing import Literal

from penteract.layout_rules import check_inner, divisors
from penteract.mesh import Axis, split_axis
from penteract.parallel.context.all_gather import AllGather
from penteract.parallel.context.all_to_all import AllToAll
from penteract.parallel.context.exchange import Exchange
from penteract.parallel.context.ring import Ring

Comm = Literal["ring", "all_gather", "all_to_all", "hierarchical"]


def group_size(comm: Comm, cp: int, inner: int | None = None) -> int:
    """Among how many ranks an exchange of `cp` ranks exchanges heads; 1 where it exchanges none.

    A hierarchical exchange's groups have `inner` ranks, or the largest divisor of cp up to its
    root. UserError where `inner` does not divide cp.
    """
    if comm != "hierarchical" or cp == 1:
        return cp if comm == "all_to_all" else 1
    if inner is None:
        return max(n for n in divisors(cp) if n <= isqrt(cp))
    check_inner(inner, cp=cp)
    return inner


def exchange_of(
    comm: Comm, axis: Axis, *, inner: int | None = None, overlap: bool = True
) -> Exchange:
    """The exchange of a name over `axis`; all ranks of the world call it together."""
    if comm == "all_gather" and axis.size > 1:
        return AllGather(axis, overlap)
    size = group_size(comm, axis.size, inner)
    if size == 1:
        return Ring(axis, overlap)
    inside, across = split_axis(axis, axis.size // size)
    return AllToAll(axis, inside, Ring(across, overlap), overlap)
