"""Pure packing: rows by best fit, and micro-batches that cost alike."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penteract.data.loader import micro_batches
from penteract.data.packing import balanced, best_fit, costs

SETTINGS = settings(max_examples=80, deadline=None, derandomize=True)


def plain_best_fit(sizes: list[int], room: int) -> list[list[int]]:
    """The rows by the textbook: every row is looked at for every item."""
    rows: list[list[int]] = []
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        left = [room - sum(sizes[i] for i in row) for row in rows]
        fitting = [i for i, free in enumerate(left) if free >= sizes[item]]
        if fitting:
            rows[min(fitting, key=lambda i: left[i])].append(item)
        else:
            rows.append([item])
    return rows


@SETTINGS
@given(st.lists(st.integers(1, 30), max_size=40), st.integers(30, 60))
def test_rows_are_those_of_the_textbook(sizes: list[int], room: int) -> None:
    """Every item in one row, none too full; as many rows as full, whichever of equal ones it is."""
    rows = best_fit(np.array(sizes, np.int64), room)
    assert rows.shape == (len(sizes),)
    used = np.bincount(rows, weights=sizes).tolist() if sizes else []
    assert all(0 < x <= room for x in used)  # and no row without an item
    expected = [sum(sizes[i] for i in row) for row in plain_best_fit(sizes, room)]
    assert sorted(used) == sorted(expected)
    # Rows are in the order of their first, largest items.
    largest = [min(np.flatnonzero(rows == r), key=lambda i: -sizes[i]) for r in range(len(used))]
    assert largest == sorted(largest)


def test_rows_by_example() -> None:
    rows = best_fit(np.array([3, 5, 2, 8, 4, 1], np.int64), 8)
    # 8 alone; 5 and 3; 4 with 2 and 1. Their first items stand at 3, 1 and 4.
    assert rows.tolist() == [0, 0, 2, 1, 2, 2]


def test_a_million_conversations_take_seconds() -> None:
    sizes = np.random.default_rng(0).lognormal(6, 1.2, 1_000_000).astype(np.int64).clip(1, 2048)
    begin = time.process_time()
    rows = best_fit(sizes, 2048)
    assert time.process_time() - begin < 10
    used = np.bincount(rows, weights=sizes)
    assert used.max() <= 2048
    assert used.min() > 0
    assert sizes.sum() / (len(used) * 2048) > 0.99


# --- balance


def test_costs_by_example() -> None:
    assert costs((3, 1, 4, 1, 1, 2), 4).tolist() == [10, 16, 6]
    assert costs((), 4).tolist() == []


def per_micro_batch(spread: np.ndarray, micro_batch: int) -> list[int]:
    return [int(spread[i : i + micro_batch].sum()) for i in range(0, len(spread), micro_batch)]


@SETTINGS
@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=60), st.integers(1, 9))
def test_the_same_samples_and_never_worse(drawn: list[int], micro_batch: int) -> None:
    """Also where micro_batch does not divide the batch, or is larger."""
    found = np.array(drawn, np.int64)
    order = balanced(found, micro_batch)
    assert sorted(order.tolist()) == list(range(len(drawn)))
    before, after = per_micro_batch(found, micro_batch), per_micro_batch(found[order], micro_batch)
    assert max(after) <= max(before)
    whole = after[: len(drawn) // micro_batch]
    assert whole == sorted(whole, reverse=True)
    assert (balanced(found, micro_batch) == order).all()


@pytest.mark.parametrize("n", [1, 8, 10])
def test_equal_costs_keep_their_order(n: int) -> None:
    assert balanced(np.full(n, 7), 4).tolist() == list(range(n))


@pytest.mark.parametrize("micro_batch", [2, 4, 7])
def test_cost_is_more_even_than_in_the_plain_order(micro_batch: int) -> None:
    draw, ratios, waits = np.random.default_rng(1), [], []
    for _ in range(50):
        found = draw.integers(50, 1000, 64) ** 2
        plain = per_micro_batch(found, micro_batch)
        spread = per_micro_batch(found[balanced(found, micro_batch)], micro_batch)
        ratios.append((max(plain) / np.mean(plain), max(spread) / np.mean(spread)))
        waits.append((slowest(plain), slowest(spread)))
    before, after = np.mean(ratios, 0)
    assert after < 0.85 * before
    assert np.mean(waits, 0)[1] < 0.95 * np.mean(waits, 0)[0]


def slowest(found: list[int], dp: int = 4) -> int:
    """What a step waits for: in each turn of the data ranks for the dearest micro-batch."""
    return sum(max(found[i : i + dp]) for i in range(0, len(found), dp))


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_micro_batches_are_those_of_any_layout(dp: int) -> None:
    """Ranks take their micro-batches from one order, which is made without knowing of them."""
    found = np.random.default_rng(2).integers(1, 100, 11)
    order = balanced(found, 2)
    by_rank = [micro_batches(11, 2, dp, rank) for rank in range(dp)]
    turns = [by_rank[j % dp][j // dp] for j in range(dp * len(by_rank[0]))]
    assert [order[p.start : p.stop].tolist() for p in turns if p] == [
        order[i : i + 2].tolist() for i in range(0, 11, 2)
    ]
