"""A layout drawn as text: which rank is where, on which node, what each group sends."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penteract.grid import DENSE, EXPERT, Grid

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
