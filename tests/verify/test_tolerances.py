"""Limits in narrow types: right layouts pass, planted faults do not."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verify import test_faults as planted

from penteract.config import Config
from penteract.testing import run_ranks
from penteract.verify.compare import judge
from penteract.verify.layouts import parse_layout
from penteract.verify.measure import measure
from penteract.verify.tolerances import tolerance
from penteract.verify.verify import Trained, limits_of, train_reference

Narrow = Literal["float32", "bfloat16"]
SIZES = st.integers(1, 100_000)


@pytest.mark.parametrize("layers", [1, 1000])
def test_float64_is_a_contract(layers: int) -> None:
    limits = tolerance("float64", layers=layers, hidden=100_000, steps=1000)
    assert set(dataclasses.astuple(limits)) == {1e-9}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@given(layers=SIZES, hidden=SIZES, steps=SIZES, more=SIZES)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_a_larger_model_has_no_smaller_limit(
    dtype: Narrow, layers: int, hidden: int, steps: int, more: int
) -> None:
    limits = tolerance(dtype, layers=layers, hidden=hidden, steps=steps)
    larger = (
        tolerance(dtype, layers=layers + more, hidden=hidden, steps=steps),
        tolerance(dtype, layers=layers, hidden=hidden + more, steps=steps),
        tolerance(dtype, layers=layers, hidden=hidden, steps=steps + more),
    )
    for kind, limit in dataclasses.asdict(limits).items():
        assert limit < 1.0  # a value that is twice what it should be is seen
        assert all(limit <= getattr(other, kind) for other in larger)


def test_the_limits_of_a_configuration_are_those_of_its_type_and_sizes() -> None:
    c = config("float32")
    assert limits_of(c) == tolerance("float32")
    deep = dataclasses.replace(c, model=dataclasses.replace(c.model, layers=64))
    wide = dataclasses.replace(c, model=dataclasses.replace(c.model, hidden=1024))
    long = dataclasses.replace(c, train=dataclasses.replace(c.train, steps=8))
    for larger in (deep, wide, long):
        assert limits_of(larger).gradients == 2 * limits_of(c).gradients


def config(dtype: Narrow) -> Config:
    c = planted.config()
    return dataclasses.replace(c, train=dataclasses.replace(c.train, dtype=dtype))


@pytest.fixture(scope="module")
def trained() -> dict[str, Trained]:
    return {dtype: train_reference(config(dtype)) for dtype in ("float32", "bfloat16")}


def is_equal(dtype: Narrow, layout: str, trained: Trained) -> bool:
    """As `verify` judges; where a difference begins is not looked for."""
    assert trained.outcome is not None
    made = parse_layout(layout, config(dtype))
    ranks = run_ranks(measure, made.world, made.config, made.grid, 1, trained.outcome)
    return judge(trained.outcome, ranks, limits_of(made.config)).ok


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_right_layout_is_equal(dtype: Narrow, trained: dict[str, Trained]) -> None:
    assert is_equal(dtype, "tp=2,sp=true", trained[dtype])


# bfloat16 takes one of them for rounding; in float64 tests/verify/test_faults.py sees them.
FAULTS: tuple[tuple[Narrow, planted.Fault, str, bool], ...] = (
    ("float32", planted.norm_not_summed, "tp=2,sp=true", True),
    ("float32", planted.bias_before_the_sum, "tp=2", True),
    ("float32", planted.local_smoothing, "tp=2", True),
    ("bfloat16", planted.norm_not_summed, "tp=2,sp=true", True),
    ("bfloat16", planted.loss_times_tp, "tp=2", True),
    ("bfloat16", planted.bias_before_the_sum, "tp=2", False),
    ("bfloat16", planted.local_smoothing, "tp=2", True),
)


@pytest.mark.parametrize(
    ("dtype", "fault", "layout", "seen"), FAULTS, ids=lambda x: getattr(x, "__name__", None)
)
def test_a_fault_is_seen_or_not(
    dtype: Narrow,
    fault: planted.Fault,
    layout: str,
    seen: bool,
    trained: dict[str, Trained],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    assert is_equal(dtype, layout, trained[dtype]) != seen
