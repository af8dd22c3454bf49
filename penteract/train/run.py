"""One training run: its weights, its optimizer, its position; one update; an evaluation."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penteract.checkpoint.model import owned
from penteract.checkpoint.plan import Shard
from penteract.checkpoint.remote import Place
from penteract.checkpoint.saving import Saving, save, start_save
from penteract.checkpoint.writing import Staging
from penteract.collectives import all_reduce_
from penteract.config import Config
from penteract.mesh import Mesh
from penteract.nn.sequences import Training
from penteract.optim.loss_scale import LossScale, LossScaleError
from penteract.optim.norm import clip_coefficient, count_zeros, gradient_norm
from penteract.optim.optimizer import build
from penteract.optim.schedule import learning_rate
from penteract.parallel.pipeline.executor import Output, Shape, Timed
from penteract.parallel.pipeline.lowering import lower
from penteract.train.assembly import buffers_of, executor_of
from penteract.train.loads import Loads
from penteract.train.metrics import peak_memory_bytes
from penteract.train.nonfinite import NonFiniteError, explain, first_parameter
from penteract.train.pace import Pace
from penteract.train.passed import Window, data_step
from penteract.train.replicas import flip_bit
from penteract.train.rerun import (
    NO_LIMITS,
    Found,
    Injected,
    Limits,
    Outliers,
    Report,
    Seen,
    Tried,
    add_bits,
    blame,
    differing,
    first_module,
    is_deterministic,
    spoiled,
    watching_modules,
)
from penteract.train.saved_state import held, load_weights, record, resume
from penteract.train.task import Task
from penteract.train.watchdog import Activity


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
        self.activity = Activity()
        self.task, self.config, self.mesh, self.device, self.read = task, config, mesh, device, read
        self.axis, pipeline = mesh.axis("dp-cp"), task.pipeline
        self.executor = executor_of(task, config, mesh, device, self.activity.now)
        self._programs = functools.cache(
            lambda m: lower(pipeline.schedule(m))[mesh.axis("pp").rank]
        )
        self._forwards = functools.cache(
            lambda m: lower(pipeline.forwards(m))[mesh.axis("pp").rank]
        )
        self.buffers = buffers_of(task, config, mesh, device)
        self.loads = Loads(task.model, mesh, device)
        self.optimizer = build(self.buffers, config.optim, mesh.axes, seed=config.train.seed)
        self.loss_scale = LossScale.of(config.optim, config.train.dtype)
        self.unequal = ""  # copies that are not, see `replicas`
        self.passed: tuple[Window, ...] = ()  # of the data, where the run went back
        self.spiked = False  # whether the last update is an outlier that was kept
        judged = config.train.rerun == "outliers" or config.train.on_spike == "rewind"
        self.outliers = Outliers(config.train.outlier if judged else None)
        self.injected = Injected(config.train.inject, mesh.rank)
        self.bits = torch.zeros((), dtype=torch.int64, device=device)  # of this rank's gradients
        if config.train.rerun != "off":
            self.buffers.on_own = functools.partial(add_bits, self.bits)
        self.pace = Pace(mesh, device, config.log)
        self.reported: Report | None = None  # of the last update, where it was run again
        self.step = self.tokens = self.skipped = 0
        self.unused: list[str] = []  # parameters that this rank's last step did not reach
        self.times: list[Timed] | None = None  # of the last step's actions, where it is traced

    # --- one update

    def update(self) -> dict[str, Any]:
        """Do one update; its line of metrics. Raises NonFiniteError on every rank alike."""
        began = time.perf_counter()
        self.pace.begin(self.step + 1)
        self.activity.step = step = self.step + 1
        self.reported = None
        self.activity.now("reading samples")
        at = data_step(step, self.passed)
        batches = self.task.batches(at)
        loaded = time.perf_counter()
        limits = self.outliers.limits()
        tried = self._try(step, batches, limits)
        computed = time.perf_counter()
        lr = learning_rate(step, self.config.optim)
        good = tried.finite
        if self.config.train.rerun == "outliers":
            good = good & tried.within
        self._apply(tried, lr, good)
        found = self._read(tried, good)
        if not found.made and self.config.train.rerun != "off" and not self._is_scaled(found):
            found = self._again(step, batches, lr, found, limits)
        self.spiked = found.made and not found.within
        skipped, norm_value = not found.made, found.norm
        extra = self._after(step, found, scaled=self._is_scaled(found))
        if found.made:
            self.outliers.add(sum(found.terms.values()), norm_value)
        if found.zeros:
            extra["zero_gradients"] = int(found.zeros[0])
        if self.config.moe is not None and step % self.config.log.every == 0:
            extra["experts"] = self.loads.line()
        if self.injected.flips(at):
            flip_bit(self)
        self.pace.end(step)
        done = time.perf_counter()
        tokens = self.task.tokens(at)
        self.step, self.tokens = step, self.tokens + tokens
        times = [done - began, loaded - began, computed - loaded, done - computed]
        worst = torch.tensor([*times, peak_memory_bytes(self.device)], dtype=torch.float64)
        worst = all_reduce_(worst.to(self.device), self.mesh.axis("world"), "max")
        seconds, *phases, memory = self.read(worst.unbind())
        wait_ms, compute_ms, update_ms = (round(1e3 * s, 3) for s in phases)
        return {
            "step": step,
            **(dict.fromkeys(found.terms) if skipped else found.terms),
            "grad_norm": None if skipped else norm_value,
            **extra,
            "lr": lr,
            "tokens": self.tokens,
            "tokens_per_second": tokens / seconds,
            "flops_per_second": self.task.flops(at) / seconds,
            "memory_bytes": int(memory),
            "step_ms": round(1e3 * seconds, 3),
            "data_wait_ms": wait_ms,
            "compute_ms": compute_ms,  # forward, backward, what of the reduction is not hidden
            "update_ms": update_ms,  # norm, clipping, optimizer
        }

    def _try(self, step: int, batches: Sequence[Any], limits: Limits = NO_LIMITS) -> Tried:
        """Losses and gradients of a step; nothing else is changed."""
        loss_limit, norm_limit = limits
        self.bits.zero_()
        parts = self._gradients(step, batches)
        self.activity.now("the update")
        parts |= self._auxiliary()
        self.on_gradients(self)
        order = float(self.config.optim.clip_norm)
        norm = gradient_norm(self.buffers, self.mesh.axes, order=order) / self.loss_scale.scale
        losses, finite, within = self._agreed(parts, norm, norm_limit)
        zeros = [count_zeros(self.buffers, self.mesh.axes)] if self.config.log.zeros else []
        within = within & (sum(losses.values()) <= loss_limit)
        return Tried(losses, norm, finite, within, zeros)

    def _apply(self, tried: Tried, lr: float, good: Tensor) -> None:
        """Update the masters where the step is good."""
        clip = clip_coefficient(tried.norm, self.config.optim.clip) / self.loss_scale.scale
        # Where no update is made, gradients must stay as they are: `first_parameter` reads them.
        self.optimizer.step(lr, torch.where(good, clip, 1.0), ~good)

    def _read(self, tried: Tried, good: Tensor) -> Found:
        flags = [tried.finite, tried.within, good]
        values = self.read([tried.norm, *flags, *tried.terms.values(), *tried.zeros])
        norm, finite, within, made, *rest = values
        terms = dict(zip(tried.terms, rest, strict=False))
        return Found(terms, norm, bool(finite), bool(within), bool(made), rest[len(terms) :])

    def _is_scaled(self, found: Found) -> bool:
        """Whether too large a loss scale is why a step is not finite: it shows in gradients, never
        in the loss, which is in float32.
        """
        losses = all(map(math.isfinite, found.terms.values()))
        return self.loss_scale.dynamic and losses and not found.finite

    def _again(
        self, step: int, batches: Sequence[Any], lr: float, found: Found, limits: Limits
    ) -> Found:
        """Run a bad step once more: what counts then. Raises HardwareError."""
        first = Seen(found.terms, found.norm, int(self.bits))
        tried = self._try(step, batches, limits)
        found = self._read(tried, tried.finite)
        second = Seen(found.terms, found.norm, int(self.bits))
        ranks = differing(first, second, self.mesh.axis("world"))
        if ranks is not None and is_deterministic(self.device):
            raise blame(step, first, second, ranks)
        if found.made:
            self._apply(tried, lr, tried.finite)
        facts: dict[str, Any] = {"samples": self._samples(step)}
        if not found.made:
            facts["first_gradient"] = first_parameter(self.buffers, self.mesh.axis("world"))
            with watching_modules(self.task.model) as names:
                self._try(step, batches)
            stage = self.task.pipeline.placement.index(self.mesh.axis("pp").rank)
            facts["first_module"] = first_module(names, stage, self.mesh.axis("world"))
        self.reported = Report(step, second, same=ranks is None, facts=facts)
        if self.mesh.rank == 0:
            self.reported.write(Path(self.config.log.dir))
        return found

    def _after(self, step: int, found: Found, *, scaled: bool) -> dict[str, Any]:
        """Adapt the loss scale, count skipped updates; what the step's line says of both.

        Raises NonFiniteError where a skipped update is not to be gone on from.
        """
        skipped = not found.made
        self.skipped = self.skipped + 1 if skipped else 0
        train = self.config.train
        if self.skipped > (train.max_skips if train.on_nonfinite == "skip" or scaled else 0):
            where = first_parameter(self.buffers, self.mesh.axis("world"))
            samples = self._samples(step)
            again = f"; {self.reported.again()}" if self.reported else ""
            said = explain(step, found.terms, found.norm, where, samples, self.skipped, again=again)
            raise NonFiniteError(said)
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

        factor = self.injected.begin(data_step(step, self.passed))

        def forward(stage: int, i: int, stream: Tensor | None) -> Output:
            training = Training(self.config.train.seed, step, i * dp.size + dp.rank, share)
            return spoiled(self.task.forward(stage, batches[i], stream, scale, training), factor)

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

    def _samples(self, step: int) -> list[str]:
        """What a step saw, for messages."""
        return self.task.describe(data_step(step, self.passed))

    def _auxiliary(self) -> dict[str, Tensor]:
        """This rank's parts of the losses of its routers, as `_agreed` wants them."""
        self.loads.sum_up()
        tp, parts = self.mesh.axis("tp"), self.loads.losses(list(self.task.auxiliary))
        return {name: part * tp.size for name, part in parts.items()}

    def _agreed(
        self, losses: dict[str, Tensor], norm: Tensor, norm_limit: float
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Each loss over all ranks; whether losses and norm are finite on every rank; whether the
        norm is within its limit on every rank.

        Ranks of a tensor group have equal losses, and all stages but the last have none. The norm
        is the same everywhere but for a fault, such as one tensor rank's in the gradient
        of a replicated parameter. One message says all.
        """
        copies = self.mesh.axis("tp").size * self.loss_scale.scale
        fault = norm - norm  # 0, or NaN where the norm is not finite
        over = (norm > norm_limit).to(fault.dtype)
        parts = torch.stack([*(x.double() / copies for x in losses.values()), fault, over])
        *sums, fault, over = all_reduce_(parts, self.mesh.axis("world")).unbind()
        finite = torch.isfinite(fault + sum(sums))
        return dict(zip(losses, sums, strict=True)), finite, over == 0

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

    def save(self, directory: Place) -> Place:
        """Save everything the run is under `directory`; all ranks together."""
        return save(directory, record(self), self.held(), axis=self.mesh.axis("world"))

    def start_save(
        self, directory: Place, staging: Staging, then: Callable[[], object] = lambda: None
    ) -> Saving:
        """As `save`, but return once `staging` has it; see `penteract.checkpoint.saving`."""
        world = self.mesh.axis("world")
        return start_save(
            directory, record(self), self.held(), staging=staging, axis=world, then=then
        )

    def held(self) -> list[tuple[Shard, Tensor]]:
        """What this rank saves, as boxes of logical tensors."""
        return list(held(self.task.model, self.buffers, self.optimizer))

    def resume(self, path: Place, *, check_hashes: bool = True) -> list[str]:
        """Continue the run saved at `path`; what of [optim] is another now, a line each.

        Raises ConfigError where model, data or optimizer are others.
        """
        return resume(self, path, check_hashes=check_hashes)

    def load_weights(self, path: Place) -> list[str]:
        """Start from the weights at `path`, all else fresh; what of them is not from there."""
        world = self.mesh.axis("world")
        told = self.activity.told(f"reading {path}")
        model, config = self.task.model, self.config
        return load_weights(path, model, self.buffers, config=config, axis=world, told=told)

    def weights(self) -> Iterator[tuple[Shard, Tensor]]:
        """The weights that this rank updates, as boxes of logical tensors, in at least float32."""
        return owned("", self.buffers.owned("master"))

    def gradients(self) -> Iterator[tuple[Shard, Tensor]]:
        """Their gradients; complete when `on_gradients` is called, used up by the update."""
        return owned("", self.buffers.owned("own_gradient"))
