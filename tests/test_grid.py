"""Ranks, coordinates and groups against the oracle and by properties; the picture of a layout."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penteract.grid import PRINTED_GROUPS, Grid, layout_json
from penteract.layout_picture import draw
from penteract.mesh import AXES

CASES = json.loads((Path(__file__).parent / "data" / "rank_groups.json").read_text())
SIZES = ("tp", "cp", "pp", "ep", "etp", "order")
ONE_OF_EACH = {"tp": 8, "pp": 2, "etp": 2, "ep": 4}


def grid_of(case: dict[str, Any]) -> Grid:
    return Grid(case["world"], **{name: case[name] for name in SIZES})


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"world{case['world']}-{case['order']}")
def test_groups_equal_the_oracle(case: dict[str, Any]) -> None:
    grid = grid_of(case)
    for name, expected in case["groups"].items():
        assert grid.groups(name).tolist() == expected, name
    printed = {name: value for name, value in case.items() if name != "groups"}
    printed["groups"] = {name: case["groups"][name] for name in PRINTED_GROUPS}
    assert layout_json(grid) == printed
    assert json.loads(json.dumps(layout_json(grid))) == printed


def test_the_dense_rank_follows_the_formula_of_the_default_order() -> None:
    grid = Grid(48, tp=2, cp=3, pp=2)
    for rank in range(48):
        at = grid.coordinates(rank)
        assert rank == at["tp"] + at["cp"] * 2 + at["dp"] * 6 + at["pp"] * 24
        assert grid.rank_at(**{axis: at[axis] for axis in ("tp", "cp", "dp", "pp")}) == rank


@st.composite
def grids(draw_from: Any) -> Grid:
    """Any valid grid up to some hundred ranks; `pp` last, so that every choice is valid."""
    tp, cp, pp, ep = (draw_from(st.integers(1, 4)) for _ in range(4))
    etp = draw_from(st.sampled_from([1, 2, tp]))
    front = draw_from(st.permutations(["tp", "cp", "ep", "dp"]))
    spare = draw_from(st.integers(1, 2))
    world = spare * tp * cp * pp * ep * etp
    return Grid(world, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, order="-".join([*front, "pp"]))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(grids())
def test_groups_partition_the_world_and_agree_with_coordinates(grid: Grid) -> None:
    at = [grid.coordinates(rank) for rank in range(grid.world)]
    for name in AXES:
        rows = grid.groups(name).tolist()
        assert sorted(rank for row in rows for rank in row) == list(range(grid.world))
        assert rows == sorted(rows)
        parts = set(at[0]) if name == "world" else set(name.split("-"))
        dense = {"tp", "cp", "dp", "pp"}
        fixed = (dense if parts <= dense else {"etp", "ep", "edp", "pp"}) - parts
        for row in rows:
            assert row == sorted(row)
            assert len(row) == grid.size(name)
            assert all(len({at[rank][axis] for rank in row}) == 1 for axis in fixed)
        if "-" not in name and name != "world":
            assert all([at[rank][name] for rank in row] == list(range(len(row))) for row in rows)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(grids())
def test_every_rank_has_its_own_coordinates_in_both_grids(grid: Grid) -> None:
    at = [grid.coordinates(rank) for rank in range(grid.world)]
    for names in (("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")):
        assert len({tuple(place[name] for name in names) for place in at}) == grid.world


def test_groups_of_100_000_ranks_take_under_two_seconds() -> None:
    grid = Grid(100_000, tp=10, cp=2, pp=10, ep=20, etp=5)
    start = time.perf_counter()
    groups = layout_json(grid)["groups"]
    assert time.perf_counter() - start < 2
    assert len(groups["tp"]) == 10_000


def test_names_and_ranks_off_the_grid_are_refused() -> None:
    grid = Grid(8, tp=2)
    for name in ("xp", "tp-ep", "tp-tp", "", "sp"):
        with pytest.raises(ValueError, match="no group"):
            grid.groups(name)
    with pytest.raises(ValueError, match=r"rank 8 is not in a world of 8"):
        grid.coordinates(8)
    with pytest.raises(ValueError, match=r"tp = 2 is not in 0 .. 1"):
        grid.rank_at(tp=2)


@pytest.mark.parametrize("world", [8, 32, 64])
def test_the_picture_shows_every_rank_on_its_node(world: int) -> None:
    lines = draw(Grid(world, tp=4, pp=2), 8).splitlines()
    shown = {}
    for line in lines:
        place, colon, rest = line.partition(" : ")
        if colon:
            numbers, _, node = rest.partition("node ")
            shown.update({int(rank): (int(node), place.split()) for rank in numbers.split()})
    assert {rank: node for rank, (node, _) in shown.items()} == {r: r // 8 for r in range(world)}
    assert shown[world - 1][1][:2] == ["pp", "1"]
    assert max(map(len, lines)) <= 120


def test_the_picture_says_what_travels_and_between_how_many_nodes() -> None:
    text = draw(Grid(32, **ONE_OF_EACH), 8)
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert rows["tp"].split()[1:5] == ["8", "4", "1", "node"]
    assert rows["dp"].split()[1:5] == ["2", "16", "2", "nodes"]
    assert "all-to-all" in rows["ep"]
    assert "cp" not in rows
    assert "nothing is sent" in draw(Grid(1))
    assert "ep" not in {line.split()[0] for line in draw(Grid(8)).splitlines() if line.strip()}


def test_the_picture_of_100_000_ranks_is_abridged_and_quick() -> None:
    start = time.perf_counter()
    text = draw(Grid(100_000, tp=10, pp=10, ep=10, etp=1), 8)
    assert time.perf_counter() - start < 2
    assert len(text.splitlines()) < 80
    assert "more lines" in text
    assert "99999" in text
    with pytest.raises(ValueError, match="gpus_per_node = 0"):
        draw(Grid(8), 0)
