"""Runs whose model is cut into stages, from the command line on: evaluation, traces, resuming in
other cuts, generation, hangs; and what is refused before they start.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from runs import (
    Ranks,
    assert_same_state,
    curve,
    evaluations,
    metrics,
    newest,
    run,
    write_config,
)

from penteract.config_file import load
from penteract.errors import UserError
from penteract.parallel.pipeline import executor
from penteract.parallel.pipeline.schedules import schedule, to_json
from penteract.train.pipeline import check

SECTIONS = {
    "model": {"layers": 3, "dropout": 0.1, "tied": True},
    "train": {"eval_every": 3, "eval_steps": 2, "micro_batch": 1},
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on one process."""
    folder = tmp_path_factory.mktemp("alone")
    run(["train", write_config(folder, SECTIONS)])
    return folder


LAYOUTS = {
    "two": (2, ["--parallel.pp=2"]),
    "v": (2, ["--parallel.pp=2", "--parallel.schedule=zb-v"]),
    "three": (3, ["--parallel.pp=3", "--parallel.stages=embed | 3*layer | norm,head"]),
    "beside": (4, ["--parallel.pp=2", "--parallel.zero=3", "--parallel.schedule=zb-h1"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_evaluation_and_state_are_those_of_one_process(
    alone: Path, tmp_path: Path, layout: str
) -> None:
    n, words = LAYOUTS[layout]
    run(["train", alone / "run.toml", f"--log.dir={tmp_path}", *words], n)
    np.testing.assert_allclose(curve(tmp_path), curve(alone / "run"), rtol=1e-12)
    for step, losses in evaluations(alone / "run").items():
        assert evaluations(tmp_path)[step] == pytest.approx(losses, rel=1e-12)
    assert_same_state(newest(tmp_path), newest(alone / "run"), tolerance=1e-12)


def test_a_run_goes_on_in_other_cuts(alone: Path, tmp_path: Path) -> None:
    config = alone / "run.toml"
    words = [f"--log.dir={tmp_path}", "--optim.decay=6"]
    for steps, layout in zip((2, 4, 5, 6), ("two", "v", "three", "beside"), strict=True):
        n, more = LAYOUTS[layout]
        run(["train", config, *words, *more, f"--train.steps={steps}"], n)
    np.testing.assert_allclose(curve(tmp_path), curve(alone / "run"), rtol=1e-12)
    assert_same_state(newest(tmp_path), newest(alone / "run"), tolerance=1e-12)


def test_fewer_micro_batches_than_stages_are_warned_of(alone: Path, tmp_path: Path) -> None:
    words = ["--parallel.pp=3", "--train.micro_batch=4", "--train.steps=1"]
    ranks = run(["train", alone / "run.toml", f"--log.dir={tmp_path}", *words], 3)
    assert "1 micro-batch for 3 pipeline ranks: 67% idle, against 25% with 6" in ranks.err[0]
    assert len(metrics(tmp_path)) == 1


def test_zero_gradients_are_counted_once(alone: Path, tmp_path: Path) -> None:
    """Those of rows of the embedding that no token of the batch uses, for one; tied, none."""
    words = ["--log.zeros=true", "--train.steps=1", "--model.tied=false"]
    counts = set()
    for i, (n, layout) in enumerate([(1, []), *LAYOUTS.values()]):
        folder = tmp_path / str(i)
        run(["train", alone / "run.toml", f"--log.dir={folder}", *words, *layout], n)
        counts.add(metrics(folder)[1]["zero_gradients"])
    assert len(counts) == 1
    assert counts.pop() > 0


def test_a_trace_of_the_measured_step(alone: Path, tmp_path: Path) -> None:
    words = [f"--log.dir={tmp_path}", "--parallel.pp=2", "--log.trace=[2]", "--train.steps=2"]
    ranks = run(["train", alone / "run.toml", *words], 2)
    assert f"wrote {tmp_path}/trace-step-2.json" in ranks.err[0]
    events = json.loads((tmp_path / "trace-step-2.json").read_text())["traceEvents"]
    done = {(e["tid"], e["name"]): e for e in events if e["ph"] == "X"}
    assert set(done) == {(r, f"{kind} {m}") for r in (0, 1) for kind in "FB" for m in range(4)}
    for m in range(4):
        first, then, back, end = (
            done[r, f"{k} {m}"] for r, k in ((0, "F"), (1, "F"), (1, "B"), (0, "B"))
        )
        starts = [event["ts"] for event in (first, then, back, end)]
        assert starts == sorted(starts)
    assert not (tmp_path / "trace-step-1.json").exists()


def test_text_from_stages_is_that_of_the_whole_model(alone: Path) -> None:
    words = ["generate", alone / "run" / "checkpoints", "--prompt", "ab c", "--max-tokens", "12"]
    whole = run(words).out[0]
    by_rank = run(words, 3).out
    assert by_rank == [whole, "", ""]


def silent(rank: int) -> None:
    """The last stage sends nothing back."""
    if rank == 1:
        executor.start_send = lambda x, channel: executor.start_receive(x[:0], channel)


def test_a_gradient_that_does_not_come_is_a_hang(alone: Path, tmp_path: Path) -> None:
    words = ["--parallel.pp=2", "--parallel.pp_timeout_s=3", f"--log.dir={tmp_path}"]
    ranks = Ranks(["train", alone / "run.toml", *words], 2, prepare=silent)
    while ranks.codes[0] is None:
        ranks.processes[0].join(1.0)
    ranks.kill()
    ranks.wait()
    assert ranks.codes[0] == 3
    said = "B of stage 0, micro-batch 0: the gradient of stage 1, micro-batch 0, has not come from"
    assert said in ranks.err[0]
    assert "Traceback" not in ranks.err[0]


# --- refused before a process starts


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--parallel.chunks=2"], "chunks = 2 with pp = 1"),
        (["--parallel.pp=2", "--parallel.schedule=1f1d"], "near names: 1f1b"),
        (["--parallel.pp=2", "--parallel.schedule=zb-v", "--parallel.chunks=3"], "zb-v"),
        (["--parallel.pp=2", "--parallel.stages=embed,2*layer | norm,head"], "1 too few"),
        (["--parallel.pp=2", "--parallel.stages=embed | 3*layer | norm,head"], "needed"),
        (["--parallel.pp=2", "--parallel.schedule=none.json"], "none.json"),
    ],
)
def test_what_cannot_be_is_refused(alone: Path, words: list[str], says: str) -> None:
    with pytest.raises((UserError, FileNotFoundError), match=says):
        check(load(alone / "run.toml", words), 2)


def test_both_ends_of_a_tied_model_on_the_last_rank(alone: Path, tmp_path: Path) -> None:
    """A V the other way round, from a table beside the configuration."""
    table = to_json(schedule("zb-v", ranks=2, chunks=2, micro_batches=4))
    (alone / "v.json").write_text(json.dumps({"actions": table["actions"][::-1]}))
    words = ["--parallel.pp=2", "--parallel.schedule=v.json", f"--log.dir={tmp_path}"]
    run(["train", alone / "run.toml", *words, "--parallel.zero=1"], 4, code=2)
    run(["train", alone / "run.toml", *words], 2)
    np.testing.assert_allclose(curve(tmp_path), curve(alone / "run"), rtol=1e-12)


def test_a_table_of_ones_own(alone: Path, tmp_path: Path) -> None:
    table = tmp_path / "mine.json"
    programs = [
        [["F", 0, m] for m in range(4)] + [["B", 0, m] for m in range(4)],
        [[kind, 1, m] for m in range(4) for kind in "FB"],
    ]
    table.write_text(json.dumps({"kind": "mine", "actions": programs}))
    words = ["--parallel.pp=2", f"--parallel.schedule={table}", f"--log.dir={tmp_path}/run"]
    run(["train", alone / "run.toml", *words], 2)
    np.testing.assert_allclose(curve(tmp_path / "run"), curve(alone / "run"), rtol=1e-12)
    ranks = run(["train", alone / "run.toml", *words, "--train.global_batch=6"], 2, code=2)
    assert "a table for micro-batches = 4, but a step has 6" in ranks.err[0]
    assert "Traceback" not in ranks.err[0]
