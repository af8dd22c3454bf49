"""Real launched ranks (`--nproc`, torchrun): what only whole processes can show.

A start of two real ranks takes ten seconds of a core, so the fast set has one of these; the same
cases on forked ranks stand in `test_signals` and `test_faults`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from runs import alive, curve, metrics, newest, run, wait_until, write_config

from penteract.launch import LAUNCHER_PID

LONG = {"train": {"steps": 100_000}, "optim": {"decay": 10}, "checkpoint": {"every": 5, "keep": 2}}


class Launched:
    """`python -m penteract train …` or another script, and the ranks it starts."""

    def __init__(self, folder: Path, *words: object, script: tuple[str, ...] = ("-m", "penteract")):
        command = [sys.executable, *script, *map(str, words)]
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        env["OMP_NUM_THREADS"] = "1"
        self.errors = folder / "stderr"
        with self.errors.open("w") as err, (folder / "stdout").open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=err, env=env)
        self.seen: set[int] = set()

    def ranks(self) -> list[int]:
        """Processes that carry this launcher's mark and run."""
        mark = f"{LAUNCHER_PID}={self.process.pid}".encode()
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdecimal() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    self.seen.add(int(entry.name))
            except OSError:
                continue
        return [pid for pid in self.seen if alive(pid)]

    def wait(self, within_s: float = 120) -> int:
        return self.process.wait(within_s)

    def err(self) -> str:
        return self.errors.read_text()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pid in self.ranks():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[list[Launched]]:
    """Ends whatever a failing test leaves, and checks that a passing one left nothing."""
    started: list[Launched] = []
    yield started
    left = [pid for one in started for pid in one.ranks()]
    for one in started:
        one.end()
    assert not left, f"ranks left behind: {left}"


def reached(folder: Path, step: int) -> bool:
    path = folder / "metrics.jsonl"
    return path.exists() and len(path.read_text().splitlines()) >= step


def test_a_signal_to_the_launcher_saves_and_stops(tmp_path: Path, launched: list[Launched]) -> None:
    config = write_config(tmp_path, LONG)
    launched.append(one := Launched(tmp_path, "train", config, "--nproc", 2))
    wait_until(lambda: reached(tmp_path / "run", 3), within_s=120)
    assert len(one.ranks()) == 2
    one.process.send_signal(signal.SIGTERM)
    assert one.wait() == 0
    last = max(metrics(tmp_path / "run"))
    assert newest(tmp_path / "run").name == f"step-{last:08d}"
    assert f"stopped at step {last} of 100000" in one.err()
    assert "Traceback" not in one.err()
    assert (tmp_path / "stdout").read_text() == ""
    # The same numbers as on one forked rank.
    run(["train", config, f"--train.steps={last}", f"--log.dir={tmp_path}/forked"])
    np.testing.assert_allclose(curve(tmp_path / "run"), curve(tmp_path / "forked"), rtol=1e-12)


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_rank(tmp_path: Path, launched: list[Launched]) -> None:
    config = write_config(tmp_path, LONG)
    launched.append(one := Launched(tmp_path, "train", config, "--nproc", 2))
    wait_until(lambda: reached(tmp_path / "run", 7), within_s=120)
    assert len(one.ranks()) == 2
    one.process.kill()
    assert one.wait() == -signal.SIGKILL
    wait_until(lambda: not one.ranks(), within_s=5)
    assert newest(tmp_path / "run").name >= "step-00000005"


@pytest.mark.slow
def test_ctrl_c_at_the_start_is_a_stop(tmp_path: Path, launched: list[Launched]) -> None:
    """The ranks are still importing torch: nothing is lost, and nothing looks like a fault."""
    config = write_config(tmp_path, LONG)
    for i, number in enumerate((signal.SIGINT, signal.SIGTERM)):
        launched.append(one := Launched(tmp_path, "train", config, "--nproc", 2))
        wait_until(lambda one=one: len(one.ranks()) == 2, within_s=120)
        time.sleep(0.4 + i)
        one.process.send_signal(number)
        assert one.wait() == 0, one.err()
        assert "Traceback" not in one.err()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_signal_to_one_rank_stops_all(
    tmp_path: Path, launched: list[Launched], victim: int
) -> None:
    config = write_config(tmp_path, LONG)
    launched.append(one := Launched(tmp_path, "train", config, "--nproc", 2))
    wait_until(lambda: reached(tmp_path / "run", 3), within_s=120)
    os.kill(sorted(one.ranks())[victim], signal.SIGTERM)
    assert one.wait() == 0, one.err()
    last = max(metrics(tmp_path / "run"))
    assert newest(tmp_path / "run").name == f"step-{last:08d}"


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_with_1(tmp_path: Path, launched: list[Launched]) -> None:
    config = write_config(tmp_path, LONG)
    launched.append(one := Launched(tmp_path, "train", config, "--nproc", 2))
    wait_until(lambda: reached(tmp_path / "run", 3), within_s=120)
    os.kill(sorted(one.ranks())[1], signal.SIGKILL)
    assert one.wait() == 1
    assert "of 2 was ended by SIGKILL" in one.err()


@pytest.mark.slow
def test_a_second_signal_ends_a_stuck_run(tmp_path: Path, launched: list[Launched]) -> None:
    config = write_config(tmp_path, LONG)
    launched.append(one := Launched(tmp_path, "train", config, "--nproc", 2))
    wait_until(lambda: reached(tmp_path / "run", 3), within_s=120)
    stuck = sorted(one.ranks())[1]
    os.kill(stuck, signal.SIGSTOP)
    one.process.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    assert one.process.poll() is None
    one.process.send_signal(signal.SIGTERM)
    assert one.wait(30) == 1
    assert "second signal" in one.err()


FAILING = """
import sys
from penteract.cli import main
from penteract.train.run import Run
real = Run._gradients
def gradients(self, step, batches):
    if step == 4 and self.mesh.rank == 1:
        raise RuntimeError("planted on rank 1")
    return real(self, step, batches)
Run._gradients = gradients
raise SystemExit(main(sys.argv[1:]))
"""
LAUNCHER = """
import sys
from penteract.local_ranks import start_local
raise SystemExit(start_local(2, sys.argv[2:], command=[sys.argv[1]]))
"""


@pytest.mark.slow
def test_the_first_ranks_traceback_is_shown_once(tmp_path: Path, launched: list[Launched]) -> None:
    config = write_config(tmp_path, LONG)
    (tmp_path / "rank.py").write_text(FAILING)
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    words = (tmp_path / "rank.py", "train", config)
    launched.append(one := Launched(tmp_path, *words, script=(str(tmp_path / "launcher.py"),)))
    assert one.wait() == 1
    assert one.err().count("Traceback") == 1
    assert "rank 1 of 2 failed with exit code 1" in one.err()
    assert "RuntimeError: planted on rank 1" in one.err()


@pytest.mark.slow
def test_torchrun_starts_it_too(tmp_path: Path, launched: list[Launched]) -> None:
    config = write_config(tmp_path)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "penteract")
    launched.append(one := Launched(tmp_path, "train", config, script=torchrun))
    assert one.wait() == 0, one.err()
    run(["train", config, f"--log.dir={tmp_path}/forked"], 2)
    assert curve(tmp_path / "run") == curve(tmp_path / "forked")
    launched.append(one := Launched(tmp_path, "train", config, "--nproc=2"))
    assert one.wait() == 0, one.err()
    assert "done already" in one.err()
