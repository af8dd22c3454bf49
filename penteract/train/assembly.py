"""What a run is made of, from its configuration: an executor with its channels, and buffers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from datetime import timedelta

import torch

from penteract.collectives import exchange, meet
from penteract.config import Config, ConfigError
from penteract.mesh import Axis, Mesh, create_channels, single
from penteract.optim.groups import group_of, unmatched
from penteract.parallel.buckets import Sharding
from penteract.parallel.buffers import Buffers
from penteract.parallel.pipeline.actions import Action
from penteract.parallel.pipeline.executor import Executor
from penteract.train.pipeline import check_backend
from penteract.train.task import Task


def executor_of(
    task: Task, config: Config, mesh: Mesh, device: torch.device, note: Callable[[Action], None]
) -> Executor:
    """With the channels that the pipeline needs, made and tried in one order on all ranks.

    `note` gets every action that begins. Raises ConfigError where the task has other stages.
    """
    parallel, pp = config.parallel, mesh.axis("pp")
    has = max(task.pipeline.placement) + 1
    if not parallel.pp == pp.size == has:
        raise ConfigError(
            f"parallel.pp = {parallel.pp}, the mesh has {pp.size} pipeline ranks, and the stages "
            f"of the task lie on {has}: they must be as many (see penteract.train.task.Pipeline)"
        )
    check_backend(parallel.pp_backend, device)
    places = itertools.pairwise(task.pipeline.placement)
    neighbours = [(a, b) for a, b in places if a != b]
    channels = create_channels(
        pp,
        [*neighbours, *((b, a) for a, b in neighbours)],
        backend=parallel.pp_backend,
        timeout=timedelta(seconds=parallel.pp_timeout_s),
    )
    for channel in channels.values():
        meet(channel, device)
    return Executor(pp.rank, channels, device, task.pipeline.turns, note)


def buffers_of(task: Task, config: Config, mesh: Mesh, device: torch.device) -> Buffers:
    """The model's parameters in buffers. Raises ConfigError where a rule matches none of them."""
    placement = task.pipeline.placement
    tied = mesh.axis("tied") if placement[0] != placement[-1] else single("tied")
    dense, experts = sharding_of(config, mesh)
    buffers = Buffers(
        task.model,
        dense,
        experts=experts,
        seed=config.train.seed,
        device=device,
        more_axes=[mesh.axis("tp"), tied, mesh.axis("etp")],
        group_of=group_of(config.optim.rules),
    )
    _check_rules(buffers, config, mesh.axis("world"))
    return buffers


def sharding_of(config: Config, mesh: Mesh) -> tuple[Sharding, Sharding | None]:
    """Who owns what of dense parameters, and of experts' where the model has some, and where: as
    `parallel.zero`, `parallel.replicas`, `optim.offload` say.
    """
    parallel = config.parallel
    how = parallel.zero, parallel.replicas, parallel.dp_overlap, config.optim.offload
    dense = Sharding.over(mesh.axis("dp-cp"), *how)
    return dense, None if config.moe is None else Sharding.over(mesh.axis("edp"), *how)


def _check_rules(buffers: Buffers, config: Config, world: Axis) -> None:
    """Raise ConfigError on all ranks where a user's rule matches no tensor of the model."""
    if not config.optim.rules:
        return
    slots = [slot for bucket in buffers.all_buckets for slot in bucket.slots]
    names = sorted({p.tensor for slot in slots for p in slot.entry.placement.pieces})
    answers = exchange(json.dumps(names).encode(), world)
    everywhere = dict.fromkeys(name for answer in answers for name in json.loads(answer))
    if messages := unmatched(config.optim.rules, everywhere):
        raise ConfigError("\n".join(messages))
