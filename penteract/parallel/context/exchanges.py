"""The exchanges of context parallelism by their names in `parallel.cp_comm`."""

from __future__ import annotations

import math
from typing import Literal

from penteract.mesh import Axis, split_axis
from penteract.parallel.context.all_gather import AllGather
from penteract.parallel.context.all_to_all import AllToAll
from penteract.parallel.context.exchange import Exchange
from penteract.parallel.context.ring import Ring

Comm = Literal["ring", "all_gather", "all_to_all", "hierarchical"]


def inner_size(cp: int, inner: int | None = None) -> int:
    """Ranks of a hierarchical exchange's groups: the largest divisor of cp up to its root.

    ValueError where the given size does not divide cp.
    """
    divisors = [n for n in range(1, cp + 1) if cp % n == 0]
    if inner is None:
        return max(n for n in divisors if n <= math.isqrt(cp))
    if inner not in divisors:
        raise ValueError(f"groups of {inner} do not divide cp = {cp}: use one of {divisors}")
    return inner


def exchange_of(
    comm: Comm, axis: Axis, *, inner: int | None = None, overlap: bool = True
) -> Exchange:
    """The exchange of a name over `axis`; all ranks of the world call it together."""
    if axis.size == 1 or comm == "ring":
        return Ring(axis, overlap)
    if comm == "all_gather":
        return AllGather(axis, overlap)
    size = axis.size if comm == "all_to_all" else inner_size(axis.size, inner)
    inside, across = split_axis(axis, axis.size // size)
    return AllToAll(axis, inside, Ring(across, overlap), overlap)
