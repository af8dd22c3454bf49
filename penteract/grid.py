"""Ranks, coordinates and groups of a layout: pure arithmetic on integers.

The same ranks are factored twice, `world = tp·cp·dp·pp` for dense layers and `etp·ep·edp·pp` for
experts, with the same pipeline groups. `order` says which axis varies fastest (leftmost first); the
dense grid skips its `ep`, the expert grid skips its `cp` and reads `tp` as `etp`, `dp` as `edp`.
A group is then one reshape and transpose of `range(world)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penteract.layout_rules import DEFAULT_ORDER, check_layout

DENSE = ("tp", "cp", "dp", "pp")
EXPERT = ("etp", "ep", "edp", "pp")
PRINTED_GROUPS = ("tp", "cp", "dp", "pp", "tp-cp", "dp-cp", "etp", "ep", "edp", "etp-ep")


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
