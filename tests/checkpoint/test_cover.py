"""Covers of a box by boxes, against counting every element."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penteract.checkpoint.cover import buckets, first_overlap, subtract_all
from penteract.placement import Box

SHAPE = (4, 5, 3)


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    offset = tuple(draw(st.integers(0, n)) for n in SHAPE)
    size = tuple(draw(st.integers(0, n - o)) for n, o in zip(SHAPE, offset, strict=True))
    return Box(offset, size)


def count(parts: list[Box]) -> np.ndarray:
    marks = np.zeros(SHAPE, int)
    for part in parts:
        marks[part.slices()] += 1
    return marks


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(boxes(), max_size=6))
def test_first_overlap_finds_one_exactly_where_there_is_one(parts: list[Box]) -> None:
    found = first_overlap(parts)
    assert (found is not None) == bool((count(parts) > 1).any())
    if found is not None:
        assert found[0].intersect(found[1]) is not None


@settings(max_examples=300, deadline=None, derandomize=True)
@given(boxes(), st.lists(boxes(), max_size=5))
def test_subtract_all_leaves_each_other_element_once(box: Box, holes: list[Box]) -> None:
    expected = np.clip(count([box]) - count(holes), 0, 1)
    assert (count(subtract_all(box, holes)) == expected).all()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(boxes(), st.integers(1, 70))
def test_buckets_are_small_and_in_the_order_of_the_values(box: Box, limit: int) -> None:
    values = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    parts = list(buckets(box, limit))
    assert all(part.numel <= limit for part in parts)
    joined = [values[part.slices()].ravel() for part in parts]
    assert (np.concatenate(joined) == values[box.slices()].ravel()).all()


def test_scalars() -> None:
    scalar = Box((), ())
    assert list(buckets(scalar, 1)) == [scalar]
    assert first_overlap([scalar]) is None
    assert first_overlap([scalar, scalar]) == (scalar, scalar)
    assert subtract_all(scalar, [scalar]) == []


def test_many_boxes_of_a_grid_are_compared_fast() -> None:
    grid = [Box((8 * i, 8 * j), (8, 8)) for i, j in itertools.product(range(8), range(2000))]
    assert first_overlap(grid) is None
    assert first_overlap([*grid, Box((0, 9000), (64, 1))]) is not None
