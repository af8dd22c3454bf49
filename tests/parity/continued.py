"""Trains cells against the reference, then goes on from their checkpoints in other layouts."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from parity.matrix import Cell
from parity.outcome import Outcome, Part, difference, initial, joined, unequal
from parity.training import new_run, next_step, reference, resume_here, train_here
from reference import bridge
from reference.plain import Weights

from penteract.grid import Grid
from penteract.mesh import create_mesh
from penteract.testing import run_ranks

TOLERANCE = 1e-9
LAYOUT = (
    "tp", "dp", "sp", "recompute", "vocab_multiple", "overlap", "zero", "replicas", "bucket_bytes",
    "pp", "chunks", "schedule", "cut", "cp", "cp_comm", "ep", "etp", "dispatcher",
)  # fmt: skip


def check(chosen: Sequence[Cell], others: Sequence[Cell], folder: Path) -> None:
    """Train each cell, then go on from its checkpoint in the layout of one of the others."""
    folders = [folder / str(i) for i in range(len(chosen))]
    trained = on_their_ranks(train_here, chosen, folders)
    for cell, parts in zip(chosen, trained, strict=True):
        compare(cell, parts, reference(cell))
        made, wanted = initial(parts), seeds_weights(cell.model, cell.moe)
        assert all(torch.equal(x, wanted[name]) for name, x in made.items()), cell
    moved = [in_layout_of(other, cell) for cell, other in zip(chosen, others, strict=True)]
    for cell, parts in zip(moved, on_their_ranks(resume_here, moved, folders), strict=True):
        compare(cell, parts, next_step(cell))


def in_layout_of(other: Cell, cell: Cell) -> Cell:
    """What `cell` trains, in the layout of `other`."""
    return dataclasses.replace(cell, **{name: getattr(other, name) for name in LAYOUT})


def on_their_ranks(
    work: Callable[..., list[Part]], chosen: Sequence[Cell], folders: Sequence[Path]
) -> list[list[Part]]:
    """What each rank of each cell holds; the cells of one number of ranks share their processes."""
    held: dict[int, list[Part]] = {}
    for world in sorted({cell.world for cell in chosen}):
        mine = [i for i, cell in enumerate(chosen) if cell.world == world]
        inputs = [chosen[i] for i in mine], [folders[i] for i in mine]
        by_rank = run_ranks(work, world, *inputs, timeout_s=600)
        held |= dict(zip(mine, map(list, zip(*by_rank, strict=True)), strict=True))
    return [held[i] for i in range(len(chosen))]


@functools.cache
def seeds_weights(model: str, moe: str) -> Weights:
    """The initial weights of a model on one rank."""
    cell = Cell(model, dp=1, micro_batch=1, global_batch=1, bucket_bytes=256, dropout=0.0, moe=moe)
    run = new_run(cell, create_mesh(Grid(1), 0))
    return initial([Part(initial=bridge.owned(run.buffers, "master"))])


def compare(cell: Cell, parts: list[Part], wanted: Outcome) -> None:
    assert not (odd := unequal(parts)), f"{cell}: copies differ: {odd[:3]}"
    worst, where = difference(joined(parts), wanted)
    assert worst <= TOLERANCE, f"{cell}: {where} differs by {worst:.3g} from the reference"


def rotated(items: Sequence[Cell], by: int) -> list[Cell]:
    return [*items[by:], *items[:by]]
