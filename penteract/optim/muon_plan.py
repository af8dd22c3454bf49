"""Which rank orthogonalises which matrix, and what travels there and back: boxes, no communication.

Ranks hold parts of logical matrices: tensor ranks hold rows or columns, or all hold the whole; data
ranks hold flat ranges of those, or all the same. Each matrix has one owner, which takes every
element from one holder, the nearest, and sends every holder its part of the result. All ranks
derive the same plan from the same lists, so a step negotiates nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from penteract.placement import Box, Shape, copies, split_range, whole


@dataclass(frozen=True)
class Matrix:
    """One logical matrix [rows, columns]."""

    name: str
    shape: Shape

    @property
    def cost(self) -> int:
        """Multiplications of one Newton–Schulz step: X Xᵀ, its square, and their product with X."""
        short, long = sorted(self.shape)
        return short * short * (2 * long + short)


Held = tuple[int, Box]  # which matrix, and what of it


@dataclass(frozen=True)
class Part:
    """A box of a matrix on its way; `held` says which entry of the holder's list it lies in."""

    matrix: int
    held: int
    box: Box


Parts = tuple[tuple[Part, ...], ...]  # by rank: what goes to it, or what comes from it


@dataclass(frozen=True)
class Plan:
    """What one rank sends and receives. Both ends of a message list its parts in one order."""

    owners: tuple[int, ...]  # of every matrix
    to_owners: Parts  # what this rank holds
    at_owner: Parts  # what comes for the matrices that this rank owns
    to_holders: Parts  # their results
    at_holder: Parts  # the results of what it holds


def deal(matrices: Sequence[Matrix], ranks: int) -> tuple[int, ...]:
    """The owner of every matrix: the dearest first, each to the rank with the least work so far."""
    loads = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(matrices)
    order = sorted(range(len(matrices)), key=lambda i: (-matrices[i].cost, matrices[i].name))
    for i in order:
        load, rank = heapq.heappop(loads)
        owners[i] = rank
        heapq.heappush(loads, (load + matrices[i].cost, rank))
    return tuple(owners)


def plan(matrices: Sequence[Matrix], held: Sequence[Sequence[Held]], rank: int) -> Plan:
    """The plan of `rank`, where rank r of the axis holds `held[r]`.

    Raises ValueError naming a matrix of which no rank holds some element.
    """
    ranks = range(len(held))
    owners = deal(matrices, len(held))
    holders: list[list[list[int]]] = [[[] for _ in ranks] for _ in matrices]
    for r, parts in enumerate(held):
        for i, (m, _) in enumerate(parts):
            holders[m][r].append(i)
    there: list[list[Part]] = [[] for _ in ranks]
    gathered: list[list[Part]] = [[] for _ in ranks]
    back: list[list[Part]] = [[] for _ in ranks]
    returned: list[list[Part]] = [[] for _ in ranks]
    for m, (matrix, owner) in enumerate(zip(matrices, owners, strict=True)):
        sources = [(r, i) for r in _nearest(owner, len(held)) for i in holders[m][r]]
        try:
            hits = copies([held[r][i][1] for r, i in sources], whole(matrix.shape))
        except ValueError as error:
            raise ValueError(f"{matrix.name}: {error}") from error
        for index, box in hits:
            r, i = sources[index]
            if r == rank:
                there[owner].append(Part(m, i, box))
            if owner == rank:
                gathered[r].append(Part(m, i, box))
        for r, i in sources:
            part = Part(m, i, held[r][i][1])
            if owner == rank:
                back[r].append(part)
            if r == rank:
                returned[owner].append(part)
    frozen = [tuple(map(tuple, parts)) for parts in (there, gathered, back, returned)]
    return Plan(owners, *frozen)


def _nearest(owner: int, ranks: int) -> list[int]:
    """All ranks, the owner first: what is near by number is near in the machine."""
    return sorted(range(ranks), key=lambda rank: (abs(rank - owner), rank))


def imagine(
    matrices: Sequence[Matrix], mine: Sequence[Held], rank: int, ranks: int
) -> list[list[Held]]:
    """What the others may hold, where nobody answers: a dry run.

    They share out evenly what this rank lacks of a matrix, or hold all of it as this rank does.
    """
    held: list[list[Held]] = [list(mine) if r == rank else [] for r in range(ranks)]
    others = [r for r in range(ranks) if r != rank]
    for m, matrix in enumerate(matrices):
        missing = [whole(matrix.shape)]
        for _, box in (entry for entry in mine if entry[0] == m):
            missing = [rest for part in missing for rest in part.minus(box)]
        for place, r in enumerate(others):
            if not missing:
                held[r].append((m, whole(matrix.shape)))
            for box in missing:
                start, stop = split_range(box.size[0], len(others), place)
                offset = (box.offset[0] + start, *box.offset[1:])
                if stop > start:
                    held[r].append((m, Box(offset, (stop - start, *box.size[1:]))))
    return held
