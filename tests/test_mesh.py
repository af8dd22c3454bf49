"""Axes and process groups are those of the grid."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penteract import compat
from penteract.collectives import all_reduce_
from penteract.grid import Grid
from penteract.mesh import AXES, create_mesh
from penteract.testing import run_ranks


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


def test_a_group_is_as_patient_as_the_default_one() -> None:
    """Torch would give it the backend's own time."""

    def seconds() -> float:
        how = {"rank": 0, "world_size": 1, "timeout": timedelta(seconds=777)}
        dist.init_process_group("gloo", store=dist.HashStore(), **how)
        group = compat.new_group("dp", [0], None, None)
        found = group._get_backend(torch.device("cpu")).options._timeout
        dist.destroy_process_group()
        return found.total_seconds()

    assert run_ranks(seconds, 1) == [777.0]
