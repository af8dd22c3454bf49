"""Ranks that are lost for good: the run goes on with those that are left, to the same numbers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from runs import alive, curve, metrics, run, wait_until, write_config

# A rank whose number is in the file `gone` is a device that does not come back.
GONE = """
import os, pathlib
gone = pathlib.Path({gone!r})
if os.environ.get("RANK") in gone.read_text().split():
    os._exit(1)
pathlib.Path({pids!r}, os.environ.get("RANK", "launcher")).write_text(str(os.getpid()))
"""
STEPS = 60


def steps_done(folder: Path) -> int:
    return max(metrics(folder), default=0) if (folder / "metrics.jsonl").exists() else 0


@pytest.mark.slow
def test_a_run_ends_on_three_ranks_then_two(tmp_path: Path) -> None:
    sections = {
        "train": {"steps": STEPS, "global_batch": 6},
        "checkpoint": {"every": 2, "keep": 3},
        "parallel": {"allowed": [{"tp": 2, "zero": 1}, {"zero": 2}]},
        "model": {"dropout": 0.1},
    }
    config = write_config(tmp_path, sections)
    run(["train", config, f"--log.dir={tmp_path / 'whole'}"])
    pids, gone = tmp_path / "pids", tmp_path / "gone"
    pids.mkdir()
    gone.write_text("")
    (tmp_path / "sitecustomize.py").write_text(GONE.format(gone=str(gone), pids=str(pids)))
    words = ["train", str(config), "--nproc", "2:4", "--max-restarts", "2"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with (tmp_path / "err").open("w") as err:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "penteract", *words], env=env, stderr=err
        )
    try:
        for lost, done in (("3", 10), ("3 2", 30)):
            wait_until(lambda done=done: steps_done(tmp_path / "run") >= done, within_s=300)
            gone.write_text(lost)
            os.kill(int((pids / lost.split()[-1]).read_text()), signal.SIGKILL)
        assert launcher.wait(300) == 0, (tmp_path / "err").read_text()
    finally:
        launcher.kill()
    said = (tmp_path / "err").read_text()
    assert "4 ranks: layout 1 of 2 of parallel.allowed, tp = 2, zero = 1" in said
    assert "starting 3 ranks again from step" in said
    assert "3 ranks: layout 2 of 2 of parallel.allowed, zero = 2" in said
    assert "starting 2 ranks again from step" in said
    found, wanted = curve(tmp_path / "run"), curve(tmp_path / "whole")
    assert len(found) == STEPS
    np.testing.assert_allclose(found, wanted, rtol=1e-9)
    wait_until(lambda: not any(alive(int(f.read_text())) for f in pids.iterdir()), within_s=10)


@pytest.mark.slow
def test_torchrun_starts_a_run_again(tmp_path: Path) -> None:
    """A rank is killed, twice; the run is the undisturbed one to the bit."""
    sections = {"train": {"steps": STEPS}, "checkpoint": {"every": 2, "keep": 3}}
    config = write_config(tmp_path, sections)
    run(["train", config, f"--log.dir={tmp_path / 'whole'}"], 2)
    pids, gone = tmp_path / "pids", tmp_path / "gone"
    pids.mkdir()
    gone.write_text("")
    (tmp_path / "sitecustomize.py").write_text(GONE.format(gone=str(gone), pids=str(pids)))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    torchrun = "-m torch.distributed.run --nproc-per-node 2 --max-restarts 3 -m penteract train"
    with (tmp_path / "err").open("w") as err:
        words = [sys.executable, *torchrun.split(), str(config)]
        launcher = subprocess.Popen(words, env=env, stderr=err)
    try:
        for rank, done in (("1", 10), ("0", 30)):
            wait_until(lambda done=done: steps_done(tmp_path / "run") >= done, within_s=300)
            os.kill(int((pids / rank).read_text()), signal.SIGKILL)
        assert launcher.wait(300) == 0, (tmp_path / "err").read_text()
    finally:
        launcher.kill()
    assert (tmp_path / "err").read_text().count("continuing ") == 2
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    wait_until(lambda: not any(alive(int(f.read_text())) for f in pids.iterdir()), within_s=10)
