"""Steps that are not finite: what all ranks do when one sees it, and float16's loss scale."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import assert_same_state, curve, metrics, newest, run, write_config
from torch import Tensor

from penteract.config import resolve
from penteract.config_file import from_dict
from penteract.grid import Grid
from penteract.mesh import create_mesh
from penteract.parallel.buckets import Slot
from penteract.parallel.pipeline.executor import Output
from penteract.testing import run_ranks, world_axis
from penteract.train.language_model import synthetic_task
from penteract.train.nonfinite import NonFiniteError
from penteract.train.run import Run

Spoil = Callable[[dict[str, Tensor]], dict[str, Tensor]]
LAYOUTS: list[dict[str, Any]] = [{"tp": 2}, {}, {"zero": 1}, {"zero": 2}, {"zero": 3}]
SKIP = {"on_nonfinite": "skip"}


def new_run(parallel: dict[str, Any], optim: dict[str, Any], **train: Any) -> Run:
    """A run of a small Llama on made tokens, over all ranks."""
    values = {
        "model": {
            "layers": 2, "hidden": 12, "ffn": 20, "heads": 2, "kv_heads": 1, "vocab": 31,
        },
        "parallel": parallel,
        "data": {"seq": 6},
        "optim": {"lr": 1e-2, "warmup": 1, **optim},
        "train": {"steps": 6, "global_batch": 4, "dtype": "float16", **train},
    }  # fmt: skip
    config, axis = resolve(from_dict(values)), world_axis()
    mesh = create_mesh(Grid(axis.size, tp=config.parallel.tp), axis.rank)
    device = torch.device("cpu")
    return Run(synthetic_task(config, mesh, device), config, mesh, device)


def spoil(run: Run, rank: int, steps: set[int], with_: Spoil) -> list[int]:
    """On `rank`, change the loss terms of some steps; the steps whose batches are asked for."""
    forward, batches, seen = run.task.forward, run.task.batches, list[int]()

    def spoiled(*args: Any) -> Output:
        found = forward(*args)
        if run.mesh.rank == rank and seen[-1] in steps:
            found = Output(found.stream, with_(dict(found.terms)))
        return found

    def asked(step: int) -> Any:
        seen.append(step)
        return batches(step)

    run.task = dataclasses.replace(run.task, forward=spoiled, batches=asked)
    return seen


def overflow(terms: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loss stays as it is; its gradient leaves float16 behind."""
    terms["loss"].register_hook(lambda gradient: gradient * 1e30)
    return terms


def not_a_number(terms: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: term * float("nan") for name, term in terms.items()}


def state(run: Run) -> list[Tensor]:
    """Copies of all that an update changes."""
    run.buffers.wait()
    buckets = run.buffers.all_buckets
    flats = [x for b in buckets for x in (b.master, b.own_parameters, b.parameters)]
    flats += [moment for _, _, moment in run.optimizer.state()]
    return [x.clone() for x in flats if x is not None]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    assert len(a) == len(b)
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# --- float16


@pytest.mark.parametrize(
    "optim",
    [
        pytest.param({}, id="adamw", marks=pytest.mark.slow),
        pytest.param({"name": "sgd", "lr": 0.3}, id="sgd"),
    ],
)
def test_float16_trains_as_float32_does_in_every_layout(optim: dict[str, Any]) -> None:
    """Under SGD a factor in the gradient would show; AdamW's updates hide it."""

    def curves() -> list[list[tuple[float, float]]]:
        runs = [new_run(layout, optim) for layout in LAYOUTS]
        lines = [[run.update() for _ in range(4)] for run in runs]
        assert all(run.loss_scale.scale == 65536 for run in runs)
        return [[(x["loss"], x["grad_norm"]) for x in of_run] for of_run in lines]

    wide = new_run({}, optim, dtype="float32")
    wanted = [wide.update() for _ in range(4)]
    ranks = run_ranks(curves, 2)
    assert ranks[0] == ranks[1]
    for found in ranks[0]:
        for (loss, norm), line in zip(found, wanted, strict=True):
            assert loss == pytest.approx(line["loss"], rel=3e-4)
            assert norm == pytest.approx(line["grad_norm"], rel=5e-3)
            assert loss != line["loss"], "this was float32"


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    def steps() -> Iterator[tuple[dict[str, Any], dict[str, Any], bool]]:
        for number, layout in enumerate(LAYOUTS):
            run = new_run(layout, {"loss_scale": 1024.0})
            seen = spoil(run, number % 2, {2}, overflow)
            run.update()
            before = state(run)
            skipped, unchanged = run.update(), same(state(run), before)
            assert run.optimizer.updates == 1
            line = run.update()
            assert run.optimizer.updates == 2
            assert seen == [1, 2, 3], "a skipped step has used up its samples"
            assert not same(state(run), before)
            yield skipped, line, unchanged

    first, second = run_ranks(lambda: list(steps()), 2)
    for of_rank in (first, second):
        for skipped, line, unchanged in of_rank:
            assert unchanged
            assert (skipped["loss"], skipped["grad_norm"], skipped["skipped"]) == (None, None, True)
            assert (skipped["step"], skipped["tokens"], skipped["loss_scale"]) == (2, 48, 512)
            assert (line["step"], line["tokens"], line["loss_scale"]) == (3, 72, 512)
            assert line["loss"] > 0
            assert "skipped" not in line
    losses = [[line["loss"] for _, line, _ in of_rank] for of_rank in (first, second)]
    assert losses[0] == losses[1]


def test_the_scale_doubles_after_good_steps_in_a_row() -> None:
    def scales() -> list[float]:
        run = new_run({}, {"loss_scale": 64.0, "loss_scale_every": 2})
        spoil(run, 1, {4}, overflow)
        return [run.update()["loss_scale"] for _ in range(7)]

    assert run_ranks(scales, 2) == [[64, 128, 128, 64, 64, 128, 128]] * 2


def test_a_scale_that_begins_too_high_comes_down_and_is_saved(tmp_path: Path) -> None:
    """Scale and count go on over a resume, so the runs are equal to the bit."""
    sections = {
        "train": {"dtype": "float16", "steps": 12},
        "optim": {"loss_scale": 2.0**27, "loss_scale_every": 3, "decay": 12},
        "log": {"tensorboard": True},
    }
    config = write_config(tmp_path, sections)
    whole = run(["train", config, f"--log.dir={tmp_path}/whole"], 2)
    for steps in (2, 8, 12):
        run(["train", config, f"--train.steps={steps}"], 2)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    scales = [[line["loss_scale"] for line in metrics(tmp_path / name).values()]
              for name in ("run", "whole")]  # fmt: skip
    assert scales[0] == scales[1]
    assert_same_state(newest(tmp_path / "run"), newest(tmp_path / "whole"))
    lines = metrics(tmp_path / "run")
    skipped = [step for step, line in lines.items() if "skipped" in line]
    assert skipped[:3] == [1, 2, 3], "and a resume was among them"
    assert 3 < len(skipped) < 12
    assert lines[1]["loss"] is lines[1]["grad_norm"] is None
    assert lines[1]["loss_scale"] == 2.0**26
    assert max(scales[0][4:]) > min(scales[0]), "it rose again"
    assert (
        "step      1  skipped: loss or gradient not finite  scale 6.71089e+07  lr" in whole.err[0]
    )
    text = (tmp_path / "run/metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text


def test_the_least_scale_ends_the_run_with_a_message(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"train": {"dtype": "float16"}, "optim": {"loss_scale": 4.0}})

    def prepare(rank: int) -> None:
        real = Run.__init__

        def spoiled(self: Run, *args: Any, **more: Any) -> None:
            real(self, *args, **more)
            spoil(self, 1, {2, 3, 4}, overflow)

        Run.__init__ = spoiled  # type: ignore[method-assign]

    ranks = run(["train", config], 2, code=1, prepare=prepare)
    for said in ranks.err:
        assert "step 4: loss or gradients are not finite at loss scale 1, the least: a" in said
        assert "Traceback" not in said
    lines = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["loss_scale"] for line in lines] == [4, 2, 1]


def test_a_loss_that_is_nan_is_no_matter_of_scale() -> None:
    """`stop` holds for float16 too: only an overflow of gradients alone is skipped."""

    def stopped() -> str:
        run = new_run({}, {})
        spoil(run, 1, {2}, not_a_number)
        run.update()
        with pytest.raises(NonFiniteError) as caught:
            run.update()
        return str(caught.value)

    for message in run_ranks(stopped, 2):
        assert message.startswith("step 2: loss = nan")


# --- the policy


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion", "muon"])
def test_skipping_goes_on_until_too_many_in_a_row(optimizer: str) -> None:
    def lines() -> tuple[list[bool], str]:
        run = new_run({}, {"name": optimizer}, dtype="float64", max_skips=2, **SKIP)
        seen = spoil(run, 1, {2, 4, 5, 6}, not_a_number)
        run.task = dataclasses.replace(run.task, describe=lambda step: [f"sample of {step}"])
        found = []
        for _ in range(5):
            before = state(run)
            found.append("skipped" in run.update())
            assert same(state(run), before) == found[-1]
        with pytest.raises(NonFiniteError) as caught:
            run.update()
        assert seen == [1, 2, 3, 4, 5, 6]
        return found, str(caught.value)

    for found, message in run_ranks(lines, 2):
        assert found == [False, True, False, True, True]
        assert message.startswith(
            "step 6: loss = nan, gradient norm = nan; the first such gradient"
        )
        assert "head.weight; 3 updates in a row were not made" in message
        assert message.endswith("Samples:\n  sample of 6")


def replicated(run: Run) -> Slot:
    """A parameter that every tensor rank has whole, with its whole gradient."""
    slots = (s for s in run.buffers.slots() if not s.entry.placement.split_axes)
    return next(s for s in slots if s.bucket.kind.more_axes == ())


def spoil_gradient(run: Run, step: int, rank: int) -> str:
    """After the sums over ranks, one element of one rank's copy is infinite; the name."""
    slot = replicated(run)

    def act(_: Run) -> None:
        if (run.step + 1, run.mesh.rank) == (step, rank):
            slot.gradient.view(-1)[0] = float("inf")

    run.on_gradients = act
    return slot.entry.name


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_in_one_tensor_ranks_copy_is_one_answer(rank: int, dtype: str) -> None:
    """The ranks' norms differ, so each alone would decide otherwise, and copies would part."""

    def outcome() -> tuple[list[bool], bool, str, str]:
        run = new_run({"tp": 2}, {}, dtype=dtype, **SKIP)
        spoil_gradient(run, 2, rank)
        run.update()
        before = state(run)
        skipped = ["skipped" in run.update()]
        unchanged = same(state(run), before)
        skipped.append("skipped" in run.update())
        run = new_run({"tp": 2}, {}, dtype=dtype)
        name = spoil_gradient(run, 1, rank)
        with pytest.raises(NonFiniteError) as caught:
            run.update()
        return skipped, unchanged, name, str(caught.value)

    for mine, (skipped, unchanged, name, message) in enumerate(run_ranks(outcome, 2)):
        assert skipped == [True, False]
        assert unchanged
        assert f"the first such gradient in backward: {name}; the update was not made" in message
        assert ("on this rank, not finite on another" in message) == (mine != rank)
        assert ("gradient norm = inf" in message) == (mine == rank)
