"""A run from its first step to its last: what it writes, and that ranks do not change it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import (
    assert_same_state,
    curve,
    evaluations,
    metrics,
    newest,
    run,
    tensors,
    write_config,
    write_corpus,
)

from penteract.checkpoint.io import read_manifest
from penteract.checkpoint.model import load_model
from penteract.checkpoint.steps import steps
from penteract.config_file import load
from penteract.data.indexed import IndexedFile
from penteract.data.loader import ValidSource
from penteract.data.rows import rows_of
from penteract.grid import Grid
from penteract.mesh import create_mesh
from penteract.nn.sequences import MicroBatch
from penteract.train.language_model import language_model
from penteract.train.run import Run

# The contract's keys, in its order, then the parts of a step that we report besides.
KEYS = [
    "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "flops_per_second",
    "memory_bytes", "step_ms", "data_wait_ms", "compute_ms", "update_ms",
]  # fmt: skip


def test_what_a_run_writes(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        {"train": {"eval_every": 4}, "log": {"tensorboard": True}, "checkpoint": {"every": 2}},
    )
    ranks = run(["train", config, "--checkpoint.keep=2"])
    folder = tmp_path / "run"
    assert ranks.out[0] == ""  # standard output is for --json
    assert sorted(p.name for p in folder.iterdir()) == [
        "checkpoints", "config.toml", "metrics.jsonl", "tensorboard",
    ]  # fmt: skip

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4, 5, 6, 6]
    assert [line["step"] for line in lines if line.pop("save_ms", None)] == [3, 5]
    for line in lines:
        assert list(line) in (KEYS, ["step", "valid"])
    assert list(evaluations(folder)) == [4, 6]
    assert list(evaluations(folder)[4]) == ["text"]
    for step, line in metrics(folder).items():
        assert line["tokens"] == step * 4 * 12
        assert line["tokens_per_second"] == pytest.approx(48e3 / line["step_ms"], rel=1e-3)
        assert line["flops_per_second"] > line["tokens_per_second"]
        assert line["memory_bytes"] > 2**20
        assert 0 <= line["data_wait_ms"] <= line["step_ms"]
    assert metrics(folder)[1]["loss"] == pytest.approx(math.log(257), abs=0.2)
    assert metrics(folder)[6]["loss"] < metrics(folder)[1]["loss"] - 0.3
    assert [line["lr"] for line in metrics(folder).values()][:2] == [0.005, 0.01]

    assert [number for number, _ in steps(folder / "checkpoints")] == [4, 6]
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    resolved = load(folder / "config.toml")
    assert resolved == _with_vocab(config)
    for step in (1, 6):
        assert re.search(rf"step +{step}  loss {metrics(folder)[step]['loss']:.4f} ", ranks.err[0])
    assert re.search(r"step +4  valid text: loss ", ranks.err[0])
    assert ranks.err[0].index("saved") > ranks.err[0].index("step      2")


def _with_vocab(path: Path) -> object:
    words = ["--model.vocab=257", "--checkpoint.keep=2"]
    return load(path, words)


def test_the_number_of_ranks_changes_nothing(tmp_path: Path) -> None:
    """Ranks 3 do not divide the batch: some micro-batches are empty, and 7 valid batches uneven."""
    sections = {"train": {"eval_every": 3, "eval_steps": 2, "micro_batch": 1}}
    config = write_config(tmp_path, {**sections, "model": {"dropout": 0.1}})
    for n in (1, 2, 3):
        run(["train", config, f"--log.dir={tmp_path}/run{n}"], n)
    alone = tmp_path / "run1"
    for n in (2, 3):
        folder = tmp_path / f"run{n}"
        np.testing.assert_allclose(curve(folder), curve(alone), rtol=1e-12)
        for step, losses in evaluations(alone).items():
            assert evaluations(folder)[step] == pytest.approx(losses, rel=1e-12)
        assert_same_state(newest(folder), newest(alone), tolerance=1e-12)
    assert read_manifest(newest(tmp_path / "run3")).layout["world"] == 3


def test_the_micro_batch_changes_nothing(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    for size in (1, 3, 8):
        run(["train", config, f"--train.micro_batch={size}", f"--log.dir={tmp_path}/run{size}"])
        np.testing.assert_allclose(
            curve(tmp_path / f"run{size}"), curve(tmp_path / "run1"), rtol=1e-12
        )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_types_and_families_train(tmp_path: Path, family: str, dtype: str) -> None:
    config = write_config(tmp_path, {"model": {"family": family}, "train": {"dtype": dtype}})
    run(["train", config, "--train.steps=12", "--optim.lr=0.02"], 2)
    line = metrics(tmp_path / "run")
    assert line[12]["loss"] < line[1]["loss"] - 0.5
    names = tensors(newest(tmp_path / "run"))
    assert ("master/head.weight" in names) == (dtype == "bfloat16")


def test_a_blend_and_named_validation_sets(tmp_path: Path) -> None:
    write_corpus(tmp_path / "other", seed=1)
    write_corpus(tmp_path / "held", seed=2, tokens=500)
    data = {
        "train": [{"prefix": "text", "weight": 3}, {"prefix": "other", "weight": 1}],
        "valid": ["held", "other"],
    }
    config = write_config(tmp_path, {"data": data})
    ranks = run(["train", config])
    assert list(evaluations(tmp_path / "run")[6]) == ["held", "other"]
    assert "valid held: loss" in ranks.err[0]


def test_evaluation_is_the_sum_over_tokens_divided_by_their_number(tmp_path: Path) -> None:
    """By hand from the checkpoint, over a number of sequences that no layout divides."""
    config = write_config(tmp_path, {"train": {"eval_steps": 100}})
    run(["train", config, "--train.steps=2"], 2)
    model, _, _ = load_model(newest(tmp_path / "run"))
    rows = rows_of(IndexedFile(tmp_path / "text"), 12, packing=False, predict_across=False)
    source = ValidSource(rows, valid_fraction=0.1)
    assert len(source) % 4, "the last batch should be ragged"
    found = source.samples(range(len(source)))
    batch = MicroBatch.of(found.tokens.flatten(), found.labels.flatten(), found.lengths)
    with torch.no_grad():
        logits = model.logits(batch.tokens, batch.sequences)
    loss = torch.nn.functional.cross_entropy(logits, batch.labels).item()
    assert evaluations(tmp_path / "run")[2]["text"] == pytest.approx(loss, rel=1e-12)


def test_evaluating_changes_nothing(tmp_path: Path) -> None:
    """Twice gives the same; a run that evaluates at every step is a run that never does."""
    sections = {"model": {"dropout": 0.2}}
    config = write_config(tmp_path, sections)
    run(["train", config, "--train.eval_every=1"])
    run(["train", config, "--data.valid_fraction=0.1", f"--log.dir={tmp_path}/other"])
    assert curve(tmp_path / "run") == curve(tmp_path / "other")

    resolved = load(config)
    mesh = create_mesh(Grid(1), 0)
    task, resolved = language_model(resolved, mesh, torch.device("cpu"))
    training = Run(task, resolved, mesh, torch.device("cpu"))
    training.update()
    first = training.evaluate()
    assert training.evaluate() == first
    training.update()
    assert training.evaluate() != first
    task.close()


def test_evaluation_without_dropout_is_the_training_loss(tmp_path: Path) -> None:
    config = load(write_config(tmp_path, {"optim": {"lr": 1e-30, "min_lr": 0.0}}))
    mesh = create_mesh(Grid(1), 0)
    task, config = language_model(config, mesh, torch.device("cpu"))
    batches = task.batches(1)
    training = Run(task, config, mesh, torch.device("cpu"))
    object.__setattr__(task, "batches", lambda step: batches)
    object.__setattr__(task, "validation", {"same": lambda: batches})
    assert training.update()["loss"] == pytest.approx(training.evaluate()["same"], rel=1e-12)
    object.__setattr__(task, "validation", {"nothing": list})
    assert training.evaluate() == {"nothing": 0.0}
    task.close()


def test_the_time_limit_saves_and_stops(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"train": {"steps": 10**6}, "optim": {"decay": 20}})
    ranks = run(["train", config, "--train.max_minutes=0.02"], 2)
    last = max(metrics(tmp_path / "run"))
    assert f"stopped at step {last} of 1000000 (train.max_minutes)" in ranks.err[0]
    assert newest(tmp_path / "run").name == f"step-{last:08d}"


def test_no_steps_saves_the_start(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"optim": {"warmup": 0}})
    run(["train", config, "--train.steps=0"])
    assert newest(tmp_path / "run").name == "step-00000000"
    run(["train", config])
    assert sorted(metrics(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]


def test_two_runs_in_one_directory_are_refused(tmp_path: Path) -> None:
    from penteract.checkpoint.io import lock

    config = write_config(tmp_path)
    with lock(tmp_path / "run/checkpoints"):
        ranks = run(["train", config], code=2)
    assert "another run writes checkpoints here (pid " in ranks.err[0]
    run(["train", config])
