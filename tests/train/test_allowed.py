"""A run takes the first layout of `parallel.allowed` that fits the ranks it has."""

from pathlib import Path
from typing import Any

import pytest
from runs import curve, run, write_config

from penteract.config import ConfigError, resolve
from penteract.config_file import from_dict, load
from penteract.train.pipeline import fitted

ALLOWED: list[dict[str, Any]] = [{"tp": 2, "pp": 2}, {"tp": 2, "zero": 1}, {}]


def config_of(allowed: list[dict[str, Any]], **parallel: Any) -> Any:
    model = {"layers": 2, "hidden": 8, "ffn": 8, "heads": 2, "vocab": 16}
    values = {"model": model, "parallel": {"allowed": allowed, **parallel}, "train": {"steps": 1}}
    return resolve(from_dict(values))


@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (8, (2, 2, 0)), (4, (2, 2, 0)), (6, (2, 1, 1)), (2, (2, 1, 1)), (3, (1, 1, 0)),
        (1, (1, 1, 0)),
    ],
)  # fmt: skip
def test_the_first_that_fits(world: int, sizes: tuple[int, int, int]) -> None:
    """Sizes that a layout does not name are 1, whatever the section has; other keys stay."""
    config, said = fitted(config_of(ALLOWED, tp=8, sp=True), world)
    parallel = config.parallel
    assert (parallel.tp, parallel.pp, parallel.zero) == sizes
    assert parallel.etp == parallel.tp
    assert parallel.sp
    assert said.startswith(f"{world} ranks: layout ")


def test_without_a_list_nothing_changes() -> None:
    config = config_of([], tp=2)
    assert fitted(config, 4) == (config, "")


def test_where_none_fits_every_reason_is_given() -> None:
    with pytest.raises(ConfigError) as error:
        fitted(config_of(ALLOWED[:2]), 3)
    first, *reasons = str(error.value).splitlines()
    assert first == "parallel.allowed: no layout fits 3 ranks:"
    assert [line.partition(": ")[0].strip() for line in reasons if line.startswith("  ")] == [
        "tp = 2, pp = 2", "tp = 2, zero = 1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"tpp": 2}, r"layout 2 \(tpp = 2\): parallel.tpp: unknown key \(did you mean parallel.tp"),
        ({"tp": 0}, r"layout 2 \(tp = 0\): parallel.tp = 0"),
        ({"ep": 2}, r"layout 2 \(ep = 2\): parallel.ep = 2: the model has no experts"),
    ],
)
def test_a_layout_that_cannot_be_is_named(layout: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fitted(config_of([{"tp": 2}, layout, {}]), 3)


def test_layouts_are_read_from_a_file_and_the_command_line(tmp_path: Path) -> None:
    path = write_config(tmp_path, {"parallel": {"allowed": ALLOWED}})
    assert list(load(path).parallel.allowed) == ALLOWED
    found = load(path, ["--parallel.allowed", '[{"tp": 2}, {}]'])
    assert list(found.parallel.allowed) == [{"tp": 2}, {}]


def test_a_run_goes_on_in_the_next_layout_with_the_same_numbers(tmp_path: Path) -> None:
    whole = write_config(tmp_path, {"log": {"dir": str(tmp_path / "whole")}})
    run(["train", whole])
    config = write_config(tmp_path, {"parallel": {"allowed": [{"tp": 2}, {"zero": 1}]}})
    run(["train", config, "--train.steps=3", "--optim.decay=6"], 2)
    (last,) = run(["train", config], 1).err
    assert "1 ranks: layout 2 of 2 of parallel.allowed, zero = 1" in last
    found = curve(tmp_path / "run")
    assert found == [pytest.approx(line, rel=1e-9) for line in curve(tmp_path / "whole")]
