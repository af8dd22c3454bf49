"""The training loop."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from penteract.checkpoint.agreement import together
from penteract.checkpoint.io import agreed, find_step, latest_good, lock, place
from penteract.checkpoint.remote import Place
from penteract.config import Config
from penteract.config_file import to_toml
from penteract.mesh import Mesh, Traffic
from penteract.parallel.pipeline.trace import Row, write_trace
from penteract.train.alike import check_alike
from penteract.train.gathered import traced, unreached
from penteract.train.metrics import Metrics
from penteract.train.replicas import Replicas
from penteract.train.run import Run
from penteract.train.saving import Saver
from penteract.train.signals import StopRequest
from penteract.train.spikes import Rewinds
from penteract.train.task import Task
from penteract.train.watchdog import Watchdog


def train(
    task: Task,
    config: Config,
    mesh: Mesh,
    device: torch.device,
    *,
    stop: StopRequest | None = None,
    report: Callable[..., None] | None = None,
) -> None:
    """Train `task` from where its checkpoint directory stands to `train.steps`.

    Returns once everything is saved, also after a signal or `train.max_minutes`. It listens for
    signals itself unless `stop`, which does already, is given. `report(text, **facts)` gets what a
    rank that hangs says before it ends, instead of standard error. Raises NonFiniteError,
    CheckpointError, and ConfigError where the directory holds another run.
    """
    assert config.checkpoint.dir is not None
    checkpoints, rank0 = place(config.checkpoint.dir), mesh.rank == 0
    world = mesh.axis("world")
    with contextlib.ExitStack() as stack:
        stop = stop or stack.enter_context(StopRequest(config.train.max_minutes))
        stack.callback(task.close)
        check_alike({"task": dict(task.state)}, world)
        held = agreed(world, lambda: stack.enter_context(lock(checkpoints)) if rank0 else None)
        metrics = agreed(world, lambda: _open_metrics(config, active=rank0))
        stack.callback(metrics.close)
        run = Run(task, config, mesh, device)
        for note in task.notes:
            metrics.say(note)
        hashes, fall_back = config.checkpoint.verify == "hashes", config.checkpoint.fall_back
        stack.enter_context(_watchdog(run, report or _print))
        told = run.activity.told("checking checkpoints")
        found = latest_good(checkpoints, hashes=hashes, fall_back=fall_back, axis=world, told=told)
        metrics.say(_restore(run, found))
        if rank0:
            (Path(config.log.dir) / "config.toml").write_text(to_toml(config), encoding="utf-8")
        saved = None if found is None else run.step
        saver = Saver(run, checkpoints, metrics.say, saved=saved, held=held)
        stack.enter_context(saver)
        _make_steps(run, saver, metrics, stop, checkpoints)
        if run.step < config.train.steps:
            why = stop.reason or "another rank"
            metrics.say(f"stopped at step {run.step} of {config.train.steps} ({why})")


def _make_steps(
    run: Run, saver: Saver, metrics: Metrics, stop: StopRequest, directory: Place
) -> None:
    """Update, evaluate and save up to the last step, or until a rank wants to stop."""
    task, world, device = run.task, run.mesh.axis("world"), run.device
    steps, every = run.config.train.steps, run.config.checkpoint.every
    evaluate_every = run.config.train.eval_every or steps
    rewinds = Rewinds(run, saver, directory, metrics.say)
    replicas = Replicas(run)
    first = run.step + 1
    while run.step < steps and not stop.agreed(world, device):
        line = run.update() | saver.pause() | run.pace.line(run.step)
        metrics.step(line | rewinds.look())
        if run.reported:
            metrics.say(run.reported.said())
        if rewinds.go_back():
            replicas.checked = run.step
            continue
        saver.look()
        if rows := traced(run):
            _write_trace(run, rows, metrics)
        if run.step == first and (names := unreached(run)):
            metrics.say(f"warning: no loss reaches {', '.join(names)}: they do not learn")
        last = run.step == steps
        saving = last or (every > 0 and run.step % every == 0)
        replicas.look(saving=saving)
        if task.validation and (last or run.step % evaluate_every == 0):
            if not last and stop.agreed(world, device):
                break
            metrics.evaluation(run.step, run.evaluate())
        if saving and not last:
            saver.save()
    replicas.look(saving=True)
    saver.finish()


def _print(text: str, **facts: float) -> None:
    print(text, file=sys.stderr, flush=True)


def _watchdog(run: Run, report: Callable[..., None]) -> Watchdog:
    """It sees every axis of the mesh, and the channels between stages."""

    def axes() -> list[tuple[str, Traffic]]:
        every = [*run.mesh.axes.values(), *run.executor.channels.values()]
        return [(axis.name, axis.traffic) for axis in every]

    limit_s = 60 * run.config.train.hang_minutes
    rank, world = run.mesh.rank, run.mesh.grid.world
    return Watchdog(run.activity, axes, rank=rank, world=world, limit_s=limit_s, report=report)


def _open_metrics(config: Config, *, active: bool) -> Metrics:
    return Metrics(
        Path(config.log.dir),
        steps=config.train.steps,
        every=config.log.every,
        tensorboard=config.log.tensorboard,
        active=active,
    )


def _restore(run: Run, path: Place | None) -> str:
    """Continue the step at `path`, or start from other weights, or from the seed; says which."""
    options, steps = run.config.checkpoint, run.config.train.steps
    if path is not None:
        changes = run.resume(path, check_hashes=False)  # they were, when it was chosen
        if run.step >= steps:
            return f"{path}: step {run.step} of {steps} is done already; raise train.steps to go on"
        return "\n  ".join([f"continuing {path} at step {run.step} of {steps}", *changes])
    if options.load is None:
        return f"starting from seed {run.config.train.seed}"
    world, load = run.mesh.axis("world"), options.load  # one rank chooses for all
    path = place(together(world, lambda: str(find_step(load)) if run.mesh.rank == 0 else "")[0])
    if options.load_state:
        changes = run.resume(path, check_hashes=options.verify == "hashes")
        return "\n  ".join([f"starting from {path}, its moments, its step {run.step}", *changes])
    changes = run.load_weights(path)
    return "\n  ".join([f"starting from the weights of {path}", *changes])


def _write_trace(run: Run, rows: Sequence[Row], metrics: Metrics) -> None:
    path = Path(run.config.log.dir) / f"trace-step-{run.step}.json"
    if run.mesh.rank == 0:
        pipelines = enumerate(run.mesh.grid.groups("pp").tolist())
        number = {rank: i for i, ranks in pipelines for rank in ranks}
        write_trace(path, rows, number.__getitem__)
    metrics.say(f"step {run.step:>6}  wrote {path}: open it with https://ui.perfetto.dev")
