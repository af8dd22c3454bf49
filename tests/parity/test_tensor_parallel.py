"""Every tensor- and sequence-parallel layout trains to the reference's numbers, and to the same
ones after a checkpoint that another layout wrote.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from parity.continued import check, rotated
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

# Fewer kinds, since the sample holds every kind with every model.
QUICK: Factors = {
    **TENSOR_PARALLEL,
    "tp": (1, 2, 3, 4),
    "recompute": ((), ("layer/2",), ("attention", "mlp", "core")),
    "model": ("llama", "gpt2", "six-heads", "nine-heads", "tiny"),
}


def test_pairwise_sample(tmp_path: Path) -> None:
    chosen = sampled(QUICK, 4)
    check(chosen, rotated(chosen, 1), tmp_path)


@pytest.mark.slow
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
    record_property("cells", ("tensor parallel", len(pairs), len(product), 0))


def test_the_sample_holds_every_pair() -> None:
    sample = sampled(QUICK, 4)
    assert len(sample) < 50
    held = set().union(*(values(cell, QUICK, 2) for cell in sample))
    assert held == tuples(QUICK, 2, 4)


@pytest.mark.slow
def test_the_product_holds_every_triple() -> None:
    product = crossed(TENSOR_PARALLEL, CROSSED, 8)
    held = set().union(*(values(cell, TENSOR_PARALLEL, 3) for cell in product))
    assert held == tuples(TENSOR_PARALLEL, 3, 8)
    assert all(fits(values(cell, TENSOR_PARALLEL, 1).pop(), 8) for cell in product)
