"""Trains a configuration in one process and in each layout on local ranks, and compares.

First numbers only: losses, norms, gradients and weights of every step. Where they differ, both
train again up to the first step that does, and every module's output of that step is compared.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch._dynamo  # optimizers import it at their first step: here once, not in every rank

from penteract.config import Config
from penteract.families import model_spec
from penteract.grid import Grid
from penteract.mesh import single
from penteract.nn.flops import training_flops
from penteract.nn.model import Stage
from penteract.parallel.parameters import declared_parameters
from penteract.parallel.tensor import TensorParallel
from penteract.testing import run_ranks
from penteract.train.batch_ramp import global_batch
from penteract.verify.compare import Verdict, judge
from penteract.verify.layouts import Layout, reference
from penteract.verify.locate import locate
from penteract.verify.measure import Measured, Reference, measure
from penteract.verify.measure import reference as train_alone
from penteract.verify.tolerances import Limits, tolerance
from penteract.verify.trace import trace

LEAST_EPS = 1e-4
LARGEST_CLIP = 0.05
# Of a parameter: weight, gradient, two moments, and the master of a narrow one.
BYTES = {"float64": 4 * 8, "float32": 4 * 4, "bfloat16": 2 + 4 * 4}
LARGE_MEMORY_SHARE = 0.5
LARGE_FLOPS = 2e12  # a minute or two on a core, in float64

Dtype = Literal["float64", "float32", "bfloat16"]


@dataclass(frozen=True)
class Result:
    """A layout, how it compares, and where it first differs."""

    layout: Layout
    verdict: Verdict
    first_difference: str | None
    seconds: float


@dataclass(frozen=True)
class Trained:
    """The reference and how long it took, or why there is none."""

    outcome: Reference | None
    failure: str = ""
    seconds: float = 0.0


def prepare(config: Config, *, dtype: Dtype, steps: int) -> tuple[Config, list[str]]:
    """The configuration that is verified, and what was changed beside type and length."""
    optim = config.optim
    eps, clip = max(optim.eps, LEAST_EPS), min(optim.clip, LARGEST_CLIP)
    notes = []
    if eps != optim.eps:
        notes.append(
            f"optim.eps {optim.eps:g} -> {eps:g}: Adam divides rounding by rounding where a "
            "gradient is zero"
        )
    if clip != optim.clip:
        notes.append(f"optim.clip {optim.clip:g} -> {clip:g}: so that gradients are clipped")
    config = dataclasses.replace(
        config,
        optim=dataclasses.replace(optim, eps=eps, clip=clip),
        train=dataclasses.replace(config.train, dtype=dtype, steps=steps),
    )
    return config, notes


def size_warning(config: Config, layouts: Sequence[Layout]) -> str | None:
    """Why this will be too much for this machine, if it will."""
    spec = model_spec(config)
    model = Stage(spec, TensorParallel(single("tp")), dtype=torch.float32)
    parameters = sum(entry.placement.numel for entry in declared_parameters(model))
    world = max((layout.world for layout in layouts), default=1)
    memory = parameters * BYTES[config.train.dtype] * world
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    steps, batch = config.train.steps, global_batch(1, config.train)
    flops = steps * training_flops(spec, [config.data.seq] * batch) * (1 + len(layouts))
    if memory < LARGE_MEMORY_SHARE * machine and flops < LARGE_FLOPS:
        return None
    return (
        f"{parameters:,} parameters on up to {world} ranks take up to {memory / 2**30:,.1f} GiB of "
        f"weights, gradients and moments (this machine has {machine / 2**30:,.1f} GiB), and "
        f"{flops:.1e} operations; --shrink keeps the structure and cuts the sizes"
    )


def train_reference(config: Config) -> Trained:
    """The configuration in one process. It is forked, so that no thread of it stays here."""
    began = time.perf_counter()
    alone = reference(config)
    try:
        (outcome,) = run_ranks(train_alone, 1, alone, alone.train.steps, timeout_s=86400.0)
    except RuntimeError as error:
        return Trained(None, f"the reference: {failure_line(error)}")
    return Trained(outcome, seconds=time.perf_counter() - began)


def verify_layout(layout: Layout, trained: Trained) -> Result:
    """Train one layout and compare it."""
    began = time.perf_counter()
    verdict, said = Verdict(), trained.failure
    if trained.outcome is not None:
        try:
            verdict, said = _compared(layout, trained.outcome, patience_s(layout, trained))
        except (RuntimeError, TimeoutError) as error:
            said = failure_line(error)
    return Result(layout, verdict, said or None, time.perf_counter() - began)


def limits_of(config: Config) -> Limits:
    """The largest relative differences at which a layout of `config` counts as equal."""
    model, train = config.model, config.train
    return tolerance(train.dtype, layers=model.layers, hidden=model.hidden, steps=train.steps)


def patience_s(layout: Layout, trained: Trained) -> float:
    """How long a layout may take before it counts as hanging: ranks share few cores."""
    return 60.0 + 30.0 * layout.world * trained.seconds


def _compared(layout: Layout, wanted: Reference, timeout_s: float) -> tuple[Verdict, str]:
    config, grid = layout.config, layout.grid
    limits, steps = limits_of(config), len(wanted.losses)
    arguments = (config, grid, steps, wanted)
    ranks: list[Measured] = run_ranks(measure, layout.world, *arguments, timeout_s=timeout_s)
    verdict = judge(wanted, ranks, limits)
    if verdict.step is None:
        return verdict, ""
    traces = None
    if verdict.step > 0:
        alone = reference(config)
        (first,) = run_ranks(trace, 1, alone, Grid(1), verdict.step, timeout_s=timeout_s)
        ranks_of = (config, grid, verdict.step)
        traces = (first, run_ranks(trace, layout.world, *ranks_of, timeout_s=timeout_s))
    return verdict, locate(wanted, ranks, verdict.step, limits, traces)


def failure_line(error: Exception) -> str:
    """One line of what `run_ranks` says of a failure: the rank, and its traceback's last line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if isinstance(error, TimeoutError):
        return lines[0]
    traceback = any(line.startswith("Traceback") for line in lines)
    return f"{lines[0]} {lines[-1] if traceback else lines[1]}"
