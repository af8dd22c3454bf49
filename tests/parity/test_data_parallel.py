"""Every data-parallel layout trains to the same numbers, and to those of the reference."""

import dataclasses
from collections.abc import Iterable

import pytest
import torch
from parity.matrix import DATA_PARALLEL, Cell, cells, pairwise
from parity.outcome import Part, difference, initial, joined, unequal
from parity.training import reference, train_here

from penteract.testing import run_ranks

TO_REFERENCE, TO_EACH_OTHER = 1e-9, 1e-12


def check(dp: int, chosen: Iterable[Cell]) -> None:
    """Train the cells on `dp` ranks and compare; ranks must agree to the bit."""
    mine = [cell for cell in chosen if cell.dp == dp]
    by_rank = run_ranks(train_here, dp, mine) if dp > 1 else [train_here(mine)]
    for cell, *parts in zip(mine, *by_rank, strict=True):
        check_cell(cell, parts)


def check_cell(cell: Cell, parts: list[Part]) -> None:
    alone = train_here([dataclasses.replace(cell, dp=1, bucket_bytes=25 << 20, zero=0, replicas=1)])
    assert not unequal(parts), cell
    made, wanted = initial(parts), initial(alone)
    assert all(torch.equal(x, wanted[name]) for name, x in made.items()), cell
    found = joined(parts)
    worst, where = difference(found, reference(cell))
    assert worst <= TO_REFERENCE, f"{cell}: {where} differs by {worst:.3g} from the reference"
    # Sums in another order: rounding of the largest values shows in tensors that are nearly zero.
    worst, where = difference(found, joined(alone), floor=1e-2)
    assert worst <= TO_EACH_OTHER, f"{cell}: {where} differs by {worst:.3g} from one rank"
    # Besides the buckets the count of the step is summed over the data ranks, and its loss over the
    # world; nothing per micro-batch.
    expected = parts[0].buckets + 1 if cell.dp > 1 else 0
    assert parts[0].gradient_messages == expected, cell


@pytest.mark.parametrize(
    "dp", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in DATA_PARALLEL["dp"] if n != 2)]
)
def test_pairwise_sample(dp: int) -> None:
    check(dp, pairwise(DATA_PARALLEL))


@pytest.mark.slow
@pytest.mark.parametrize("model", DATA_PARALLEL["model"])
@pytest.mark.parametrize("dp", DATA_PARALLEL["dp"])
def test_full_product(dp: int, model: str) -> None:
    check(dp, (cell for cell in cells(DATA_PARALLEL) if cell.model == model))


def test_the_sample_holds_every_pair() -> None:
    sample = pairwise(DATA_PARALLEL)
    assert len(sample) < 30
    for a, b in (("dp", "micro_batch"), ("model", "dropout"), ("bucket_bytes", "dp")):
        found = {(getattr(cell, a), getattr(cell, b)) for cell in sample}
        assert len(found) == len(DATA_PARALLEL[a]) * len(DATA_PARALLEL[b])
