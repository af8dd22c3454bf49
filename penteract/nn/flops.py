"""Floating-point operations of a training step: the model's own, without recomputation.

T·[6·h·f·x + 6·h·(2q + k + v)] per block, 6·T·h·V for the head, and 6·q·Σ n² per block for attention
over n tokens (half of the full matrix: causal), where a window of w < n leaves n² − (n−w)² of n²;
with q, k, v the widths of all heads together and x = 3 for a gated feed-forward layer, 2 otherwise.
With experts f is topk times the width of one, and that of the shared ones; the router is left out.
A multiply-add counts 2, backward twice the forward.
"""

from __future__ import annotations

from collections.abc import Iterable

from penteract.nn.block import BlockSpec
from penteract.nn.mlp import MLPSpec
from penteract.nn.model import ModelSpec
from penteract.nn.moe import MoESpec


def training_flops(spec: ModelSpec, lengths: Iterable[int]) -> int:
    """FLOPs of forward and backward over sequences of the given lengths."""
    lengths = list(lengths)
    tokens = sum(lengths)
    windows = {block.attention.window for block in spec.blocks}
    squares = {window: sum(_square(n, window) for n in lengths) for window in windows}
    blocks = sum(
        _block_flops(spec, block, tokens, squares[block.attention.window]) for block in spec.blocks
    )
    return 6 * tokens * spec.hidden * spec.vocab + blocks


def layer_flops(spec: ModelSpec, seq: int, name: str) -> int:
    """FLOPs of one layer of `spec.layer_names` on one sequence, forward and backward.

    Embedding and norm have no product; they count 6 for each element that they make.
    """
    if name == "head":
        return 6 * seq * spec.hidden * spec.vocab
    if not name.startswith("layers."):
        return 6 * seq * spec.hidden
    block = spec.blocks[int(name.removeprefix("layers."))]
    return _block_flops(spec, block, seq, _square(seq, block.attention.window))


def _square(n: int, window: int | None) -> int:
    """Twice the pairs of a token and one that it attends to, by the convention above."""
    return n * n if window is None else n * n - max(0, n - window) ** 2


def _block_flops(spec: ModelSpec, block: BlockSpec, tokens: int, squares: int) -> int:
    attention = block.attention
    q, kv = (n * attention.head_size for n in (attention.heads, attention.kv_heads))
    widths = _widths(block.mlp) + 2 * q + 2 * kv
    return tokens * 6 * spec.hidden * widths + squares * 6 * q


def _widths(mlp: MLPSpec | MoESpec) -> int:
    """Of the matrices that a token passes in a feed-forward layer, together."""
    if isinstance(mlp, MLPSpec):
        return mlp.width * (3 if mlp.activation == "swiglu" else 2)
    shared = 0 if mlp.shared is None else _widths(mlp.shared)
    return mlp.router.topk * _widths(mlp.expert) + shared
