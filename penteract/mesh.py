"""A grid seen from one rank: `Axis` objects with their process groups."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from penteract import compat
from penteract.grid import PRINTED_GROUPS, Grid

AXES = (
    *PRINTED_GROUPS,
    "tp-dp-cp",
    "world",
)  # also the one global order in which groups are created

TOKENS = "etp-ep"  # its messages are in flight beside those of gradients


class Traffic:
    """What was sent over one axis: per call name, how often and how many bytes left this rank; and
    how long was waited for it.
    """

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.bytes: dict[str, int] = {}
        self.last, self.at = "", 0.0  # the last call, and when on the monotonic clock
        self.waited_s = 0.0  # by the host
        # Where it is a list: events of the present stream of a GPU, before and after each wait.
        self.stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None

    def add(self, call: str, sent_bytes: int) -> None:
        self.last, self.at = call, time.monotonic()
        self.calls[call] = self.calls.get(call, 0) + 1
        self.bytes[call] = self.bytes.get(call, 0) + sent_bytes

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for messages."""
        if self.stalls is None:
            began = time.perf_counter()
            yield
            self.waited_s += time.perf_counter() - began
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        yield
        after.record()
        self.stalls.append((before, after))


@dataclass(frozen=True)
class Axis:
    """One direction of the mesh, or a fusion of several, seen from one rank."""

    name: str
    size: int
    rank: int  # this rank's coordinate on the axis, 0 <= rank < size
    ranks: tuple[int, ...]  # global ranks along the axis, in coordinate order
    group: dist.ProcessGroup | None = None  # None where size is 1
    traffic: Traffic = field(default_factory=Traffic, compare=False, repr=False)


def single(name: str, rank: int = 0) -> Axis:
    """An axis of size 1: every collective over it is the identity and needs no process group."""
    return Axis(name, 1, 0, (rank,))


def world_axis(name: str = "world") -> Axis:
    """All ranks as one axis over the default process group; size 1 without one."""
    if not dist.is_initialized():
        return single(name)
    n = dist.get_world_size()
    return Axis(name, n, dist.get_rank(), tuple(range(n)), dist.group.WORLD)


@dataclass(frozen=True)
class Mesh:
    """A grid seen from one rank: an `Axis` with its process group for every name in `AXES`.

    "tied" is one more: the ranks that hold tied embeddings.
    """

    grid: Grid
    rank: int
    axes: Mapping[str, Axis]

    def axis(self, name: str) -> Axis:
        """One of `AXES`, or "tied"; KeyError otherwise."""
        return self.axes[name]


def create_mesh(grid: Grid, rank: int, *, timeout: timedelta | None = None) -> Mesh:
    """Create this rank's process groups, in the same order on every rank, and return its axes.

    Needs the default process group of `grid.world` ranks unless the world is 1. A group of one rank
    is none; a group of the whole world is the default group; a fusion with the ranks of one of its
    parts has that part's group. "etp-ep" has one of its own. Axes of the two grids do not share a
    communicator otherwise, since their messages may be in flight at once. `timeout` bounds each
    collective; None is the backend's own.
    Raises ValueError where the default process group has another size or rank.
    """
    if grid.world > 1:
        _check_default_group(grid, rank)
    axes: dict[str, Axis] = {}
    for name in AXES:
        rows = grid.groups(name)
        row = rows[np.nonzero(rows == rank)[0][0]]
        ranks = tuple(int(r) for r in row)
        group = None
        if len(ranks) == grid.world > 1 and name != TOKENS:
            group = dist.group.WORLD
        elif len(ranks) > 1:
            within = set(name.split("-"))
            parts = (a for p, a in axes.items() if set(p.split("-")) < within)
            same = [part.group for part in parts if part.ranks == ranks and name != TOKENS]
            group = same[0] if same else compat.new_group(name, ranks, timeout, None)
        axes[name] = Axis(name, len(ranks), ranks.index(rank), ranks, group)
    axes["tied"] = _tied_axis(axes["pp"], rank, timeout)
    return Mesh(grid, rank, axes)


def create_channels(
    axis: Axis,
    pairs: Iterable[tuple[int, int]],
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> dict[tuple[int, int], Axis]:
    """A communicator of its own for each directed pair of coordinates on `axis`: this rank's.

    All ranks of the axis call it together. A channel is an axis of two ranks, the first of which
    sends to the second; what is sent counts as sent over `axis`.
    """
    channels = {}
    for pair in sorted(set(pairs)):
        if axis.rank in pair:
            ranks = axis.ranks[pair[0]], axis.ranks[pair[1]]
            group = compat.new_group(
                f"{axis.name} {pair[0]} to {pair[1]}", sorted(ranks), timeout, backend
            )
            place = pair.index(axis.rank)
            channels[pair] = Axis(axis.name, 2, place, ranks, group, axis.traffic)
    return channels


def split_axis(axis: Axis, parts: int) -> tuple[Axis, Axis]:
    """`axis` cut into `parts` runs of ranks: the axis inside a run, and the one across the runs.

    All ranks of the world call it together. What is sent over either counts as sent over `axis`.
    Raises ValueError where `parts` does not divide the size.
    """
    if axis.size % parts:
        raise ValueError(f"{axis.name} of {axis.size} ranks cannot be cut into {parts} equal parts")
    n = axis.size // parts
    run, place = divmod(axis.rank, n)
    inside, across = axis.ranks[run * n : (run + 1) * n], axis.ranks[place::n]
    return _part(axis, inside, place), _part(axis, across, run)


def _part(axis: Axis, ranks: tuple[int, ...], rank: int) -> Axis:
    group = None
    if len(ranks) > 1:
        group = (
            axis.group if ranks == axis.ranks else compat.new_group(axis.name, ranks, None, None)
        )
    return Axis(axis.name, len(ranks), rank, ranks, group, axis.traffic)


def _tied_axis(pp: Axis, rank: int, timeout: timedelta | None) -> Axis:
    """The first and the last rank of a pipeline, who hold tied embeddings; others stand alone."""
    ranks = (pp.ranks[0], pp.ranks[-1])
    if pp.size == 1 or rank not in ranks:
        return single("tied", rank)
    return Axis("tied", 2, ranks.index(rank), ranks, compat.new_group("tied", ranks, timeout, None))


def _check_default_group(grid: Grid, rank: int) -> None:
    if not dist.is_initialized():
        raise ValueError(
            f"world = {grid.world} needs a process group: start {grid.world} ranks with "
            f"--nproc {grid.world}, torchrun or SLURM, or use world = 1"
        )
    if (dist.get_world_size(), dist.get_rank()) != (grid.world, rank):
        raise ValueError(
            f"the layout is for rank {rank} of {grid.world}, but this process is rank "
            f"{dist.get_rank()} of {dist.get_world_size()}; start {grid.world} ranks"
        )
