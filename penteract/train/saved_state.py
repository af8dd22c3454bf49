"""What a run keeps in a checkpoint, and how it goes on from one that was written otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penteract.checkpoint.agreement import agreed, together
from penteract.checkpoint.difference import unlike
from penteract.checkpoint.format import UNEQUAL, Manifest, StoredTensor
from penteract.checkpoint.io import Record, load, read_manifest
from penteract.checkpoint.model import STATE_PREFIXES, kept, owned
from penteract.checkpoint.plan import Shard, changed_state, stored_as
from penteract.checkpoint.remote import Place
from penteract.config import Config, ConfigError
from penteract.config_file import from_dict, to_dict
from penteract.mesh import Axis
from penteract.optim.optimizer import Optimizer
from penteract.parallel.buffers import Buffers
from penteract.train.batch_ramp import ramp_until
from penteract.train.partial import left_out, matches, taken
from penteract.train.passed import data_step, from_state, to_state
from penteract.train.task import Task
from penteract.train.upcycle import blocks_to_fill, few, note, source

if TYPE_CHECKING:
    from penteract.train.run import Run


def held(
    model: nn.Module, buffers: Buffers, optimizer: Optimizer
) -> Iterator[tuple[Shard, Tensor]]:
    """Everything saved, as boxes of logical tensors: weights, what else the model keeps, masters,
    moments.
    """
    yield from kept(model)
    for bucket in buffers.all_buckets:
        narrow = bucket.kind.narrow
        yield from owned("", bucket.owned(bucket.own_parameters if narrow else bucket.master))
    for bucket in (bucket for bucket in buffers.buckets if bucket.kind.narrow):
        yield from owned("master/", bucket.owned(bucket.master))
    for name, bucket, moment in optimizer.state():
        yield from owned(f"{name}/", bucket.owned(moment))


def record(run: Run) -> Record:
    """What a step of a run says besides its tensors."""
    state = {
        "step": run.step,
        "tokens": run.tokens,
        "cursor": run.task.cursor(data_step(run.step, run.passed)),
        "updates": run.optimizer.updates,
        "loss_scale": run.loss_scale.state(),
        "skipped": run.skipped,
        **to_state(run.passed),
        **run.outliers.state(),
        **run.task.state,
        **({UNEQUAL: run.unequal} if run.unequal else {}),
    }
    grid = dataclasses.asdict(run.mesh.grid)
    layout = {key: value for key, value in grid.items() if isinstance(value, int | str)}
    return Record(step=run.step, config=to_dict(run.config), layout=layout, state=state)


def resume(run: Run, path: Place, *, check_hashes: bool) -> list[str]:
    """Continue the run saved at `path`; what of [optim] is another now, a line each.

    Moments of another `optim.moments` are converted, to the nearest.
    Tensors that are frozen now leave their state unread; that of tensors that have none there,
    since they were frozen, starts at zero, their masters from the weights.
    Raises ConfigError where model, data or optimizer are others.
    """
    world = run.mesh.axis("world")
    manifest = agreed(world, lambda: read_manifest(path))
    check_same(path, manifest, run.config, run.task)
    shards = run.held()
    told = together(world, lambda: sorted({shard.tensor for shard, _ in shards}))
    names = {name for answer in told for name in answer}
    unread, fresh = changed_state(manifest.tensors, names, STATE_PREFIXES)
    run.buffers.wait()
    wanted = [
        (as_saved(shard, manifest.tensors), view)
        for shard, view in shards
        if shard.tensor not in fresh
    ]
    part = run.activity.told(f"reading {path}")
    load_as(path, wanted, axis=world, check_hashes=check_hashes, unread=unread, told=part)
    start_state(run.buffers, run.optimizer, fresh)
    run.step, run.tokens = manifest.state["step"], manifest.state["tokens"]
    run.skipped = manifest.state.get("skipped", 0)
    run.passed = from_state(manifest.state)
    run.outliers.load(manifest.state)
    run.buffers.publish(frozen=True)
    run.optimizer.updates = manifest.state["updates"]
    run.loss_scale.load(manifest.state.get("loss_scale"))
    theirs, mine = (to_dict(c)["optim"] for c in (from_dict(manifest.config), run.config))
    return [*differences(theirs, mine, "optim"), *said_of(fresh)]


def check_same(path: Place, manifest: Manifest, config: Config, task: Task) -> None:
    """Refuse a checkpoint whose model, data or optimizer are others than the run's: ConfigError."""
    state = manifest.state
    theirs = from_dict(manifest.config)  # with the defaults of keys that came after it
    mine = _compared(config, task.state)
    saved = _compared(theirs, {key: state.get(key) for key in task.state})
    seen, step = state["cursor"], data_step(state["step"], from_state(state))
    if (would_have := task.cursor(step)) != seen:
        ramp = [list(entry) for entry in ramp_until(step, theirs.train)]
        raise ConfigError(
            f"{path}: its {step} steps took {seen} samples, but with this train.global_batch "
            f"and train.ramp they would have taken {would_have}: say how large the batches "
            f"were so far with train.ramp = {ramp}"
        )
    if wrong := list(differences(saved, mine)):
        raise ConfigError(
            f"{path} is of another run, and training would not continue it:\n  "
            + "\n  ".join(wrong)
            + "\nChoose another checkpoint.dir, or start from its weights with checkpoint.load."
        )


def _compared(config: Config, state: Mapping[str, Any]) -> dict[str, Any]:
    """What a run must keep: not how something is computed, nor a template's file."""
    values = to_dict(config)
    model, moe = values["model"], values.get("moe", {})
    for how in ("dispatcher", "pad"):
        moe.pop(how, None)
    del model["attention"]
    chat = state.get("chat")
    hashed = {"chat": {"hash": chat["hash"]}} if chat else {}
    return {"model": model, "moe": moe, "optim": {"name": config.optim.name}, **state, **hashed}


@torch.no_grad()
def start_state(buffers: Buffers, optimizer: Optimizer, names: Collection[str]) -> None:
    """Masters and moments that stand under `names` start: from the weights, and at zero."""
    for bucket in buffers.buckets:
        weights = bucket.owned(bucket.own_parameters)
        masters = bucket.owned(bucket.master)
        for (_, fragment, weight), (_, _, master) in zip(weights, masters, strict=True):
            if f"master/{fragment.tensor}" in names:
                master.copy_(weight)
    for name, bucket, moment in optimizer.state():
        for _, fragment, view in bucket.owned(moment):
            if f"{name}/{fragment.tensor}" in names:
                view.zero_()


def as_saved(shard: Shard, saved: Mapping[str, StoredTensor]) -> Shard:
    """`shard`; a moment's in the type in which it was saved, where one of the two is bfloat16."""
    stored = saved.get(shard.tensor)
    if stored is None or not shard.tensor.startswith(STATE_PREFIXES):
        return shard
    types = (shard.dtype, stored.dtype)
    return dataclasses.replace(shard, dtype=stored.dtype) if "bfloat16" in types else shard


def load_as(path: Place, wanted: Sequence[tuple[Shard, Tensor]], **how: Any) -> None:
    """`load` where a shard may be of another type than its view: the values are converted."""
    types = [getattr(torch, shard.dtype) for shard, _ in wanted]
    views = [view for _, view in wanted]
    values = [
        view if view.dtype == dtype else torch.empty_like(view, dtype=dtype)
        for view, dtype in zip(views, types, strict=True)
    ]
    load(path, [(shard, x) for (shard, _), x in zip(wanted, values, strict=True)], **how)
    for view, x in zip(views, values, strict=True):
        if x is not view:
            view.copy_(x)


def load_weights(
    path: Place,
    model: nn.Module,
    buffers: Buffers,
    *,
    config: Config,
    axis: Axis,
    told: Callable[[int], None],
) -> list[str]:
    """Fill weights, and what else the model keeps, from those saved at `path`; what is not from
    there, a line each.

    Masters are filled from the run's own where it kept some, so they must be of their type. A
    tensor that is frozen on one side has a master on the other only, and is converted. A router's
    bias is left behind where none is wanted, and stays at zero where there was none. Tensors that
    `checkpoint.load_only` and `load_missing` leave out keep the values they have.
    """
    saved, options = agreed(axis, lambda: read_manifest(path)).tensors, config.checkpoint
    weights = {name.removeprefix("master/") for name in saved}
    weights = {name for name in weights if not name.startswith(STATE_PREFIXES)}
    filled = blocks_to_fill(config, saved) if options.upcycle else []
    parts = [
        (bucket, shard, view)
        for bucket in buffers.all_buckets
        for shard, view in owned("", bucket.owned(bucket.master))
    ]
    more = {s.tensor: (s, x) for s, x in kept(model) if not s.tensor.startswith(STATE_PREFIXES)}
    mine = {shard.tensor: source(shard.tensor, filled) for _, shard, _ in parts}
    mine |= {name: name if name in saved else None for name in more}
    # Of all ranks, since each compares what all want with what is stored.
    sources = {k: v for answer in together(axis, lambda: mine) for k, v in answer.items()}
    names = taken(sources, weights, options)
    wanted: list[tuple[Shard, Tensor]] = [more[name] for name in more if name in names]
    for bucket, shard, view in parts:
        if shard.tensor in names:
            types = (bucket.master.dtype, bucket.kind.dtype, bucket.kind.wide)
            dtypes = [str(dtype).removeprefix("torch.") for dtype in types]
            name, dtype = stored_as(saved, sources[shard.tensor], dtypes)
            wanted.append((dataclasses.replace(shard, tensor=name, dtype=dtype), view))
    unread = {sources[name] for name in names}  # what has a master may stay unread itself
    unread |= {name for name in saved if name.endswith(".router.bias") and name not in sources}
    if options.load_only:
        unread |= {name for name in saved if not matches(name, options.load_only)}
    buffers.wait()
    how = {"check_hashes": options.verify == "hashes", "skip": STATE_PREFIXES, "unread": unread}
    load_as(path, wanted, axis=axis, told=told, **how)
    buffers.publish(frozen=True)
    said = [note(config, filled)] if filled else []
    partly = options.load_only or options.load_missing
    return [*said, *left_out(sources, weights, names)] if partly else said


def said_of(fresh: Collection[str]) -> Iterator[str]:
    """What is said of optimizer state that a checkpoint does not have."""
    if tensors := sorted({name.partition("/")[2] for name in fresh}):
        yield f"moments start at zero, the checkpoint has none of {few(tensors)}"


def differences(saved: Any, mine: Any, key: str = "") -> Iterator[str]:
    """A line for every value in which two nested dictionaries differ."""
    for name, a, b in unlike(saved, mine, key):
        yield f"{name}: saved {a!r}, now {b!r}"
