"""Golden learning rates, and what holds for every schedule."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penteract.config import OptimConfig, resolve
from penteract.config_file import from_dict
from penteract.optim.schedule import learning_rate

SCHEDULES = ("cosine", "linear", "inverse_sqrt", "constant", "wsd")


def optim(schedule: str, **values: Any) -> OptimConfig:
    values = {"lr": 1e-3, "min_lr": 1e-5, "warmup": 10, "decay": 100, **values}
    sizes = {"layers": 1, "hidden": 4, "ffn": 4, "heads": 1}
    config = {"model": sizes, "optim": {"schedule": schedule, **values}, "train": {"steps": 100}}
    return resolve(from_dict(config)).optim


@pytest.mark.parametrize(
    ("schedule", "step", "wanted"),
    [
        ("cosine", 5, 5e-4), ("cosine", 10, 1e-3), ("cosine", 55, 5.05e-4),
        ("cosine", 100, 1e-5), ("cosine", 1000, 1e-5),
        ("linear", 5, 5e-4), ("linear", 10, 1e-3), ("linear", 55, 5.05e-4), ("linear", 100, 1e-5),
        ("inverse_sqrt", 5, 5e-4), ("inverse_sqrt", 10, 1e-3), ("inverse_sqrt", 55, 4.264014e-4),
        ("constant", 1, 1e-4), ("constant", 500, 1e-3),
        ("wsd", 5, 5e-4), ("wsd", 55, 1e-3), ("wsd", 90, 1e-3), ("wsd", 95, 5.05e-4),
        ("wsd", 100, 1e-5),
    ],
)  # fmt: skip
def test_golden_values(schedule: str, step: int, wanted: float) -> None:
    assert learning_rate(step, optim(schedule)) == pytest.approx(wanted, rel=1e-6)


def test_the_first_step_without_warm_up_has_the_peak_rate() -> None:
    assert learning_rate(1, optim("constant", warmup=0)) == 1e-3


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    schedule=st.sampled_from(SCHEDULES),
    warmup=st.integers(0, 40),
    length=st.integers(1, 60),
    step=st.integers(1, 200),
)
def test_rates_rise_in_warm_up_then_fall_and_keep_their_bounds(
    schedule: str, warmup: int, length: int, step: int
) -> None:
    options = optim(schedule, warmup=warmup, decay=warmup + length, cooldown=1)
    now, then = learning_rate(step, options), learning_rate(step + 1, options)
    assert 0 < now <= 1e-3
    if step < warmup:
        assert now <= then
    else:
        assert now >= then >= 1e-5
