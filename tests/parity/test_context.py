"""Every exchange on every number of context ranks trains to the reference's numbers, and to those
same ones after a checkpoint that another layout wrote.
"""

import dataclasses
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from parity.continued import check, rotated
from parity.matrix import (
    CONTEXT,
    CONTEXT_CROSSED,
    Cell,
    Factors,
    crossed,
    sampled,
    tuples,
    values,
)

PRODUCT = math.prod(len(CONTEXT[name]) for name in CONTEXT_CROSSED)
QUICK: Factors = {**CONTEXT, "model": ("llama", "sinks", "capped", "gpt2"), "optimizer": ("adamw",)}


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_pairwise_sample(half: int, tmp_path: Path) -> None:
    chosen = sampled(QUICK, 4)[half::2]
    check(chosen, rotated(chosen, 1), tmp_path)


@pytest.mark.slow
def test_scores_are_dropped_alike_by_every_exchange(tmp_path: Path) -> None:
    """By their head and places in the micro-batch, over tp and in recomputation too."""
    cell = Cell(
        "sinks", dp=1, micro_batch=2, global_batch=3, bucket_bytes=256, dropout=0.0, seq=8,
        ragged=True, window=5, attention_dropout=0.3,
    )  # fmt: skip
    layouts: list[dict[str, Any]] = [
        {"cp_comm": "ring", "cp": 2, "recompute": ("core",)},
        {"cp_comm": "all_gather", "cp": 2, "tp": 2, "sp": True},
        {"cp_comm": "all_to_all", "cp": 2},
        {"cp_comm": "hierarchical", "cp": 4},
    ]
    cells = [dataclasses.replace(cell, **layout) for layout in layouts]
    check(cells, rotated(cells, 1), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("cp", CONTEXT["cp"])
@pytest.mark.parametrize("comm", CONTEXT["cp_comm"])
def test_full_product(
    comm: str, cp: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Checkpoints go on in the layout of any other cell."""
    cells = crossed(CONTEXT, CONTEXT_CROSSED, 8)
    others = random.Random(0).sample(cells, len(cells))
    pairs = [p for p in zip(cells, others, strict=True) if (p[0].cp_comm, p[0].cp) == (comm, cp)]
    check(*zip(*pairs, strict=True), tmp_path)
    record_property("cells", ("context", len(pairs), PRODUCT, PRODUCT - len(cells)))


def test_the_sample_holds_every_pair() -> None:
    sample = sampled(QUICK, 4)
    assert len(sample) < 60
    held = set().union(*(values(cell, QUICK, 2) for cell in sample))
    assert held == tuples(QUICK, 2, 4)
