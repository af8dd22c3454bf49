"""Before a loss spike a run goes back, and goes on as if the data up to it were not there."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import Ranks, assert_same_state, curve, metrics, newest, run, tensors, write_config

from penteract import cli
from penteract.checkpoint import steps as steps_module
from penteract.checkpoint.commit import Renames
from penteract.checkpoint.examine import reading
from penteract.checkpoint.io import latest_good, read_manifest
from penteract.config import ConfigError
from penteract.config_file import load
from penteract.train import language_model
from penteract.train import spikes as spikes_module
from penteract.train.passed import Window, data_step, from_state, passing, to_state
from penteract.train.run import Run

SPIKE = {"step": 20, "kind": "spike", "times": 0}  # of the data of that step, whenever it is taken
TRAIN: dict[str, Any] = {"steps": 24, "outlier": 30.0, "on_spike": "rewind", "rewind_steps": 3}


def config_of(folder: Path, *inject: dict[str, Any], every: int = 4, **train: Any) -> Path:
    train = {**TRAIN, "inject": list(inject), **train}
    sections = {"train": train, "optim": {"decay": 24}, "checkpoint": {"every": every}}
    return write_config(folder, sections)


def lacking(steps: int, after: int) -> Callable[[int], None]:
    """Plants data without that of so many steps after `after`."""

    def prepare(rank: int) -> None:
        real = language_model._Reader.read

        def read(reader: Any, step: int) -> Any:
            return real(reader, step + steps if step > after else step)

        language_model._Reader.read = read

    return prepare


@pytest.fixture(scope="module")
def gone_back(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A spike at step 20, from which the newest step that is 3 older is 16."""
    folder = tmp_path_factory.mktemp("gone_back")
    ranks = run(["train", config_of(folder, SPIKE)], 2)
    said = "step     20  a spike: back to step 16, past the data of 4 steps"
    assert said in ranks.err[0]
    assert [line["spike"] for line in lines(folder) if "spike" in line] == [{"back_to": 16}]
    return folder / "run"


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (folder / "run/metrics.jsonl").read_text().splitlines()]


def test_it_is_the_run_whose_data_lacks_the_window(tmp_path: Path, gone_back: Path) -> None:
    path = config_of(tmp_path, on_spike="keep")
    run(["train", path], 2, prepare=lacking(steps=4, after=16))
    assert curve(tmp_path / "run") == curve(gone_back)
    mine, other = tensors(newest(tmp_path / "run")), tensors(newest(gone_back))
    assert mine.keys() == other.keys()
    assert all(bool((mine[name] == other[name]).all()) for name in mine)
    state = read_manifest(newest(gone_back)).state
    assert state["cursor"] == (24 + 4) * 4
    assert from_state(state) == (Window(16, 4),)


@pytest.mark.parametrize(
    ("n", "layout"),
    [
        (1, []),
        pytest.param(2, ["--parallel.tp=2", "--parallel.zero=1"], marks=pytest.mark.slow),
        pytest.param(2, ["--parallel.pp=2"], marks=pytest.mark.slow),
        pytest.param(4, ["--parallel.zero=3", "--parallel.cp=2"], marks=pytest.mark.slow),
        pytest.param(2, ["--checkpoint.asynchronous=true"], marks=pytest.mark.slow),
        pytest.param(2, ["--train.rerun=outliers"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_it_is_the_same_in_every_layout(
    tmp_path: Path, gone_back: Path, n: int, layout: list[str]
) -> None:
    last = {"rank": 1} if "--parallel.pp=2" in layout else {}  # the stage that has the loss
    run(["train", config_of(tmp_path, SPIKE | last), *layout], n)
    np.testing.assert_allclose(curve(tmp_path / "run"), curve(gone_back), rtol=1e-11)
    assert from_state(read_manifest(newest(tmp_path / "run")).state) == (Window(16, 4),)


def killed_at(owner: Any, name: str, *, after: bool, calls: int = 1) -> Callable[[int], None]:
    """Rank 0 is killed at a call of `owner.name`, before it does anything or after it."""

    def prepare(rank: int) -> None:
        real, left = getattr(owner, name), [calls]

        def killed(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if not left[0] and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        if rank == 0:
            setattr(owner, name, killed)

    return prepare


# Saved every 2 steps, so that 18 and 20 are there when a spike at 21 goes back to 18: k is 3.
MOMENTS: list[tuple[Any, str, bool, int]] = [
    (spikes_module, "go_back", False, 1),
    (spikes_module, "go_back", True, 1),
    (Renames, "remove", True, 1),
    (Run, "update", False, 22),
    (Renames, "replace", False, 10),
]


@pytest.mark.parametrize("moment", MOMENTS[:2], ids=lambda m: f"{m[1]}-{m[2]}")
def test_a_kill_at_any_moment_changes_nothing(tmp_path: Path, moment: Any) -> None:
    check_kill(tmp_path, *moment)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS[2:], ids=lambda m: f"{m[1]}-{m[2]}")
def test_a_kill_at_other_moments_changes_nothing(tmp_path: Path, moment: Any) -> None:
    check_kill(tmp_path, *moment)


def check_kill(folder: Path, owner: Any, name: str, after: bool, calls: int) -> None:
    how = {"every": 2, "steps": 23}
    config = config_of(folder, {**SPIKE, "step": 21}, **how)
    run(["train", config, f"--log.dir={folder}/whole"])
    ranks = Ranks(["train", config], prepare=killed_at(owner, name, after=after, calls=calls))
    ranks.wait()
    assert ranks.codes == [-signal.SIGKILL]
    run(["train", config])
    assert curve(folder / "run") == curve(folder / "whole")
    assert_same_state(newest(folder / "run"), newest(folder / "whole"))
    state = read_manifest(newest(folder / "run")).state
    assert from_state(state) == (Window(18, 3),)
    told = sum("spike" in line for line in lines(folder))
    assert told == (2 if (name, after) == ("go_back", False) else 1), "once it is recorded: one"
    found = [
        [n for n, _ in steps_module.steps(folder / f / "checkpoints")] for f in ("run", "whole")
    ]
    assert found[0] == found[1]


def test_going_back_again_and_again_ends(tmp_path: Path) -> None:
    """All data from step 20 on spikes: it is not the data."""
    inject = [{**SPIKE, "step": step} for step in range(20, 40)]
    config = config_of(tmp_path, *inject, rewind_steps=1)
    for _ in range(2):  # a restart changes nothing of that
        ranks = run(["train", config], code=1)
        assert "penteract: step 17 is a spike" in ranks.err[0]
        assert "went back to step 16 or before 3 times in a row" in ranks.err[0]
    state = read_manifest(newest(tmp_path / "run")).state
    assert from_state(state) == (Window(16, 6, 3),)  # that of 17 to 22: only 20 to 22 spiked


def test_without_a_step_that_is_old_enough_the_spike_is_kept(tmp_path: Path) -> None:
    config = config_of(tmp_path, SPIKE, rewind_steps=19)
    ranks = run(["train", config])
    said = "a spike: kept, no saved step is 19 steps (train.rewind_steps) older"
    assert said in ranks.err[0]
    found = metrics(tmp_path / "run")
    assert found[20]["spike"] == {"back_to": None}
    assert "skipped" not in found[20]
    assert len(found) == 24


def test_a_resume_judges_by_the_steps_before_it_and_keeps_what_was_passed(
    tmp_path: Path, gone_back: Path
) -> None:
    config = config_of(tmp_path, SPIKE)
    for steps in (18, 19, 22, 24):  # 18 is saved as the last one, and not gone back to
        run(["train", config, f"--train.steps={steps}"], 2)
    assert curve(tmp_path / "run") == curve(gone_back)
    assert_same_state(newest(tmp_path / "run"), newest(gone_back))


def test_what_a_step_saw_is_shown(gone_back: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data", "show", str(gone_back.parent / "run.toml"), "--step"]
    shown = []
    for step in ("16", "17"):
        assert cli.main([*words, step]) == 0
        shown.append([int(line.split()[0]) for line in capsys.readouterr().out.splitlines()])
    assert shown == [[60, 61, 62, 63], [80, 81, 82, 83]]


def test_a_damaged_step_is_passed_over_for_an_older_one(tmp_path: Path) -> None:
    config = config_of(tmp_path, SPIKE)
    run(["train", config, "--train.steps=18"])
    (file,) = (tmp_path / "run/checkpoints/step-00000016").glob("*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"x")
    ranks = run(["train", config])
    assert "step 16 is damaged: " in ranks.err[0]
    assert from_state(read_manifest(newest(tmp_path / "run")).state) == (Window(12, 8),)


def test_newer_steps_go_but_for_those_that_somebody_keeps(tmp_path: Path) -> None:
    """A pinned one, and one that is being read, are set aside; none counts as a step any more."""
    run(["train", config_of(tmp_path, every=1, steps=6)])
    directory = tmp_path / "run/checkpoints"
    every = dict(steps_module.steps(directory))
    steps_module.pin(every[4])
    state = read_manifest(every[2]).state
    with reading(every[5]):
        aside = steps_module.go_back(every[2], state | to_state([Window(2, 3)]))
    assert [path.name[: len("rewound-step-00000005")] for path in aside] == [
        "rewound-step-00000005",
        "rewound-step-00000004",
    ]
    assert [n for n, _ in steps_module.steps(directory)] == [1, 2]
    assert steps_module.pointed(directory) == every[2]
    assert latest_good(directory, hashes=True) == every[2]
    assert spikes_module.passed_in(directory) == (Window(2, 3),)
    assert all((path / "manifest.json").exists() for path in aside)


def test_windows_join_and_count() -> None:
    one = passing((), back_to=10, spike=15)
    assert one == (Window(10, 5),)
    assert [data_step(step, one) for step in (10, 11)] == [10, 16]
    later = passing(one, back_to=12, spike=14)  # its data is that of 17 to 19
    assert later == (Window(10, 5), Window(12, 2))
    assert data_step(13, later) == 20
    earlier = passing(later, back_to=10, spike=13)
    assert earlier == (Window(10, 10, 2),)
    assert data_step(11, earlier) == 21
    assert passing(earlier, back_to=8, spike=11) == (Window(8, 13, 3),)
    assert from_state(to_state(earlier)) == earlier
    assert to_state(()) == {}


def test_what_cannot_go_back_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"goes back to a saved step: give checkpoint.every"):
        load(config_of(tmp_path, every=0))
    words = ["--train.rewind_steps=10", "--checkpoint.keep"]
    with pytest.raises(ConfigError, match=r"keep = 3: .* keep at least 4"):
        load(config_of(tmp_path), [*words, "3"])
    load(config_of(tmp_path), [*words, "4"])
    assert write_config(tmp_path).exists()
