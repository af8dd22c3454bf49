"""A step beyond the numbers of `test_data_parallel`: loader, NaN, narrow types, evaluation."""

import dataclasses
from typing import Any

import pytest
import torch
from parity.matrix import MODELS, Cell
from parity.outcome import Part, difference, joined
from parity.training import (
    STEPS,
    collect,
    config_of,
    documents,
    meshes,
    new_run,
    set_weights,
    train_here,
    update,
)
from reference import bridge, plain

from penteract.families import model_spec
from penteract.grid import Grid
from penteract.mesh import Mesh, create_mesh
from penteract.nn.sequences import MicroBatch
from penteract.parallel.pipeline.executor import Output
from penteract.testing import run_ranks, world_axis
from penteract.train.language_model import synthetic_task
from penteract.train.nonfinite import NonFiniteError
from penteract.train.run import Run

CELL = Cell("llama", dp=2, micro_batch=1, global_batch=4, bucket_bytes=25 << 20, dropout=0.0)


def world_mesh() -> Mesh:
    axis = world_axis()
    return create_mesh(Grid(axis.size), axis.rank)


def through_the_loader(cell: Cell) -> Part:
    """Two updates on the synthetic task with its own batches."""
    mesh = world_mesh()
    task = synthetic_task(config_of(cell), mesh, torch.device("cpu"))
    run = new_run(cell, mesh, task=task)
    set_weights(run)
    part = Part()
    for step in range(1, STEPS + 1):
        update(run, part)
        assert run.tokens == step * cell.global_batch * run.config.data.seq
    task.close()
    return collect(run, part)


@pytest.mark.parametrize("dp", [2, 3])
def test_the_loaders_batches_train_alike_in_every_layout(dp: int) -> None:
    cell = Cell("gpt2", dp=dp, micro_batch=3, global_batch=8, bucket_bytes=256, dropout=0.1)
    alone = joined([through_the_loader(dataclasses.replace(cell, dp=1))])
    for found in run_ranks(through_the_loader, dp, cell):
        worst, where = difference(joined([found]), alone, floor=1e-2)
        assert worst <= 1e-12, where


def broken_step(poisoned_rank: int) -> tuple[str, bool, int]:
    """A step with a NaN: the error, whether weights and moments are as before, steps done."""
    run = new_run(CELL, world_mesh())
    set_weights(run)
    run.update()
    flats = [b.master for b in run.buffers.buckets] + [x for _, _, x in run.optimizer.state()]
    before = [x.clone() for x in flats]
    if run.mesh.rank == poisoned_rank:
        forward = run.task.forward

        def poisoned(*args: Any) -> Output:
            found = forward(*args)
            return Output(found.stream, {k: x * float("nan") for k, x in found.terms.items()})

        run.task = dataclasses.replace(run.task, forward=poisoned)
    message = ""
    try:
        run.update()
    except NonFiniteError as error:
        message = str(error)
    same = all(torch.equal(a, b) for a, b in zip(before, flats, strict=True))
    return message, same, run.step


@pytest.mark.parametrize("poisoned_rank", [0, 2])
def test_a_nan_on_one_rank_stops_all_of_them_before_the_update(poisoned_rank: int) -> None:
    for message, same, steps in run_ranks(broken_step, 3, poisoned_rank):
        assert message.startswith(
            "step 2: loss = nan, gradient norm = nan; the first such gradient in backward: "
            "head.weight; the update was not made"
        )
        assert same
        assert steps == 1


def test_without_a_nan_the_same_step_does_change_the_weights() -> None:
    for message, same, steps in run_ranks(broken_step, 2, -1):
        assert (message, same, steps) == ("", False, 2)


def test_stale_gradients_are_never_read() -> None:
    """Every gradient is NaN before a step, and the parameters' own are absent."""

    def two_steps(poison: bool) -> Part:
        run, part = new_run(CELL, world_mesh()), Part()
        set_weights(run)
        for _ in range(STEPS):
            for slot in run.buffers.slots() if poison else ():
                slot.gradient.fill_(float("nan"))
            update(run, part)
        return collect(run, part)

    clean, poisoned = run_ranks(two_steps, 2, False)[1], run_ranks(two_steps, 2, True)[1]
    assert difference(joined([poisoned]), joined([clean]))[0] == 0.0


def test_every_rank_ends_with_the_same_bits_in_narrow_types() -> None:
    """bfloat16 weights are the rounded masters, and near those of a float64 run."""

    def narrow() -> Part:
        run, part = new_run(CELL, world_mesh(), dtype="bfloat16"), Part()
        set_weights(run)
        for _ in range(STEPS):
            update(run, part)
        for slot in run.buffers.slots():
            assert slot.master.dtype == slot.gradient.dtype == torch.float32
            assert torch.equal(slot.entry.parameter, slot.master.bfloat16())
        return collect(run, part)

    first, second = (joined([part]) for part in run_ranks(narrow, 2))
    assert difference(first, second)[0] == 0.0
    wide = joined(train_here([dataclasses.replace(CELL, dp=1)]))
    assert first.losses == pytest.approx(wide.losses, rel=3e-2)
    worst, name = bridge.worst_difference(first.weights[-1], wide.weights[-1])
    assert worst < 3e-2, name


def evaluation(cell: Cell, samples: list[int]) -> dict[str, float]:
    """Evaluate on packed, masked samples, one a micro-batch, dealt out to the data ranks."""
    mesh = meshes()(cp=cell.cp)
    dp, cp = mesh.axis("dp"), mesh.axis("cp")
    turns = -(-len(samples) // dp.size)
    mine = (samples + [-1] * dp.size)[dp.rank :: dp.size][:turns]
    vocab = MODELS[cell.model]["vocab"]
    parts = [bridge.micro_batch(documents(i, vocab) if i >= 0 else [], cp) for i in mine]

    def batches() -> list[MicroBatch]:
        return parts

    run = new_run(cell, mesh)
    set_weights(run)
    run.task = dataclasses.replace(run.task, validation={"v": batches, "none": list})
    return run.evaluate()


@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (2, 1), (3, 1), (1, 3), (2, 2)])
def test_evaluation_is_sum_over_count_in_every_layout(dp: int, cp: int) -> None:
    """Ragged masks: a mean of the ranks' means would differ. No token at all gives 0, not NaN."""
    cell = dataclasses.replace(CELL, dropout=0.1)  # which evaluation must not apply
    samples = [0, 1, 2, 3, 4]
    described = bridge.describe(model_spec(config_of(cell)))
    weights = bridge.random_weights(
        bridge.placements(new_run(cell, create_mesh(Grid(1), 0)).buffers)
    )
    docs = [doc for i in samples for doc in documents(i, MODELS[cell.model]["vocab"])]
    wanted = sum(plain.loss_sum(doc, weights, described).item() for doc in docs)
    wanted /= sum(sum(doc.weights) for doc in docs)
    cell = dataclasses.replace(cell, dp=dp, cp=cp)
    for found in run_ranks(evaluation, dp * cp, cell, samples):
        assert found == {"v": pytest.approx(wanted, rel=1e-9), "none": 0.0}


def test_a_step_without_any_counted_token_is_zero_and_no_error() -> None:
    run = new_run(CELL, create_mesh(Grid(1), 0))
    set_weights(run)
    vocab = MODELS[CELL.model]["vocab"]
    masked = [
        dataclasses.replace(doc, weights=[0.0] * len(doc.tokens)) for doc in documents(0, vocab)
    ]
    run.task = dataclasses.replace(run.task, batches=lambda step: [bridge.micro_batch(masked)])
    line = run.update()
    assert (line["loss"], line["grad_norm"]) == (0.0, 0.0)


def test_metrics_of_a_step() -> None:
    run: Run = new_run(CELL, create_mesh(Grid(1), 0))
    line: dict[str, Any] = run.update()
    assert line["step"] == 1
    assert line["lr"] == run.config.optim.lr
    assert line["tokens"] == CELL.global_batch * run.config.data.seq
    seconds = line["tokens"] / line["tokens_per_second"]
    assert line["flops_per_second"] == pytest.approx(run.task.flops(1) / seconds)
