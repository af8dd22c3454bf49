"""Every tensor- and sequence-parallel layout trains to the reference's numbers, and to the same
ones after a checkpoint that another layout wrote.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.matrix import (
    CROSSED,
    SPLIT_MODELS,
    TENSOR_PARALLEL,
    Cell,
    Factors,
    crossed,
    fits,
    sampled,
    tuples,
    values,
)
from parity.outcome import Outcome, Part, difference, initial, joined, unequal
from parity.training import new_run, next_step, reference, resume_here, train_here
from reference import bridge
from reference.plain import Weights

from penteract.grid import Grid
from penteract.mesh import create_mesh
from penteract.testing import run_ranks

TOLERANCE = 1e-9
LAYOUT = ("tp", "dp", "sp", "recompute", "vocab_multiple", "overlap")
# Fewer kinds, since the sample holds every kind with every model.
QUICK: Factors = {
    **TENSOR_PARALLEL,
    "tp": (1, 2, 3, 4),
    "recompute": ((), ("layer/2",), ("attention", "mlp", "core")),
}


def check(chosen: Sequence[Cell], others: Sequence[Cell], folder: Path) -> None:
    """Train each cell, then go on from its checkpoint in the layout of one of the others."""
    folders = [folder / str(i) for i in range(len(chosen))]
    trained = on_their_ranks(train_here, chosen, folders)
    for cell, parts in zip(chosen, trained, strict=True):
        compare(cell, parts, reference(cell))
        made, wanted = initial(parts), seeds_weights(cell.model)
        assert all(torch.equal(x, wanted[name]) for name, x in made.items()), cell
    layouts = [{name: getattr(other, name) for name in LAYOUT} for other in others]
    pairs = zip(chosen, layouts, strict=True)
    moved = [dataclasses.replace(cell, **layout) for cell, layout in pairs]
    for cell, parts in zip(moved, on_their_ranks(resume_here, moved, folders), strict=True):
        compare(cell, parts, next_step(cell))


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
def seeds_weights(model: str) -> Weights:
    """The initial weights of a model on one rank."""
    cell = Cell(model, dp=1, micro_batch=1, global_batch=1, bucket_bytes=256, dropout=0.0)
    run = new_run(cell, create_mesh(Grid(1), 0))
    return initial([Part(initial=bridge.fragments(bridge.masters(run.buffers)))])


def compare(cell: Cell, parts: list[Part], wanted: Outcome) -> None:
    assert not unequal(parts), cell
    worst, where = difference(joined(parts), wanted)
    assert worst <= TOLERANCE, f"{cell}: {where} differs by {worst:.3g} from the reference"


def rotated(items: Sequence[Cell], by: int) -> list[Cell]:
    return [*items[by:], *items[:by]]


def test_pairwise_sample(tmp_path: Path) -> None:
    chosen = sampled(QUICK, 4)
    check(chosen, rotated(chosen, 1), tmp_path)


def test_eight_ranks(tmp_path: Path) -> None:
    """More ranks than heads, than rows, than the feed-forward layer or the vocabulary has."""
    common: dict[str, Any] = {"micro_batch": 1, "global_batch": 3, "bucket_bytes": 256}
    chosen = [
        Cell("tiny", dp=1, tp=8, sp=True, dropout=0.1, seq=7, recompute=("layer",), **common),
        Cell("gpt2-plain", dp=2, tp=4, dropout=0.0, seq=7, label_smoothing=0.1, **common),
        Cell("six-heads", dp=1, tp=8, dropout=0.1, seq=1, z_loss=1e-2, vocab_multiple=4, **common),
    ]
    check(chosen, rotated(chosen, 1), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("tp", TENSOR_PARALLEL["tp"])
@pytest.mark.parametrize("model", SPLIT_MODELS)
def test_full_product(
    model: str, tp: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Checkpoints go on in the layout of another cell of the same model."""
    product = crossed(TENSOR_PARALLEL, CROSSED, 8)
    alike = [cell for cell in product if cell.model == model]
    others = rotated(alike, len(alike) // 2 + 1)
    pairs = [pair for pair in zip(alike, others, strict=True) if pair[0].tp == tp]
    check(*zip(*pairs, strict=True), tmp_path)
    record_property("cells", (len(pairs), len(product)))


def test_the_sample_holds_every_pair() -> None:
    sample = sampled(QUICK, 4)
    assert len(sample) < 45
    held = set().union(*(values(cell, QUICK, 2) for cell in sample))
    assert held == tuples(QUICK, 2, 4)


@pytest.mark.slow
def test_the_product_holds_every_triple() -> None:
    product = crossed(TENSOR_PARALLEL, CROSSED, 8)
    held = set().union(*(values(cell, TENSOR_PARALLEL, 3) for cell in product))
    assert held == tuples(TENSOR_PARALLEL, 3, 8)
    assert all(fits(values(cell, TENSOR_PARALLEL, 1).pop(), 8) for cell in product)
