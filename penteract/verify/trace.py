"""What every module computes in one step: its output, and the gradient of its output.

A module that declares a `Boundary` says which features of which logical vector its output holds,
and `Sequences` says which tokens its rows are. So the records of all ranks, put together, are
arrays of [tokens of the step, features] that do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penteract.config import Config
from penteract.grid import Grid
from penteract.nn.model import Stage
from penteract.nn.sequences import MicroBatch, Training
from penteract.parallel.parameters import Boundary
from penteract.verify.gaps import Array
from penteract.verify.measure import started

Key = tuple[str, str]  # of the output: logical vector, kind of module


@dataclass(frozen=True)
class Record:
    """A part of one output, or of its gradient: some features of some tokens."""

    tokens: Array  # [rows] numbers of the tokens in the step
    features: slice
    width: int  # features of the whole vector
    values: Array  # [rows, features], float64
    partial: bool = False  # the gradient is a part of the sum over the ranks


@dataclass
class Trace:
    """One rank's records of one step, outputs in the order in which they were first computed."""

    outputs: dict[Key, list[Record]] = field(default_factory=dict)
    gradients: dict[Key, list[Record]] = field(default_factory=dict)
    places: dict[Key, int] = field(default_factory=dict)  # of outputs in the order of the forward
    parameters: dict[str, float] = field(default_factory=dict)  # the place of their module


def trace(config: Config, grid: Grid, step: int) -> Trace:
    """Train up to `step` as this rank of `grid` and record that step."""
    with started(config, grid) as run:
        for _ in range(step - 1):
            run.update()
        recorder = _Recorder(config.train.micro_batch * config.data.seq)
        recorder.watch(run.task.model)
        run.update()
        recorder.place_parameters(run.task.model)
    return recorder.trace


class _Recorder:
    """Hooks on a model, and what they have seen."""

    def __init__(self, tokens_per_micro_batch: int) -> None:
        self.trace = Trace()
        self.tokens = tokens_per_micro_batch
        self.batch: MicroBatch | None = None  # the one that is being computed
        self.number = 0  # its number in the step, over all ranks
        self.seen: set[tuple[str, Key, int]] = set()
        self.places: dict[int, int] = {}  # of modules in the order of the forward

    def watch(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, Stage):
                module.register_forward_pre_hook(self._begin, with_kwargs=True)
            boundary = getattr(module, "boundary", None)
            if boundary is not None:
                module.register_forward_hook(self._hook(boundary))

    def place_parameters(self, model: nn.Module) -> None:
        """Where each logical parameter stands: at the first module that holds it.

        A module that is not called as one, such as a head, stands behind those before it.
        """
        last = 0.0
        for module in model.modules():
            last = max(last, float(self.places.get(id(module), 0)))
            place = self.places.get(id(module), last + 0.5)
            for placement in getattr(module, "placements", {}).values():
                for piece in placement.pieces:
                    self.trace.parameters.setdefault(piece.tensor, place)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        training: Training = options["training"]
        self.batch, self.number = args[0], training.micro_batch

    def _hook(self, boundary: Boundary) -> Callable[[nn.Module, Any, Any], None]:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            assert self.batch is not None, "a module was called outside the model"
            place = self.places.setdefault(id(module), len(self.places))
            for piece in boundary.pieces:
                self.trace.places.setdefault((piece.tensor, type(module).__name__), place)
            rows = self.batch.sequences.part(boundary.rows).rows.cpu().numpy()
            tokens = np.where(rows < 0, rows, self.number * self.tokens + rows)
            number, kind = self.number, type(module).__name__
            self._keep("outputs", kind, number, (boundary, tokens, output))
            if output.requires_grad:
                output.register_hook(
                    lambda grad: self._keep("gradients", kind, number, (boundary, tokens, grad))
                )

        return keep

    def _keep(
        self, what: str, kind: str, number: int, found: tuple[Boundary, Array, Tensor]
    ) -> None:
        boundary, tokens, x = found
        into, real = getattr(self.trace, what), tokens >= 0  # without padding
        values = x.detach().flatten(1)[torch.from_numpy(real)]  # [rows, features]
        for piece in boundary.pieces:
            key = (piece.tensor, kind)
            if (what, key, number) in self.seen:  # computed again for backward
                continue
            self.seen.add((what, key, number))
            part = values[:, piece.local.slices()[0]].to(torch.float64, copy=True).cpu().numpy()
            partial = what == "gradients" and piece.tensor in boundary.partial
            features, width = piece.box.slices()[0], piece.shape[0]
            into.setdefault(key, []).append(Record(tokens[real], features, width, part, partial))
