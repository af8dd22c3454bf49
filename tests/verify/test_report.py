"""Bytes beside their formula, and numbers and names in the table."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from penteract.config import Config, resolve
from penteract.config_file import from_dict
from penteract.grid import Grid
from penteract.verify.compare import Sent, Verdict
from penteract.verify.layouts import parse_layout
from penteract.verify.report import (
    byte_rows,
    bytes_table,
    fuzz_summary,
    number,
    short,
    table,
)
from penteract.verify.verify import Result

Bytes = dict[str, dict[str, int | None]]
SENT: list[Sent] = [{"tp": {"a": 10, "b": 2}, "dp": {}}, {"tp": {"a": 20}, "dp": {}}]


def result(sent: list[Sent]) -> Result:
    model = {"layers": 1, "hidden": 8, "ffn": 8, "heads": 2, "vocab": 11}
    config = resolve(from_dict({"model": model, "train": {"steps": 1}}))
    name = "layers.0.a_module_with_a_very_long_name.weight"
    verdict = Verdict(0.0, 1.5e-16, name, 1e-17, 2e-16, ok=True, sent=sent)
    return Result(parse_layout("tp=2", config), verdict, None, 1.0)


@pytest.mark.parametrize(
    ("expected", "row"),
    [
        ([12, 20], ("tp=2", "tp", 20, 20, "=")),
        ([24, 20], ("tp=2", "tp", 12, 24, "0.5 times, rank 0")),
        ([12, 10], ("tp=2", "tp", 20, 10, "2 times, rank 1")),
        ([12, 0], ("tp=2", "tp", 20, 0, "inf times, rank 1")),
    ],
)
def test_bytes_are_compared_rank_by_rank(
    expected: list[int], row: tuple[str, str, int, int, str]
) -> None:
    def formula(config: Config, grid: Grid, rank: int) -> Sent:
        return {"tp": {"everything": expected[rank]}}

    assert list(byte_rows(result(SENT), formula)) == [row]
    assert list(bytes_table([result(SENT)], formula))[-1].endswith(row[-1])


def test_an_axis_that_only_the_formula_knows_is_shown() -> None:
    rows = list(byte_rows(result([{}, {}]), lambda config, grid, rank: {"ep": {"x": 4}}))
    assert rows == [("tp=2", "ep", 0, 4, "0 times, rank 0")]


def test_bytes_that_follow_from_the_routing_are_neither_equal_nor_different() -> None:
    def formula(config: Config, grid: Grid, rank: int) -> Bytes:
        return {"tp": {"tokens": None, "norm": 8}, "dp": {"counts": 0}}

    routed = [result(SENT)]
    assert list(byte_rows(*routed, formula)) == [("tp=2", "tp", 20, None, "by routing")]
    head, shown = list(bytes_table(routed, formula))[-2:]
    assert shown.split() == ["tp=2", "tp", "20", "by", "routing"]
    assert shown.index("by routing") == len(head) + 1
    lines = list(fuzz_summary([*routed, *routed], Counter(), formula))
    assert "bytes over an axis: 0 as the formula says, 0 not, 2 by routing" in lines


def test_a_rank_of_which_all_is_known_must_agree() -> None:
    def formula(config: Config, grid: Grid, rank: int) -> Bytes:
        return {"tp": {"tokens": (10, None)[rank]}}

    assert list(byte_rows(result(SENT), formula)) == [("tp=2", "tp", 12, 10, "1.2 times, rank 0")]
    lines = list(fuzz_summary([result(SENT)], Counter(), formula))
    assert "bytes over an axis: 0 as the formula says, 1 not" in lines
    assert "  tp=2, tp: 12 for 10, 1.2 times, rank 0" in lines


def test_a_layout_that_crashed_has_no_bytes() -> None:
    assert list(bytes_table([result([])], lambda config, grid, rank: {"tp": {"x": 4}})) == []


def test_the_table_is_narrow_and_says_what_is_equal() -> None:
    lines = list(table([result(SENT)], 1e-9))
    assert max(map(len, lines)) <= 100
    assert lines[1].startswith("tp=2")
    assert lines[1].endswith("equal")
    assert "…" in lines[1]
    assert "1e-09" in lines[-1]


def test_numbers_and_names_are_short() -> None:
    assert [number(x) for x in (0.0, 1.2345e-16, 2.0, math.inf)] == [
        "0",
        "1.2e-16",
        "2.0e+00",
        "inf",
    ]
    assert short("norm.weight") == "norm.weight"
    assert len(short("x" * 80)) == 34
