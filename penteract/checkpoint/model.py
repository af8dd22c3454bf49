"""A model from a checkpoint, whatever layout wrote it: on one process, or cut into stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from penteract.checkpoint.examine import read_manifest
from penteract.checkpoint.io import load
from penteract.checkpoint.plan import Shard
from penteract.checkpoint.remote import Place
from penteract.config import Config
from penteract.config_file import from_dict
from penteract.families import model_spec
from penteract.mesh import Axis, create_channels, single
from penteract.nn.model import Stage, Stages
from penteract.nn.pipelined import Pipelined
from penteract.parallel.buckets import Slot
from penteract.parallel.parameters import declared_parameters, kept_tensors, place_kept
from penteract.parallel.pipeline.stages import cut
from penteract.parallel.tensor import TensorParallel
from penteract.placement import Fragment, Placement, whole

# Tensors of a run that are not its weights stand under these prefixes.
STATE_PREFIXES = ("master/", "exp_avg/", "exp_avg_sq/", "momentum/", "load/")


def boxes(prefix: str, placement: Placement, stored: Tensor) -> Iterator[tuple[Shard, Tensor]]:
    """A stored tensor as boxes of logical tensors, each with its view of the values."""
    dtype = str(stored.dtype).removeprefix("torch.")
    for fragment in placement.fragments():
        view = stored[fragment.local.slices()].view(fragment.box.size)
        yield Shard(prefix + fragment.tensor, fragment.shape, dtype, fragment.box), view


def kept(model: nn.Module) -> Iterator[tuple[Shard, Tensor]]:
    """What a model keeps besides parameters: every rank holds it whole."""
    for layer, attribute, name in kept_tensors(model):
        x: Tensor = getattr(layer, attribute)
        dtype, shape = str(x.dtype).removeprefix("torch."), tuple(x.shape)
        yield Shard(name, shape, dtype, whole(shape)), x


def owned(
    prefix: str, parts: Iterable[tuple[Slot, Fragment, Tensor]]
) -> Iterator[tuple[Shard, Tensor]]:
    """What a rank owns of a run, as boxes of logical tensors."""
    for _, fragment, view in parts:
        dtype = str(view.dtype).removeprefix("torch.")
        yield Shard(prefix + fragment.tensor, fragment.shape, dtype, fragment.box), view


def load_model(
    path: Place, *, device: torch.device | str = "cpu"
) -> tuple[Stage, Config, dict[str, Any]]:
    """The whole model saved at step directory `path`, its configuration and its saved state."""
    manifest = read_manifest(path)
    config = from_dict(manifest.config)
    alone, dtype = TensorParallel(single("tp")), getattr(torch, config.train.dtype)
    model = Stage(model_spec(config), alone, dtype=dtype)
    load(path, _allocate(model, device), skip=STATE_PREFIXES)
    return model.eval(), config, manifest.state


def load_pipelined(
    path: Place, pp: Axis, *, device: torch.device | str = "cpu"
) -> tuple[Pipelined, Config, dict[str, Any]]:
    """As `load_model`, one stage on each rank of `pp`; all of them call it together."""
    manifest = read_manifest(path)
    config = from_dict(manifest.config)
    spec, dtype = model_spec(config), getattr(torch, config.train.dtype)
    names = cut(spec.layer_names, pp.size)
    alone = TensorParallel(single("tp"))
    stages = Stages(spec, alone, {pp.rank: names[pp.rank]}, dtype=dtype)
    load(path, _allocate(stages, device), axis=pp, skip=STATE_PREFIXES)
    channels = create_channels(pp, pairwise(range(pp.size)))
    model = Pipelined(stages.eval(), range(pp.size), pp, channels, dtype)
    return model, config, manifest.state


def _allocate(model: nn.Module, device: torch.device | str) -> list[tuple[Shard, Tensor]]:
    wanted: list[tuple[Shard, Tensor]] = []
    for entry in declared_parameters(model):
        shape, dtype = entry.placement.shape, entry.parameter.dtype
        entry.replace(torch.empty(shape, dtype=dtype, device=device))
        wanted += boxes("", entry.placement, entry.parameter.detach())
    place_kept(model, device)
    model_state = [(shard, x) for shard, x in kept(model) if shard.tensor.partition("/")[1] == ""]
    return [*wanted, *model_state]
