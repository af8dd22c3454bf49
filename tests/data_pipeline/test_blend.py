"""Blends: every prefix within one sample of ideal, checked with exact fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penteract.data.blend import LARGEST_PERIOD, Blend, resolve_weights
from penteract.errors import UserError


def check(weights: list[float], prefix: int) -> None:
    blend = Blend(weights)
    source, ordinal = blend.locate(np.arange(prefix))
    taken = [0] * len(weights)
    for t, (i, before) in enumerate(zip(source.tolist(), ordinal.tolist(), strict=True), 1):
        assert before == taken[i]
        taken[i] += 1
        for count, weight in zip(taken, blend.weights, strict=True):
            assert abs(count - Fraction(t * weight, blend.period)) < 1, (t, taken, blend.weights)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=9))
def test_every_prefix_is_within_one_sample(weights: list[int]) -> None:
    """Row 170, for whole weights over more than one period."""
    check([float(weight) for weight in weights], sum(weights) + 50)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=6))
def test_any_weights(weights: list[float]) -> None:
    resolved = resolve_weights(weights)
    period = sum(resolved)
    assert period <= LARGEST_PERIOD
    for weight, got in zip(weights, resolved, strict=True):
        assert got >= 1
        assert abs(got / period - weight / sum(weights)) <= 2 / LARGEST_PERIOD


@pytest.mark.parametrize(
    "weights", [[0.7, 0.3], [1] * 13, [0.5, 0.25, 0.125, 0.125], [97, 1, 1, 1], [1e6, 1], [3.0]]
)
def test_examples(weights: list[float]) -> None:
    check(weights, 400)


def test_many_sources_of_one_heavy() -> None:
    check([50.0, *[1.0] * 50], 150)


def test_resolved_weights() -> None:
    assert resolve_weights([0.7, 0.3]) == (7, 3)
    assert resolve_weights([0.1, 0.2, 0.3]) == (1, 2, 3)
    assert resolve_weights([10**18, 10**18]) == (1, 1)
    assert resolve_weights([1e9, 1e-9]) == (LARGEST_PERIOD - 1, 1)
    assert sum(resolve_weights([np.pi, np.e, 1 / 3])) <= LARGEST_PERIOD


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_weights(weight: float) -> None:
    with pytest.raises(UserError, match=f"the weight of source 1 is {weight}: it must be"):
        resolve_weights([1.0, weight])
    with pytest.raises(UserError, match="at least one source"):
        Blend([])


def test_indices_beyond_31_bits() -> None:
    blend = Blend([3, 1])
    start = 2**40
    source, ordinal = blend.locate(np.arange(start, start + 4))
    assert source.tolist() == blend.locate(np.arange(4))[0].tolist()
    assert ordinal.dtype == np.int64
    assert ordinal[source == 1].tolist() == [2**38]


def test_locate_does_not_depend_on_the_batch() -> None:
    blend = Blend([5, 3, 2])
    whole = np.stack(blend.locate(np.arange(60)))
    parts = np.concatenate(
        [np.stack(blend.locate(np.arange(i, i + 4))) for i in range(0, 60, 4)], 1
    )
    assert (whole == parts).all()
