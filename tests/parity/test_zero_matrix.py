"""Every stage of ZeRO with every optimizer trains to the reference's numbers, moments included, and
to the same ones after a checkpoint that another layout and another stage wrote.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
from parity.continued import check, rotated
from parity.matrix import (
    ZERO,
    ZERO_CROSSED,
    Cell,
    cell_of,
    crossed,
    refused,
    sampled,
    tuples,
    values,
)
from parity.outcome import difference, joined
from parity.training import config_of, train_here

from penteract.config import check_world
from penteract.errors import UserError
from penteract.testing import run_ranks

PRODUCT = math.prod(len(ZERO[name]) for name in ZERO_CROSSED)


def refused_cells() -> Iterator[Cell]:
    """The cells of the crossed factors, others at their first values, that a rule refuses."""
    first = {name: choices[0] for name, choices in ZERO.items()}
    for combination in product(*(ZERO[name] for name in ZERO_CROSSED)):
        chosen = first | dict(zip(ZERO_CROSSED, combination, strict=True))
        if refused(chosen):
            yield cell_of(chosen)


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_pairwise_sample(half: int, tmp_path: Path) -> None:
    chosen = sampled(ZERO, 4)[half::2]
    check(chosen, rotated(chosen, 1), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("zero", ZERO["zero"])
@pytest.mark.parametrize("dp", ZERO["dp"])
def test_full_product(
    dp: int, zero: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Checkpoints go on in the layout of any other cell."""
    cells = crossed(ZERO, ZERO_CROSSED, 8)
    others = random.Random(0).sample(cells, len(cells))
    pairs = [p for p in zip(cells, others, strict=True) if (p[0].dp, p[0].zero) == (dp, zero)]
    check(*zip(*pairs, strict=True), tmp_path)
    record_property("cells", ("zero", len(pairs), PRODUCT, len(list(refused_cells()))))


def test_the_sample_holds_every_pair() -> None:
    sample = sampled(ZERO, 4)
    assert len(sample) < 45
    held = set().union(*(values(cell, ZERO, 2) for cell in sample))
    assert held == tuples(ZERO, 2, 4)


@pytest.mark.slow
def test_the_product_is_whole_but_for_what_a_rule_refuses() -> None:
    cells = crossed(ZERO, ZERO_CROSSED, 8)
    assert len({values(cell, ZERO_CROSSED, len(ZERO_CROSSED)).pop() for cell in cells}) == len(
        cells
    )
    assert len(cells) + len(list(refused_cells())) == PRODUCT
    held = set().union(*(values(cell, ZERO, 2) for cell in cells))
    assert held == tuples(ZERO, 2, 8)


def test_replicas_that_do_not_divide_the_data_ranks_are_refused() -> None:
    """The one rule that leaves cells out."""
    assert {(cell.dp, cell.replicas) for cell in refused_cells()} == {(1, 2), (3, 2)}
    for cell in refused_cells():
        said = f"replicas = 2 does not divide dp = {cell.dp}; values that work: replicas 1"
        with pytest.raises(UserError, match=said):
            check_world(config_of(cell).parallel, cell.world)


@pytest.mark.parametrize("zero", ZERO["zero"])
def test_the_micro_batch_changes_nothing(zero: int) -> None:
    """The same batch of 7 in 7, 4, 3 and 1 pieces, over 2 ranks."""
    whole = Cell(
        "gpt2", dp=2, micro_batch=8, global_batch=7, bucket_bytes=4096, dropout=0.0, zero=zero
    )
    cells = [dataclasses.replace(whole, micro_batch=n) for n in (8, 1, 2, 3)]
    first, *rest = (joined(parts) for parts in zip(*run_ranks(train_here, 2, cells), strict=True))
    for found in rest:
        worst, where = difference(found, first, floor=1e-2)
        assert worst <= 1e-12, where
