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
| dp-cp | gradients, parameters | see `parallel.buffers`      | buckets                   |
| dp-cp | norm                  | 1 all-reduce a step, split  | 8                         |
| dp-cp | counts                | 1 all-reduce a step         | 8                         |
| tp-dp-cp | matrices           | 2 all-to-alls, with Muon    | see `optim.muon`          |
| world | losses and the norm   | 1 all-reduce a step         | 8 a loss term, and 8      |
| world | metrics               | 1 all-reduce a step         | 5·8                       |

A sum is an all-reduce, with sp a reduce-scatter; 2l+1 of them follow the embedding and both halves
of every block, and 2l+1 gathers precede the two halves and the head. Over tp a backward through the
whole model is counted: where the first layers are frozen, what is sent is less.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penteract.config import Config
from penteract.data.loader import micro_batches
from penteract.families import model_spec
from penteract.grid import Grid
from penteract.mesh import Axis
from penteract.nn.model import ModelSpec, Stage
from penteract.optim.groups import group_of
from penteract.optim.muon_plan import Matrix, plan
from penteract.parallel.buckets import Bucket, Sharding, at_least_float32, lay_out, unit_numbers
from penteract.parallel.parameters import declared_parameters
from penteract.parallel.recompute import Recompute
from penteract.parallel.tensor import TensorParallel
from penteract.parallel.zero import SLOTS
from penteract.placement import Fragment, even_sizes
from penteract.train.batch_ramp import global_batch

Sent = dict[str, dict[str, int]]  # axis: what: bytes
SCALAR = 8  # norms, counts, losses and metrics travel in float64
METRICS = 5  # four times and the memory


def step_bytes(config: Config, grid: Grid, rank: int, *, step: int = 1) -> Sent:
    """Bytes that `rank` of `grid` sends in update `step`: {axis: {what: bytes}}, axes above 1 only.

    `config` is resolved and has its vocabulary. The sum over an axis is what its `traffic` counts.
    """
    spec, at = model_spec(config.model), grid.coordinates(rank)
    tp, sharding = _split(config, grid, rank)
    buckets, splits = _parameters(spec, tp, sharding, config)
    trained = [bucket for bucket in buckets if not bucket.kind.group.frozen]
    partial = [bucket for bucket in trained if "tp" in bucket.kind.more_axes]
    train, terms = config.train, 2 if config.train.z_loss else 1
    parts = micro_batches(global_batch(step, train), train.micro_batch, grid.dp, at["dp"])
    data, world = grid.size("dp-cp"), grid.world
    sent: Sent = {"tp": {}}
    for part in parts:
        messages = _micro_batch(len(part) * config.data.seq, spec, tp, config)
        for what, size in messages.items():
            sent["tp"][what] = sent["tp"].get(what, 0) + size
    own_partial = sum(b.numel // sharding.shard.size * b.kind.wide.itemsize for b in partial)
    sent["tp"]["gradients"] = all_reduced(own_partial, grid.tp)
    sent["tp"]["norm"] = all_reduced(SCALAR, grid.tp)
    sent["dp-cp"] = {
        **_data(buckets, sharding, len(parts)),
        "norm": splits * all_reduced(SCALAR, sharding.shard.size),
        "counts": all_reduced(SCALAR, data),
    }
    if config.optim.name == "muon":
        sent["tp-dp-cp"] = {"matrices": _muon(spec, config, grid, rank)}
    sent["world"] = {
        "losses": all_reduced((terms + 1) * SCALAR, world),  # and whether the norm is finite
        "metrics": all_reduced(METRICS * SCALAR, world),
    }
    return {name: what for name, what in sent.items() if grid.size(name) > 1}


def _group(grid: Grid, name: str, rank: int) -> list[int]:
    """The ranks of the rank's group."""
    rows = grid.groups(name)
    return [int(r) for r in rows[(rows == rank).any(1)][0]]


def _split(config: Config, grid: Grid, rank: int) -> tuple[TensorParallel, Sharding]:
    """How the rank's model is split, on axes that only have sizes: nothing is sent over them."""

    def axis(name: str, size: int, at: int) -> Axis:
        return Axis(name, size, at, tuple(range(size)))

    parallel, n = config.parallel, grid.size("dp-cp")
    tp = TensorParallel(axis("tp", grid.tp, grid.coordinates(rank)["tp"]), parallel.sp)
    replicas = n if parallel.zero == 0 else parallel.replicas
    run, place = divmod(_group(grid, "dp-cp", rank).index(rank), n // replicas)
    shard, replicate = axis("dp-cp", n // replicas, place), axis("dp-cp", replicas, run)
    return tp, Sharding(shard, replicate, parallel.zero, parallel.dp_overlap)


def _muon(spec: ModelSpec, config: Config, grid: Grid, rank: int) -> int:
    """Bytes of what the rank holds of matrices to their owners, and of its own to their holders."""
    group = _group(grid, "tp-dp-cp", rank)
    parts: list[list[Fragment]] = []
    for r in group:
        buckets, _ = _parameters(spec, *_split(config, grid, r), config)
        flats = [(b, torch.empty(b.own.stop - b.own.start, device="meta")) for b in buckets]
        trained = [(b, flat) for b, flat in flats if not b.kind.group.frozen]
        matrices = [(b, flat) for b, flat in trained if b.kind.matrix]
        parts.append([fragment for b, flat in matrices for _, fragment, _ in b.owned(flat)])
    shapes = {fragment.tensor: fragment.shape for held in parts for fragment in held}
    names = sorted(shapes)
    number = {name: i for i, name in enumerate(names)}
    held = [[(number[fragment.tensor], fragment.box) for fragment in own] for own in parts]
    mine = group.index(rank)
    sent = plan([Matrix(name, shapes[name]) for name in names], held, mine)
    width = at_least_float32(getattr(torch, config.train.dtype)).itemsize
    return width * sum(
        part.box.numel
        for way in (sent.to_owners, sent.to_holders)
        for to, there in enumerate(way)
        for part in there
        if to != mine
    )


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


def _parameters(
    spec: ModelSpec, tp: TensorParallel, sharding: Sharding, config: Config
) -> tuple[list[Bucket], int]:
    """The buckets of a rank in the order of backward, and how many kinds of splits are trained."""
    dtype, multiple = getattr(torch, config.train.dtype), config.parallel.vocab_multiple
    model = Stage(spec, tp, dtype=dtype, vocab_multiple=multiple)  # declared: without memory
    entries = declared_parameters(model)[::-1]
    groups = group_of(config.optim.rules)
    kinds = lay_out(
        entries, unit_numbers(model, entries), sharding, group_of=groups, bucket_bytes=None
    )
    splits = {kind.split_axes for kind in kinds if not kind.group.frozen}
    return [bucket for kind in kinds for bucket in kind.buckets], len(splits)


def _data(buckets: Sequence[Bucket], sharding: Sharding, micro_batches: int) -> dict[str, int]:
    """What a step's gradients and parameters send over the data ranks."""
    n, r, stage = sharding.shard.size, sharding.replicate.size, sharding.stage
    gradients = parameters = 0
    for bucket in buckets:
        if bucket.kind.group.frozen:
            continue
        own, wide = bucket.numel // n, bucket.kind.wide.itemsize
        reductions = micro_batches if stage >= 2 else 1
        gradients += reductions * (n - 1) * own * wide + all_reduced(own * wide, r)
        parameters += (n - 1) * own * bucket.kind.dtype.itemsize * bucket.kept
    absent = [bucket for bucket in buckets if not bucket.kept][::-1]  # the order of forward
    units = sorted({bucket.unit for bucket in absent})
    trained = [bucket.unit for bucket in buckets if not bucket.kind.group.frozen]
    first = sum(unit < min(trained, default=0) for unit in units)
    times = gathers(len(units), micro_batches, first=first, overlap=sharding.overlap)
    for bucket in absent:
        own_bytes = bucket.numel // n * bucket.kind.dtype.itemsize
        parameters += times[units.index(bucket.unit)] * (n - 1) * own_bytes
    return {"gradients": gradients, "parameters": parameters}


def gathers(units: int, micro_batches: int, *, first: int = 0, overlap: bool = True) -> list[int]:
    """How often a step gathers each of `units`: those that the ring of `SLOTS` holds no more.

    Units before `first` have no backward, since everything up to them is frozen.
    """
    resident: list[int | None] = [None] * SLOTS
    times = [0] * units
    forward = [(i, i + 1) for i in range(units)]
    backward = [(i, i - 1) for i in reversed(range(first, units))]
    for place, following in (forward + backward) * micro_batches:
        for i in (place, following) if overlap else (place,):
            if 0 <= i < units and resident[i % SLOTS] != i:
                resident[i % SLOTS] = i
                times[i] += 1
    return times
