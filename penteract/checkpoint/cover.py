"""How boxes cover a tensor: overlaps, remainders and cuts. Pure integers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from penteract.placement import Box


def first_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two of `boxes` that share an element, or None. Boxes without elements overlap nothing.

    A sweep along the dim with the most distinct offsets: near-linear for the cuts that layouts
    make, where comparing every pair would be quadratic in the number of ranks.
    """
    full = [box for box in boxes if box.numel]
    if len(full) < 2:
        return None
    dims = range(len(full[0].size))
    if not dims:
        return full[0], full[1]
    dim = max(dims, key=lambda d: len({box.offset[d] for box in full}))
    active: list[Box] = []
    for box in sorted(full, key=lambda b: (b.offset[dim], b.offset, b.size)):
        active = [a for a in active if a.offset[dim] + a.size[dim] > box.offset[dim]]
        for other in active:
            if box.intersect(other) is not None:
                return other, box
        active.append(box)
    return None


def subtract_all(box: Box, holes: Iterable[Box]) -> list[Box]:
    """`box` without every one of `holes`, as disjoint boxes."""
    rest = [box] if box.numel else []
    for hole in holes:
        rest = [part for piece in rest for part in piece.minus(hole)]
    return rest


def cutting_dim(box: Box) -> int:
    """The first dim with more than one element: cutting there keeps each part contiguous."""
    return next((dim for dim, n in enumerate(box.size) if n > 1), 0)


def cut(box: Box, dim: int, first: int) -> tuple[Box, Box]:
    """The first `first` rows of `box` along `dim`, and the rest."""
    assert 0 < first < box.size[dim]
    offset, size = list(box.offset), list(box.size)
    size[dim] = first
    head = Box(box.offset, tuple(size))
    offset[dim], size[dim] = box.offset[dim] + first, box.size[dim] - first
    return head, Box(tuple(offset), tuple(size))


def buckets(box: Box, limit: int) -> Iterator[Box]:
    """`box` as boxes of at most `limit` elements whose values, in order, are those of `box`."""
    assert limit > 0
    if box.numel <= limit:
        yield box
        return
    dim = cutting_dim(box)
    rows = max(1, limit * box.size[dim] // box.numel)
    while box.size[dim] > rows:
        head, box = cut(box, dim, rows)
        yield from buckets(head, limit)
    yield from buckets(box, limit)
