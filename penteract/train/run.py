"""One training run: its weights, its optimizer, its position; one update; saving and resuming."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penteract.checkpoint.agreement import together
from penteract.checkpoint.format import StoredTensor
from penteract.checkpoint.io import Record, load, read_manifest, save
from penteract.checkpoint.model import STATE_PREFIXES, owned
from penteract.checkpoint.plan import Shard, changed_state, stored_as
from penteract.collectives import all_reduce_, exchange
from penteract.config import Config, ConfigError
from penteract.config_file import from_dict, to_dict
from penteract.mesh import Mesh, split_axis
from penteract.nn.sequences import Noise
from penteract.optim.groups import group_of, unmatched
from penteract.optim.loss_scale import LossScale, LossScaleError
from penteract.optim.norm import clip_coefficient, gradient_norm
from penteract.optim.optimizer import build
from penteract.optim.schedule import learning_rate
from penteract.parallel.buckets import Sharding
from penteract.parallel.buffers import Buffers
from penteract.parallel.pipeline.executor import execute
from penteract.parallel.pipeline.schedules import accumulate
from penteract.train.batch_ramp import ramp_until
from penteract.train.metrics import peak_memory_bytes
from penteract.train.nonfinite import NonFiniteError, explain, first_parameter
from penteract.train.task import Task


def sharding_of(config: Config, mesh: Mesh) -> Sharding:
    """Who owns what and where, as `parallel.zero`, `parallel.replicas`, `optim.offload` say."""
    axis, parallel = mesh.axis("dp-cp"), config.parallel
    if parallel.zero == 0:
        sharding = Sharding.whole(axis, overlap=parallel.dp_overlap)
    else:
        shard, replicate = split_axis(axis, parallel.replicas)
        sharding = Sharding(shard, replicate, parallel.zero, parallel.dp_overlap)
    return dataclasses.replace(sharding, offload=config.optim.offload)


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
        sharding = sharding_of(config, mesh)
        self.buffers = Buffers(
            task.model,
            sharding,
            seed=seed,
            device=device,
            more_axes=more,
            group_of=group_of(config.optim.rules),
        )
        self._check_rules()
        self.optimizer = build(self.buffers, config.optim, mesh.axes, seed=seed)
        self.loss_scale = LossScale.of(config.optim, config.train.dtype)
        self.step = self.tokens = self.skipped = 0
        self.unused: list[str] = []  # parameters that this rank's last step did not reach

    def _check_rules(self) -> None:
        """Raise ConfigError on all ranks where a user's rule matches no tensor of the model."""
        if not self.config.optim.rules:
            return
        buckets = self.buffers.all_buckets
        slots = [slot for bucket in buckets for slot in bucket.slots]
        names = sorted({p.tensor for slot in slots for p in slot.entry.placement.pieces})
        answers = exchange(json.dumps(names).encode(), self.mesh.axis("world"))
        everywhere = dict.fromkeys(name for answer in answers for name in json.loads(answer))
        if messages := unmatched(self.config.optim.rules, everywhere):
            raise ConfigError("\n".join(messages))

    # --- one update

    def update(self) -> dict[str, Any]:
        """Do one update; its line of metrics. Raises NonFiniteError on every rank alike."""
        began = time.perf_counter()
        step = self.step + 1
        batches = self.task.batches(step)
        loaded = time.perf_counter()
        parts = self._gradients(step, batches)
        self.on_gradients(self)
        computed = time.perf_counter()
        order = float(self.config.optim.clip_norm)
        norm = gradient_norm(self.buffers, self.mesh.axes, order=order) / self.loss_scale.scale
        lr = learning_rate(step, self.config.optim)
        losses, finite = self._agreed(parts, norm)
        coefficient = clip_coefficient(norm, self.config.optim.clip) / self.loss_scale.scale
        # Where no update is made, gradients must stay as they are: `first_parameter` reads them.
        self.optimizer.step(lr, torch.where(finite, coefficient, 1.0), ~finite)
        norm_value, made, *values = self.read([norm, finite, *losses.values()])
        terms, skipped = dict(zip(losses, values, strict=True)), not made
        extra = self._after(step, terms, norm_value, skipped=skipped)
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
            **(dict.fromkeys(terms) if skipped else terms),
            "grad_norm": None if skipped else norm_value,
            **extra,
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

    def _after(
        self, step: int, terms: dict[str, float], norm: float, *, skipped: bool
    ) -> dict[str, Any]:
        """Adapt the loss scale, count skipped updates; what the step's line says of both.

        Raises NonFiniteError where a skipped update is not to be gone on from.
        """
        self.skipped = self.skipped + 1 if skipped else 0
        # Too large a loss scale shows in gradients, never in the loss, which is in float32.
        scaled = self.loss_scale.dynamic and all(map(math.isfinite, terms.values()))
        train = self.config.train
        if self.skipped > (train.max_skips if train.on_nonfinite == "skip" or scaled else 0):
            where = first_parameter(self.buffers, self.mesh.axis("world"))
            samples = self.task.describe(step)
            raise NonFiniteError(explain(step, terms, norm, where, samples, self.skipped))
        try:
            self.loss_scale.update(finite=not skipped)
        except LossScaleError as error:
            raise NonFiniteError(f"step {step}: {error}") from None
        line: dict[str, Any] = {"skipped": True} if skipped else {}
        return {**line, "loss_scale": self.loss_scale.scale} if self.loss_scale.dynamic else line

    def _gradients(self, step: int, batches: Sequence[Any]) -> dict[str, Tensor]:
        """Forward and backward of a step: gradients summed over the ranks; this rank's losses."""
        self.task.model.train()
        count = self._total([self.task.count(batch) for batch in batches])
        scale = torch.where(count > 0, 1.0 / count, 0.0)  # nothing counted: loss and gradients 0
        scale = scale * self.loss_scale.scale
        dp = self.mesh.axis("dp")

        def forward(stage: int, i: int) -> dict[str, Tensor]:
            noise = Noise(self.config.train.seed, step, i * dp.size + dp.rank)
            return self.task.loss(batches[i], scale, noise)

        self.buffers.begin()
        terms = execute(accumulate(len(batches)), forward, self.buffers)
        self.unused = self.buffers.finish()
        return terms

    def _agreed(self, losses: dict[str, Tensor], norm: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Each loss over all ranks, and whether losses and norm are finite on every rank.

        The norm is the same everywhere but for a fault, such as one tensor rank's in the gradient
        of a replicated parameter. One message says both; ranks of a tensor group have equal losses.
        """
        copies = self.mesh.axis("tp").size * self.loss_scale.scale
        fault = norm - norm  # 0, or NaN where the norm is not finite
        parts = torch.stack([*(x.double() / copies for x in losses.values()), fault])
        *sums, fault = all_reduce_(parts, self.mesh.axis("world")).unbind()
        return dict(zip(losses, sums, strict=True)), torch.isfinite(fault + sum(sums))

    def unreached(self) -> list[str]:
        """Names of parameters that no data rank's last step reached; all ranks call it together."""
        world = self.mesh.axis("world")
        some = torch.tensor(float(bool(self.unused)), device=self.device)
        if not any(self.read([all_reduce_(some, world, "max")])):
            return []
        answers = together(world, lambda: self.unused)
        # Ranks of one such group hold the same parameters, whole or in part.
        groups = self.mesh.grid.groups("tp-dp-cp").tolist()
        found = [set.intersection(*(set(answers[rank]) for rank in group)) for group in groups]
        return sorted(set[str]().union(*found))

    def _total(self, parts: Sequence[Tensor | float]) -> Tensor:
        """Sum over this rank's parts and over the data ranks, float64, a scalar."""
        local = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in parts:
            local += part
        return all_reduce_(local, self.axis)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """{validation set: mean loss in nats a token}, each from its own start; 0 if empty."""
        self.task.model.eval()
        self.buffers.wait()
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
            "loss_scale": self.loss_scale.state(),
            "skipped": self.skipped,
            **self.task.state,
        }
        layout = {
            k: v for k, v in dataclasses.asdict(self.mesh.grid).items() if isinstance(v, (int, str))
        }
        record = Record(step=self.step, config=to_dict(self.config), layout=layout, state=state)
        return save(directory, record, list(self._shards()), axis=self.mesh.axis("world"))

    def resume(self, path: Path, *, check_hashes: bool = True) -> list[str]:
        """Continue the run saved at `path`; what of [optim] is another now, a line each.

        Moments of another `optim.moments` are converted, to the nearest.
        Tensors that are frozen now leave their state unread; that of tensors that have none there,
        since they were frozen, starts at zero, their masters from the weights.
        Raises ConfigError where model, data or optimizer are others.
        """
        manifest, world = read_manifest(path), self.mesh.axis("world")
        self._check_same(path, manifest.config, manifest.state)
        shards = list(self._shards())
        told = together(world, lambda: sorted({shard.tensor for shard, _ in shards}))
        names = {name for answer in told for name in answer}
        unread, fresh = changed_state(manifest.tensors, names, STATE_PREFIXES)
        self.buffers.wait()
        wanted = [
            (_as_saved(shard, manifest.tensors), view)
            for shard, view in shards
            if shard.tensor not in fresh
        ]
        _load(path, wanted, axis=world, check_hashes=check_hashes, skip=tuple(unread))
        self._start_state(fresh)
        self.step, self.tokens = manifest.state["step"], manifest.state["tokens"]
        self.skipped = manifest.state.get("skipped", 0)
        self.buffers.publish(frozen=True)
        self.optimizer.updates = manifest.state["updates"]
        self.loss_scale.load(manifest.state.get("loss_scale"))
        theirs, mine = (to_dict(c)["optim"] for c in (from_dict(manifest.config), self.config))
        return [*_differences(theirs, mine, "optim"), *_said_of(fresh)]

    @torch.no_grad()
    def _start_state(self, names: Collection[str]) -> None:
        """Masters and moments that stand under `names` start: from the weights, and at zero."""
        for bucket in self.buffers.buckets:
            weights = bucket.owned(bucket.own_parameters)
            masters = bucket.owned(bucket.master)
            for (_, fragment, weight), (_, _, master) in zip(weights, masters, strict=True):
                if f"master/{fragment.tensor}" in names:
                    master.copy_(weight)
        for name, bucket, moment in self.optimizer.state():
            for _, fragment, view in bucket.owned(moment):
                if f"{name}/{fragment.tensor}" in names:
                    view.zero_()

    def load_weights(self, path: Path) -> None:
        """Start from the weights saved at `path`, with fresh moments, step and cursor.

        Masters are filled, from the run's own where it kept some, so they must be of their type.
        A tensor that is frozen on one side has a master on the other only, and is converted.
        """
        saved, skip = read_manifest(path).tensors, [*STATE_PREFIXES]
        wanted: list[tuple[Shard, Tensor]] = []
        for bucket in self.buffers.all_buckets:
            types = (bucket.master.dtype, bucket.kind.dtype, bucket.kind.wide)
            dtypes = [str(dtype).removeprefix("torch.") for dtype in types]
            for shard, view in owned("", bucket.owned(bucket.master)):
                name, dtype = stored_as(saved, shard.tensor, dtypes)
                skip += [shard.tensor] if name != shard.tensor else []
                wanted.append((dataclasses.replace(shard, tensor=name, dtype=dtype), view))
        self.buffers.wait()
        _load(path, wanted, axis=self.mesh.axis("world"), skip=tuple(skip))
        self.buffers.publish(frozen=True)

    def _check_same(self, path: Path, config: dict[str, Any], state: dict[str, Any]) -> None:
        theirs = from_dict(config)  # with the defaults of keys that came after it
        mine, saved = (
            {"model": to_dict(c)["model"], "optim": {"name": c.optim.name}}
            for c in (self.config, theirs)
        )
        mine |= self.task.state
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
        return owned("", self.buffers.owned("master"))

    def gradients(self) -> Iterator[tuple[Shard, Tensor]]:
        """Their gradients; complete when `on_gradients` is called, used up by the update."""
        return owned("", self.buffers.owned("own_gradient"))

    def _shards(self) -> Iterator[tuple[Shard, Tensor]]:
        """Everything saved, as boxes of logical tensors: weights, masters, moments."""
        for bucket in self.buffers.all_buckets:
            narrow = bucket.kind.narrow
            yield from owned("", bucket.owned(bucket.own_parameters if narrow else bucket.master))
        for bucket in (bucket for bucket in self.buffers.buckets if bucket.kind.narrow):
            yield from owned("master/", bucket.owned(bucket.master))
        for name, bucket, moment in self.optimizer.state():
            yield from owned(f"{name}/", bucket.owned(moment))


def _as_saved(shard: Shard, saved: Mapping[str, StoredTensor]) -> Shard:
    """`shard`; a moment's in the type in which it was saved, where one of the two is bfloat16."""
    stored = saved.get(shard.tensor)
    if stored is None or not shard.tensor.startswith(STATE_PREFIXES):
        return shard
    types = (shard.dtype, stored.dtype)
    return dataclasses.replace(shard, dtype=stored.dtype) if "bfloat16" in types else shard


def _load(path: Path, wanted: Sequence[tuple[Shard, Tensor]], **how: Any) -> None:
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


def _said_of(fresh: Collection[str]) -> Iterator[str]:
    """What is said of optimizer state that a checkpoint does not have."""
    if tensors := sorted({name.partition("/")[2] for name in fresh}):
        more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
        names = ", ".join(tensors[:3])
        yield f"moments start at zero, the checkpoint has none of {names}{more}"


def _differences(saved: Any, mine: Any, key: str = "") -> Iterator[str]:
    if isinstance(saved, dict) and isinstance(mine, dict):
        for name in sorted({*saved, *mine}):
            yield from _differences(saved.get(name), mine.get(name), f"{key}.{name}".lstrip("."))
    elif saved != mine:
        yield f"{key}: saved {saved!r}, now {mine!r}"
