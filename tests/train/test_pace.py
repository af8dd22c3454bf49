"""A rank that is slow by itself is named with its host; those that wait for it are not."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from runs import metrics, run, write_config

from penteract.collectives import exchange
from penteract.config import ConfigError
from penteract.config_file import load
from penteract.mesh import Traffic
from penteract.pending import Pending
from penteract.testing import run_ranks, world_axis
from penteract.train.pace import slow_ranks
from penteract.train.run import Run


@pytest.mark.parametrize(
    ("n", "layout"),
    [
        (2, []),
        (2, ["--parallel.tp=2"]),
        (2, ["--parallel.zero=3"]),
        pytest.param(4, ["--parallel.pp=2", "--model.layers=2"], marks=pytest.mark.slow),
        pytest.param(4, ["--parallel.cp=2", "--parallel.tp=2"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_only_the_slow_rank_is_named(tmp_path: Path, n: int, layout: list[str]) -> None:
    inject = {"step": 4, "rank": n - 1, "kind": "slow"}
    sections = {"train": {"inject": [inject]}, "log": {"every": 2, "slow": 3.0}}
    ranks = run(["train", write_config(tmp_path, sections), *layout], n)
    line = metrics(tmp_path / "run")[4]
    name = f"rank {n - 1} ({os.uname().nodename})"
    assert line["slow"].keys() == {name}
    assert line["slow"][name] > 3
    assert f"step      4  slow: {name} takes {line['slow'][name]:.2f} times" in ranks.err[0]
    assert line["step_ms"] > 1000


def test_off_is_off(tmp_path: Path) -> None:
    inject = {"step": 2, "rank": 1, "kind": "slow"}
    sections = {"train": {"inject": [inject], "steps": 2}, "log": {"slow": 0}}
    run(["train", write_config(tmp_path, sections)], 2)
    assert "slow" not in metrics(tmp_path / "run")[2]


def test_a_stage_is_measured_by_itself() -> None:
    own_s = [1.0, 1.6, 9.0, 8.0, 1.0, 1.2, 13.0, 8.0]
    groups = [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert slow_ranks(own_s, groups, 1.5) == {6: 13 / 8, 1: 1.6}
    assert slow_ranks(own_s, groups, 1.65) == {}
    assert slow_ranks([1.0, 2.0], [[0, 1]], 1.5) == {1: 2.0}
    assert slow_ranks([1.0, 2.0], [[0], [1]], 1.5) == {}


def test_a_wait_is_counted_where_it_is() -> None:
    class Work:
        def wait(self) -> None:
            time.sleep(0.1)

    def finish() -> torch.Tensor:
        time.sleep(0.8)  # the host's own: what it makes of what came
        return torch.zeros(1)

    traffic, work = Traffic(), cast(Any, Work())
    pending = Pending([work], finish, traffic)
    pending.wait()
    pending.wait()
    assert 0.09 < traffic.waited_s < 0.7

    def late() -> float:
        axis = world_axis()
        time.sleep(0.8 * axis.rank)
        exchange(b"x", axis)
        return axis.traffic.waited_s

    first, second = run_ranks(late, 2)
    assert first > 0.5
    assert second < 0.4


def test_own_time_is_that_of_all_steps_since_the_last_line(tmp_path: Path) -> None:
    """A rank that loses a little in every step shows as much as one that loses it at once."""
    config = write_config(tmp_path, {"log": {"every": 3, "slow": 2.0}})

    def prepare(rank: int) -> None:
        real: Callable[..., Any] = Run._gradients

        def slower(run: Run, *args: Any) -> Any:
            time.sleep(0.2 if rank == 0 and run.step + 1 in (4, 5) else 0.0)
            return real(run, *args)

        Run._gradients = slower

    run(["train", config], 2, prepare=prepare)
    (name,) = metrics(tmp_path / "run")[6]["slow"]
    assert name.startswith("rank 0 ")


def test_a_factor_that_names_everybody_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"log.slow = 0.5 times the median .* such as 1.5, or 0"):
        load(write_config(tmp_path, {"log": {"slow": 0.5}}))
