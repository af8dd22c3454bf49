"""The order of samples: bijections, no favoured places, resuming anywhere, splits."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penteract.data.indexed import DataError
from penteract.data.order import (
    SourceOrder,
    count_samples,
    permutation_keys,
    permute,
    permute_many,
    split_samples,
)
from penteract.errors import UserError


def whole(n: int, seed: int) -> np.ndarray:
    return SourceOrder(n, seed).sample(np.arange(n))


def test_every_small_size_is_a_bijection() -> None:
    for n in [*range(1, 70), 255, 256, 257, 1023, 1024, 1025, 4099]:
        assert sorted(whole(n, seed=n).tolist()) == list(range(n)), n


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(1, 2**62), st.integers(-(2**63), 2**64), st.data())
def test_large_sizes_stay_inside_and_apart(n: int, seed: int, data: st.DataObject) -> None:
    places = st.integers(0, n - 1)
    indices = np.array(data.draw(st.lists(places, min_size=1, max_size=20, unique=True)), np.int64)
    keys = permutation_keys(seed, 0, np.zeros(len(indices), np.int64))
    out = permute_many(indices, n, keys)
    assert out.min() >= 0
    assert out.max() < n
    assert len(set(out.tolist())) == len(indices)
    assert permute(int(indices[0]), n, seed) == out[0]


def test_golden_order() -> None:
    """A change of the order is a change of every run: these numbers must not move."""
    assert SourceOrder(10, seed=1234, source=1).sample(np.arange(12)).tolist() == [
        *(4, 6, 0, 3, 8, 1, 7, 2, 5, 9),
        *(0, 3),
    ]
    assert permute(5, 10**15, 42) == 582700251558059


@pytest.mark.parametrize("n", [2, 3, 5, 6, 20])
def test_every_place_is_equally_likely(n: int) -> None:
    """Chi-square of (place, sample) over seeds; a shuffle by halves or by the 80 % rule fails."""
    trials = 6000
    counts = np.zeros((n, n))
    keys = permutation_keys(7, 0, np.arange(trials))
    for place in range(n):
        out = permute_many(np.full(trials, place), n, keys)
        counts[place] = np.bincount(out, minlength=n)
    expected = trials / n
    chi = ((counts - expected) ** 2 / expected).sum() / (n - 1) ** 2
    assert abs(chi - 1) < 6 / (n - 1) * np.sqrt(2), chi


def test_all_orders_of_four_occur_equally() -> None:
    keys = permutation_keys(3, 0, np.arange(12_000))
    rows = [permute_many(np.full(12_000, place), 4, keys) for place in range(4)]
    counts = Counter(zip(*(row.tolist() for row in rows), strict=True))
    assert len(counts) == 24
    assert all(abs(count - 500) < 120 for count in counts.values()), counts


def test_no_trend_within_or_across_epochs() -> None:
    """Row 168: any window of the run, in the last and partial epoch too, is a fair sample."""
    n = 10_000
    order = SourceOrder(n, seed=5)
    for first in range(0, 25_000, 2500):
        got = order.sample(np.arange(first, first + 2500))
        assert abs(got.mean() / n - 0.5) < 5 * 0.2887 / 50, first
        assert abs(np.corrcoef(np.arange(2500), got)[0, 1]) < 0.1, first
        deciles = np.bincount(got * 10 // n, minlength=10)
        assert abs(deciles - 250).max() < 80, (first, deciles)


def test_epochs_sources_and_seeds_have_orders_of_their_own() -> None:
    n = 1000
    base = SourceOrder(n, 1, 0)
    orders = [base.sample(np.arange(n) + n * epoch) for epoch in range(3)]
    orders += [SourceOrder(n, 1, 1).sample(np.arange(n)), SourceOrder(n, 2, 0).sample(np.arange(n))]
    for i, one in enumerate(orders):
        assert sorted(one.tolist()) == list(range(n))
        for other in orders[:i]:
            assert (one == other).sum() < 12  # one in expectation
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.15


def test_resuming_anywhere_repeats_nothing() -> None:
    """Rows 175, 176, 178: three epochs, stopped mid-epoch, at the boundary, in the second epoch."""
    n = 37
    straight = SourceOrder(n, 9).sample(np.arange(3 * n))
    for stop in (1, 20, n - 1, n, n + 5, 2 * n):
        parts = (np.arange(stop), np.arange(stop, 3 * n))
        resumed = np.concatenate([SourceOrder(n, 9).sample(part) for part in parts])
        assert (resumed == straight).all(), stop
    for epoch in range(3):
        assert sorted(straight[epoch * n : (epoch + 1) * n].tolist()) == list(range(n))
    assert (straight[:n] != straight[n : 2 * n]).any()
    assert SourceOrder(n, 9).epochs(np.array([0, n - 1, n, 2 * n])).tolist() == [0, 0, 1, 2]


def test_ordinals_beyond_31_bits() -> None:
    n = 2**33 + 5
    out = SourceOrder(n, 3).sample(np.arange(3 * n, 3 * n + 1000))
    assert out.min() >= 0
    assert out.max() > 2**32
    assert out.max() < n
    assert len(set(out.tolist())) == 1000


def test_count_of_samples() -> None:
    assert [count_samples(tokens, 8, "x") for tokens in (9, 16, 17)] == [1, 1, 2]
    with pytest.raises(DataError, match=r"x: 8 tokens hold no sample of seq \+ 1 = 9.*at most 7"):
        count_samples(8, 8, "x")
    with pytest.raises(UserError, match="at least 1, not 0"):
        count_samples(8, 0, "x")


def test_split() -> None:
    assert split_samples(10, 0.25, "x") == (range(8), range(8, 10))
    assert split_samples(10, 0.0, "x") == (range(10), range(10, 10))
    with pytest.raises(DataError, match=r"10 samples × valid_fraction 0\.01 = 0 for validation"):
        split_samples(10, 0.01, "x")
    with pytest.raises(DataError, match="0 for training"):
        split_samples(1, 0.9, "x")
    with pytest.raises(UserError, match="in \\[0, 1\\), not 1"):
        split_samples(10, 1, "x")
