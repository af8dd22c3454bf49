"""A rank that hangs, and its peers that wait for it, say where they are and end with code 3."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import Ranks, metrics, run, wait_until, write_config

import penteract.checkpoint.examine
import penteract.checkpoint.io
import penteract.cli
from penteract.launch import ERROR_FILE, report_failure
from penteract.mesh import Traffic
from penteract.nn.model import Stage
from penteract.train import watchdog as watchdog_module
from penteract.train.run import Run
from penteract.train.watchdog import Activity, Watchdog

LIMIT = {"hang_minutes": 2.0 / 60, "steps": 1000}


def hanging(rank: int, step: int, where: str = "_auxiliary") -> Callable[[int], None]:
    """A rank sleeps for ever in that step."""

    def prepare(this: int) -> None:
        watchdog_module.TOGETHER_S = 1.0
        real = getattr(Run, where)

        def maybe(run: Run, *args: Any) -> Any:
            if this == rank and run.step + 1 == step:
                time.sleep(1e6)
            return real(run, *args)

        setattr(Run, where, maybe)

    return prepare


@pytest.mark.parametrize("hung", [0, 1])
def test_all_ranks_say_where_they_are(tmp_path: Path, hung: int) -> None:
    config = write_config(tmp_path, {"train": LIMIT, "optim": {"decay": 10}})
    ranks = run(["train", config], 2, code=3, prepare=hanging(hung, 3))
    assert len(metrics(tmp_path / "run")) == 2
    for rank, said in enumerate(ranks.err):
        head = next(line for line in said.splitlines() if "no progress" in line)
        assert head.startswith(f"rank {rank} of 2 on ")
        assert " s in step 3, the update; its last message, " in head
        assert ("in maybe" in said) == (rank == hung)  # the stack of the one that sleeps


def test_an_action_is_named(tmp_path: Path) -> None:
    sections = {"train": LIMIT | {"global_batch": 4}, "optim": {"decay": 10}}
    config = write_config(tmp_path, sections)

    def prepare(rank: int) -> None:
        watchdog_module.TOGETHER_S = 0.1
        calls = [0]

        def sleepy(*_: Any) -> None:
            calls[0] += 1
            if calls[0] == 3:
                time.sleep(1e6)

        real = Stage.__init__

        def made(stage: Stage, *args: Any, **kwargs: Any) -> None:
            real(stage, *args, **kwargs)
            stage.register_forward_pre_hook(sleepy)

        Stage.__init__ = made

    ranks = run(["train", config], 1, code=3, prepare=prepare)
    assert "in step 1, F of stage 0, micro-batch 2; no message yet" in ranks.err[0]


def test_a_slow_run_that_goes_on_is_left_alone(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"train": {"hang_minutes": 0.6 / 60, "steps": 4}})

    def prepare(rank: int) -> None:
        real = Run._gradients

        def slow(run: Run, *args: Any) -> Any:
            time.sleep(0.3)
            return real(run, *args)

        Run._gradients = slow

    run(["train", config], 2, prepare=prepare)


def test_a_stopped_rank_ends_the_others(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"train": LIMIT, "optim": {"decay": 10}})
    ranks = Ranks(["train", config], 2)
    wait_until(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and metrics(tmp_path / "run"))
    os.kill(ranks.pids[1], signal.SIGSTOP)
    wait_until(lambda: ranks.codes[0] is not None)
    os.kill(ranks.pids[1], signal.SIGKILL)
    ranks.wait()
    assert ranks.codes == [3, -signal.SIGKILL]
    assert "rank 0 of 2" in ranks.err[0]


def test_without_a_limit_nothing_watches() -> None:
    activity, said = Activity(), list[str]()
    activity.at -= 1e6
    axes: list[tuple[str, Traffic]] = []
    with Watchdog(activity, lambda: axes, rank=0, world=1, limit_s=0, report=said.append):
        time.sleep(0.05)
    assert not said


@pytest.mark.parametrize("read", ["hashes", "tensors"])
def test_a_disk_that_hangs_while_a_checkpoint_is_read(tmp_path: Path, read: str) -> None:
    config = write_config(tmp_path, {"train": LIMIT | {"steps": 3}})
    run(["train", config, "--train.steps=2"], 2)

    def prepare(rank: int) -> None:
        watchdog_module.TOGETHER_S = 1.0

        def stuck(*_: Any, **__: Any) -> None:
            time.sleep(1e6)

        if rank:
            owner = penteract.checkpoint.examine if read == "hashes" else penteract.checkpoint.io
            setattr(owner, "hash_file" if read == "hashes" else "open_tensors", stuck)

    ranks = Ranks(["train", config], 2, prepare=prepare).wait()
    assert ranks.codes == [1, 3]  # the one that waits for it sees it leave
    where = "checking checkpoints" if read == "hashes" else f"reading {tmp_path}"
    assert f" in step 0, {where}" in ranks.err[1]
    assert "in stuck" in ranks.err[1]


def test_reading_slowly_is_progress(tmp_path: Path) -> None:
    """Each file takes most of the limit: two are above it, and rank 1 waits for that long."""
    config = write_config(tmp_path, {"train": {"hang_minutes": 0.6 / 60, "steps": 3}})
    run(["train", config, "--train.steps=2"], 3)

    def prepare(rank: int) -> None:
        real = penteract.checkpoint.examine.hash_file

        def slow(*args: Any, **how: Any) -> str:
            time.sleep(0.4)
            return real(*args, **how)

        if rank == 0:
            penteract.checkpoint.examine.hash_file = slow

    run(["train", config], 2, prepare=prepare)


def test_a_report_that_goes_nowhere_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """A full disk, or a pipe that nobody reads."""

    def prepare(rank: int) -> None:
        watchdog_module.REPORT_S = 0.2
        hanging(0, 3)(rank)

        def stuck(*_: Any, **__: float) -> None:
            time.sleep(1e6)

        penteract.cli.report_failure = stuck

    config = write_config(tmp_path, {"train": LIMIT, "optim": {"decay": 10}})
    run(["train", config], 1, code=3, prepare=prepare)


def test_what_fails_after_a_hang_does_not_replace_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv(ERROR_FILE, str(path))
    report_failure("it hangs", sent_at=1.0)
    report_failure("a peer has left")
    assert json.loads(path.read_text())["message"]["message"] == "it hangs"
    path.unlink()
    report_failure("a fault of its own")
    report_failure("the one after it")
    assert json.loads(path.read_text())["message"]["message"] == "the one after it"


@pytest.mark.slow
def test_the_launcher_shows_who_was_silent_first(tmp_path: Path) -> None:
    """Real ranks; the one that hangs is named with its stack, the other with a line."""
    config = write_config(tmp_path, {"train": LIMIT, "optim": {"decay": 10}})
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import time\n"
        "    from penteract.train.run import Run\n"
        "    real = Run._auxiliary\n"
        "    def hung(run):\n"
        "        if run.step == 3: time.sleep(1e6)\n"
        "        return real(run)\n"
        "    Run._auxiliary = hung\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    words = [sys.executable, "-m", "penteract", "train", str(config), "--nproc", "2"]
    found = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 3, found.stderr
    lines = found.stderr.splitlines()
    heads = [i for i, line in enumerate(lines) if "no progress for" in line]
    assert len(heads) == 3
    assert lines[heads[0]].startswith("rank 1 of 2")
    assert lines[heads[1]].startswith("rank 0 of 2")
    assert lines[heads[2] - 1] == "the one that was silent first:"
    assert any("in hung" in line for line in lines[heads[2] :])
