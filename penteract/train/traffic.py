"""What a rank sends in one update, by arithmetic: the formula that tests and `verify` measure.

A message's bytes are counted as `wire` says. With n ranks on an axis, t tokens in a micro-batch of
this rank, h hidden, l layers on it, m of them with experts, s of these with shared ones, e bytes a
number and w at least float32's 4:

| axis  | what                  | messages                    | bytes of each             |
|-------|-----------------------|-----------------------------|---------------------------|
| tp    | stream forward        | p+1 sums, and sp's gathers  | t·h·e                     |
| tp    | stream backward       | p+1 sums, and sp's gathers  | t·h·e                     |
| tp    | stream gathered again | p+1 gathers, with sp only   | t·h·e                     |
| tp    | stream recomputed     | `recomputed`, a block       | t·h·e                     |
| tp    | experts               | 2m gathers, without sp only | t·h·e                     |
| tp    | vocabulary            | 2 all-reduces               | t·w and 3·t·w             |
| tp    | gradients             | 1 all-reduce a step         | those partial over tp     |
| cp    | attention             | see `parallel.context`      | those of the exchange     |
| tp-cp | loads, logits,        | see `nn.moe`, recomputed    | see there                 |
|       | choices               | once more                   |                           |
| etp-ep | tokens               | see `parallel.expert`       | see there                 |
| etp   | gradients             | 1 all-reduce a step         | those partial over etp    |
| pp    | streams               | 1 a stage whose next or     | t·h·e, with sp t·h·e/tp   |
|       |                       | last one is elsewhere       |                           |
| tied  | gradients             | 1 all-reduce a step         | the tied weight's         |
| dp-cp, edp | gradients,       | see `parallel.buffers`      | buckets                   |
|       | parameters            |                             |                           |
| any   | norm                  | see `optim.norm`            | 8                         |
| dp-cp | counts                | 1 all-reduce a step         | 8, with experts 2·8       |
| tp-dp-cp | matrices           | 2 all-to-alls, with Muon    | see `optim.muon`          |
| tp-dp-cp | loads              | 1 all-reduce a step         | see `train.loads`         |
| pp    | experts               | see `train.loads`           | JSON                      |
| world | losses and the norm   | 1 all-reduce a step         | 8 a loss term, and 16     |
| world | metrics               | 1 all-reduce a step         | 5·8                       |

A sum is an all-reduce, with sp a reduce-scatter. In forward p = 2l-m+s sums follow attentions and
feed-forward layers, shared experts too, and one the embedding, and p gathers precede them and one
the head; backward has a gather for each sum, and a sum for each gather. What needs embedding or
head is sent where they are. With context parallelism t is the rows of a rank, padding too. Over tp,
cp, tp-cp and etp-ep a backward through the whole model is counted: where the first layers are
frozen, less is sent. What follows from the routing (tokens by `all_to_all`, JSON) is not known.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from penteract.config import Config
from penteract.data.loader import micro_batches
from penteract.data.packing import balanced, costs
from penteract.data.synthetic import SyntheticSource
from penteract.families import model_spec
from penteract.grid import Grid
from penteract.mesh import Axis
from penteract.nn.model import Stages
from penteract.nn.moe import SUMS, MoESpec
from penteract.optim.groups import group_of
from penteract.optim.muon_plan import Matrix, plan
from penteract.parallel.buckets import Bucket, Sharding, Units, at_least_float32, lay_out
from penteract.parallel.context.cut import Cut
from penteract.parallel.expert.places import ExpertParallel
from penteract.parallel.expert.traffic import Routed
from penteract.parallel.parameters import declared_parameters
from penteract.parallel.pipeline.actions import Action, actions
from penteract.parallel.tensor import TensorParallel
from penteract.parallel.zero import SLOTS
from penteract.placement import Fragment, even_sizes, split_range
from penteract.train.batch_ramp import cursor, global_batch
from penteract.train.block_traffic import (
    Held,
    Portion,
    Sent,
    all_reduced,
    count,
    micro_batch_bytes,
)
from penteract.train.pipeline import Plan
from penteract.train.pipeline import plan as make_plan

SCALAR = 8  # norms, counts, losses, loads and metrics travel in float64
METRICS = 5  # four times and the memory


def step_bytes(
    config: Config,
    grid: Grid,
    rank: int,
    *,
    step: int = 1,
    routed: Mapping[tuple[int, int], Routed] | None = None,
) -> Sent:
    """Bytes that `rank` of `grid` sends in update `step`: {axis: {what: bytes}}, axes above 1 only.

    `config` is resolved and has its vocabulary. The sum over an axis is what its `traffic` counts.
    Bytes are None where they follow from the routing; of tokens `routed` may say where they go, by
    block and place among the rank's micro-batches. Packed documents are the synthetic source's.
    """
    plan, pp = make_plan(config), grid.coordinates(rank)["pp"]
    held = _held(config, grid, rank, plan)
    model = _model(held, plan.held(pp))
    buckets = _parameters(model, config, grid, rank)
    trained = [bucket for bucket in buckets if not bucket.kind.group.frozen]
    sent: Sent = {}
    micro = range(len(_parts(config, grid, rank, step)))
    for i in micro:
        portion = _portion(config, grid, rank, step, i)
        known = {block: r for (block, number), r in (routed or {}).items() if number == i}
        count(sent, micro_batch_bytes(held, portion, known))
        stream = (portion.own if held.tp.sequence else portion.rows) * held.row_bytes
        count(sent, {"pp": {"streams": _crossings(plan, pp) * stream}})
    program = list(actions(plan.schedule(len(micro)).programs[pp]))
    count(sent, _data(buckets, model.unit_stages, program))
    count(sent, _partial(trained, grid))
    first = plan.placement[0]
    count(sent, _norm([b for b in trained if pp == first or not _tied(b)], grid))
    count(sent, _numbers(held, grid, step))
    if config.optim.name == "muon":
        count(sent, {"tp-dp-cp": {"matrices": _muon(config, grid, rank, plan)}})
    apart = first != plan.placement[-1] and any(map(_tied, trained))
    wide = {name for name in sent if (apart if name == "tied" else grid.size(name) > 1)}
    return {
        name: what
        for name, what in sent.items()
        if name in wide and any(x != 0 for x in what.values())
    }


def _numbers(held: Held, grid: Grid, step: int) -> Sent:
    """The few numbers on which a step agrees, or that it says."""
    config, moe = held.config, held.config.moe
    losses = 1 + (config.train.z_loss > 0)
    counts, routers = 1, [b.mlp.router for _, b, _ in held.blocks() if isinstance(b.mlp, MoESpec)]
    sent: Sent = {}
    if moe is not None:
        losses += moe.balance.endswith("aux") + (moe.z_weight > 0)
        counts += 1
        loads = sum(router.experts + len(SUMS) for router in routers) * SCALAR
        sent["tp-dp-cp"] = {"loads": all_reduced(loads, grid.size("tp-dp-cp"))}
        if step % config.log.every == 0:
            sent["pp"] = {"experts": None}
    sent["dp-cp"] = {"counts": all_reduced(counts * SCALAR, grid.size("dp-cp"))}
    sent["world"] = {
        "losses": all_reduced(
            (losses + 2) * SCALAR, grid.world
        ),  # is the norm finite, or too large
        "metrics": all_reduced(METRICS * SCALAR, grid.world),
    }
    return sent


def _partial(trained: Sequence[Bucket], grid: Grid) -> Sent:
    """Gradients that are summed once a step, besides those over the ranks of the sharding."""
    sent: Sent = {}
    for name in ("tp", "etp", "tied"):
        buckets = [bucket for bucket in trained if name in bucket.kind.more_axes]
        size = sum(b.numel // b.kind.sharding.shard.size * b.kind.wide.itemsize for b in buckets)
        sent[name] = {"gradients": all_reduced(size, 2 if name == "tied" else grid.size(name))}
    return sent


def _tied(bucket: Bucket) -> bool:
    return "tied" in bucket.kind.more_axes


def _norm(counted: Sequence[Bucket], grid: Grid) -> Sent:
    """One number for each way to split parameters, over the axes that do and over their owners."""
    sent: Sent = {"pp": {"norm": all_reduced(SCALAR, grid.pp)}}
    for split_axes, shard in {(b.kind.split_axes, b.kind.sharding.shard) for b in counted}:
        for name in split_axes:
            count(sent, {name: {"norm": all_reduced(SCALAR, grid.size(name))}})
        count(sent, {shard.name: {"norm": all_reduced(SCALAR, shard.size)}})
    return sent


def _crossings(plan: Plan, rank: int) -> int:
    """How many streams, or gradients of streams, a pipeline rank sends in a micro-batch."""
    pairs = itertools.pairwise(plan.placement)
    return sum(pair.count(rank) for pair in pairs if pair[0] != pair[1])


def _parts(config: Config, grid: Grid, rank: int, step: int) -> list[range]:
    """The rank's micro-batches, as places in the step's global batch."""
    train, dp = config.train, grid.coordinates(rank)["dp"]
    return micro_batches(global_batch(step, train), train.micro_batch, grid.dp, dp)


def _portion(config: Config, grid: Grid, rank: int, step: int, i: int) -> Portion:
    """Micro-batch `i` of the rank."""
    at = grid.coordinates(rank)
    part = _parts(config, grid, rank, step)[i]
    rows, own = _rows(config, grid, rank, step, i)
    if config.moe is None:
        return Portion(rows, own, own, own, len(part))
    lengths = _lengths(config, step, part)
    start, stop = split_range(rows, grid.tp, at["tp"])
    real = int((Cut.of(lengths, grid.cp).rows(at["cp"])[start:stop] >= 0).sum())
    together = sum(_rows(config, grid, r, step, i)[1] for r in _group(grid, "etp-ep", rank))
    return Portion(rows, own, real, together, len(lengths))


def _rows(config: Config, grid: Grid, rank: int, step: int, i: int) -> tuple[int, int]:
    """Rows of micro-batch `i` on the rank's context rank, and its own where tp splits them."""
    rows = -(-len(_parts(config, grid, rank, step)[i]) * config.data.seq // grid.cp)
    return rows, even_sizes(rows, grid.tp)[grid.coordinates(rank)["tp"]]


def _lengths(config: Config, step: int, part: range) -> tuple[int, ...]:
    """Of the sequences of a micro-batch."""
    data, train, vocab = config.data, config.train, model_spec(config).vocab
    source = SyntheticSource(seq=data.seq, vocab=vocab, seed=data.seed, packing=data.packing)
    first, batch = cursor(step - 1, train), global_batch(step, train)
    order = np.arange(first, first + batch)
    if data.balance:
        every = source.lengths(order)
        order = first + balanced(costs(every, data.seq), train.micro_batch)
    return source.lengths(order[part.start : part.stop])


def _group(grid: Grid, name: str, rank: int) -> list[int]:
    """The ranks of the rank's group."""
    rows = grid.groups(name)
    return [int(r) for r in rows[(rows == rank).any(1)][0]]


def _axis(grid: Grid, name: str, rank: int) -> Axis:
    """An axis that only has a size: nothing is sent over it."""
    ranks = _group(grid, name, rank)
    return Axis(name, len(ranks), ranks.index(rank), tuple(ranks))


def _held(config: Config, grid: Grid, rank: int, plan: Plan) -> Held:
    ep, etp, group, parts, tp, cp = (
        _axis(grid, name, rank) for name in ("ep", "etp", "etp-ep", "tp-cp", "tp", "cp")
    )
    homes = tuple(grid.coordinates(r)["ep"] for r in group.ranks)
    stages = plan.held(grid.coordinates(rank)["pp"])
    names = tuple(name for stage in stages.values() for name in stage)
    experts = ExpertParallel(ep, etp, group, homes, parts)
    return Held(
        config, model_spec(config), names, TensorParallel(tp, config.parallel.sp), cp, experts
    )


def _sharding(config: Config, axis: Axis) -> Sharding:
    parallel, n = config.parallel, axis.size
    replicas = n if parallel.zero == 0 else parallel.replicas
    run, place = divmod(axis.rank, n // replicas)
    shard, replicate = (
        Axis(axis.name, size, at, tuple(range(size)))
        for size, at in ((n // replicas, place), (replicas, run))
    )
    return Sharding(shard, replicate, parallel.zero, parallel.dp_overlap)


def _muon(config: Config, grid: Grid, rank: int, layers: Plan) -> int:
    """Bytes of what the rank holds of matrices to their owners, and of its own to their holders."""
    group = _group(grid, "tp-dp-cp", rank)
    stages = layers.held(grid.coordinates(rank)["pp"])
    parts: list[list[Fragment]] = []
    for r in group:
        buckets = _parameters(_model(_held(config, grid, r, layers), stages), config, grid, r)
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


def _model(held: Held, stages: Mapping[int, Sequence[str]]) -> Stages:
    """What a rank holds, declared, without memory."""
    return Stages(
        held.spec,
        held.tp,
        stages,
        dtype=held.dtype,
        vocab_multiple=held.config.parallel.vocab_multiple,
        experts=held.experts,
    )


def _parameters(model: Stages, config: Config, grid: Grid, rank: int) -> list[Bucket]:
    """The buckets of a rank in the order of backward."""
    dense = _sharding(config, _axis(grid, "dp-cp", rank))
    experts = None if config.moe is None else _sharding(config, _axis(grid, "edp", rank))
    entries, groups = declared_parameters(model)[::-1], group_of(config.optim.rules)
    kinds = lay_out(
        entries, Units(model), dense, experts=experts, group_of=groups, bucket_bytes=None
    )
    return [bucket for kind in kinds for bucket in kind.buckets]


def _data(buckets: Sequence[Bucket], unit_stages: Sequence[int], program: Sequence[Action]) -> Sent:
    """What a step's gradients and parameters send over the ranks of their shardings."""
    sent: Sent = {}
    micro_batches = len({action.micro_batch for action in program})
    trained = [bucket for bucket in buckets if not bucket.kind.group.frozen]
    for bucket in trained:
        n, r = bucket.kind.sharding.shard.size, bucket.kind.sharding.replicate.size
        own, wide = bucket.numel // n, bucket.kind.wide.itemsize
        often = bucket.kind.sharding.stage >= 2 and not bucket.late
        summed = (micro_batches if often else 1) * (n - 1) * own * wide
        gathered = (n - 1) * own * bucket.kind.dtype.itemsize * bucket.kept
        what = {"gradients": summed + all_reduced(own * wide, r), "parameters": gathered}
        count(sent, {bucket.kind.sharding.shard.name: {**what}})
    absent = [bucket for bucket in buckets if not bucket.kept][::-1]  # the order of forward
    units = sorted({bucket.unit for bucket in absent})
    # In the first stage nothing up to the first unit that is trained has a backward.
    start = min((b.unit for b in trained if b.stage == 0), default=len(unit_stages))
    first = sum(unit_stages[unit] == 0 and unit < start for unit in units)
    stages = [unit_stages[unit] for unit in units]
    overlap = all(bucket.kind.sharding.overlap for bucket in absent)
    times = gathers(stages, program, first=first, overlap=overlap)
    for bucket in absent:
        shard = bucket.kind.sharding.shard
        own_bytes = bucket.numel // shard.size * bucket.kind.dtype.itemsize
        gathered = times[units.index(bucket.unit)] * (shard.size - 1) * own_bytes
        count(sent, {shard.name: {"parameters": gathered}})
    return sent


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
