"""What a rank sends in one update, by arithmetic: the formula that tests and `verify` measure.

A message's bytes are counted as `wire` says. With n ranks on an axis, t tokens in a micro-batch of
this rank, h hidden, l layers on it, e bytes a number and w at least float32's 4:

| axis  | what                  | messages                    | bytes of each             |
|-------|-----------------------|-----------------------------|---------------------------|
| tp    | stream forward        | 2l+1 sums, and sp's gathers | t·h·e                     |
| tp    | stream backward       | 2l+1 sums, and sp's gathers | t·h·e                     |
| tp    | stream gathered again | 2l+1 gathers, with sp only  | t·h·e                     |
| tp    | stream recomputed     | `recomputed`, a block       | t·h·e                     |
| tp    | vocabulary            | 2 all-reduces               | t·w and 3·t·w             |
| tp    | gradients             | 1 all-reduce a step         | those partial over tp     |
| tp    | norm                  | 1 all-reduce a step         | 8                         |
| cp    | attention             | see `parallel.context`      | those of the exchange     |
| pp    | streams               | 1 a stage whose next or     | t·h·e, with sp t·h·e/tp   |
|       |                       | last one is elsewhere       |                           |
| pp    | norm                  | 1 all-reduce a step         | 8                         |
| tied  | gradients             | 1 all-reduce a step         | the tied weight's         |
| dp-cp | gradients, parameters | see `parallel.buffers`      | buckets                   |
| dp-cp | norm                  | 1 all-reduce a step, split  | 8                         |
| dp-cp | counts                | 1 all-reduce a step         | 8                         |
| tp-dp-cp | matrices           | 2 all-to-alls, with Muon    | see `optim.muon`          |
| world | losses and the norm   | 1 all-reduce a step         | 8 a loss term, and 8      |
| world | metrics               | 1 all-reduce a step         | 5·8                       |

A sum is an all-reduce, with sp a reduce-scatter. In forward 2l sums follow the halves of the blocks
and one the embedding, and 2l gathers precede the halves and one the head; backward has a gather for
each sum, and a sum for each gather. What needs embedding or head is sent where they are. With
context parallelism t is the rows of a rank, padding too. Over tp and cp a backward through the
whole model is counted: where the first layers are frozen, less is sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from penteract.config import Config
from penteract.data.loader import micro_batches
from penteract.families import model_spec
from penteract.grid import Grid
from penteract.mesh import Axis
from penteract.nn.attention import Heads
from penteract.nn.model import ModelSpec, Stages
from penteract.optim.groups import group_of
from penteract.optim.muon_plan import Matrix, plan
from penteract.parallel.buckets import Bucket, Sharding, Units, at_least_float32, lay_out
from penteract.parallel.context.traffic import Sizes, attention_bytes
from penteract.parallel.parameters import declared_parameters
from penteract.parallel.pipeline.actions import Action, actions
from penteract.parallel.recompute import Recompute
from penteract.parallel.tensor import TensorParallel
from penteract.parallel.zero import SLOTS
from penteract.placement import Fragment, even_sizes
from penteract.train.batch_ramp import global_batch
from penteract.train.pipeline import Plan
from penteract.train.pipeline import plan as make_plan

Sent = dict[str, dict[str, int]]  # axis: what: bytes
SCALAR = 8  # norms, counts, losses and metrics travel in float64
METRICS = 5  # four times and the memory


def step_bytes(config: Config, grid: Grid, rank: int, *, step: int = 1) -> Sent:
    """Bytes that `rank` of `grid` sends in update `step`: {axis: {what: bytes}}, axes above 1 only.

    `config` is resolved and has its vocabulary. The sum over an axis is what its `traffic` counts.
    """
    spec, at, plan = model_spec(config.model), grid.coordinates(rank), make_plan(config)
    tp, sharding = _split(config, grid, rank)
    held = plan.held(at["pp"])
    model = _model(spec, tp, held, config)
    buckets = _parameters(model, sharding, config)
    trained = [bucket for bucket in buckets if not bucket.kind.group.frozen]
    partial = [bucket for bucket in trained if "tp" in bucket.kind.more_axes]
    ends = plan.placement[0], plan.placement[-1]
    tied = [bucket for bucket in trained if "tied" in bucket.kind.more_axes]
    apart = ends[0] != ends[1] and bool(tied)
    counted = [b for b in trained if "tied" not in b.kind.more_axes or at["pp"] == ends[0]]
    splits = {b.kind.split_axes for b in counted}
    train, terms = config.train, 2 if config.train.z_loss else 1
    parts = micro_batches(global_batch(step, train), train.micro_batch, grid.dp, at["dp"])
    data, world = grid.size("dp-cp"), grid.world
    sent: Sent = {"tp": {}, "pp": {}, "cp": {}}
    names = [n for names in held.values() for n in names]
    for part in parts:
        tokens = -(-len(part) * config.data.seq // grid.cp)  # of a context rank
        around = _attention(tokens, spec, tp, names, config, at["cp"])
        sent["cp"]["attention"] = sent["cp"].get("attention", 0) + around
        for what, size in _micro_batch(tokens, spec, tp, names, config).items():
            sent["tp"][what] = sent["tp"].get(what, 0) + size
        stream = _stream(tokens, spec, tp, config)
        sent["pp"]["streams"] = sent["pp"].get("streams", 0) + _crossings(plan, at["pp"]) * stream
    sent["tp"]["gradients"] = all_reduced(_own_bytes(partial), grid.tp)
    sent["tp"]["norm"] = sum("tp" in axes for axes in splits) * all_reduced(SCALAR, grid.tp)
    sent["pp"]["norm"] = all_reduced(SCALAR, grid.pp)
    sent["tied"] = {"gradients": all_reduced(_own_bytes(tied), 2)}
    program = list(actions(plan.schedule(len(parts)).programs[at["pp"]]))
    sent["dp-cp"] = {
        **_data(buckets, model.unit_stages, sharding, program),
        "norm": len(splits) * all_reduced(SCALAR, sharding.shard.size),
        "counts": all_reduced(SCALAR, data),
    }
    if config.optim.name == "muon":
        sent["tp-dp-cp"] = {"matrices": _muon(spec, config, grid, rank)}
    sent["world"] = {
        "losses": all_reduced((terms + 1) * SCALAR, world),  # and whether the norm is finite
        "metrics": all_reduced(METRICS * SCALAR, world),
    }
    wide = {name for name in sent if (apart if name == "tied" else grid.size(name) > 1)}
    return {name: what for name, what in sent.items() if name in wide}


def _own_bytes(buckets: Sequence[Bucket]) -> int:
    """Of this rank's slices of gradients."""
    return sum(b.numel // b.kind.sharding.shard.size * b.kind.wide.itemsize for b in buckets)


def _crossings(plan: Plan, rank: int) -> int:
    """How many streams, or gradients of streams, a pipeline rank sends in a micro-batch."""
    pairs = itertools.pairwise(plan.placement)
    return sum(pair.count(rank) for pair in pairs if pair[0] != pair[1])


def _stream(tokens: int, spec: ModelSpec, tp: TensorParallel, config: Config) -> int:
    """Bytes of the stream that this rank holds."""
    rows = even_sizes(tokens, tp.axis.size)[tp.axis.rank] if tp.sequence else tokens
    return rows * spec.hidden * getattr(torch, config.train.dtype).itemsize


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
    layers = make_plan(config).held(grid.coordinates(rank)["pp"])
    for r in group:
        tp, sharding = _split(config, grid, r)
        buckets = _parameters(_model(spec, tp, layers, config), sharding, config)
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
    tokens: int, spec: ModelSpec, tp: TensorParallel, held: Sequence[str], config: Config
) -> dict[str, int]:
    """What one micro-batch sends over tp on a rank that holds these layers."""
    n, dtype = tp.axis.size, getattr(torch, config.train.dtype)
    row, wide = spec.hidden * dtype.itemsize, at_least_float32(dtype).itemsize
    own = even_sizes(tokens, n)[tp.axis.rank]
    gather = (n - 1) * own * row if tp.sequence else 0
    sums = (tokens - own) * row if tp.sequence else all_reduced(tokens * row, n)
    embed, head = "embed" in held, "head" in held
    blocks = [int(name.removeprefix("layers.")) for name in held if name.startswith("layers.")]
    again = 0
    for i in blocks:
        parts = Recompute.of(config.parallel.recompute, i).parts
        gathers, reductions = recomputed(parts, dropout=spec.blocks[i].dropout > 0)
        again += gathers * gather + reductions * sums
    into, out = 2 * len(blocks) + head, 2 * len(blocks) + embed  # column and row layers
    vocabulary = all_reduced(tokens * wide, n) + all_reduced(3 * tokens * wide, n)
    return {
        "stream forward": into * gather + out * sums,
        "stream backward": out * gather + into * sums,
        "stream gathered again": into * gather,
        "stream recomputed": again,
        "vocabulary": head * vocabulary,
    }


def _attention(
    rows: int,
    spec: ModelSpec,
    tp: TensorParallel,
    held: Sequence[str],
    config: Config,
    rank: int,
) -> int:
    """What the attention of one micro-batch sends over cp on a rank that holds these layers."""
    parallel, total = config.parallel, 0
    for name in (name for name in held if name.startswith("layers.")):
        number = int(name.removeprefix("layers."))
        attention = spec.blocks[number].attention
        heads = Heads.of(attention, tp.axis)
        a, even = heads.q[1] - heads.q[0], len(set(heads.served)) <= 1
        g = heads.kv[1] - heads.kv[0] if even else a
        sizes = Sizes(rows, a, g, attention.head_size, getattr(torch, config.train.dtype))
        sent = attention_bytes(
            parallel.cp_comm, sizes, cp=parallel.cp, rank=rank, inner=parallel.cp_inner
        )
        again = Recompute.of(parallel.recompute, number).parts & {"layer", "attention", "core"}
        total += (1 + len(again)) * sent.forward + sent.backward
    return total


def _model(
    spec: ModelSpec, tp: TensorParallel, held: Mapping[int, Sequence[str]], config: Config
) -> Stages:
    """What a rank holds, declared, without memory."""
    dtype, multiple = getattr(torch, config.train.dtype), config.parallel.vocab_multiple
    return Stages(spec, tp, held, dtype=dtype, vocab_multiple=multiple)


def _parameters(model: Stages, sharding: Sharding, config: Config) -> list[Bucket]:
    """The buckets of a rank in the order of backward."""
    entries, groups = declared_parameters(model)[::-1], group_of(config.optim.rules)
    kinds = lay_out(entries, Units(model), sharding, group_of=groups, bucket_bytes=None)
    return [bucket for kind in kinds for bucket in kind.buckets]


def _data(
    buckets: Sequence[Bucket],
    unit_stages: Sequence[int],
    sharding: Sharding,
    program: Sequence[Action],
) -> dict[str, int]:
    """What a step's gradients and parameters send over the data ranks."""
    n, r, stage = sharding.shard.size, sharding.replicate.size, sharding.stage
    micro_batches = len({action.micro_batch for action in program})
    gradients = parameters = 0
    for bucket in buckets:
        if bucket.kind.group.frozen:
            continue
        own, wide = bucket.numel // n, bucket.kind.wide.itemsize
        reductions = micro_batches if stage >= 2 and not bucket.late else 1
        gradients += reductions * (n - 1) * own * wide + all_reduced(own * wide, r)
        parameters += (n - 1) * own * bucket.kind.dtype.itemsize * bucket.kept
    absent = [bucket for bucket in buckets if not bucket.kept][::-1]  # the order of forward
    units = sorted({bucket.unit for bucket in absent})
    # In the first stage nothing up to the first unit that is trained has a backward.
    trained = [b.unit for b in buckets if b.stage == 0 and not b.kind.group.frozen]
    start = min(trained, default=len(unit_stages))
    first = sum(unit_stages[unit] == 0 and unit < start for unit in units)
    stages = [unit_stages[unit] for unit in units]
    times = gathers(stages, program, first=first, overlap=sharding.overlap)
    for bucket in absent:
        own_bytes = bucket.numel // n * bucket.kind.dtype.itemsize
        parameters += times[units.index(bucket.unit)] * (n - 1) * own_bytes
    return {"gradients": gradients, "parameters": parameters}


def gathers(
    stages: Sequence[int], program: Sequence[Action], *, first: int = 0, overlap: bool = True
) -> list[int]:
    """How often a step gathers each unit, given their stages: when the ring holds it no more.

    Units before `first` have no backward, since everything up to them is frozen.
    """
    resident: list[int | None] = [None] * SLOTS
    times = [0] * len(stages)
    for action in program:
        if action.kind == "W":
            continue
        units = [i for i, stage in enumerate(stages) if stage == action.stage]
        if action.kind != "F":
            units.reverse()
        for place, following in itertools.zip_longest(units, units[1:]):
            if action.kind != "F" and place < first:
                break
            ahead = [following] if overlap and following is not None else []
            for i in [place, *ahead]:
                if resident[i % SLOTS] != i:
                    resident[i % SLOTS] = i
                    times[i] += 1
    return times
