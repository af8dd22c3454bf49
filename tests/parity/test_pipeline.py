"""Every schedule on every number of ranks, chunks and micro-batches trains to the reference's
numbers, and to the same ones after a checkpoint that another layout wrote.
"""

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from parity.continued import check, rotated
from parity.matrix import (
    PIPELINE,
    PIPELINE_CROSSED,
    Factors,
    crossed,
    sampled,
    tuples,
    values,
)

PRODUCT = math.prod(len(PIPELINE[name]) for name in PIPELINE_CROSSED)
QUICK: Factors = {
    **PIPELINE,
    "model": ("deep", "gpt2", "six-heads"),
    "count": ("1", "p-1", "p+1", "3p+1"),
    "cut": ("even", "ends", "gap"),
}


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_pairwise_sample(half: int, tmp_path: Path) -> None:
    chosen = sampled(QUICK, 4)[half::2]
    check(chosen, rotated(chosen, 1), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("pp", PIPELINE["pp"])
@pytest.mark.parametrize("schedule", PIPELINE["schedule"])
def test_full_product(
    schedule: str, pp: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Checkpoints go on in the layout of any other cell."""
    cells = crossed(PIPELINE, PIPELINE_CROSSED, 8)
    others = random.Random(0).sample(cells, len(cells))
    pairs = [
        p for p in zip(cells, others, strict=True) if (p[0].schedule, p[0].pp) == (schedule, pp)
    ]
    check(*zip(*pairs, strict=True), tmp_path)
    record_property("cells", ("pipeline", len(pairs), PRODUCT, PRODUCT - len(cells)))


def test_the_sample_holds_every_pair() -> None:
    sample = sampled(QUICK, 4)
    assert len(sample) < 60
    held = set().union(*(values(cell, QUICK, 2) for cell in sample))
    assert held == tuples(QUICK, 2, 4)
