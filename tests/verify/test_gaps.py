"""Differences of arrays: how large, where, and of which factor."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penteract.verify.gaps import common_factor, gap, in_words, relative, scales


def test_the_largest_difference_and_its_place() -> None:
    wanted = np.arange(6.0).reshape(2, 3)
    found = wanted.copy()
    found[1, 2] += 0.5
    off = gap(found, wanted, (4, 0))
    assert (off.size, off.at, off.found, off.wanted) == (0.5, (5, 2), 5.5, 5.0)
    assert off.factor is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_infinitely_far_off(bad: float) -> None:
    assert gap(np.array([1.0, bad]), np.array([1.0, 2.0])).size == math.inf


def test_a_reference_that_is_no_number_is_infinitely_far_off_too() -> None:
    """Or a tensor that the reference holds in part would pass."""
    assert gap(np.array([1.0, 2.0]), np.array([1.0, math.nan])).size == math.inf
    assert gap(np.array(3.0), np.array(1.0)).at == ()


def test_an_empty_array_is_equal() -> None:
    assert gap(np.zeros((0, 3)), np.zeros((0, 3))).size == 0.0


@pytest.mark.parametrize(
    ("factor", "said"),
    [(2.0, " (twice; tp is 2)"), (0.5, " (half; tp is 2)"), (4.0, " (4 times)"),
     (0.25, " (1/4)"), (3.0, " (3 times; dp is 3)"), (1.5, " (1.5 times)"), (-1.0, " (-1 times)")],
)  # fmt: skip
def test_a_common_factor_is_named(factor: float, said: str) -> None:
    wanted = np.array([0.0, 1e-9, 1.0, -3.0])
    found = common_factor(factor * wanted, wanted)
    assert found == pytest.approx(factor)
    assert in_words(found, {"cp": 1, "tp": 2, "dp": 3}) == said


@pytest.mark.parametrize("found", [[1.0, 2.0], [2.0, 3.0], [0.0, 0.0]])
def test_without_one_factor_nothing_is_said(found: list[float]) -> None:
    assert common_factor(np.array(found), np.array([1.0, 2.0])) is None


def test_what_is_about_a_factor_is_called_so() -> None:
    wanted = np.array([1.0, 2.0, -3.0, 4.0])
    nearly = np.array([2.02, 3.97, -6.05, 5.0])
    assert gap(nearly, wanted).hint({"tp": 2}) == " (about twice; tp is 2)"
    assert gap(2 * wanted, wanted).hint({"tp": 2}) == " (twice; tp is 2)"
    assert gap(0.7 * nearly, wanted).hint({"tp": 2}) == ""


def test_small_tensors_are_measured_by_the_largest_of_their_kind() -> None:
    of = scales({"a": np.array([2.0, -10.0]), "b": np.array([1e-12]), "c": np.zeros(0)})
    assert of == {"a": 10.0, "b": 1e-3, "c": 1e-3}
    assert relative(0.0, 0.0) == 0.0
    assert relative(1.0, 0.0) == math.inf
    assert relative(1.0, 4.0) == 0.25
