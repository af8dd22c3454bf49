"""Faults in a run: what is said, what every rank does, and what is left on the disk."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Ranks, curve, killed_in, metrics, newest, run, write_config, write_corpus

from penteract.checkpoint.io import latest_good
from penteract.checkpoint.steps import steps
from penteract.checkpoint.storage import Files
from penteract.data.indexed import IndexedFile
from penteract.nn.model import Stage
from penteract.train.run import Run
from penteract.train.saving import Saver

SECTIONS: dict[str, dict[str, Any]] = {"checkpoint": {"every": 2}, "optim": {"decay": 6}}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, SECTIONS)


def at_step(step: int, rank: int, act: Callable[[Run], None]) -> Callable[[int], None]:
    """What to run in each rank so that `rank` does something at the start of a step."""

    def prepare(mine: int) -> None:
        real = Run._gradients

        def wrapped(self: Run, number: int, batches: Any) -> Any:
            if (number, mine) == (step, rank):
                act(self)
            return real(self, number, batches)

        Run._gradients = wrapped  # type: ignore[method-assign]

    return prepare


@pytest.mark.parametrize("rank", [0, 1])
def test_a_nan_on_one_rank_stops_all_before_the_update(
    tmp_path: Path, config: Path, rank: int
) -> None:
    def spoil(run: Run) -> None:
        with torch.no_grad():
            next(run.task.model.parameters()).fill_(float("nan"))

    ranks = run(["train", config], 2, code=1, prepare=at_step(3, rank, spoil))
    for said in ranks.err:
        assert said.splitlines()[-5].startswith("penteract: step 3: loss = nan")
        assert "Traceback" not in said
        assert said.count("sample") >= 4
        for index in range(8, 12):  # the third batch of four
            assert f"{index}" in said
        assert "text" in said
    assert newest(tmp_path / "run").name == "step-00000002"
    assert sorted(metrics(tmp_path / "run")) == [1, 2]
    run(["train", config], 2)
    run(["train", config, f"--log.dir={tmp_path}/whole"], 2)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_a_hopeless_learning_rate_ends_with_the_step(tmp_path: Path, config: Path) -> None:
    words = ["--train.dtype=float32", "--optim.lr=1e30", "--checkpoint.every=1"]
    ranks = run(["train", config, *words], code=1)
    assert "the update was not made" in ranks.err[0]
    done = max(metrics(tmp_path / "run"))
    assert f"step {done + 1}: loss = " in ranks.err[0]
    assert newest(tmp_path / "run").name == f"step-{done:08d}"


def test_an_evaluation_that_is_nan_saves_nothing(tmp_path: Path, config: Path) -> None:
    def prepare(rank: int) -> None:
        real = Run.evaluate

        def spoiled(self: Run) -> dict[str, float]:
            with torch.no_grad():
                next(self.task.model.parameters()).fill_(float("inf"))
            return real(self)

        Run.evaluate = spoiled  # type: ignore[method-assign]

    ranks = run(["train", config, "--train.eval_every=4"], 2, code=1, prepare=prepare)
    assert "step 4: loss of text = nan" in ranks.err[0]
    assert newest(tmp_path / "run").name == "step-00000002"


def test_a_rank_that_raises_ends_the_others(tmp_path: Path, config: Path) -> None:
    def fail(run: Run) -> None:
        raise RuntimeError("planted on rank 1")

    ranks = Ranks(["train", config], 2, prepare=at_step(4, 1, fail)).wait(within_s=20)
    assert ranks.codes == [1, 1]
    assert "RuntimeError: planted on rank 1" in ranks.err[1]
    assert newest(tmp_path / "run").name == "step-00000002"


def test_a_rank_that_is_killed_ends_the_others(tmp_path: Path, config: Path) -> None:
    kill = lambda run: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    ranks = Ranks(["train", config], 2, prepare=at_step(4, 0, kill)).wait(within_s=20)
    assert ranks.codes == [-signal.SIGKILL, 1]
    assert newest(tmp_path / "run").name == "step-00000002"


def test_a_full_disk_stops_all_and_leaves_no_half(tmp_path: Path, config: Path) -> None:
    def prepare(rank: int) -> None:
        real, calls = Files.write, 0

        def full(self: Files, file: Any, data: memoryview) -> None:
            nonlocal calls
            calls += 1
            if rank == 1 and calls > 3:
                raise OSError(28, "No space left on device", file.name)
            real(self, file, data)

        Files.write = full  # type: ignore[method-assign]

    ranks = run(["train", config], 2, code=1, prepare=prepare)
    for said in ranks.err:
        assert "No space left on device" in said
        assert "bytes" in said
        assert "Traceback" not in said
    folder = tmp_path / "run/checkpoints"
    assert not list(folder.glob(".tmp*"))
    assert latest_good(folder, hashes=True) is not None or not list(folder.glob("step-*"))


@pytest.mark.parametrize(
    "operation",
    ["rename", *(pytest.param(o, marks=pytest.mark.slow) for o in ("create", "write", "sync"))],
)
def test_a_save_that_is_killed_keeps_the_step_before(
    tmp_path: Path, config: Path, operation: str
) -> None:
    """The first save of the second checkpoint dies inside each kind of operation."""
    run(["train", config, "--train.steps=2"], 2)

    ranks = Ranks(["train", config], 2, prepare=killed_in(operation)).wait(within_s=20)
    assert ranks.codes[0] == -signal.SIGKILL
    assert newest(tmp_path / "run").name == "step-00000002"
    ranks = run(["train", config], 2)
    if operation != "create":
        assert "removed, left by a save that did not finish" in ranks.err[0]
    run(["train", config, f"--log.dir={tmp_path}/whole"], 2)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    assert not list((tmp_path / "run/checkpoints").glob(".tmp*"))


def test_a_token_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"data": {"valid_fraction": 0.0}})
    file = IndexedFile(tmp_path / "text")
    content = bytearray((tmp_path / "text.bin").read_bytes())
    content[:] = b"\xff\x7f" * (len(content) // 2)
    (tmp_path / "text.bin").write_bytes(content)
    assert file.tokens > 0
    ranks = Ranks(["train", config], 2).wait(within_s=20)
    assert 2 in ranks.codes
    assert "32767" in "".join(ranks.err)
    assert "text" in "".join(ranks.err)
    write_corpus(tmp_path / "text")
    run(["train", config], 2)


def test_a_reader_that_dies_is_an_error_and_no_hang(tmp_path: Path, config: Path) -> None:
    def prepare(rank: int) -> None:
        from penteract.data.loader import TrainSource

        real = TrainSource.samples

        def failing(self: TrainSource, indices: Any) -> Any:
            if max(indices, default=0) >= 12:
                raise RuntimeError("planted in the reader")
            return real(self, indices)

        TrainSource.samples = failing  # type: ignore[method-assign]

    ranks = run(["train", config], code=1, prepare=prepare)
    assert "planted in the reader" in ranks.err[0]
    assert max(metrics(tmp_path / "run")) == 3


@pytest.mark.parametrize("everywhere", [True, False])
def test_an_unused_parameter_does_not_stop_a_run_and_is_named(
    tmp_path: Path, config: Path, everywhere: bool
) -> None:
    """One that a rank's loss does not reach counts as zero; said once, if it is so on all ranks."""

    def prepare(rank: int) -> None:
        real = Stage.forward
        if rank == 0 and not everywhere:
            return

        def cut(self: Stage, batch: Any, stream: Any = None, **more: Any) -> Any:
            norm = self.layers[-2]
            norm.weight.requires_grad_(False)
            try:
                return real(self, batch, stream, **more)
            finally:
                norm.weight.requires_grad_(True)

        Stage.forward = cut  # type: ignore[method-assign]

    ranks = run(["train", config], 2, prepare=prepare)
    assert newest(tmp_path / "run").name == "step-00000006"
    said = "warning: no loss reaches norm.weight: they do not learn"
    assert ranks.err[0].count("warning:") == everywhere
    assert (said in ranks.err[0]) == everywhere, ranks.err[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_parameter_reached_on_one_tensor_rank_is_used(tmp_path: Path, rank: int) -> None:
    config = write_config(tmp_path, {"parallel": {"tp": 2}})

    def prepare(mine: int) -> None:
        real = Run.update

        def update(self: Run) -> dict[str, Any]:
            line = real(self)
            self.unused = ["norm.weight", *(["head.weight"] if mine == rank else [])]
            return line

        Run.update = update  # type: ignore[method-assign]

    ranks = run(["train", config], 2, prepare=prepare)
    assert "warning: no loss reaches norm.weight: they do not learn" in ranks.err[0]


def full_at(rank: int, step: int) -> Callable[[int], None]:
    """The disk of `rank` is full while that step is saved, and only then."""

    def prepare(mine: int) -> None:
        real = Files.create

        def create(self: Files, path: Path) -> Any:
            if mine == rank and f"step-{step:08d}" in str(path) and path.suffix == ".safetensors":
                raise OSError(28, "No space left on device", str(path))
            return real(self, path)

        Files.create = create  # type: ignore[method-assign]

    return prepare


def test_a_read_only_directory_is_said_before_anything_is_written(
    tmp_path: Path, config: Path
) -> None:
    """It becomes so while the run goes: step 2 is saved, step 4 is not."""

    def prepare(rank: int) -> None:
        real = Files.make_directory

        def make_directory(self: Files, path: Path) -> None:
            if "step-00000004" in str(path):
                raise OSError(30, "Read-only file system", str(path))
            real(self, path)

        Files.make_directory = make_directory  # type: ignore[method-assign]

    ranks = run(["train", config, "--checkpoint.on_error=go_on"], 2, prepare=prepare)
    assert "cannot save (Read-only file system)" in ranks.err[0]
    assert "going on, the newest on the disk is step 2" in ranks.err[0]
    ranks = run(["train", config, f"--log.dir={tmp_path}/other"], 2, code=1, prepare=prepare)
    for said in ranks.err:
        assert "cannot save (Read-only file system)" in said
        assert "Traceback" not in said
    assert newest(tmp_path / "other").name == "step-00000002"


@pytest.mark.parametrize("asynchronous", ["true", "false"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_may_go_on_after_a_save_that_failed(
    tmp_path: Path, config: Path, rank: int, asynchronous: str
) -> None:
    words = ["train", config, "--checkpoint.every=2", "--train.steps=7", "--checkpoint.keep=2",
             f"--checkpoint.asynchronous={asynchronous}"]  # fmt: skip
    ranks = run([*words, "--checkpoint.on_error=go_on"], 2, prepare=full_at(rank, 4))
    assert "No space left on device" in ranks.err[0]
    assert "going on, the newest on the disk is step 2" in ranks.err[0]
    found = [number for number, _ in steps(tmp_path / "run/checkpoints")]
    assert found == [6, 7]
    assert not list((tmp_path / "run/checkpoints").glob(".tmp*"))
    run([*words, f"--log.dir={tmp_path}/whole"], 2)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_the_last_save_must_succeed(tmp_path: Path, config: Path) -> None:
    words = ["train", config, "--train.steps=4", "--checkpoint.on_error=go_on"]
    ranks = run(words, 2, code=1, prepare=full_at(1, 4))
    for said in ranks.err:
        assert "No space left on device" in said
        assert "Traceback" not in said


def test_a_save_that_fails_in_flight_is_tried_once_more_at_the_end(
    tmp_path: Path, config: Path
) -> None:
    """Step 4 is being written when a signal ends the run, and fails while that is waited for."""

    def prepare(rank: int) -> None:
        create, finish = Files.create, Saver.finish
        finishing = threading.Event()

        def failing(self: Files, path: Path) -> Any:
            if rank == 1 and "step-00000004" in str(path) and not finishing.is_set():
                os.kill(os.getpid(), signal.SIGTERM)
                finishing.wait(30)
                raise OSError(5, "Input/output error", str(path))
            return create(self, path)

        def seen(self: Saver) -> None:
            finishing.set()
            finish(self)

        Files.create, Saver.finish = failing, seen  # type: ignore[method-assign]

    words = ["--checkpoint.every=4", "--checkpoint.asynchronous=true", "--train.steps=1000"]
    ranks = run(["train", config, *words], 2, prepare=prepare)
    assert "Input/output error" in ranks.err[0]
    assert "tried once more" in ranks.err[0]
    last = max(metrics(tmp_path / "run"))
    assert newest(tmp_path / "run").name == f"step-{last:08d}"


def test_a_disk_that_went_away_is_not_written_past(tmp_path: Path, config: Path) -> None:
    """What remains is an empty directory of the same name, where a mount was."""
    checkpoints = tmp_path / "run/checkpoints"

    def away(run: Run) -> None:
        checkpoints.rename(tmp_path / "elsewhere")
        checkpoints.mkdir()

    ranks = run(["train", config], 2, code=1, prepare=at_step(3, 0, away))
    for said in ranks.err:
        assert f"{checkpoints}: cannot save: the directory that was here is gone" in said
        assert "Traceback" not in said
    assert not list(checkpoints.iterdir())
    assert [number for number, _ in steps(tmp_path / "elsewhere")] == [2]
