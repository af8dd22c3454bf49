"""Ranks that were not started alike are told what differs, and where, before anything is built."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import run, write_config

from penteract import cli
from penteract.config_file import load
from penteract.data.loader import TrainSource
from penteract.launch import surroundings
from penteract.testing import run_ranks, world_axis
from penteract.train.alike import UnlikeError, check_alike, facts_of


def told(facts: list[dict[str, Any]]) -> list[str]:
    """What each of some ranks raises, with facts of its own; "" where nothing."""

    def check() -> str:
        world = world_axis()
        try:
            check_alike(facts[world.rank], world)
        except UnlikeError as error:
            return str(error) if error.said_here == (world.rank == 0) else "who says it?"
        return ""

    found: list[str] = run_ranks(check, len(facts))
    return found


def test_the_odd_rank_is_named_with_every_key() -> None:
    same = {"optim": {"lr": 0.01, "name": "adamw"}, "version": {"torch": "2"}}
    odd = {"optim": {"lr": 0.02, "name": "adamw", "eps": 1.0}, "version": {"torch": "3"}}
    said = told([same, same, odd])
    assert len(set(said)) == 1
    _, eps, lr, version, advice = said[0].splitlines()
    assert eps.startswith("  optim.eps: not given on rank 0 (")
    assert "; 1.0 on rank 2 (" in eps
    assert lr.startswith("  optim.lr: 0.01 on rank 0 (")
    assert ", rank 1 (" in lr
    assert "; 0.02 on rank 2 (" in lr
    assert version.startswith("  version.torch: 2 on rank 0")
    assert advice.startswith("Give all of them the same")
    assert told([same, dict(reversed(same.items()))]) == ["", ""]


def test_a_message_stays_short_where_all_differ() -> None:
    (first, *_) = told([{"x": {"y": rank}} for rank in range(6)])
    assert first.splitlines()[1].count("rank ") == 4
    assert first.splitlines()[1].endswith("; 2 more values")


def rank_1(plant: Callable[[], None]) -> Callable[[int], None]:
    return lambda rank: plant() if rank == 1 else None


def plant_configuration() -> None:
    real = cli._load

    def other(arguments: Any) -> Any:
        arguments.rest = [*arguments.rest, "--optim.lr=0.5"]
        return real(arguments)

    cli._load = other


def plant_variable() -> None:
    os.environ["NCCL_ALGO"] = "Ring"


def plant_data() -> None:
    TrainSource.fingerprint = lambda source: "other"


@pytest.mark.parametrize(
    ("plant", "line"),
    [
        (plant_configuration, "  optim.lr: 0.01 on rank 0 ({}); 0.5 on rank 1 ({})"),
        (plant_variable, "  environment.NCCL_ALGO: not given on rank 0 ({}); Ring on rank 1 ({})"),
        (plant_data, "task.data.files: "),
    ],
    ids=["configuration", "environment", "data"],
)
def test_a_run_does_not_start(tmp_path: Path, plant: Callable[[], None], line: str) -> None:
    """All ranks end with code 2, and one of them says why."""
    host = os.uname().nodename
    ranks = run(["train", write_config(tmp_path)], 2, code=2, prepare=rank_1(plant))
    assert line.format(host, host) in ranks.err[0]
    assert "penteract: ranks were not started alike:" in ranks.err[0]
    assert "Traceback" not in ranks.err[0]
    assert "alike" not in ranks.err[1]
    assert not (tmp_path / "run").exists()


def test_folders_of_data_may_differ_and_versions_are_facts(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    configs = [load(write_config(tmp_path / name), ["--log.dir=x"]) for name in "ab"]
    assert facts_of(configs[0]) == facts_of(configs[1])
    assert configs[0] != configs[1]
    version = surroundings()["version"]
    assert {"penteract", "torch", "cuda"} <= version.keys()
