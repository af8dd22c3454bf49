"""A few steps of training as one rank, and what came out beside the reference.

The reference is kept whole, as logical tensors. A rank of a layout compares what it holds with the
same boxes of the reference, which it inherits when it is forked, and returns numbers: how far off,
where, and a checksum of the bits, by which replicas are compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penteract.checkpoint.plan import Shard
from penteract.config import Config
from penteract.grid import Grid
from penteract.mesh import create_mesh
from penteract.parallel.parameters import declared_parameters
from penteract.placement import Box
from penteract.random import fill_box
from penteract.testing import world_axis
from penteract.train.language_model import synthetic_task
from penteract.train.run import Run
from penteract.verify.gaps import Array, Gap, gap

Tensors = dict[str, Array]  # logical tensors by name, float64
EXPOSED = 0.3  # how far initial biases and norm weights are from 0 and 1


@dataclass
class Reference:
    """What one process computes."""

    losses: list[float] = field(default_factory=list)  # of step i + 1
    norms: list[float] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    weights: list[Tensors] = field(default_factory=list)  # after i steps


@dataclass(frozen=True)
class Part:
    """What a rank holds of a tensor."""

    tensor: str
    shape: tuple[int, ...]
    box: Box
    checksum: int
    gap: Gap | None  # None: the reference has no such tensor


@dataclass
class Measured:
    """One rank's outcome, as `Reference`."""

    sizes: dict[str, int]  # of every axis
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[list[Part]] = field(default_factory=list)
    weights: list[list[Part]] = field(default_factory=list)
    sent: dict[str, dict[str, int]] = field(default_factory=dict)  # axis, call: bytes of a step


@contextmanager
def started(
    config: Config, grid: Grid, on_gradients: Callable[[Run], None] = lambda run: None
) -> Iterator[Run]:
    """A run of this rank at its initial weights, which are such that they show mistakes."""
    axis = world_axis()
    mesh = create_mesh(grid, axis.rank)
    device = torch.device("cpu")  # the one place that says where layouts run
    task = synthetic_task(config, mesh, device)
    try:
        expose(task.model, config.train.seed)
        yield Run(task, config, mesh, device, on_gradients=on_gradients)
    finally:
        task.close()


@torch.no_grad()
def expose(model: nn.Module, seed: int) -> None:
    """Give parameters that would start as one number (0, 1) values of their own.

    A bias that is added twice and a norm weight that is left out change nothing at 0 and 1. Each
    value is a function of the seed and the element of the logical tensor.
    """
    for entry in declared_parameters(model):
        init = entry.placement.init
        if init.kind == "normal":
            continue
        middle = {"ones": 1.0, "zeros": 0.0, "constant": init.scale}[init.kind]
        data = torch.zeros(entry.placement.shape, dtype=entry.parameter.dtype)
        for piece in entry.placement.pieces:
            extra = len(piece.at) - len(piece.shape)
            view = data[piece.at[:extra] + piece.local.slices()[extra:]]
            stream = f"verify/{piece.tensor}"
            fill_box(view, seed, stream, shape=piece.shape, box=piece.box, std=EXPOSED)
            view += middle
        entry.replace(data)


def reference(config: Config, steps: int) -> Reference:
    """Train `config` for `steps` steps in one process and keep everything."""
    outcome = Reference()

    def keep(run: Run) -> None:
        outcome.gradients.append(_whole(run.gradients()))

    with started(config, Grid(1), keep) as run:
        outcome.weights.append(_whole(run.weights()))
        for _ in range(steps):
            line = run.update()
            outcome.losses.append(line["loss"])
            outcome.norms.append(line["grad_norm"])
            outcome.weights.append(_whole(run.weights()))
    return outcome


def measure(config: Config, grid: Grid, steps: int, wanted: Reference) -> Measured:
    """Train `steps` steps as this rank of `grid`, comparing each with the reference."""
    outcome = Measured({})

    def compare(run: Run) -> None:
        outcome.gradients.append(_parts(run.gradients(), wanted.gradients[run.step]))

    with started(config, grid, compare) as run:
        axes = run.mesh.axes
        outcome.sizes = {name: axis.size for name, axis in axes.items()}
        outcome.weights.append(_parts(run.weights(), wanted.weights[0]))
        for step in range(1, steps + 1):
            before = {name: dict(axis.traffic.bytes) for name, axis in axes.items()}
            line = run.update()
            outcome.losses.append(line["loss"])
            outcome.norms.append(line["grad_norm"])
            outcome.weights.append(_parts(run.weights(), wanted.weights[step]))
        outcome.sent = {name: _since(before[name], axes[name].traffic.bytes) for name in axes}
    return outcome


def _since(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    found = {call: n - before.get(call, 0) for call, n in now.items()}
    return {call: n for call, n in found.items() if n}


def _whole(held: Iterable[tuple[Shard, Tensor]]) -> Tensors:
    """Logical tensors from what the one rank holds; elements that it lacks are NaN."""
    found: Tensors = {}
    for shard, view in held:
        tensor = found.setdefault(shard.tensor, np.full(shard.shape, np.nan))
        tensor[shard.box.slices()] = _float64(view)
    return found


def _parts(held: Iterable[tuple[Shard, Tensor]], wanted: Tensors) -> list[Part]:
    return [_part(shard, view, wanted.get(shard.tensor)) for shard, view in held]


def _part(shard: Shard, view: Tensor, wanted: Array | None) -> Part:
    off = None
    if wanted is not None and wanted.shape == shard.shape:
        off = gap(_float64(view), wanted[shard.box.slices()], shard.box.offset)
    bits = view.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return Part(shard.tensor, shard.shape, shard.box, zlib.crc32(bits.tobytes()), off)


def _float64(view: Tensor) -> Array:
    array: Any = view.detach().double().cpu().numpy()
    return array


def holders(parts: Sequence[Sequence[Part]]) -> dict[str, list[tuple[int, Part]]]:
    """(rank, part) of every tensor, over the ranks' parts."""
    found: dict[str, list[tuple[int, Part]]] = {}
    for rank, held in enumerate(parts):
        for part in held:
            found.setdefault(part.tensor, []).append((rank, part))
    return found
