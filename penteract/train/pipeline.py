"""How a configuration's model lies on a pipeline: its stages, their ranks, the order of their work.

Everything here is decided before a process starts, so that what cannot be is refused there.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penteract.config import Config, ConfigError, check_world, resolve
from penteract.config_file import from_dict, to_dict
from penteract.data.loader import micro_batches
from penteract.errors import UserError
from penteract.families import model_spec
from penteract.layout_rules import SIZES, check_chunks
from penteract.nn.flops import layer_flops
from penteract.parallel.pipeline.actions import Schedule
from penteract.parallel.pipeline.schedules import SCHEDULES, from_json, schedule
from penteract.parallel.pipeline.stages import Cut, cut
from penteract.train.batch_ramp import global_batch


@dataclass(frozen=True)
class Plan:
    """The layers of every stage, the pipeline rank of each, and what is done in which order."""

    stages: Cut
    placement: tuple[int, ...]
    kind: str  # of schedule, or the file of a table
    table: Schedule | None = None

    def schedule(self, micro_batches: int) -> Schedule:
        """For a step of so many micro-batches a rank. Raises ConfigError where a table has not."""
        if self.table is None:
            ranks = max(self.placement) + 1
            chunks = len(self.placement) // ranks
            return schedule(self.kind, ranks=ranks, chunks=chunks, micro_batches=micro_batches)
        if self.table.micro_batches != micro_batches:
            raise ConfigError(
                f"{self.kind} is a table for micro-batches = {self.table.micro_batches}, but a "
                f"step has {micro_batches}: change train.global_batch or train.micro_batch, or the "
                f"table"
            )
        return self.table

    def held(self, rank: int) -> dict[int, tuple[str, ...]]:
        """The stages of one pipeline rank, by number, with their layers."""
        return {i: self.stages[i] for i, r in enumerate(self.placement) if r == rank}


def plan(config: Config) -> Plan:
    """The plan of a resolved configuration that has its vocabulary. Raises UserError."""
    parallel, spec = config.parallel, model_spec(config)
    pp, chunks, table = parallel.pp, parallel.chunks, None
    kind = parallel.schedule or ("1f1b" if chunks in (None, 1) else "interleaved")
    if kind.endswith(".json"):
        table = _table(Path(kind), pp, chunks)
        placement = table.placement
    else:
        usual = SCHEDULES[kind].chunks if kind in SCHEDULES else None
        chunks = chunks or usual or 1
        check_chunks(chunks, pp=pp)
        placement = schedule(kind, ranks=pp, chunks=chunks, micro_batches=1).placement
    ends = placement[0], placement[-1]
    if spec.tied and ends[0] != ends[1] and ends != (0, parallel.pp - 1):
        raise ConfigError(
            f"{kind}: with model.tied the first stage and the last lie on pipeline ranks 0 and "
            f"{parallel.pp - 1}, or both on one; here they lie on {ends[0]} and {ends[1]}"
        )
    cost = functools.partial(layer_flops, spec, config.data.seq)
    stages = cut(spec.layer_names, len(placement), parallel.stages, cost=cost)
    return Plan(stages, placement, kind, table)


def _table(path: Path, ranks: int, chunks: int | None) -> Schedule:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"parallel.schedule: {path} is no JSON file: {error}") from None
    table = from_json(value, name=str(path))
    stages = len(table.placement)
    if table.ranks != ranks or (chunks is not None and stages != ranks * chunks):
        asked = "" if chunks is None else f" and parallel.chunks = {chunks}"
        raise ConfigError(
            f"parallel.schedule: {path} has {stages} stages on {table.ranks} ranks; that is not "
            f"parallel.pp = {ranks}{asked}"
        )
    return table


def in_layout(config: Config, keys: Mapping[str, Any]) -> Config:
    """`config` with these of [parallel]; sizes that are not among them are 1. Raises UserError."""
    values = to_dict(config)
    kept = {k: v for k, v in values["parallel"].items() if k not in SIZES}
    values["parallel"] = {**kept, **keys}
    try:
        return resolve(from_dict(values))
    except UserError as error:
        raise ConfigError(str(error).replace("saved configuration: ", "")) from None


def fitted(config: Config, world: int) -> tuple[Config, str]:
    """`config` in the first layout of `parallel.allowed` that fits `world` ranks, and which it is;
    where none is listed, itself and nothing. Raises UserError where nothing fits.
    """
    allowed, reasons = config.parallel.allowed, list[str]()
    for i, keys in enumerate(allowed, 1):
        named = ", ".join(f"{k} = {json.dumps(v)}" for k, v in keys.items()) or "nothing split"
        try:
            made = in_layout(config, keys)
        except UserError as error:
            raise ConfigError(f"parallel.allowed, layout {i} ({named}): {error}") from None
        try:
            check(made, world)
        except UserError as error:
            reasons.append(f"  {named}: {error}")
            continue
        return made, f"{world} ranks: layout {i} of {len(allowed)} of parallel.allowed, {named}"
    if reasons:
        said = "\n".join(reasons)
        raise ConfigError(f"parallel.allowed: no layout fits {world} ranks:\n{said}")
    check(config, world)
    return config, ""


def check(config: Config, world: int) -> None:
    """Every rule that joins a resolved configuration with the number of ranks. Raises UserError."""
    check_world(config.parallel, world)
    # The vocabulary of a tokenizer that is not read yet changes no rule.
    model = dataclasses.replace(config.model, vocab=config.model.vocab or 1)
    made = plan(dataclasses.replace(config, model=model))
    for step in (1, *(until + 1 for until, _ in config.train.ramp)):
        if made.table is not None and step <= config.train.steps:
            made.schedule(micro_batches_of(config, world, step))


def check_backend(name: str | None, device: torch.device) -> None:
    """Refuse a backend that this torch has not, or that does not carry tensors of the device."""
    if name is None:
        return
    there = [known for known in ("gloo", "nccl", "ucc") if dist.is_backend_available(known)]
    fit = {"cuda": ("nccl", "ucc"), "cpu": ("gloo", "ucc")}[device.type]
    carries = [known for known in there if known in fit]
    if name not in carries:
        raise ConfigError(
            f"parallel.pp_backend = {name}: tensors on {device.type} travel here over "
            f"{' or '.join(carries) or 'nothing'}, of {', '.join(there)} that this torch has"
        )


def micro_batches_of(config: Config, world: int, step: int = 1) -> int:
    """How many micro-batches a rank has in a step."""
    parallel = config.parallel
    dp = world // (parallel.tp * parallel.cp * parallel.pp)
    batch = global_batch(step, config.train)
    return len(micro_batches(batch, config.train.micro_batch, dp, 0))
