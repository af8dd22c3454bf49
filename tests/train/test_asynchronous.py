"""Runs saved in the background: their steps are those of runs that stop to save; so are faults."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import (
    Ranks,
    curve,
    killed_in,
    metrics,
    newest,
    run,
    wait_until,
    write_config,
)

from penteract.checkpoint.examine import read_manifest
from penteract.checkpoint.steps import latest_good, steps
from penteract.checkpoint.storage import Files
from penteract.train.run import Run

SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"layers": 2},
    "checkpoint": {"every": 2, "asynchronous": True},
    "optim": {"decay": 8},
    "train": {"steps": 8},
}
MOE = ["--moe.experts=4", "--moe.topk=2", "--moe.balance=bias"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, SECTIONS)


def slowly(seconds: float) -> Callable[[int], None]:
    """Every file of tensors takes so long to be begun."""

    def prepare(rank: int) -> None:
        real = Files.create

        def create(self: Files, path: Path) -> Any:
            if path.suffix == ".safetensors":
                time.sleep(seconds)
            return real(self, path)

        Files.create = create  # type: ignore[method-assign]

    return prepare


def held_up(folder: Path, rank: int = 0) -> Callable[[int], None]:
    """Files of tensors that a rank writes in the background are begun when `folder/go` is there."""

    def prepare(mine: int) -> None:
        real = Files.create

        def create(self: Files, path: Path) -> Any:
            beside = threading.current_thread() is not threading.main_thread()
            if path.suffix == ".safetensors" and mine == rank and beside:
                (folder / "begun").touch()
                wait_until((folder / "go").exists)
            return real(self, path)

        Files.create = create  # type: ignore[method-assign]

    return prepare


def contents(folder: Path) -> dict[str, dict[str, Any]]:
    """By step, its files' bytes and its state: all but the configuration, which is not the same."""
    found = {}
    for _, path in steps(folder / "checkpoints"):
        files = {file.name: file.read_bytes() for file in path.glob("*.safetensors")}
        found[path.name] = {**files, "state": read_manifest(path).state}
    return found


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, ["--parallel.zero=1", "--train.dtype=bfloat16"]),
        (2, ["--parallel.zero=2", "--optim.offload=true"]),
        (2, ["--parallel.pp=2", "--train.dtype=bfloat16"]),
        (2, ["--parallel.ep=2", "--parallel.zero=1", *MOE]),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (1, ["--train.dtype=bfloat16", "--optim.moments=bfloat16"]),
                (2, ["--parallel.zero=0", "--optim.name=muon"]),
                (2, ["--parallel.zero=3", "--train.dtype=float16"]),
                (2, ["--parallel.tp=2", "--parallel.sp=true", "--optim.offload=true"]),
            )
        ),
    ],
    ids=lambda value: " ".join(value).replace("--", "") if isinstance(value, list) else str(value),
)
def test_each_step_is_that_of_a_run_that_stops_to_save(
    tmp_path: Path, config: Path, ranks: int, options: list[str]
) -> None:
    """Files are begun steps later, when weights and moments have been updated in place."""
    words = ["train", config, "--train.steps=6", *options]
    run([*words, "--checkpoint.asynchronous=false", f"--log.dir={tmp_path}/at-once"], ranks)
    run(words, ranks, prepare=slowly(0.3))
    found, wanted = (contents(tmp_path / name) for name in ("run", "at-once"))
    assert list(found) == ["step-00000002", "step-00000004", "step-00000006"]
    assert found == wanted
    assert len({step["rank-00000.safetensors"] for step in found.values()}) == 3
    assert curve(tmp_path / "run") == curve(tmp_path / "at-once")


def test_training_goes_on_meanwhile(tmp_path: Path, config: Path) -> None:
    """All of its steps, while the first checkpoint is held up; the others are skipped, but the
    last.
    """
    words = ["train", config, "--checkpoint.when_busy=skip"]
    ranks = Ranks(words, 2, prepare=held_up(tmp_path))
    path = tmp_path / "run/metrics.jsonl"
    wait_until(lambda: path.exists() and '"step": 8' in path.read_text())
    assert latest_good(tmp_path / "run/checkpoints") is None
    (tmp_path / "go").touch()
    ranks.wait()
    assert ranks.codes == [0, 0], ranks.err
    for number in (4, 6):
        assert f"step {number:>6}  not saved: step 2 is still being written" in ranks.err[0]
    checkpoints = tmp_path / "run/checkpoints"
    assert [number for number, _ in steps(checkpoints)] == [2, 8]
    assert (checkpoints / "latest").read_text() == "step-00000008\n"
    saved = [line for line in ranks.err[0].splitlines() if "  saved " in line]
    assert [line.split()[1] for line in saved] == ["2", "8"]


def test_a_save_waits_for_the_one_before(tmp_path: Path, config: Path) -> None:
    ranks = run(["train", config, "--checkpoint.keep=1"], 2, prepare=slowly(0.5))
    assert "step      4  waits: step 2 is still being written" in ranks.err[0]
    lines = metrics(tmp_path / "run")
    assert [step for step in sorted(lines) if "save_ms" in lines[step]] == [3, 5, 7]
    assert all(lines[step]["save_ms"] > 0 for step in (3, 5, 7))
    assert [number for number, _ in steps(tmp_path / "run/checkpoints")] == [8]
    left = {path.name for path in (tmp_path / "run/checkpoints").iterdir()}
    assert left == {".lock", "latest", "step-00000008"}


@pytest.mark.parametrize(("rank", "last"), [(0, 1000), (1, 1000), (1, 5)])
def test_a_full_disk_stops_all_and_leaves_no_half(
    tmp_path: Path, config: Path, rank: int, last: int
) -> None:
    """It fills while step 4 is written: the run ends at the next step, as it does at once; or when
    it waits at its end.
    """

    def prepare(mine: int) -> None:
        real, files = Files.create, 0

        def create(self: Files, path: Path) -> Any:
            nonlocal files
            files += path.suffix == ".safetensors"
            if mine == rank and files > 1:
                time.sleep(0.5 if last == 5 else 0.0)
                raise OSError(28, "No space left on device", str(path))
            return real(self, path)

        Files.create = create  # type: ignore[method-assign]

    ranks = run(["train", config, f"--train.steps={last}"], 2, code=1, prepare=prepare)
    for said in ranks.err:
        assert f"rank-0000{rank}.safetensors: cannot save (No space left on device)" in said
        assert "Traceback" not in said
    assert newest(tmp_path / "run").name == "step-00000002"
    assert not list((tmp_path / "run/checkpoints").glob(".tmp*"))
    assert 4 <= max(metrics(tmp_path / "run")) <= 6
    run(["train", config], 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_waits_for_the_save_in_flight(tmp_path: Path, config: Path, rank: int) -> None:
    ranks = Ranks(["train", config, "--train.steps=100000"], 2, prepare=held_up(tmp_path, rank))
    wait_until((tmp_path / "begun").exists)
    os.kill(ranks.pids[rank], signal.SIGTERM)
    time.sleep(0.3)
    assert ranks.codes == [None, None]
    (tmp_path / "go").touch()
    ranks.wait()
    assert ranks.codes == [0, 0], ranks.err
    found = [number for number, _ in steps(tmp_path / "run/checkpoints")]
    assert found[0] == 2
    last = max(metrics(tmp_path / "run"))
    assert found[-1] == last
    assert f"stopped at step {last} of 100000" in ranks.err[0]


@pytest.mark.parametrize("steps", [3, 5])
def test_a_save_that_never_ends_ends_the_run(tmp_path: Path, config: Path, steps: int) -> None:
    """At its end, or where the next is due: what hangs may still write later, beside others."""

    def prepare(rank: int) -> None:
        from penteract.checkpoint import background

        background.STOP_S = 0.2  # type: ignore[misc]
        held_up(tmp_path)(rank)

    words = [f"--train.steps={steps}", "--checkpoint.flush_s=0.3", "--checkpoint.on_error=go_on"]
    ranks = run(["train", config, *words], 2, code=1, prepare=prepare)
    for said in ranks.err:
        assert "step-00000002: given up, its files take too long to write" in said
    assert latest_good(tmp_path / "run/checkpoints") is None


def test_a_nan_loses_no_save_in_flight(tmp_path: Path, config: Path) -> None:
    def prepare(rank: int) -> None:
        real = Run._gradients
        slowly(0.3)(rank)

        def spoiled(self: Run, step: int, batches: Any) -> Any:
            if step == 3:
                with torch.no_grad():
                    next(self.task.model.parameters()).fill_(float("nan"))
            return real(self, step, batches)

        Run._gradients = spoiled  # type: ignore[method-assign]

    ranks = run(["train", config], 2, code=1, prepare=prepare)
    assert "step 3: loss = nan" in ranks.err[0]
    assert newest(tmp_path / "run").name == "step-00000002"
    assert not list((tmp_path / "run/checkpoints").glob(".tmp*"))


def test_a_rank_that_raises_leaves_no_rank_waiting(tmp_path: Path, config: Path) -> None:
    """While step 4 is written: what is left of it is removed by the next run's first save."""

    def prepare(rank: int) -> None:
        real = Run._gradients
        slowly(0.5)(rank)

        def failing(self: Run, step: int, batches: Any) -> Any:
            if (step, rank) == (5, 1):
                raise RuntimeError("planted on rank 1")
            return real(self, step, batches)

        Run._gradients = failing  # type: ignore[method-assign]

    ranks = Ranks(["train", config], 2, prepare=prepare).wait(within_s=20)
    assert ranks.codes == [1, 1]
    assert "RuntimeError: planted on rank 1" in ranks.err[1]
    assert newest(tmp_path / "run").name == "step-00000002"
    ranks = run(["train", config], 2)
    assert "continuing" in ranks.err[0]
    run(["train", config, f"--log.dir={tmp_path}/whole"], 2)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    assert not list((tmp_path / "run/checkpoints").glob(".tmp*"))


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["create", "write", "sync", "rename"])
def test_a_save_that_is_killed_keeps_the_step_before(
    tmp_path: Path, config: Path, operation: str
) -> None:
    run(["train", config, "--train.steps=2"], 2)

    ranks = Ranks(["train", config], 2, prepare=killed_in(operation)).wait(within_s=20)
    assert ranks.codes[0] == -signal.SIGKILL
    assert newest(tmp_path / "run").name == "step-00000002"
    run(["train", config], 2)
    run(["train", config, f"--log.dir={tmp_path}/whole"], 2)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    assert not list((tmp_path / "run/checkpoints").glob(".tmp*"))
