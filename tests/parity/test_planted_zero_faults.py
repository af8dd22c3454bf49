"""Faults that sharing out invites, planted: `test_zero_matrix` would see each."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.continued import in_layout_of
from parity.matrix import Cell
from parity.outcome import Part, joined
from parity.training import (
    STEPS,
    collect,
    first_difference,
    first_of,
    keep_gradients,
    meshes,
    new_run,
    next_step,
    reference,
    resume_here,
    set_weights,
    train_here,
    update,
)
from torch import Tensor

from penteract.collectives import done
from penteract.mesh import Axis
from penteract.nn.block import Block
from penteract.optim.optimizer import Optimizer
from penteract.parallel import buffers as buffers_module
from penteract.parallel import zero as zero_module
from penteract.parallel.buckets import Bucket, Slot
from penteract.parallel.buffers import Buffers
from penteract.parallel.pipeline.executor import Output
from penteract.pending import Pending
from penteract.testing import run_ranks
from penteract.train.run import Run

STAGE_1 = Cell("gpt2", dp=2, micro_batch=1, global_batch=6, bucket_bytes=4096, dropout=0.1, zero=1)
STAGE_2, STAGE_3 = (dataclasses.replace(STAGE_1, zero=zero) for zero in (2, 3))
REPLICAS = dataclasses.replace(STAGE_1, dp=4, replicas=2)

Fault = Callable[[pytest.MonkeyPatch], None]


def slice_of_the_next_rank(patch: pytest.MonkeyPatch) -> None:
    """A bucket's sums go to the wrong owners."""
    scatter = buffers_module.start_reduce_scatter_

    def rolled(x: Tensor, axis: Axis) -> Pending:
        return scatter(x.copy_(x.roll(x.numel() // axis.size)), axis)

    patch.setattr(buffers_module, "start_reduce_scatter_", rolled)


def bucket_not_reduced(patch: pytest.MonkeyPatch) -> None:
    """Each rank keeps its own slice of its own gradient."""

    def local(x: Tensor, axis: Axis) -> Pending:
        return done(x.view(axis.size, -1)[axis.rank])

    patch.setattr(buffers_module, "start_reduce_scatter_", local)


def replicas_not_summed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(buffers_module, "start_all_reduce_", lambda x, axis: done(x))


def last_micro_batch_only(patch: pytest.MonkeyPatch) -> None:
    """A micro-batch's sum overwrites that of the one before."""
    settle = Buffers._settle

    def forgetting(self: Buffers, left: int) -> None:
        for bucket in self.buckets:
            bucket.summed = False
        settle(self, left)

    patch.setattr(Buffers, "_settle", forgetting)


def not_gathered_after_a_step(patch: pytest.MonkeyPatch) -> None:
    """Parameters that others own stay those of the start."""
    step, gather = Optimizer.step, buffers_module.start_all_gather_into

    def stale(self: Optimizer, lr: float, coefficient: Tensor, skip: Tensor) -> None:
        buffers_module.start_all_gather_into = lambda out, x, axis: done(out)
        step(self, lr, coefficient, skip)
        buffers_module.start_all_gather_into = gather

    patch.setattr(Optimizer, "step", stale)


def ring_not_dropped(patch: pytest.MonkeyPatch) -> None:
    """What stage 3 gathered before an update is used after it."""
    not_gathered_after_a_step(patch)
    patch.setattr(zero_module.Gathering, "drop", lambda self: None)


def dirty_memory(patch: pytest.MonkeyPatch) -> None:
    """A micro-batch's gradient begins with what the memory held, in the gaps too."""
    target = Buffers._target

    def dirty(self: Buffers, slot: Slot) -> Tensor:
        new = slot.bucket.gradient is None
        view = target(self, slot)
        if new:
            slot.bucket.gradient.fill_(0.01)
        return view

    patch.setattr(Buffers, "_target", dirty)


FAULTS: tuple[tuple[Fault, Cell, str], ...] = (  # and the first quantity in which each shows
    (slice_of_the_next_rank, STAGE_1, "gradients"),
    (slice_of_the_next_rank, STAGE_3, "gradients"),
    (bucket_not_reduced, STAGE_1, "gradients"),
    (bucket_not_reduced, STAGE_2, "gradients"),
    (replicas_not_summed, REPLICAS, "gradients"),
    (last_micro_batch_only, STAGE_2, "gradients"),
    (last_micro_batch_only, STAGE_3, "gradients"),
    (not_gathered_after_a_step, STAGE_1, "loss of step 2"),
    (not_gathered_after_a_step, STAGE_2, "loss of step 2"),
    (ring_not_dropped, STAGE_3, "loss of step 2"),
    (dirty_memory, STAGE_2, "norm"),
)


@pytest.mark.parametrize(
    ("fault", "cell", "shows"),
    FAULTS,
    ids=[f"{fault.__name__}-zero={cell.zero}" for fault, cell, _ in FAULTS],
)
def test_a_planted_fault_is_seen(
    fault: Fault, cell: Cell, shows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference(cell)  # before anything is broken
    fault(monkeypatch)
    assert first_difference(cell) == shows


@pytest.mark.parametrize("cell", [STAGE_1, STAGE_2, STAGE_3, REPLICAS])
def test_without_a_fault_there_is_none(cell: Cell) -> None:
    assert first_difference(cell) is None


# --- moments, over a checkpoint


def moments_of_the_next_rank(patch: pytest.MonkeyPatch) -> None:
    """On resuming a rank loads the moments of a slice that is another's."""
    resume, state = Run.resume, Optimizer.state

    def rotated(self: Optimizer) -> Iterator[tuple[str, Bucket, Tensor]]:
        for name, bucket, moment in state(self):
            kind = bucket.kind
            shard = kind.sharding.shard
            other = dataclasses.replace(shard, rank=(shard.rank + 1) % shard.size)
            sharding = dataclasses.replace(kind.sharding, shard=other)
            yield (
                name,
                dataclasses.replace(bucket, kind=dataclasses.replace(kind, sharding=sharding)),
                moment,
            )

    def wrong(self: Run, path: Path) -> list[str]:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(Optimizer, "state", rotated)
            return resume(self, path)

    patch.setattr(Run, "resume", wrong)


def moments_from_nothing(patch: pytest.MonkeyPatch) -> None:
    resume = Run.resume

    def forgetting(self: Run, path: Path) -> list[str]:
        lines = resume(self, path)
        for _, _, moment in self.optimizer.state():
            moment.zero_()
        return lines

    patch.setattr(Run, "resume", forgetting)


def no_fault(patch: pytest.MonkeyPatch) -> None:
    """The step after a resume is right."""


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("fault", "shows"),
    [(no_fault, None), (moments_of_the_next_rank, "weights"), (moments_from_nothing, "weights")],
)
def test_a_fault_of_a_resume_is_seen_in_the_next_step(
    fault: Fault,
    shows: str | None,
    optimizer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved = dataclasses.replace(STAGE_1, optimizer=optimizer)
    moved = in_layout_of(STAGE_3, saved)
    run_ranks(train_here, saved.world, [saved], [tmp_path])
    wanted = next_step(moved)
    fault(monkeypatch)
    parts = [held for (held,) in run_ranks(resume_here, moved.world, [moved], [tmp_path])]
    assert first_of(parts, wanted) == shows


# --- a parameter that some micro-batches do not use


def train_without_some(cell: Cell) -> Part:
    """As `train`, but odd micro-batches pass the last block's feed-forward layer by."""
    run, part = new_run(cell, meshes()(cell.tp)), Part()
    set_weights(run)
    keep_gradients(run, part.gradients)
    blocks = [layer for layer in run.task.model.modules() if isinstance(layer, Block)]
    mlp, forward = blocks[-1].mlp, run.task.forward

    def some(*args: Any) -> Output:
        *_, training = args
        with pytest.MonkeyPatch.context() as patch:
            if training.micro_batch % 2:
                patch.setattr(mlp, "forward", lambda x, sizes: torch.zeros_like(x))
            return forward(*args)

    run.task = dataclasses.replace(run.task, forward=some)
    for _ in range(STEPS):
        update(run, part)
    return collect(run, part)


def unused_not_zeroed(patch: pytest.MonkeyPatch) -> None:
    """What no micro-batch wrote is sent as the memory holds it."""
    dirty_memory(patch)
    start = Buffers._start_complete

    def keeping(self: Buffers) -> None:
        for bucket in self.buckets:
            for slot in bucket.slots if not bucket.pending else ():
                if slot.fresh:
                    self._target(slot)
                slot.fresh = False
        start(self)

    patch.setattr(Buffers, "_start_complete", keeping)


@pytest.mark.parametrize(
    ("zero", "shows"),
    [(0, "gradients of step 2"), (1, "gradients of step 2"), (2, "gradients"), (3, "gradients")],
)
def test_a_parameter_that_some_micro_batches_do_not_use(
    zero: int, shows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 2 ranks one of them never uses it: it counts as zero, and nothing stale does."""
    cell = dataclasses.replace(STAGE_1, zero=zero)
    wanted = joined([train_without_some(dataclasses.replace(cell, dp=1, zero=0))])
    assert first_of(run_ranks(train_without_some, 2, cell, timeout_s=30), wanted) is None
    unused_not_zeroed(monkeypatch)
    assert first_of(run_ranks(train_without_some, 2, cell, timeout_s=30), wanted) == shows
