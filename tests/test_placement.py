"""Boxes, pieces and resharding on integers; labelled tensors come back whole from every layout."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penteract.placement import (
    Box,
    Fragment,
    Init,
    Piece,
    Placement,
    assemble,
    copies,
    even_sizes,
    flat_range_boxes,
    flat_view,
    row_strides,
    split_range,
    whole,
)

quick = settings(max_examples=200, deadline=None, derandomize=True)
NORMAL = Init("normal", 0.02)


def place(shape, pieces, axes=None):
    return Placement(tuple(shape), tuple(pieces), axes or {}, NORMAL, decay=True)


def labels(*shape: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + math.prod(shape)).view(shape)


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(a, b) for a, b in zip(box.offset, box.stop, strict=True))))


def store(placement: Placement, logical: dict[str, torch.Tensor]) -> torch.Tensor:
    """The stored tensor of a rank, with padding -1."""
    out = torch.full(placement.shape, -1)
    for piece in placement.pieces:
        out[piece.local.slices()] = logical[piece.tensor][piece.box.slices()].view(piece.local.size)
    return out


def gathered(name: str, ranks: list[tuple[Placement, torch.Tensor]]) -> torch.Tensor:
    parts = [
        (fragment, stored[fragment.local.slices()])
        for placement, stored in ranks
        for fragment in placement.fragments()
        if fragment.tensor == name
    ]
    return assemble(name, parts)


# Boxes ------------------------------------------------------------------------------------------


@st.composite
def box_pairs(draw):
    n = draw(st.integers(0, 3))
    coordinates = st.tuples(*[st.integers(0, 4)] * n)
    return tuple(Box(draw(coordinates), draw(coordinates)) for _ in range(2))


@quick
@given(box_pairs())
def test_box_algebra_is_set_algebra(pair):
    a, b = pair
    hit = a.intersect(b)
    assert (elements(hit) if hit else set()) == elements(a) & elements(b)
    rest = a.minus(b)
    assert len(rest) <= max(1, 2 * len(a.size))
    assert sum(box.numel for box in rest) == len(elements(a) - elements(b))
    assert set().union(*map(elements, rest)) == elements(a) - elements(b)
    assert len(elements(a)) == a.numel
    if b.numel:
        assert a.contains(b) == (elements(b) <= elements(a))


def test_box_moves_and_indexes():
    box = Box((1, 2), (3, 4))
    assert box.stop == (4, 6)
    assert box.shifted((10, -2)) == Box((11, 0), (3, 4))
    assert box.relative_to((1, 1)) == Box((0, 1), (3, 4))
    assert labels(5, 7)[box.slices()].shape == (3, 4)
    assert str(box) == "[1:4, 2:6]"
    with pytest.raises(ValueError, match="1 and 2 dims"):
        Box((0,), (1, 2))
    with pytest.raises(ValueError, match="must be >= 0"):
        Box((0,), (-1,))


@given(st.integers(0, 50), st.integers(1, 9))
@quick
def test_split_range_is_even_sizes(n, parts):
    sizes = even_sizes(n, parts)
    ranges = [split_range(n, parts, i) for i in range(parts)]
    assert sizes == [b - a for a, b in ranges] == sorted(sizes, reverse=True)
    assert [a for a, _ in ranges] + [n] == [0] + [b for _, b in ranges]
    assert max(sizes) - min(sizes) <= 1


def test_split_errors_give_the_numbers():
    for wrong in ((-1, 2), (3, 0)):
        with pytest.raises(ValueError, match="parts >= 1"):
            even_sizes(*wrong)
        with pytest.raises(ValueError, match="parts >= 1"):
            split_range(*wrong, 0)
    with pytest.raises(ValueError, match="part 2 of 2"):
        split_range(5, 2, 2)


# Flat ranges ------------------------------------------------------------------------------------


@st.composite
def flat_ranges(draw):
    size = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    total = math.prod(size)
    start = draw(st.integers(0, total))
    return tuple(size), start, draw(st.integers(start, total))


@settings(max_examples=500, deadline=None, derandomize=True)
@given(flat_ranges())
def test_flat_range_is_few_boxes_in_order(case):
    size, start, stop = case
    boxes = flat_range_boxes(size, start, stop)
    array = labels(*size)
    found = [array[box.slices()].flatten().tolist() for box in boxes]
    assert list(itertools.chain(*found)) == list(range(start, stop))  # exact, disjoint, in order
    assert all(found)
    assert len(boxes) <= 2 * len(size) - 1


def test_flat_range_bound_is_reached_and_errors():
    assert len(flat_range_boxes((4, 4, 4), 5, 59)) == 5
    assert flat_range_boxes((), 0, 1) == [Box((), ())]
    assert flat_range_boxes((), 0, 0) == []
    assert flat_range_boxes((4, 5), 0, 20) == [whole((4, 5))]
    for start, stop in ((0, 21), (-1, 3), (5, 4)):
        with pytest.raises(ValueError, match="20 elements"):
            flat_range_boxes((4, 5), start, stop)


@quick
@given(flat_ranges())
def test_flat_view_reads_a_box_of_a_range(case):
    size, start, stop = case
    array = labels(*size)
    buffer = torch.cat([torch.tensor([-7]), array.flatten()[start:stop]])[1:]  # storage offset 1
    for box in flat_range_boxes(size, start, stop):
        view = flat_view(buffer, size, box, start)
        assert torch.equal(view, array[box.slices()])
        assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def test_flat_view_refuses_what_is_outside():
    flat = torch.arange(12)
    with pytest.raises(ValueError, match="not inside the flat range"):
        flat_view(flat[4:8], (3, 4), Box((0, 3), (2, 1)), start=4)
    with pytest.raises(ValueError, match="not inside the flat range"):
        flat_view(flat[4:8], (3, 4), Box((1, 0), (2, 1)), start=4)
    with pytest.raises(ValueError, match="stride 1"):
        flat_view(flat[::2], (6,), Box((0,), (1,)))
    assert row_strides((2, 3, 4)) == (12, 4, 1)
    assert row_strides(()) == ()


# Declarations -----------------------------------------------------------------------------------


def test_placement_lists_axes_and_size():
    axes = {"tp": "split", "dp": "replicated", "cp": "partial", "ep": "partial"}
    placement = place((2, 3), [Piece("w", (4, 3), Box((2, 0), (2, 3)), (0, 0))], axes)
    assert placement.numel == 6
    assert placement.split_axes == ("tp",)
    assert placement.partial_axes == ("cp", "ep")


def test_wrong_declarations_are_refused():
    def piece(offset, size, at, name="w", shape=(4, 3)):
        return Piece(name, shape, Box(offset, size), at)

    with pytest.raises(ValueError, match="leaves the logical shape"):
        piece((3, 0), (2, 3), (0, 0))
    with pytest.raises(ValueError, match="do not fit"):
        piece((0,), (2,), (0, 0))
    with pytest.raises(ValueError, match="leaves the stored shape"):
        place((2, 3), [piece((0, 0), (2, 3), (1, 0))])
    with pytest.raises(ValueError, match="leaves the stored shape"):
        place((2, 3), [piece((0, 0), (2, 3), (0, 0, 0))])
    with pytest.raises(ValueError, match="overlap in the storage"):
        place((3, 3), [piece((0, 0), (2, 3), (0, 0)), piece((0, 0), (2, 3), (1, 0), "v")])
    with pytest.raises(ValueError, match="overlap in the logical tensor"):
        place((4, 3), [piece((0, 0), (2, 3), (0, 0)), piece((1, 0), (2, 3), (2, 0))])
    with pytest.raises(ValueError, match="disagree on its shape"):
        place((4, 3), [piece((0, 0), (2, 3), (0, 0)), piece((2, 0), (2, 3), (2, 0), shape=(5, 3))])
    with pytest.raises(ValueError, match="'shared' is not one of"):
        place((4, 3), [], {"tp": "shared"})
    with pytest.raises(ValueError, match="kind 'xavier' is unknown"):
        Init("xavier")
    with pytest.raises(ValueError, match=r"-1\.0"):
        Init("normal", -1.0)
    with pytest.raises(ValueError, match="nan"):
        Init("constant", math.nan)


@quick
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=4), st.data())
def test_overlap_is_found_however_it_lies(offsets, data):
    sizes = [data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3))) for _ in offsets]
    boxes = [Box(offset, size) for offset, size in zip(offsets, sizes, strict=True)]
    pieces = [Piece(f"w{i}", b.size, whole(b.size), b.offset) for i, b in enumerate(boxes)]
    disjoint = all(a.intersect(b) is None for a, b in itertools.combinations(boxes, 2))
    if disjoint:
        place((6, 6), pieces)
    else:
        with pytest.raises(ValueError, match="overlap"):
            place((6, 6), pieces)


# Fragments and round trips ----------------------------------------------------------------------


def grouped_experts(ep: int, rank: int, experts: int = 5) -> Placement:
    """[e, 2f, h] of gate|up, padded by one row, as two logical [f, h] matrices an expert."""
    start, stop = split_range(experts, ep, rank)
    f, h = 3, 2
    pieces = [
        Piece(f"{e}.{part}", (f, h), whole((f, h)), (e - start, row, 0))
        for e in range(start, stop)
        for part, row in (("gate", 0), ("up", f))
    ]
    return place((stop - start, 2 * f + 1, h), pieces, {"ep": "split"})


def fused_gate_up(tp: int, rank: int, f: int = 7, h: int = 3) -> Placement:
    start, stop = split_range(f, tp, rank)
    n = stop - start
    box = Box((start, 0), (n, h))
    pieces = [Piece("gate", (f, h), box, (0, 0)), Piece("up", (f, h), box, (n, 0))]
    return place((2 * n, h), pieces, {"tp": "split"})


def padded_vocabulary(tp: int, rank: int, v: int = 13, h: int = 2) -> Placement:
    rows = -(-v // tp)
    start, stop = min(rank * rows, v), min((rank + 1) * rows, v)
    piece = Piece("embed", (v, h), Box((start, 0), (stop - start, h)), (0, 0))
    return place((rows, h), [piece], {"tp": "split"})


LOGICAL = {
    **{
        f"{e}.{part}": labels(3, 2, start=100 * e + 10 * i)
        for e in range(5)
        for i, part in enumerate(("gate", "up"))
    },
    "gate": labels(7, 3),
    "up": labels(7, 3, start=1000),
    "embed": labels(13, 2),
}


@pytest.mark.parametrize("make", [grouped_experts, fused_gate_up, padded_vocabulary])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_labelled_integers_round_trip(make, world):
    ranks = [make(world, rank) for rank in range(world)]
    stored = [(placement, store(placement, LOGICAL)) for placement in ranks]
    names = {piece.tensor for placement in ranks for piece in placement.pieces}
    for name in names:
        assert torch.equal(gathered(name, stored), LOGICAL[name])
    if make is padded_vocabulary:
        assert gathered("embed", stored).shape == (13, 2)
        assert sum(placement.numel for placement in ranks) >= 26


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_tensors_smaller_than_the_world_round_trip(size, world):
    for shape, dim in (((size,), 0), ((3, size), 1), ((size, 2, 2), 0)):
        full, stored = labels(*shape), []
        for rank in range(world):
            start, stop = split_range(size, world, rank)
            local = (*shape[:dim], stop - start, *shape[dim + 1 :])
            offset = tuple(start if d == dim else 0 for d in range(len(shape)))
            placement = place(local, [Piece("w", shape, Box(offset, local), (0,) * len(shape))])
            stored.append((placement, store(placement, {"w": full})))
        assert torch.equal(gathered("w", stored), full)


@pytest.mark.parametrize("make", [grouped_experts, fused_gate_up, padded_vocabulary])
@pytest.mark.parametrize(("tp", "dp"), [(1, 3), (2, 2), (2, 3), (3, 2), (4, 4)])
def test_flat_slices_of_uneven_splits_round_trip(make, tp, dp):
    """Both ways at once, as in ZeRO: a tensor rank's storage is cut flat over the data ranks."""
    parts: dict[str, list] = {}
    for rank in range(tp):
        placement = make(tp, rank)
        flat = store(placement, LOGICAL).flatten()
        for owner in range(dp):
            start, stop = split_range(placement.numel, dp, owner)
            held = flat[start:stop].clone()
            for fragment in placement.fragments(start, stop):
                values = flat_view(held, placement.shape, fragment.local, start)
                assert -1 not in values  # padding belongs to no piece
                parts.setdefault(fragment.tensor, []).append((fragment, values))
    for name, tensor_parts in parts.items():
        assert torch.equal(assemble(name, tensor_parts), LOGICAL[name])
        assert sum(f.box.numel for f, _ in tensor_parts) == LOGICAL[name].numel()


def test_two_dim_split_keeps_its_order():
    """Rows over one axis, then columns over another, both uneven, gathered in any order."""
    full, stored = labels(5, 7), []
    for i, j in itertools.product(range(2), range(3)):
        (r0, r1), (c0, c1) = split_range(5, 2, i), split_range(7, 3, j)
        box = Box((r0, c0), (r1 - r0, c1 - c0))
        placement = place(box.size, [Piece("w", (5, 7), box, (0, 0))])
        stored.append((placement, store(placement, {"w": full})))
    assert torch.equal(gathered("w", stored), full)
    assert torch.equal(gathered("w", stored[::-1]), full)


# Resharding -------------------------------------------------------------------------------------


@quick
@given(st.data(), st.integers(1, 3))
def test_copies_read_each_element_once(data, n):
    coordinates = st.tuples(*[st.integers(0, 5)] * n)
    wanted = Box(data.draw(coordinates), data.draw(coordinates))
    sources = [
        Box(data.draw(coordinates), data.draw(coordinates))
        for _ in range(data.draw(st.integers(0, 5)))
    ]
    held = set().union(*map(elements, sources)) if sources else set()
    if not elements(wanted) <= held:
        with pytest.raises(ValueError, match="first missing box") as error:
            copies(sources, wanted)
        missing = len(elements(wanted) - held)
        assert str(error.value).startswith(f"{missing} of {wanted.numel} elements")
        return
    plan = copies(sources, wanted)
    read = [x for index, box in plan for x in elements(box) if x in elements(sources[index])]
    assert len(read) == wanted.numel
    assert set(read) == elements(wanted)


def test_copies_prefer_the_first_source():
    assert copies([whole((4,)), whole((4,))], Box((1,), (2,))) == [(0, Box((1,), (2,)))]
    assert copies([], Box((3,), (0,))) == []
    with pytest.raises(ValueError, match=r"first missing box is \[2:4\]"):
        copies([whole((2,))], whole((4,)))


def test_assemble_refuses_what_does_not_fit():
    half = Fragment("w", (4,), Box((0,), (2,)), Box((0,), (2,)))
    rest = Fragment("w", (4,), Box((2,), (2,)), Box((0,), (2,)))
    ones = torch.ones(2)
    assert assemble("w", [(half, ones), (rest, 2 * ones)]).tolist() == [1, 1, 2, 2]
    assert assemble("w", [(half, ones), (half, 3 * ones), (rest, ones)]).tolist() == [1] * 4
    with pytest.raises(ValueError, match=r"'w' is incomplete: 2 of 4 .* \[2:4\]"):
        assemble("w", [(half, ones)])
    with pytest.raises(ValueError, match="no fragment"):
        assemble("w", [])
    with pytest.raises(ValueError, match="cannot take a fragment"):
        assemble("v", [(half, ones)])
    with pytest.raises(ValueError, match=r"values of shape \(3,\)"):
        assemble("w", [(half, torch.ones(3))])
    with pytest.raises(ValueError, match="float64"):
        assemble("w", [(half, ones), (rest, ones.double())])
