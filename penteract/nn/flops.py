"""Floating-point operations of a training step: the model's own, without recomputation.

T·[6·h·f·x + 6·h·(2q + k + v)] per block, 6·T·h·V for the head, and 6·q·Σ length² per block for
attention (half of the full matrix: causal), with q, k, v the widths of all heads together and x = 3
for a gated feed-forward layer, 2 otherwise. A multiply-add counts 2, backward twice the forward.
"""

from __future__ import annotations

from collections.abc import Iterable

from penteract.nn.block import BlockSpec
from penteract.nn.model import ModelSpec


def training_flops(spec: ModelSpec, lengths: Iterable[int]) -> int:
    """FLOPs of forward and backward over sequences of the given lengths."""
    lengths = list(lengths)
    tokens, squares = sum(lengths), sum(n * n for n in lengths)
    blocks = sum(_block_flops(spec, block, tokens, squares) for block in spec.blocks)
    return 6 * tokens * spec.hidden * spec.vocab + blocks


def layer_flops(spec: ModelSpec, seq: int, name: str) -> int:
    """FLOPs of one layer of `spec.layer_names` on one sequence, forward and backward.

    Embedding and norm have no product; they count 6 for each element that they make.
    """
    if name == "head":
        return 6 * seq * spec.hidden * spec.vocab
    if not name.startswith("layers."):
        return 6 * seq * spec.hidden
    return _block_flops(spec, spec.blocks[int(name.removeprefix("layers."))], seq, seq * seq)


def _block_flops(spec: ModelSpec, block: BlockSpec, tokens: int, squares: int) -> int:
    attention, mlp = block.attention, block.mlp
    q, kv = (n * attention.head_size for n in (attention.heads, attention.kv_heads))
    matrices = 3 if mlp.activation == "swiglu" else 2
    return tokens * 6 * spec.hidden * (mlp.width * matrices + 2 * q + 2 * kv) + squares * 6 * q
