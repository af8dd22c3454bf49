"""Who sends which box of which matrix to whom: exhaustively, with the messages played on arrays."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penteract.optim.muon_plan import Held, Matrix, Plan, deal, imagine, plan
from penteract.placement import Box, flat_range_boxes, split_range, whole

SHAPES = ((1, 1), (1, 5), (3, 2), (4, 4), (7, 3))
CUTS = ("rows", "columns", "not", "rows", "columns")
MATRICES = [Matrix(f"m{i}", shape) for i, shape in enumerate(SHAPES)]


def cut(shape: tuple[int, int], how: str, tp: int, t: int, shard: int, s: int) -> list[Box]:
    """What tensor rank t and data rank s of a replica hold: rows, columns or all, then a range."""
    rows, columns = shape
    box = whole(shape)
    if how == "rows":
        start, stop = split_range(rows, tp, t)
        box = Box((start, 0), (stop - start, columns))
    elif how == "columns":
        start, stop = split_range(columns, tp, t)
        box = Box((0, start), (rows, stop - start))
    boxes = flat_range_boxes(box.size, *split_range(box.numel, shard, s))
    return [part.shifted(box.offset) for part in boxes]


def holdings(tp: int, shard: int, replicas: int) -> list[list[Held]]:
    """By rank, tp varying fastest; the matrices are cut in turn by rows, by columns, not at all."""
    held: list[list[Held]] = []
    for _, s, t in product(range(replicas), range(shard), range(tp)):
        mine: list[Held] = []
        for m, (shape, how) in enumerate(zip(SHAPES, CUTS, strict=True)):
            mine += [(m, box) for box in cut(shape, how, tp, t, shard, s)]
        held.append(mine)
    return held


def numbered(shape: tuple[int, int]) -> np.ndarray:
    return np.arange(1, 1 + shape[0] * shape[1]).reshape(shape)


def play(held: list[list[Held]], plans: list[Plan]) -> None:
    """Send all messages: each owner gets every element once, each holder all that it holds."""
    ranks = range(len(held))
    for o in ranks:
        gathered = {m: np.zeros(SHAPES[m], int) for m, x in enumerate(plans[o].owners) if x == o}
        for r in ranks:
            sent, came = plans[r].to_owners[o], plans[o].at_owner[r]
            assert sent == came
            for part in sent:
                m, box = held[r][part.held]
                assert m == part.matrix
                assert box.contains(part.box)
                gathered[m][part.box.slices()] += numbered(SHAPES[m])[part.box.slices()]
            assert plans[o].to_holders[r] == plans[r].at_holder[o]
        for m, x in gathered.items():
            assert np.array_equal(x, numbered(SHAPES[m]))
    for r in ranks:
        back = [(p.matrix, p.box) for parts in plans[r].at_holder for p in parts]
        assert sorted(back, key=str) == sorted(held[r], key=str)
        for o, parts in enumerate(plans[r].at_holder):
            assert all(plans[r].owners[part.matrix] == o for part in parts)


@pytest.mark.parametrize(("tp", "shard", "replicas"), [*product((1, 2, 3), (1, 2, 4), (1, 2))])
def test_every_element_travels_once_there_and_to_every_holder_back(
    tp: int, shard: int, replicas: int
) -> None:
    held = holdings(tp, shard, replicas)
    plans = [plan(MATRICES, held, rank) for rank in range(len(held))]
    assert len({p.owners for p in plans}) == 1
    play(held, plans)


def test_the_owner_takes_what_it_has_itself() -> None:
    """Where every rank holds all, nothing travels to owners."""
    held = holdings(1, 1, 4)
    for rank in range(4):
        there = plan(MATRICES, held, rank).to_owners
        assert [r for r, parts in enumerate(there) if parts] in ([], [rank])


def test_a_part_that_nobody_holds_is_named() -> None:
    """So a tensor rank's part cannot pass for the matrix."""
    with pytest.raises(ValueError, match=r"m0: 1 of 1 elements"):
        plan(MATRICES, [[], []], 0)
    with pytest.raises(ValueError, match=r"m\d: .* elements"):
        plan(MATRICES, holdings(2, 1, 1)[:1], 0)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12),
    ranks=st.integers(1, 6),
)
def test_work_is_dealt_evenly(shapes: list[tuple[int, int]], ranks: int) -> None:
    """No rank has more than the mean and one matrix; the order of the list does not matter."""
    matrices = [Matrix(f"m{i:02}", shape) for i, shape in enumerate(shapes)]
    owners = deal(matrices, ranks)
    loads = [0] * ranks
    for matrix, owner in zip(matrices, owners, strict=True):
        loads[owner] += matrix.cost
    costs = [matrix.cost for matrix in matrices]
    assert max(loads) <= sum(costs) / ranks + max(costs)
    assert deal(matrices[::-1], ranks) == owners[::-1]


def test_the_dearest_matrix_is_dealt_first() -> None:
    """Else it would come on top of an equal share of the others."""
    matrices = [Matrix(f"m{i}", (2, 2)) for i in range(8)] + [Matrix("m8", (4, 4))]
    assert [m.cost for m in matrices[-2:]] == [24, 192]
    owners = deal(matrices, 2)
    assert owners == (1,) * 8 + (0,)


@pytest.mark.parametrize(("tp", "shard"), [*product((1, 2, 3), (1, 2))])
def test_what_a_dry_run_imagines_is_complete(tp: int, shard: int) -> None:
    real = holdings(tp, shard, 1)
    for rank, mine in enumerate(real):
        held = imagine(MATRICES, mine, rank, len(real))
        assert held[rank] == mine
        play(held, [plan(MATRICES, held, r) for r in range(len(held))])
        for m, matrix in enumerate(MATRICES):
            here = sum(box.numel for i, box in mine if i == m)
            total = sum(box.numel for parts in held for i, box in parts if i == m)
            copies = len(real) if here == whole(matrix.shape).numel else 1
            assert total == copies * whole(matrix.shape).numel
