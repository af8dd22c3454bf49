"""What a rank sends in one update, by arithmetic: the formula that tests and `verify` measure.

A message's bytes are counted as `wire` says. With n ranks on an axis, t tokens in a micro-batch of
this rank, h hidden, l layers, e bytes a number and w at least float32's 4:

| axis  | what                  | messages                    | bytes of each             |
|-------|-----------------------|-----------------------------|---------------------------|
| tp    | stream forward        | 2l+1 sums, and sp's gathers | t·h·e                     |
| tp    | stream backward       | 2l+1 sums, and sp's gathers | t·h·e                     |
| tp    | stream gathered again | 2l+1 gathers, with sp only  | t·h·e                     |
| tp    | stream recomputed     | `recomputed`, a block       | t·h·e                     |
| tp    | vocabulary            | 2 all-reduces               | t·w and 3·t·w             |
| tp    | gradients             | 1 all-reduce a step         | those partial over tp     |
| tp    | norm                  | 1 all-reduce a step         | 8                         |
| dp-cp | gradients             | 1 all-reduce a bucket, step | the bucket                |
| dp-cp | counts, losses        | 1 all-reduce each, step     | 8, and 8 a loss term      |
| world | metrics               | 1 all-reduce a step         | 5·8                       |

A sum is an all-reduce, with sp a reduce-scatter; 2l+1 of them follow the embedding and both halves
of every block, and 2l+1 gathers precede the two halves and the head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from penteract.config import Config
from penteract.data.loader import micro_batches
from penteract.families import model_spec
from penteract.grid import Grid
from penteract.mesh import Axis
from penteract.nn.model import ModelSpec, Stage
from penteract.parallel.buffers import ALIGNMENT, BUCKET_BYTES, at_least_float32
from penteract.parallel.parameters import declared_parameters
from penteract.parallel.recompute import Recompute
from penteract.parallel.tensor import TensorParallel
from penteract.placement import even_sizes
from penteract.train.batch_ramp import global_batch

Sent = dict[str, dict[str, int]]  # axis: what: bytes
SCALAR = 8  # norms, counts, losses and metrics travel in float64
METRICS = 5  # four times and the memory


def step_bytes(config: Config, grid: Grid, rank: int, *, step: int = 1) -> Sent:
    """Bytes that `rank` of `grid` sends in update `step`: {axis: {what: bytes}}, axes above 1 only.

    `config` is resolved and has its vocabulary. The sum over an axis is what its `traffic` counts.
    """
    spec, at = model_spec(config.model), grid.coordinates(rank)
    axis = Axis("tp", grid.tp, at["tp"], tuple(range(grid.tp)))  # for sizes: nothing is sent here
    tp = TensorParallel(axis, config.parallel.sp)
    held = _Held.of(spec, tp, config)
    train, terms = config.train, 2 if config.train.z_loss else 1
    parts = micro_batches(global_batch(step, train), train.micro_batch, grid.dp, at["dp"])
    data, world = grid.size("dp-cp"), grid.world
    sent: Sent = {"tp": {}}
    for part in parts:
        messages = _micro_batch(len(part) * config.data.seq, spec, tp, config)
        for what, size in messages.items():
            sent["tp"][what] = sent["tp"].get(what, 0) + size
    sent["tp"]["gradients"] = all_reduced(held.partial_over_tp, grid.tp)
    sent["tp"]["norm"] = all_reduced(SCALAR, grid.tp)
    sent["dp-cp"] = {
        "gradients": sum(all_reduced(bucket, data) for bucket in held.buckets),
        "counts": all_reduced(SCALAR, data),
        "losses": all_reduced(terms * SCALAR, data),
    }
    sent["world"] = {"metrics": all_reduced(METRICS * SCALAR, world)}
    return {name: what for name, what in sent.items() if grid.size(name) > 1}


def all_reduced(size: int, n: int) -> int:
    """What each of n ranks sends to all-reduce `size` bytes."""
    return 2 * (n - 1) * size // n


def recomputed(parts: frozenset[str], *, dropout: bool) -> tuple[int, int]:
    """(gathers, sums) that backward repeats in a block of which `parts` are recomputed.

    Recomputation ends at the last activation that backward needs, so a half's sum is repeated only
    where something needs what follows it: its dropout, or the other half within a whole layer.
    Within `layer`, a half of its own is not reached by the layer's recomputation but by its own.
    """
    layer, attention, mlp = ("layer" in parts, "attention" in parts, "mlp" in parts)
    gathers = layer + attention + (layer or mlp)
    sums = layer + dropout * (attention + (layer or mlp))
    return gathers, sums


def _micro_batch(
    tokens: int, spec: ModelSpec, tp: TensorParallel, config: Config
) -> dict[str, int]:
    """What one micro-batch sends over tp."""
    n, dtype = tp.axis.size, getattr(torch, config.train.dtype)
    row, wide = spec.hidden * dtype.itemsize, at_least_float32(dtype).itemsize
    own = even_sizes(tokens, n)[tp.axis.rank]
    gather = (n - 1) * own * row if tp.sequence else 0
    sums = (tokens - own) * row if tp.sequence else all_reduced(tokens * row, n)
    pairs = 2 * len(spec.blocks) + 1  # of a column layer's gather and a row layer's sum
    again = 0
    for i, block in enumerate(spec.blocks):
        parts = Recompute.of(config.parallel.recompute, i).parts
        gathers, reductions = recomputed(parts, dropout=block.dropout > 0)
        again += gathers * gather + reductions * sums
    return {
        "stream forward": pairs * (gather + sums),
        "stream backward": pairs * (gather + sums),
        "stream gathered again": pairs * gather,
        "stream recomputed": again,
        "vocabulary": all_reduced(tokens * wide, n) + all_reduced(3 * tokens * wide, n),
    }


@dataclass(frozen=True)
class _Held:
    """Sizes in bytes of the flat gradients that `parallel.buffers` makes of a rank's parameters."""

    buckets: tuple[int, ...]
    partial_over_tp: int

    @classmethod
    def of(cls, spec: ModelSpec, tp: TensorParallel, config: Config) -> _Held:
        dtype, multiple = getattr(torch, config.train.dtype), config.parallel.vocab_multiple
        model = Stage(spec, tp, dtype=dtype, vocab_multiple=multiple)  # declared: without memory
        kinds: dict[tuple[object, ...], list[int]] = {}
        width, partial = at_least_float32(dtype).itemsize, 0
        for entry in reversed(declared_parameters(model)):
            p = entry.placement
            size = -(-p.numel // ALIGNMENT) * ALIGNMENT * width
            partial += size if "tp" in p.partial_axes else 0
            kinds.setdefault((p.decay, p.split_axes, "tp" in p.partial_axes), []).append(size)
        buckets = (bucket for sizes in kinds.values() for bucket in _bucketed(sizes))
        return cls(tuple(buckets), partial)


def _bucketed(sizes: list[int]) -> Iterator[int]:
    """Sums of neighbours, each closed by the parameter that fills it."""
    bucket = 0
    for size in sizes:
        bucket += size
        if bucket >= BUCKET_BYTES:
            yield bucket
            bucket = 0
    if bucket:
        yield bucket
