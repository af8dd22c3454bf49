"""Kills of the whole run at any moment: it always goes on, and its numbers are those of no kill."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import (
    Ranks,
    alive,
    assert_same_state,
    curve,
    evaluations,
    newest,
    run,
    write_config,
)

from penteract.checkpoint.io import latest_good
from penteract.checkpoint.storage import Files

OPERATIONS = ("create", "write", "sync", "sync_directory", "rename", "remove", "make_directory")


def killed_in_a_save(at: int) -> Callable[[int], None]:
    """Rank 0 is killed before its `at`-th operation on storage."""

    def prepare(rank: int) -> None:
        if rank:
            return
        left = at

        def wrap(name: str) -> None:
            real = getattr(Files, name)

            def counted(*args: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args)

            setattr(Files, name, counted)

        for name in OPERATIONS:
            wrap(name)

    return prepare


def kill(config: Path, ranks: int, draw: random.Random) -> None:
    """Start the run and kill all of it: two times in three in a save, else after a random time."""
    if draw.random() < 2 / 3:
        running = Ranks(["train", config], ranks, prepare=killed_in_a_save(draw.randint(1, 60)))
        end = time.monotonic() + 60
        while running.codes[0] is None and time.monotonic() < end:
            time.sleep(0.01)
    else:
        running = Ranks(["train", config], ranks)
        time.sleep(draw.uniform(0.05, 1.0))
    for pid in running.pids:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
    running.wait()
    assert not any(alive(pid) for pid in running.pids)


def disturb(
    folder: Path, *, kills: int, ranks: int, steps: int, seed: int, asynchronous: bool
) -> None:
    sections = {
        "train": {"steps": steps, "eval_every": 5},
        "checkpoint": {"every": 2, "keep": 2, "asynchronous": asynchronous},
        "model": {"dropout": 0.1},
    }
    config = write_config(folder, sections)
    run(["train", config, f"--log.dir={folder}/undisturbed"], ranks)
    draw = random.Random(seed)
    checkpoints = folder / "run/checkpoints"
    for _ in range(kills):
        kill(config, ranks, draw)
        # What a resume would choose is whole to the last byte, however the save ended.
        latest_good(checkpoints, hashes=True)
    run(["train", config], ranks)
    assert curve(folder / "run") == curve(folder / "undisturbed")
    assert evaluations(folder / "run") == evaluations(folder / "undisturbed")
    assert_same_state(newest(folder / "run"), newest(folder / "undisturbed"))
    left = {path.name for path in checkpoints.iterdir()}
    assert left == {".lock", "latest", f"step-{steps - 2:08d}", f"step-{steps:08d}"}


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.slow), True])
def test_two_kills(tmp_path: Path, asynchronous: bool) -> None:
    disturb(tmp_path, kills=2, ranks=2, steps=12, seed=1, asynchronous=asynchronous)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_many_kills(tmp_path: Path, seed: int, ranks: int, asynchronous: bool) -> None:
    seed += 100 * ranks
    disturb(tmp_path, kills=8, ranks=ranks, steps=60, seed=seed, asynchronous=asynchronous)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_kill_before_each_operation_of_a_save(tmp_path: Path, asynchronous: bool) -> None:
    """One after another, until a run survives to its end: no operation is left out."""
    sections = {
        "checkpoint": {"every": 1, "keep": 1, "asynchronous": asynchronous},
        "optim": {"decay": 3},
        "train": {"steps": 3},
    }
    config = write_config(tmp_path, sections)
    run(["train", config, f"--log.dir={tmp_path}/undisturbed"], 2)
    for at in range(1, 300):
        words = ["train", config, f"--log.dir={tmp_path}/{at}"]
        ranks = Ranks(words, 2, prepare=killed_in_a_save(at)).wait()
        if ranks.codes == [0, 0]:
            break
        latest_good(tmp_path / f"{at}/checkpoints", hashes=True)  # raises where it is damaged
        run(words, 2)
        assert curve(tmp_path / f"{at}") == curve(tmp_path / "undisturbed"), at
        assert_same_state(newest(tmp_path / f"{at}"), newest(tmp_path / "undisturbed"))
    assert at > 30, "so many operations has a run of three saves"
