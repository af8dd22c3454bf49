"""Faults that data parallelism invites, planted: `test_data_parallel` would see each."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity.matrix import Cell
from parity.training import first_difference, reference
from torch import Tensor

from penteract.collectives import all_reduce_
from penteract.mesh import Axis
from penteract.nn import norm as norm_module
from penteract.nn.sequences import Training
from penteract.parallel import buffers as buffers_module
from penteract.parallel.buffers import Buffers
from penteract.parallel.pipeline.executor import Executor, Output
from penteract.pending import Pending
from penteract.placement import Placement
from penteract.train import run as run_module
from penteract.train.run import Run

CELL = Cell("gpt2", dp=2, micro_batch=1, global_batch=8, bucket_bytes=256, dropout=0.1)


def missing_all_reduce(patch: pytest.MonkeyPatch) -> None:
    """The first bucket of a step is not reduced."""
    start = buffers_module.start_all_reduce_
    count = 0

    def skip_first(x: Tensor, axis: Axis) -> Pending:
        nonlocal count
        count += 1
        return Pending((), lambda: x) if count == 1 else start(x, axis)

    patch.setattr(buffers_module, "start_all_reduce_", skip_first)


def local_count(patch: pytest.MonkeyPatch) -> None:
    """Each rank divides by its own number of tokens."""

    def totals(self: Run, *several: list[Tensor]) -> Tensor:
        local = [[torch.as_tensor(part).double() for part in parts] for parts in several]
        return torch.stack([torch.stack(parts).sum() for parts in local]) * 2

    patch.setattr(Run, "_totals", totals)


def accumulation_factor(patch: pytest.MonkeyPatch) -> None:
    """The sum is divided by the number of micro-batches once more."""
    run = Executor.run

    def divided(self: Executor, program: Any, forward: Any, *others: Any) -> dict[str, Tensor]:
        n = len({step.step.micro_batch for step in program})

        def smaller(stage: int, i: int, stream: Tensor | None) -> Output:
            output = forward(stage, i, stream)
            return Output(output.stream, {k: term / n for k, term in output.terms.items()})

        return run(self, program, smaller, *others)

    patch.setattr(Executor, "run", divided)


def norm_of_replicas(patch: pytest.MonkeyPatch) -> None:
    """Copies of a gradient on the data ranks are counted as many times as there are ranks."""
    norm = run_module.gradient_norm

    def counted(buffers: Buffers, axes: dict[str, Axis], *, order: float) -> Tensor:
        return all_reduce_(norm(buffers, axes, order=order).square(), axes["dp"]).sqrt()

    patch.setattr(run_module, "gradient_norm", counted)


def decay_on_norms(patch: pytest.MonkeyPatch) -> None:
    declared = norm_module.replicated

    def decayed(*arguments: Any, **options: Any) -> Placement:
        return dataclasses.replace(declared(*arguments, **options), decay=True)

    patch.setattr(norm_module, "replicated", decayed)


def local_dropout(patch: pytest.MonkeyPatch) -> None:
    """Masks follow a rank's own number of the micro-batch."""

    def of(seed: int, step: int, i: int, share: Tensor) -> Training:
        return Training(seed, step, i // CELL.dp, share)

    patch.setattr(run_module, "Training", of)


def dropped_weight_gradient(patch: pytest.MonkeyPatch) -> None:
    """One linear layer's closure is lost in every micro-batch but the last."""
    accumulate = Buffers.accumulate

    def drop(self: Buffers, parameter: torch.nn.Parameter, write: Callable[..., None]) -> None:
        name = self._slots[id(parameter)].entry.name
        if name != "layers.1.mlp.up.weight" or self._last:
            accumulate(self, parameter, write)

    patch.setattr(Buffers, "accumulate", drop)


def tied_gradient_once(patch: pytest.MonkeyPatch) -> None:
    """The head's part of a tied weight's gradient is overwritten by the embedding's."""
    accumulate = Buffers.accumulate

    def overwrite(self: Buffers, parameter: torch.nn.Parameter, write: Callable[..., None]) -> None:
        slot = self._slots[id(parameter)]
        slot.fresh = slot.fresh or slot.uses == 2
        accumulate(self, parameter, write)

    patch.setattr(Buffers, "accumulate", overwrite)


FAULTS = {  # and the first quantity in which each shows
    missing_all_reduce: "gradients",
    local_count: "loss",
    accumulation_factor: "loss",
    norm_of_replicas: "norm",
    decay_on_norms: "weights",
    local_dropout: "loss",
    dropped_weight_gradient: "gradients",
    tied_gradient_once: "gradients",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_seen(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference(CELL)  # before anything is broken
    fault(monkeypatch)
    assert first_difference(CELL) == FAULTS[fault]


def test_without_a_fault_there_is_none() -> None:
    assert first_difference(CELL) is None
