"""Ranks, coordinates and groups (pure), then `Axis` objects with process groups.

The same ranks are factored twice, `world = tp·cp·dp·pp` for dense layers and `etp·ep·edp·pp` for
experts, with the same pipeline groups. `order` says which axis varies fastest (leftmost first); the
dense grid skips its `ep`, the expert grid skips its `cp` and reads `tp` as `etp`, `dp` as `edp`.
A group is then one reshape and transpose of `range(world)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from penteract.layout_rules import DEFAULT_ORDER, check_layout

DENSE = ("tp", "cp", "dp", "pp")
EXPERT = ("etp", "ep", "edp", "pp")
PRINTED_GROUPS = ("tp", "cp", "dp", "pp", "tp-cp", "dp-cp", "etp", "ep", "edp", "etp-ep")
AXES = (*PRINTED_GROUPS, "world")  # also the one global order in which groups are created


class Traffic:
    """What was sent over one axis: per call name, how often and how many bytes left this rank."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.bytes: dict[str, int] = {}

    def add(self, call: str, sent_bytes: int) -> None:
        self.calls[call] = self.calls.get(call, 0) + 1
        self.bytes[call] = self.bytes.get(call, 0) + sent_bytes


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


@dataclass(frozen=True, init=False)
class Grid:
    """The sizes of a layout and what follows from them: pure arithmetic, no process."""

    world: int
    tp: int
    cp: int
    pp: int
    ep: int
    etp: int
    order: str

    # One parameter per size: a layout is these seven numbers. Written out so that `etp` may be
    # left to follow `tp` and still be an int once constructed.
    def __init__(
        self,
        world: int,
        *,
        tp: int = 1,
        cp: int = 1,
        pp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        order: str = DEFAULT_ORDER,
    ) -> None:
        """Raises ValueError with the nearest values that work where a layout rule is broken."""
        sizes = {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp}
        check_layout(world, sizes, order)
        values = {**sizes, "world": world, "etp": tp if etp is None else etp, "order": order}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        return self.world // (self.etp * self.ep * self.pp)

    def size(self, name: str) -> int:
        """Ranks in a group: of one axis (`"dp"`), of a fusion (`"dp-cp"`) or of `"world"`."""
        if name == "world":
            return self.world
        return int(np.prod([getattr(self, axis) for axis in self._parts(name)]))

    def groups(self, name: str) -> npt.NDArray[np.int64]:
        """All groups of an axis or fusion, `[groups, size]`: each row in rank order, rows by first.

        `name` is "world", one axis, or axes of one grid joined by '-'. Raises ValueError otherwise.
        """
        ranks = np.arange(self.world, dtype=np.int64)
        if name == "world":
            return ranks[None]
        wanted = self._parts(name)
        axes = self._axes_slowest_first(DENSE if set(wanted) <= set(DENSE) else EXPERT)
        cube = ranks.reshape([getattr(self, axis) for axis in axes])
        # Wanted axes go last, both halves keep their relative order: rows and the ranks in them
        # come out ascending.
        outer = [i for i, axis in enumerate(axes) if axis not in wanted]
        inner = [i for i, axis in enumerate(axes) if axis in wanted]
        return cube.transpose(outer + inner).reshape(-1, self.size(name))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` stands on each of tp cp dp pp etp ep edp. Raises ValueError off the grid."""
        if not 0 <= rank < self.world:
            raise ValueError(
                f"rank {rank} is not in a world of {self.world}: 0 .. {self.world - 1}"
            )
        found = {}
        for grid in (DENSE, EXPERT):
            rest = rank
            for axis in reversed(self._axes_slowest_first(grid)):
                rest, found[axis] = divmod(rest, getattr(self, axis))
        return found

    def rank_at(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank at these dense coordinates: the inverse of `coordinates`."""
        at = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
        rank = 0
        for axis in self._axes_slowest_first(DENSE):
            if not 0 <= at[axis] < getattr(self, axis):
                raise ValueError(f"{axis} = {at[axis]} is not in 0 .. {getattr(self, axis) - 1}")
            rank = rank * getattr(self, axis) + at[axis]
        return rank

    def _parts(self, name: str) -> tuple[str, ...]:
        parts = tuple(name.split("-"))
        if len(set(parts)) < len(parts) or not (
            set(parts) <= set(DENSE) or set(parts) <= set(EXPERT)
        ):
            raise ValueError(
                f"no group {name!r}: join axes of one grid, {' '.join(DENSE)} or {' '.join(EXPERT)}"
            )
        return parts

    def _axes_slowest_first(self, grid: tuple[str, ...]) -> list[str]:
        """A grid's axes as numpy orders dims, the fastest last; left-out ones (size 1) first."""
        if grid is EXPERT:
            names = [{"tp": "etp", "dp": "edp"}.get(name, name) for name in self.order.split("-")]
        else:
            names = self.order.split("-")
        named = [name for name in reversed(names) if name in grid]
        return [name for name in grid if name not in named] + named


def layout_json(grid: Grid) -> dict[str, Any]:
    """The sizes and every group list of `penteract layout --json`, ready for `json.dumps`."""
    names = ("world", "tp", "cp", "pp", "dp", "ep", "etp", "edp", "order")
    groups = {name: grid.groups(name).tolist() for name in PRINTED_GROUPS}
    return {**{name: getattr(grid, name) for name in names}, "groups": groups}


_SENDS = {
    "tp": "activations: all-gather and reduce-scatter in every block, forward and backward",
    "cp": "keys and values of attention, and their gradients",
    "pp": "activations to the next stage, their gradients back, for every micro-batch",
    "dp": "gradients of dense layers once a step, and what ZeRO shards",
    "dp-cp": "gradients of dense layers once a step, and what ZeRO shards",
    "etp": "activations inside the experts",
    "ep": "tokens to their experts and back: all-to-all in every expert layer",
    "edp": "gradients of experts once a step, and what ZeRO shards",
}
_SHOWN_LINES = (20, 4)  # of a longer picture: the first and the last


def draw(grid: Grid, gpus_per_node: int = 8) -> str:
    """A picture for people: which rank is where, on which node, and what each group sends.

    Long pictures are abridged. Raises ValueError where `gpus_per_node` is below 1.
    """
    if gpus_per_node < 1:
        raise ValueError(f"gpus_per_node = {gpus_per_node}: a node has at least 1")
    own_experts = grid.ep > 1 or grid.etp != grid.tp
    nodes = -(-grid.world // gpus_per_node)
    lines = [
        f"{_counted(grid.world, 'rank')} on {_counted(nodes, 'node')} of {gpus_per_node}; "
        f"order {grid.order}, the leftmost varies fastest",
        f"dense layers: {_product(grid, DENSE)}",
        *_picture(grid, DENSE, gpus_per_node),
        "",
    ]
    if own_experts:
        lines += [f"experts: {_product(grid, EXPERT)}", *_picture(grid, EXPERT, gpus_per_node), ""]
    else:
        lines += [
            "experts, if the model has any: whole on every rank of dp and cp, split as tp",
            "",
        ]
    table = [("group", "size", "groups", "lies in", "each rank sends")]
    for name, what in _SENDS.items():
        fusion_of_one = "-" in name and min(grid.size(part) for part in name.split("-")) == 1
        skipped = name in ("etp", "ep", "edp") and not own_experts
        if grid.size(name) > 1 and not fusion_of_one and not skipped:
            size = grid.size(name)
            where = _span(grid.groups(name), gpus_per_node)
            if name == "dp" and grid.cp > 1:
                what = "nothing by itself: gradients travel over dp-cp"
            table.append((name, str(size), str(grid.world // size), where, what))
    if len(table) == 1:
        return "\n".join([*lines, "every axis has size 1: nothing is sent"])
    widths = [max(len(row[i]) for row in table) for i in range(4)]
    for *cells, what in table:
        lines.append("  ".join([*(c.ljust(w) for c, w in zip(cells, widths, strict=True)), what]))
    return "\n".join(lines)


def _picture(grid: Grid, axes: tuple[str, ...], gpus_per_node: int) -> list[str]:
    """One line per run of ranks along the fastest axis, at most a node (or 16 ranks) wide."""
    slowest_first = [axis for axis in grid._axes_slowest_first(axes) if grid.size(axis) > 1]
    fastest = slowest_first[-1] if slowest_first else axes[0]
    labels = slowest_first[:-1]
    rows = grid.groups(fastest)
    width = min(gpus_per_node if 4 <= gpus_per_node <= 16 else 16, rows.shape[1])
    pieces = -(-rows.shape[1] // width)
    total = len(rows) * pieces
    head, tail = _SHOWN_LINES
    shown = range(total) if total <= head + tail else [*range(head), *range(total - tail, total)]
    digits = len(str(grid.world - 1))
    lines = []
    for i in shown:
        start = i % pieces * width
        ranks = rows[i // pieces, start : start + width]
        at = grid.coordinates(int(ranks[0]))
        cells = [f"{axis} {at[axis]:<{len(str(grid.size(axis) - 1))}}" for axis in labels]
        end = len(str(rows.shape[1] - 1))
        cells.append(f"{fastest} {start:>{end}}-{start + len(ranks) - 1:<{end}}")
        numbers = " ".join(f"{rank:>{digits}}" for rank in ranks).ljust(width * (digits + 1) - 1)
        lines.append("  " + "  ".join([*cells, ":", numbers, _on_nodes(ranks, gpus_per_node)]))
    if total > head + tail:
        lines.insert(head, f"  ... {total - head - tail} more lines ...")
    return lines


def _product(grid: Grid, axes: tuple[str, ...]) -> str:
    return " x ".join(f"{axis} {grid.size(axis)}" for axis in axes)


def _on_nodes(ranks: npt.NDArray[np.int64], gpus_per_node: int) -> str:
    nodes = [int(n) for n in np.unique(ranks // gpus_per_node)]
    if len(nodes) == 1:
        return f"node {nodes[0]}"
    if nodes[-1] - nodes[0] == len(nodes) - 1:
        return f"nodes {nodes[0]}-{nodes[-1]}"
    listed = ", ".join(str(n) for n in nodes[:3])
    return f"nodes {listed}" + (f", ... {nodes[-1]}" if len(nodes) > 3 else "")


def _span(groups: npt.NDArray[np.int64], gpus_per_node: int) -> str:
    """How many nodes a group touches; rows are ascending, so their nodes are too."""
    touched = 1 + np.count_nonzero(np.diff(groups // gpus_per_node, axis=1), axis=1)
    least, most = int(touched.min()), int(touched.max())
    return _counted(most, "node") if least == most else f"{least} to {most} nodes"


def _counted(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


@dataclass(frozen=True)
class Mesh:
    """A grid seen from one rank: an `Axis` with its process group for every name in `AXES`.

    "tied" is one more: the ranks that hold tied embeddings.
    """

    grid: Grid
    rank: int
    axes: Mapping[str, Axis]

    def axis(self, name: str) -> Axis:
        """One of tp cp dp pp tp-cp dp-cp etp ep edp etp-ep world tied; KeyError otherwise."""
        return self.axes[name]


def create_mesh(grid: Grid, rank: int, *, timeout: timedelta | None = None) -> Mesh:
    """Create this rank's process groups, in the same order on every rank, and return its axes.

    Needs the default process group of `grid.world` ranks unless the world is 1. A group of one rank
    is none; a group of the whole world is the default group; a fusion with one axis larger than 1
    is that axis' group. Axes of the two grids do not share a communicator otherwise, since their
    messages may be in flight at once. `timeout` bounds each collective; None is the backend's own.
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
        if len(ranks) == grid.world > 1:
            group = dist.group.WORLD
        elif len(ranks) > 1:
            same = [axes[p].group for p in name.split("-") if p != name and axes[p].ranks == ranks]
            group = same[0] if same else _new_group(name, ranks, timeout)
        axes[name] = Axis(name, len(ranks), ranks.index(rank), ranks, group)
    axes["tied"] = _tied_axis(axes["pp"], rank, timeout)
    return Mesh(grid, rank, axes)


def _tied_axis(pp: Axis, rank: int, timeout: timedelta | None) -> Axis:
    """The first and the last rank of a pipeline, who hold tied embeddings; others stand alone."""
    ranks = (pp.ranks[0], pp.ranks[-1])
    if pp.size == 1 or rank not in ranks:
        return single("tied", rank)
    return Axis("tied", 2, ranks.index(rank), ranks, _new_group("tied", ranks, timeout))


def _new_group(name: str, ranks: tuple[int, ...], timeout: timedelta | None) -> dist.ProcessGroup:
    # Only the members call this. That cannot deadlock: the groups of one name share out the world,
    # and every rank goes through the names in one order.
    group = dist.new_group(
        list(ranks), timeout=timeout, use_local_synchronization=True, group_desc=name
    )
    assert isinstance(group, dist.ProcessGroup), f"rank is not in its own group {name}"
    return group


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
