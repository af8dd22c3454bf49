"""Grids against the oracle file and by properties; meshes on gloo and on a fake process group."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from penteract.collectives import all_reduce_
from penteract.mesh import AXES, PRINTED_GROUPS, Grid, create_mesh, draw, layout_json
from penteract.testing import run_ranks

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


def test_one_process_needs_no_process_group() -> None:
    mesh = create_mesh(Grid(1), 0)
    assert not dist.is_initialized()
    for name in AXES:
        axis = mesh.axis(name)
        assert (axis.size, axis.rank, axis.ranks, axis.group) == (1, 0, (0,), None)


def test_a_larger_world_needs_the_right_process_group() -> None:
    with pytest.raises(ValueError, match=r"world = 2 needs a process group.*--nproc 2"):
        create_mesh(Grid(2), 0)

    def another_world() -> str:
        with pytest.raises(ValueError) as caught:
            create_mesh(Grid(4), dist.get_rank())
        return str(caught.value)

    assert "rank 1 of 2" in run_ranks(another_world, 2)[1]


def sums(grid: Grid) -> dict[str, Any]:
    """The sum of ranks over every axis, as its process group says it."""
    mesh = create_mesh(grid, dist.get_rank())
    found = {}
    for name, axis in mesh.axes.items():
        x = torch.tensor([float(mesh.rank)])
        if axis.group is not None:
            assert dist.get_process_group_ranks(axis.group) == list(axis.ranks)
            assert dist.get_rank(axis.group) == axis.rank
            dist.all_reduce(x, group=axis.group)
        assert (axis.group is None) == (axis.size == 1)
        assert axis.name == name
        assert axis.ranks[axis.rank] == mesh.rank
        found[name] = x.item()
    return found


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 2},
        {"tp": 2, "pp": 2},
        {"cp": 2, "ep": 2},
        {"tp": 4},
        {"ep": 4},
        {"tp": 2, "ep": 2, "etp": 2},
        {"pp": 2, "order": "pp-tp-cp-ep-dp"},
    ],
    ids=str,
)
def test_process_groups_are_the_grids_groups(sizes: dict[str, Any]) -> None:
    grid = Grid(4, **sizes)
    for rank, found in enumerate(run_ranks(sums, 4, grid)):
        for name in AXES:
            row = next(row for row in grid.groups(name).tolist() if rank in row)
            assert found[name] == sum(row), (rank, name)


def test_which_axes_share_a_communicator() -> None:
    def shared() -> dict[str, bool]:
        mesh = create_mesh(Grid(4, tp=2), dist.get_rank())
        groups = {name: axis.group for name, axis in mesh.axes.items()}
        return {
            "tp is etp": groups["tp"] is groups["etp"],
            "dp is edp": groups["dp"] is groups["edp"],
            "dp is dp-cp": groups["dp"] is groups["dp-cp"],
            "world is the default": groups["world"] is dist.group.WORLD,
        }

    for found in run_ranks(shared, 4):
        assert found == {
            "tp is etp": False,
            "dp is edp": False,
            "dp is dp-cp": True,
            "world is the default": True,
        }


@pytest.fixture
def fake_world() -> Iterator[int]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1234, world_size=4096)
    yield 4096
    dist.destroy_process_group()


@pytest.mark.parametrize("pp", [2, 4])
def test_the_ends_of_a_pipeline_hold_tied_embeddings(pp: int) -> None:
    def body() -> tuple[tuple[int, ...], float]:
        tied = create_mesh(Grid(4, pp=pp), dist.get_rank()).axis("tied")
        return tied.ranks, all_reduce_(torch.tensor(1.0 + dist.get_rank()), tied).item()

    found = run_ranks(body, 4)
    if pp == 2:  # two pipelines of two stages: ranks 0, 2 and 1, 3
        assert found == [((0, 2), 4.0), ((1, 3), 6.0), ((0, 2), 4.0), ((1, 3), 6.0)]
    else:  # the stages between hold nothing
        assert found == [((0, 3), 5.0), ((1,), 2.0), ((2,), 3.0), ((0, 3), 5.0)]


def test_a_mesh_of_4096_ranks_on_a_fake_process_group(fake_world: int) -> None:
    grid = Grid(fake_world, tp=8, cp=2, pp=4, ep=16, etp=2)
    mesh = create_mesh(grid, 1234)
    at = grid.coordinates(1234)
    for name in ("tp", "cp", "dp", "pp", "ep", "etp", "edp"):
        axis = mesh.axis(name)
        assert (axis.size, axis.rank) == (grid.size(name), at[name])
        assert dist.get_world_size(axis.group) == axis.size
    with pytest.raises(KeyError):
        mesh.axis("sp")
