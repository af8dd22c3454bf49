"""One training run: its weights, its optimizer, its position; one update; saving and resuming."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penteract.checkpoint.io import Record, Shard, load, read_manifest, save
from penteract.checkpoint.model import STATE_PREFIXES, boxes
from penteract.collectives import all_reduce_
from penteract.config import Config, ConfigError
from penteract.config_file import from_dict, to_dict
from penteract.mesh import Mesh
from penteract.nn.sequences import Noise
from penteract.optim.adamw import AdamW
from penteract.optim.norm import clip_coefficient, gradient_norm
from penteract.optim.schedule import learning_rate
from penteract.parallel.buffers import Buffers
from penteract.parallel.pipeline.executor import execute
from penteract.parallel.pipeline.schedules import accumulate
from penteract.train.batch_ramp import ramp_until
from penteract.train.metrics import peak_memory_bytes
from penteract.train.task import Task


class NonFiniteError(RuntimeError):
    """The loss or the gradient of a step is NaN or infinite; the weights are those before it."""


def read_values(values: Sequence[Tensor]) -> list[float]:
    """The one place where a step reads numbers from the device; a dry run passes another."""
    return [float(x) for x in torch.stack([v.double() for v in values]).tolist()]


class Run:
    """A run as one rank sees it. `step` updates are done; `update` does the next one."""

    def __init__(
        self,
        task: Task,
        config: Config,
        mesh: Mesh,
        device: torch.device,
        *,
        read: Callable[[Sequence[Tensor]], list[float]] = read_values,
        on_gradients: Callable[[Run], None] = lambda run: None,
    ) -> None:
        self.on_gradients = on_gradients  # called in an update before gradients are clipped
        self.task, self.config, self.mesh, self.device, self.read = task, config, mesh, device, read
        self.axis, seed, more = mesh.axis("dp-cp"), config.train.seed, [mesh.axis("tp")]
        self.buffers = Buffers(task.model, self.axis, seed=seed, device=device, more_axes=more)
        self.optimizer = AdamW(self.buffers, config.optim)
        self.step = 0
        self.tokens = 0

    # --- one update

    def update(self) -> dict[str, Any]:
        """Do one update; its line of metrics. Raises NonFiniteError on every rank alike."""
        began = time.perf_counter()
        step = self.step + 1
        batches = self.task.batches(step)
        loaded = time.perf_counter()
        losses = self._gradients(step, batches)
        self.on_gradients(self)
        computed = time.perf_counter()
        norm = gradient_norm(self.buffers, self.mesh.axes)
        lr = learning_rate(step, self.config.optim)
        skip = ~torch.isfinite(norm + sum(losses.values()))
        self.optimizer.step(lr, clip_coefficient(norm, self.config.optim.clip), skip)
        norm_value, *values = self.read([norm, *losses.values()])
        terms = dict(zip(losses, values, strict=True))
        if not all(map(math.isfinite, (norm_value, *values))):
            raise NonFiniteError(self._explain(step, terms, norm_value))
        done = time.perf_counter()
        tokens = self.task.tokens(step)
        self.step, self.tokens = step, self.tokens + tokens
        times = [done - began, loaded - began, computed - loaded, done - computed]
        worst = torch.tensor([*times, peak_memory_bytes(self.device)], dtype=torch.float64)
        worst = all_reduce_(worst.to(self.device), self.mesh.axis("world"), "max")
        seconds, *phases, memory = self.read(worst.unbind())
        wait_ms, compute_ms, update_ms = (round(1e3 * s, 3) for s in phases)
        return {
            "step": step,
            **terms,
            "grad_norm": norm_value,
            "lr": lr,
            "tokens": self.tokens,
            "tokens_per_second": tokens / seconds,
            "flops_per_second": self.task.flops(step) / seconds,
            "memory_bytes": int(memory),
            "step_ms": round(1e3 * seconds, 3),
            "data_wait_ms": wait_ms,
            "compute_ms": compute_ms,  # forward, backward, what of the reduction is not hidden
            "update_ms": update_ms,  # norm, clipping, optimizer
        }

    def _gradients(self, step: int, batches: Sequence[Any]) -> dict[str, Tensor]:
        """Forward and backward of a step: gradients summed over the ranks; each loss, a scalar."""
        self.task.model.train()
        count = self._total([self.task.count(batch) for batch in batches])
        scale = torch.where(count > 0, 1.0 / count, 0.0)  # nothing counted: loss and gradients 0
        dp = self.mesh.axis("dp")

        def forward(stage: int, i: int) -> dict[str, Tensor]:
            noise = Noise(self.config.train.seed, step, i * dp.size + dp.rank)
            return self.task.loss(batches[i], scale, noise)

        self.buffers.begin()
        terms = execute(accumulate(len(batches)), forward, self.buffers)
        self.buffers.finish()
        sums = all_reduce_(torch.stack([x.double() for x in terms.values()]), self.axis)
        return dict(zip(terms, sums.unbind(), strict=True))

    def _total(self, parts: Sequence[Tensor | float]) -> Tensor:
        """Sum over this rank's parts and over the data ranks, float64, a scalar."""
        local = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in parts:
            local += part
        return all_reduce_(local, self.axis)

    def _explain(self, step: int, terms: dict[str, float], norm: float) -> str:
        losses = ", ".join(f"{name} = {value}" for name, value in terms.items())
        samples = "".join(f"\n  {line}" for line in self.task.describe(step))
        return (
            f"step {step}: {losses}, gradient norm = {norm}; the update was not made. A lower "
            f"optim.lr, a longer optim.warmup or a look at the data may help. Samples:{samples}"
        )

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """{validation set: mean loss in nats a token}, each from its own start; 0 if empty."""
        self.task.model.eval()
        one = torch.ones((), device=self.device)
        losses = {}
        for name, batches in self.task.validation.items():
            sums, counts = [], []
            for batch in batches():
                sums.append(self.task.loss(batch, one, None)["loss"].double())
                counts.append(self.task.count(batch))
            total, count = self.read([self._total(sums), self._total(counts)])
            losses[name] = total / count if count else 0.0
            if not math.isfinite(losses[name]):
                raise NonFiniteError(f"step {self.step}: loss of {name} = {losses[name]}")
        return losses

    # --- saving and resuming

    def save(self, directory: Path) -> Path:
        """Save everything the run is under `directory`; all ranks together."""
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "cursor": self.task.cursor(self.step),
            "updates": self.optimizer.updates,
            **self.task.state,
        }
        layout = {
            k: v for k, v in dataclasses.asdict(self.mesh.grid).items() if isinstance(v, (int, str))
        }
        record = Record(step=self.step, config=to_dict(self.config), layout=layout, state=state)
        return save(directory, record, list(self._shards()), axis=self.mesh.axis("world"))

    def resume(self, path: Path, *, check_hashes: bool = True) -> list[str]:
        """Continue the run saved at `path`; what of [optim] is another now, a line each.

        Raises ConfigError where model or data are others.
        """
        manifest = read_manifest(path)
        self._check_same(path, manifest.config, manifest.state)
        shards, world = list(self._shards()), self.mesh.axis("world")
        load(path, shards, axis=world, check_hashes=check_hashes)
        self.step, self.tokens = manifest.state["step"], manifest.state["tokens"]
        self.optimizer.updates = manifest.state["updates"]
        theirs, mine = (to_dict(c)["optim"] for c in (from_dict(manifest.config), self.config))
        return list(_differences(theirs, mine, "optim"))

    def load_weights(self, path: Path) -> None:
        """Start from the weights saved at `path`, with fresh moments, step and cursor.

        Masters are filled, from the run's own where it kept some, so they must be of their type.
        """
        saved = read_manifest(path).tensors
        skip = [*STATE_PREFIXES]
        weights: list[tuple[Shard, Tensor]] = []
        for slot in self.buffers.slots():
            for shard, view in boxes("", slot.entry.placement, slot.master):
                if (finer := f"master/{shard.tensor}") in saved:
                    skip.append(shard.tensor)
                    shard = dataclasses.replace(shard, tensor=finer)
                weights.append((shard, view))
        load(path, weights, axis=self.mesh.axis("world"), skip=tuple(skip))
        self.buffers.publish()

    def _check_same(self, path: Path, config: dict[str, Any], state: dict[str, Any]) -> None:
        theirs = from_dict(config)  # with the defaults of keys that came after it
        mine = {"model": to_dict(self.config)["model"], **self.task.state}
        saved = {"model": to_dict(theirs)["model"]}
        saved |= {key: state.get(key) for key in self.task.state}
        seen, step = state["cursor"], state["step"]
        if (would_have := self.task.cursor(step)) != seen:
            ramp = [list(entry) for entry in ramp_until(step, theirs.train)]
            raise ConfigError(
                f"{path}: its {step} steps took {seen} samples, but with this train.global_batch "
                f"and train.ramp they would have taken {would_have}: say how large the batches "
                f"were so far with train.ramp = {ramp}"
            )
        if wrong := list(_differences(saved, mine)):
            raise ConfigError(
                f"{path} is of another run, and training would not continue it:\n  "
                + "\n  ".join(wrong)
                + "\nChoose another checkpoint.dir, or start from its weights with checkpoint.load."
            )

    def weights(self) -> Iterator[tuple[Shard, Tensor]]:
        """The weights that this rank updates, as boxes of logical tensors, in at least float32."""
        for slot in self.buffers.slots():
            yield from boxes("", slot.entry.placement, slot.master)

    def gradients(self) -> Iterator[tuple[Shard, Tensor]]:
        """Their gradients; complete when `on_gradients` is called, scaled by clipping after it."""
        for slot in self.buffers.slots():
            yield from boxes("", slot.entry.placement, slot.gradient)

    def _shards(self) -> Iterator[tuple[Shard, Tensor]]:
        """Everything saved, as boxes of logical tensors: weights, masters, moments."""
        for slot in self.buffers.slots():
            parameter = slot.entry.parameter.detach()
            yield from boxes("", slot.entry.placement, parameter)
            if slot.master.dtype != parameter.dtype:
                yield from boxes("master/", slot.entry.placement, slot.master)
        for name, slot, moment in self.optimizer.state():
            yield from boxes(f"{name}/", slot.entry.placement, moment)


def _differences(saved: Any, mine: Any, key: str = "") -> Iterator[str]:
    if isinstance(saved, dict) and isinstance(mine, dict):
        for name in sorted({*saved, *mine}):
            yield from _differences(saved.get(name), mine.get(name), f"{key}.{name}".lstrip("."))
    elif saved != mine:
        yield f"{key}: saved {saved!r}, now {mine!r}"
