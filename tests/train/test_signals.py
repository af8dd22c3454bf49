"""A signal at any moment, on any rank: all save the same step, end with 0, and can go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import Ranks, curve, newest, run, wait_until, write_config

import penteract.train.language_model
from penteract.checkpoint.storage import Files
from penteract.train.run import Run
from penteract.train.signals import StopRequest

SECTIONS: dict[str, dict[str, Any]] = {
    "optim": {"decay": 8},
    "train": {"steps": 8, "eval_every": 3},
    "checkpoint": {"every": 4},
}

# Phase of a run: (what is called in it, at which call to signal, the step that is then saved).
PHASES: dict[str, tuple[Any, str, int, int]] = {
    "start": (penteract.train.language_model, "language_model", 1, 0),
    "resuming": (Run, "__init__", 1, 0),
    "step": (Run, "_gradients", 2, 2),
    "evaluation": (Run, "evaluate", 1, 3),
    "save": (Files, "sync", 1, 4),
}


def signalled(phase: str, rank: int, *numbers: signal.Signals) -> Callable[[int], None]:
    """What to run in each rank so that `rank` gets signals in the middle of a phase."""
    owner, name, at, _ = PHASES[phase]

    def prepare(mine: int) -> None:
        if mine != rank:
            return
        real, calls = getattr(owner, name), 0

        def wrapped(*args: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                for number in numbers:
                    os.kill(os.getpid(), number)
            return real(*args, **more)

        setattr(owner, name, wrapped)

    return prepare


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    run(["train", write_config(folder, SECTIONS)], 2)
    return folder / "run"


@pytest.mark.parametrize(
    ("rank", "number"),
    [(0, signal.SIGTERM), (1, signal.SIGTERM), (1, signal.SIGINT), (0, signal.SIGUSR1)],
)
@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_saves_and_stops(
    tmp_path: Path, undisturbed: Path, phase: str, rank: int, number: signal.Signals
) -> None:
    config = write_config(tmp_path, SECTIONS)
    if phase == "save" and rank == 1:
        run(["train", config, "--train.steps=1"], 2)  # so that rank 1 has something to write
    ranks = run(["train", config], 2, prepare=signalled(phase, rank, number))
    step = PHASES[phase][3]
    assert newest(tmp_path / "run").name == f"step-{step:08d}"
    why = number.name if rank == 0 else "another rank"
    assert f"stopped at step {step} of 8 ({why})" in ranks.err[0]
    run(["train", config], 2)
    assert curve(tmp_path / "run") == curve(undisturbed)


def test_a_signal_at_the_last_step_is_the_end(tmp_path: Path) -> None:
    config = write_config(tmp_path, SECTIONS)
    run(["train", config, "--train.steps=2"], prepare=signalled("step", 0, signal.SIGTERM))
    assert newest(tmp_path / "run").name == "step-00000002"


def test_the_same_request_twice_is_one(tmp_path: Path) -> None:
    """`timeout` signals a process and then its group."""
    config = write_config(tmp_path, SECTIONS)
    both = signalled("step", 0, signal.SIGTERM, signal.SIGINT, signal.SIGTERM)
    run(["train", config], 2, prepare=both)
    assert newest(tmp_path / "run").name == "step-00000002"


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """In a step that would take a minute."""
    config = write_config(tmp_path, SECTIONS)

    def prepare(rank: int) -> None:
        real = Run._gradients

        def slow(self: Run, step: int, batches: Any) -> Any:
            if step == 2:
                (tmp_path / "slow").touch()
                end = time.monotonic() + 60
                while time.monotonic() < end:
                    time.sleep(0.01)
            return real(self, step, batches)

        Run._gradients = slow  # type: ignore[method-assign]

    ranks = Ranks(["train", config], prepare=prepare)
    wait_until((tmp_path / "slow").exists)
    os.kill(ranks.pids[0], signal.SIGTERM)
    time.sleep(1.2)
    assert ranks.codes == [None]
    os.kill(ranks.pids[0], signal.SIGTERM)
    ranks.wait(within_s=5)
    assert ranks.codes == [128 + signal.SIGTERM]


def test_handlers_come_and_go() -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        wait_until(lambda: stop.reason == "SIGHUP")
        with stop.released():
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) == stop._receive
    assert {n: signal.getsignal(n) for n in before} == before


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.05)
            assert stop.reason is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_listening_needs_no_torch() -> None:
    """The import of torch takes seconds, and signals in it count."""
    code = "import sys, penteract.train.signals; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_limit_of_time_is_a_wish_to_stop() -> None:
    assert StopRequest(10).reason is None
    assert StopRequest(0).reason == "train.max_minutes"
