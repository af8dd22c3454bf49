"""The training loop."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch

from penteract.checkpoint.io import agreed, find_step, latest_good, lock, retain
from penteract.config import Config
from penteract.config_file import to_toml
from penteract.mesh import Mesh
from penteract.parallel.pipeline.trace import Row, write_trace
from penteract.train.metrics import Metrics
from penteract.train.run import Run
from penteract.train.signals import StopRequest
from penteract.train.task import Task


def train(
    task: Task,
    config: Config,
    mesh: Mesh,
    device: torch.device,
    *,
    stop: StopRequest | None = None,
) -> None:
    """Train `task` from where its checkpoint directory stands to `train.steps`.

    Returns once everything is saved, also after a signal or `train.max_minutes`. It listens for
    signals itself unless `stop`, which does already, is given. Raises NonFiniteError,
    CheckpointError, and ConfigError where the directory holds another run.
    """
    assert config.checkpoint.dir is not None
    checkpoints, rank0 = Path(config.checkpoint.dir), mesh.rank == 0
    world = mesh.axis("world")
    steps, every = config.train.steps, config.checkpoint.every
    with contextlib.ExitStack() as stack:
        stop = stop or stack.enter_context(StopRequest(config.train.max_minutes))
        stack.callback(task.close)
        agreed(world, lambda: stack.enter_context(lock(checkpoints)) if rank0 else None)
        metrics = agreed(world, lambda: _open_metrics(config, active=rank0))
        stack.callback(metrics.close)
        run = Run(task, config, mesh, device)
        for note in task.notes:
            metrics.say(note)
        hashes, fall_back = config.checkpoint.verify == "hashes", config.checkpoint.fall_back
        found = latest_good(checkpoints, hashes=hashes, fall_back=fall_back, axis=world)
        metrics.say(_restore(run, found))
        if rank0:
            (Path(config.log.dir) / "config.toml").write_text(to_toml(config), encoding="utf-8")
        saved = None if found is None else run.step
        evaluate_every = config.train.eval_every or steps
        first = run.step + 1
        while run.step < steps and not stop.agreed(world, device):
            metrics.step(run.update())
            if rows := run.traced():
                _write_trace(run, rows, metrics)
            if run.step == first and (names := run.unreached()):
                metrics.say(f"warning: no loss reaches {', '.join(names)}: they do not learn")
            last = run.step == steps
            if task.validation and (last or run.step % evaluate_every == 0):
                if not last and stop.agreed(world, device):
                    break
                metrics.evaluation(run.step, run.evaluate())
            if every and run.step % every == 0:
                saved = _save(run, checkpoints, metrics)
        if saved != run.step:
            _save(run, checkpoints, metrics)
        if run.step < steps:
            metrics.say(f"stopped at step {run.step} of {steps} ({stop.reason or 'another rank'})")


def _open_metrics(config: Config, *, active: bool) -> Metrics:
    return Metrics(
        Path(config.log.dir),
        steps=config.train.steps,
        every=config.log.every,
        tensorboard=config.log.tensorboard,
        active=active,
    )


def _restore(run: Run, path: Path | None) -> str:
    """Continue the step at `path`, or start from other weights, or from the seed; says which."""
    options, steps = run.config.checkpoint, run.config.train.steps
    if path is not None:
        changes = run.resume(path, check_hashes=False)  # they were, when it was chosen
        if run.step >= steps:
            return f"{path}: step {run.step} of {steps} is done already; raise train.steps to go on"
        return "\n  ".join([f"continuing {path} at step {run.step} of {steps}", *changes])
    if options.load is None:
        return f"starting from seed {run.config.train.seed}"
    path = find_step(options.load)
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


def _save(run: Run, checkpoints: Path, metrics: Metrics) -> int:
    path = run.save(checkpoints)
    if run.mesh.rank == 0:
        options = run.config.checkpoint
        retain(checkpoints, options.keep, keep_every=options.keep_every)
    metrics.say(f"step {run.step:>6}  saved {path}")
    return run.step
