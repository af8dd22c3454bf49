"""The matrices of models and layouts, as data."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

# Values that expose: biases, eps 1e-2, a head size that is not hidden / heads, an odd vocabulary.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "family": "llama", "layers": 2, "hidden": 12, "ffn": 10, "heads": 4, "kv_heads": 2,
        "head_size": 6, "vocab": 13, "norm_eps": 1e-2, "rope_theta": 100.0, "qk_norm": True,
    },
    "llama-tied-bias": {
        "family": "llama", "layers": 1, "hidden": 10, "ffn": 7, "heads": 3, "kv_heads": 1,
        "head_size": 8, "vocab": 11, "norm_eps": 1e-2, "tied": True, "bias": True,
    },
    "gpt2": {
        "family": "gpt2", "layers": 2, "hidden": 12, "ffn": 20, "heads": 2, "vocab": 17,
        "norm_eps": 1e-2, "tied": True, "max_positions": 16,
    },
    "gpt2-plain": {
        "family": "gpt2", "layers": 1, "hidden": 9, "ffn": 5, "heads": 4, "kv_heads": 2,
        "head_size": 5, "vocab": 7, "norm_eps": 1e-2, "bias": False, "qk_norm": True,
        "max_positions": 16,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One way to train: what is trained, and over how many ranks in which portions."""

    model: str
    dp: int
    micro_batch: int
    global_batch: int
    bucket_bytes: int
    dropout: float


# dp 3 and micro-batch 3 divide neither batch; batch 2 leaves ranks and micro-batches empty.
DATA_PARALLEL: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "dp": (1, 2, 3, 4),
    "micro_batch": (1, 2, 3, 8),
    "global_batch": (8, 2),
    "bucket_bytes": (25 << 20, 256),
    "dropout": (0.0, 0.1),
}


def cells(matrix: dict[str, tuple[Any, ...]]) -> Iterator[Cell]:
    """The full product."""
    return (Cell(*values) for values in product(*matrix.values()))


def pairwise(matrix: dict[str, tuple[Any, ...]]) -> list[Cell]:
    """Few cells that together hold every pair of values of any two factors, greedily chosen."""
    names = tuple(matrix)

    def pairs(cell: Cell) -> set[tuple[Any, ...]]:
        values = [(name, getattr(cell, name)) for name in names]
        return set(combinations(values, 2))

    candidates = {cell: pairs(cell) for cell in cells(matrix)}
    missing = set().union(*candidates.values())
    chosen = []
    while missing:
        best = max(candidates, key=lambda cell: len(candidates[cell] & missing))
        chosen.append(best)
        missing -= candidates[best]
    return chosen
