"""One training run: its weights, its optimizer, its position; one update; saving and resuming."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penteract.checkpoint.agreement import together
from penteract.checkpoint.io import Record, read_manifest, save
from penteract.checkpoint.model import STATE_PREFIXES, owned
from penteract.checkpoint.plan import Shard, changed_state
from penteract.collectives import all_reduce_, exchange, meet
from penteract.config import Config, ConfigError
from penteract.config_file import from_dict, to_dict
from penteract.mesh import Mesh, create_channels, single
from penteract.nn.sequences import Training
from penteract.optim.groups import group_of, unmatched
from penteract.optim.loss_scale import LossScale, LossScaleError
from penteract.optim.norm import clip_coefficient, count_zeros, gradient_norm
from penteract.optim.optimizer import build
from penteract.optim.schedule import learning_rate
from penteract.parallel.buckets import Sharding
from penteract.parallel.buffers import Buffers
from penteract.parallel.pipeline.executor import Executor, Output, Shape, Timed
from penteract.parallel.pipeline.lowering import lower
from penteract.parallel.pipeline.trace import Row
from penteract.train.loads import Loads
from penteract.train.metrics import peak_memory_bytes
from penteract.train.nonfinite import NonFiniteError, explain, first_parameter
from penteract.train.pipeline import check_backend
from penteract.train.saved_state import (
    as_saved,
    check_same,
    differences,
    held,
    load_as,
    load_weights,
    said_of,
    start_state,
)
from penteract.train.task import Task


def sharding_of(config: Config, mesh: Mesh) -> tuple[Sharding, Sharding | None]:
    """Who owns what of dense parameters, and of experts' where the model has some, and where: as
    `parallel.zero`, `parallel.replicas`, `optim.offload` say.
    """
    parallel = config.parallel
    how = parallel.zero, parallel.replicas, parallel.dp_overlap, config.optim.offload
    dense = Sharding.over(mesh.axis("dp-cp"), *how)
    return dense, None if config.moe is None else Sharding.over(mesh.axis("edp"), *how)


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
        self.axis, seed, pipeline = mesh.axis("dp-cp"), config.train.seed, task.pipeline
        self._check_pipeline()
        self.executor = self._executor()
        apart = pipeline.placement[0] != pipeline.placement[-1]
        tied = mesh.axis("tied") if apart else single("tied")
        self._programs = functools.cache(
            lambda m: lower(pipeline.schedule(m))[mesh.axis("pp").rank]
        )
        self._forwards = functools.cache(
            lambda m: lower(pipeline.forwards(m))[mesh.axis("pp").rank]
        )
        dense, experts = sharding_of(config, mesh)
        self.buffers = Buffers(
            task.model,
            dense,
            experts=experts,
            seed=seed,
            device=device,
            more_axes=[mesh.axis("tp"), tied, mesh.axis("etp")],
            group_of=group_of(config.optim.rules),
        )
        self.loads = Loads(task.model, mesh, device)
        self._check_rules()
        self.optimizer = build(self.buffers, config.optim, mesh.axes, seed=seed)
        self.loss_scale = LossScale.of(config.optim, config.train.dtype)
        self.step = self.tokens = self.skipped = 0
        self.unused: list[str] = []  # parameters that this rank's last step did not reach
        self.times: list[Timed] | None = None  # of the last step's actions, where it is traced

    def _check_pipeline(self) -> None:
        wanted, ranks = self.config.parallel.pp, self.mesh.axis("pp").size
        has = max(self.task.pipeline.placement) + 1
        if not wanted == ranks == has:
            raise ConfigError(
                f"parallel.pp = {wanted}, the mesh has {ranks} pipeline ranks, and the stages of "
                f"the task lie on {has}: they must be as many (see penteract.train.task.Pipeline)"
            )

    def _executor(self) -> Executor:
        """With the channels that the pipeline needs, made and tried in one order on all ranks."""
        parallel, pp = self.config.parallel, self.mesh.axis("pp")
        check_backend(parallel.pp_backend, self.device)
        places = itertools.pairwise(self.task.pipeline.placement)
        neighbours = [(a, b) for a, b in places if a != b]
        channels = create_channels(
            pp,
            [*neighbours, *((b, a) for a, b in neighbours)],
            backend=parallel.pp_backend,
            timeout=timedelta(seconds=parallel.pp_timeout_s),
        )
        for channel in channels.values():
            meet(channel, self.device)
        return Executor(pp.rank, channels, self.device, self.task.pipeline.turns)

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
        parts |= self._auxiliary()
        self.on_gradients(self)
        computed = time.perf_counter()
        order = float(self.config.optim.clip_norm)
        norm = gradient_norm(self.buffers, self.mesh.axes, order=order) / self.loss_scale.scale
        lr = learning_rate(step, self.config.optim)
        losses, finite = self._agreed(parts, norm)
        zeros = [count_zeros(self.buffers, self.mesh.axes)] if self.config.log.zeros else []
        coefficient = clip_coefficient(norm, self.config.optim.clip) / self.loss_scale.scale
        # Where no update is made, gradients must stay as they are: `first_parameter` reads them.
        self.optimizer.step(lr, torch.where(finite, coefficient, 1.0), ~finite)
        norm_value, made, *values = self.read([norm, finite, *losses.values(), *zeros])
        terms, skipped = dict(zip(losses, values, strict=False)), not made
        extra = self._after(step, terms, norm_value, skipped=skipped)
        if zeros:
            extra["zero_gradients"] = int(values[-1])
        if self.config.moe is not None and step % self.config.log.every == 0:
            extra["experts"] = self.loads.line()
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
        if not skipped:
            self.loads.commit()
        line: dict[str, Any] = {"skipped": True} if skipped else {}
        return {**line, "loss_scale": self.loss_scale.scale} if self.loss_scale.dynamic else line

    def _gradients(self, step: int, batches: Sequence[Any]) -> dict[str, Tensor]:
        """Forward and backward of a step: gradients summed over the ranks; this rank's losses."""
        self.task.model.train()
        counts = [[self.task.count(batch) for batch in batches]]
        if self.task.real is not None:
            counts.append([self.task.real(batch) for batch in batches])
        totals = self._totals(*counts)
        # Nothing counted: losses and gradients are 0.
        scales = torch.where(totals > 0, 1.0 / totals, 0.0) * self.loss_scale.scale
        scale, share = scales[0], scales[-1]
        dp = self.mesh.axis("dp")

        def forward(stage: int, i: int, stream: Tensor | None) -> Output:
            training = Training(self.config.train.seed, step, i * dp.size + dp.rank, share)
            return self.task.forward(stage, batches[i], stream, scale, training)

        def boundary(stage: int, i: int) -> Shape | None:
            return self.task.pipeline.boundary(stage, batches[i])

        program = self._programs(len(batches))
        self.times = [] if step in self.config.log.trace else None
        self.buffers.begin()
        self.loads.begin()
        terms = self.executor.run(program, forward, boundary, self.buffers, self.times)
        self.unused = self.buffers.finish()
        nothing = torch.zeros((), dtype=torch.float64, device=self.device)
        return {**dict.fromkeys(self.task.terms, nothing), **terms}

    def _auxiliary(self) -> dict[str, Tensor]:
        """This rank's parts of the losses of its routers, as `_agreed` wants them."""
        self.loads.sum_up()
        tp, parts = self.mesh.axis("tp"), self.loads.losses(list(self.task.auxiliary))
        return {name: part * tp.size for name, part in parts.items()}

    def traced(self) -> list[Row]:
        """When every action of a traced step ran, of all ranks, which call it together; else []."""
        if self.times is None:
            return []
        rank = self.mesh.rank
        rows = [(rank, *dataclasses.astuple(t.action), t.start, t.end) for t in self.times]
        answers = exchange(json.dumps(rows).encode(), self.mesh.axis("world"))
        every = [row for answer in answers for row in json.loads(answer)]
        first = min(start for *_, start, _ in every)
        return [(*what, start - first, end - first) for *what, start, end in every]

    def _agreed(self, losses: dict[str, Tensor], norm: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Each loss over all ranks, and whether losses and norm are finite on every rank.

        Ranks of a tensor group have equal losses, and all stages but the last have none. The norm
        is the same everywhere but for a fault, such as one tensor rank's in the gradient
        of a replicated parameter. One message says both.
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

    def _totals(self, *several: Sequence[Tensor | float]) -> Tensor:
        """[n]: n lists, each summed over this rank's parts and the data ranks, in one message."""
        local = torch.zeros(len(several), dtype=torch.float64, device=self.device)
        for total, parts in zip(local, several, strict=True):
            for part in parts:
                total += part
        return all_reduce_(local, self.axis)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """{validation set: mean loss in nats a token}, each from its own start; 0 if empty."""
        self.task.model.eval()
        self.buffers.wait()
        losses, stages = {}, len(self.task.pipeline.placement)
        for name, batches in self.task.validation.items():
            sums: list[Tensor] = []
            counts: list[Tensor | float] = []
            found = iter(batches())
            while group := list(itertools.islice(found, stages)):
                sums.append(self._evaluated(group).double())
                counts += map(self.task.count, group)
            summed, counted = self._totals(sums, counts)
            total, count = self.read([all_reduce_(summed, self.mesh.axis("pp")), counted])
            losses[name] = total / count if count else 0.0
            if not math.isfinite(losses[name]):
                raise NonFiniteError(f"step {self.step}: loss of {name} = {losses[name]}")
        return losses

    def _evaluated(self, batches: Sequence[Any]) -> Tensor:
        """The summed loss of some micro-batches on the rank of the last stage; elsewhere 0."""
        pipeline, one = self.task.pipeline, torch.ones((), device=self.device)

        def forward(stage: int, i: int, stream: Tensor | None) -> Output:
            return self.task.forward(stage, batches[i], stream, one, None)

        def boundary(stage: int, i: int) -> Shape | None:
            return pipeline.boundary(stage, batches[i])

        terms = self.executor.run(self._forwards(len(batches)), forward, boundary, None)
        return terms.get("loss", torch.zeros((), device=self.device))

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
        return save(
            directory,
            record,
            list(held(self.task.model, self.buffers, self.optimizer)),
            axis=self.mesh.axis("world"),
        )

    def resume(self, path: Path, *, check_hashes: bool = True) -> list[str]:
        """Continue the run saved at `path`; what of [optim] is another now, a line each.

        Moments of another `optim.moments` are converted, to the nearest.
        Tensors that are frozen now leave their state unread; that of tensors that have none there,
        since they were frozen, starts at zero, their masters from the weights.
        Raises ConfigError where model, data or optimizer are others.
        """
        manifest, world = read_manifest(path), self.mesh.axis("world")
        check_same(path, manifest, self.config, self.task)
        shards = list(held(self.task.model, self.buffers, self.optimizer))
        told = together(world, lambda: sorted({shard.tensor for shard, _ in shards}))
        names = {name for answer in told for name in answer}
        unread, fresh = changed_state(manifest.tensors, names, STATE_PREFIXES)
        self.buffers.wait()
        wanted = [
            (as_saved(shard, manifest.tensors), view)
            for shard, view in shards
            if shard.tensor not in fresh
        ]
        load_as(path, wanted, axis=world, check_hashes=check_hashes, unread=unread)
        start_state(self.buffers, self.optimizer, fresh)
        self.step, self.tokens = manifest.state["step"], manifest.state["tokens"]
        self.skipped = manifest.state.get("skipped", 0)
        self.buffers.publish(frozen=True)
        self.optimizer.updates = manifest.state["updates"]
        self.loss_scale.load(manifest.state.get("loss_scale"))
        theirs, mine = (to_dict(c)["optim"] for c in (from_dict(manifest.config), self.config))
        return [*differences(theirs, mine, "optim"), *said_of(fresh)]

    def load_weights(self, path: Path) -> list[str]:
        """Start from the weights at `path`, all else fresh; what of them is not from there."""
        world = self.mesh.axis("world")
        return load_weights(path, self.task.model, self.buffers, config=self.config, axis=world)

    def weights(self) -> Iterator[tuple[Shard, Tensor]]:
        """The weights that this rank updates, as boxes of logical tensors, in at least float32."""
        return owned("", self.buffers.owned("master"))

    def gradients(self) -> Iterator[tuple[Shard, Tensor]]:
        """Their gradients; complete when `on_gradients` is called, used up by the update."""
        return owned("", self.buffers.owned("own_gradient"))
