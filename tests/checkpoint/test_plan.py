"""Who writes what and who reads what, on every small case, without files."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penteract.checkpoint.format import CheckpointError, StoredBox, StoredTensor
from penteract.checkpoint.plan import (
    Shard,
    Write,
    compare,
    load_plan,
    save_plan,
    written_bytes,
)
from penteract.placement import Box, flat_range_boxes, split_range, whole


def shard(tensor: str, shape: tuple[int, ...], box: Box | None = None, dtype: str = "float32"):
    return Shard(tensor, shape, dtype, whole(shape) if box is None else box)


def flat_shards(tensor: str, shape: tuple[int, ...], ranks: int) -> list[list[Shard]]:
    """A tensor's flattened elements split over `ranks`, as optimizer state is."""
    total = int(np.prod(shape))
    return [
        [
            shard(tensor, shape, box)
            for box in flat_range_boxes(shape, *split_range(total, ranks, r))
        ]
        for r in range(ranks)
    ]


def check_written_once(held: list[list[Shard]], plan: list[list[Write]]) -> None:
    shapes = {s.tensor: s.shape for shards in held for s in shards}
    marks = {name: np.zeros(shape, int) for name, shape in shapes.items()}
    for rank, writes in enumerate(plan):
        for write in writes:
            assert held[rank][write.source] == write.shard
            assert write.shard.box.contains(write.box)
            marks[write.shard.tensor][write.box.slices()] += 1
    assert all((mark == 1).all() for mark in marks.values())
    keys = [[write.key for write in writes] for writes in plan]
    assert all(len(set(names)) == len(names) for names in keys)


@st.composite
def random_holdings(draw: st.DrawFn) -> list[list[Shard]]:
    """Tensors of one to three dims, each held by ranks in boxes that overlap as they like."""
    ranks = draw(st.integers(1, 4))
    held: list[list[Shard]] = [[] for _ in range(ranks)]
    for name in "abc"[: draw(st.integers(1, 3))]:
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        for _ in range(draw(st.integers(0, 4))):
            offset = tuple(draw(st.integers(0, n)) for n in shape)
            size = tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))
            held[draw(st.integers(0, ranks - 1))].append(shard(name, shape, Box(offset, size)))
        for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            held[rank].append(shard(name, shape))
    return held


@settings(max_examples=400, deadline=None, derandomize=True)
@given(random_holdings())
def test_every_element_is_written_exactly_once(held: list[list[Shard]]) -> None:
    plan = save_plan(held)
    check_written_once(held, plan)
    assert plan == save_plan(held)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_tensors_smaller_than_the_world(size: int, ranks: int) -> None:
    for shape in [(size,), (1, size), (size, 1), (size, 2, 3)]:
        held = flat_shards("w", shape, ranks)
        check_written_once(held, save_plan(held))
        copies = [[shard("w", shape)] for _ in range(ranks)]
        check_written_once(copies, save_plan(copies))


def transformer(hidden: int, layers: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embed": (1000, hidden), "norm": (hidden,)}
    for layer in range(layers):
        shapes[f"{layer}.qkv"] = (3 * hidden, hidden)
        shapes[f"{layer}.up"] = (4 * hidden, hidden)
        shapes[f"{layer}.down"] = (hidden, 4 * hidden)
        shapes[f"{layer}.norm"] = (hidden,)
    return shapes


def spread(plan: list[list[Write]]) -> float:
    """How far the busiest and idlest ranks are from the mean, as a part of it."""
    loads = [written_bytes(writes) for writes in plan]
    mean = sum(loads) / len(loads)
    return max(max(loads) - mean, mean - min(loads)) / mean


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
def test_what_all_ranks_hold_is_dealt_evenly(ranks: int) -> None:
    held = [[shard(n, s) for n, s in transformer(64, 3).items()] for _ in range(ranks)]
    plan = save_plan(held)
    check_written_once(held, plan)
    assert spread(plan) < 0.1
    # A cut only where a rank's share ends: no more than one for each border.
    assert sum(map(len, plan)) <= len(held[0]) + ranks - 1


@pytest.mark.parametrize(("tp", "dp"), [(2, 2), (2, 3), (4, 2), (1, 5)])
def test_layouts_with_tensor_and_data_axes_are_even(tp: int, dp: int) -> None:
    """Matrices split over tp, norms on every rank, all repeated over dp; moments split over dp."""
    held: list[list[Shard]] = []
    for d, t in itertools.product(range(dp), range(tp)):
        mine = []
        for name, shape in transformer(64, 3).items():
            box = whole(shape)
            if len(shape) == 2:
                start, stop = split_range(shape[0], tp, t)
                box = Box((start, 0), (stop - start, shape[1]))
            mine.append(shard(name, shape, box))
            part = split_range(box.numel, dp, d)
            for inner in flat_range_boxes(box.size, *part):
                mine.append(shard(f"m/{name}", shape, inner.shifted(box.offset)))
        held.append(mine)
    plan = save_plan(held)
    check_written_once(held, plan)
    assert spread(plan) < 0.1


def test_ranks_with_more_of_their_own_write_less_of_what_is_shared() -> None:
    held = [
        [shard("own", (300, 10)), shard("shared", (600, 10))],
        [shard("shared", (600, 10))],
        [shard("shared", (600, 10))],
    ]
    assert [written_bytes(writes) for writes in save_plan(held)] == [12000, 12000, 12000]


def test_one_large_tensor_and_a_thousand_ranks() -> None:
    held = [[shard("w", (4096, 64))] for _ in range(1000)]
    plan = save_plan(held)
    check_written_once(held, plan)
    assert max(map(written_bytes, plan)) <= 5 * 64 * 4


def test_faults_of_the_shards_are_listed_together() -> None:
    held = [
        [
            shard("shape", (4, 2)),
            shard("dtype", (3,)),
            shard("gap", (6,), Box((0,), (2,))),
            shard("out", (4,), Box((2,), (3,))),
            shard("a@1", (2,)),
        ],
        [
            shard("shape", (2, 4)),
            shard("dtype", (3,), dtype="bfloat16"),
            shard("gap", (6,), Box((1,), (3,))),
        ],
    ]
    with pytest.raises(CheckpointError) as caught:
        save_plan(held)
    for text in (
        "shape: ranks disagree: [2, 4] float32 on rank 1, [4, 2] float32 on rank 0",
        "dtype: ranks disagree",
        "gap: no rank holds 2 of 6 elements",
        "out: the box [2:5] on rank 0 leaves [4]",
        "'a@1': a tensor's name",
    ):
        assert text in str(caught.value)


def stored(shape: tuple[int, ...], boxes: list[Box], dtype: str = "float32") -> StoredTensor:
    return StoredTensor(
        shape, dtype, tuple(StoredBox(box, f"f{i % 2}", f"k{i}") for i, box in enumerate(boxes))
    )


def test_compare_lists_every_mismatch() -> None:
    tensors = {
        "same": stored((2,), []),
        "wide": stored((2, 8), []),
        "half": stored((2,), [], "bfloat16"),
        "head": stored((9, 2), []),
        "m/x": stored((2,), []),
    }
    wanted = [
        shard("same", (2,)),
        shard("wide", (2, 4)),
        shard("half", (2,)),
        shard("bias", (3,)),
        shard("bias", (3,)),
    ]
    assert compare(tensors, wanted) == [
        "  bias: not in the checkpoint (wanted [3] float32)",
        "  half: checkpoint [2] bfloat16, wanted [2] float32",
        "  head: in the checkpoint, not in the model",
        "  m/x: in the checkpoint, not in the model",
        "  wide: checkpoint [2, 8] float32, wanted [2, 4] float32",
    ]
    assert "  m/x: in the checkpoint, not in the model" not in compare(
        tensors, wanted, skip=("m/",)
    )
    assert compare({"same": tensors["same"]}, wanted[:1]) == []


@pytest.mark.parametrize("shape", [(1,), (7,), (6, 5), (3, 5, 2), ()])
@pytest.mark.parametrize(("before", "after"), [(a, b) for a in range(1, 5) for b in range(1, 5)])
def test_any_cut_loads_into_any_other(shape: tuple[int, ...], before: int, after: int) -> None:
    values = np.arange(int(np.prod(shape))).reshape(shape)
    boxes = [s.box for shards in flat_shards("w", shape, before) for s in shards]
    tensors = {"w": stored(shape, boxes)}
    for wanted in flat_shards("w", shape, after):
        filled = [np.full(s.box.size, -1) for s in wanted]
        for read in load_plan(tensors, wanted):
            index = int(read.key[1:])
            assert read.stored == boxes[index]
            source = values[read.stored.slices()][read.box.relative_to(read.stored.offset).slices()]
            origin = wanted[read.target].box.offset
            filled[read.target][read.box.relative_to(origin).slices()] = source
        for got, want in zip(filled, wanted, strict=True):
            assert (got == values[want.box.slices()]).all()


def test_a_box_that_is_not_stored_is_an_error() -> None:
    tensors = {"w": stored((6,), [Box((0,), (4,))])}
    with pytest.raises(ValueError, match="missing box"):
        load_plan(tensors, [shard("w", (6,))])
