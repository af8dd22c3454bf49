"""The loss scale falls, rises, stops at its least, and goes on where it was saved."""

import pytest

from penteract.config import OptimConfig
from penteract.optim.loss_scale import LossScale, LossScaleError


def test_it_halves_at_once_and_doubles_after_good_steps_in_a_row() -> None:
    scale = LossScale(8.0, every=3)
    seen = []
    for finite in (True, True, False, True, True, True, True, True, True, False, False):
        scale.update(finite)
        seen.append(scale.scale)
    assert seen == [8, 8, 4, 4, 4, 8, 8, 8, 16, 8, 4]


def test_an_overflow_at_the_least_scale_is_an_error() -> None:
    scale = LossScale(3.0, least=1.0)
    scale.update(False)
    scale.update(False)
    assert scale.scale == 1.0
    scale.update(True)
    with pytest.raises(LossScaleError, match="not finite at loss scale 1, the least"):
        scale.update(False)


def test_it_goes_on_where_it_was_saved() -> None:
    one, other = LossScale(8.0, every=3), LossScale(2.0, every=3)
    one.update(True)
    one.update(True)
    other.load(one.state())
    other.update(True)
    assert other.scale == 16.0
    other.load(None)
    assert other.scale == 16.0


def test_only_float16_needs_one() -> None:
    optim = OptimConfig(loss_scale=0.5, loss_scale_every=7)
    assert LossScale.of(optim, "float16") == LossScale(0.5, every=7, least=0.5)
    for dtype in ("bfloat16", "float32", "float64"):
        scale = LossScale.of(optim, dtype)
        for finite in (True, False) * 10:
            scale.update(finite)
        scale.load({"scale": 4.0, "good": 1})
        assert (scale.scale, scale.state()) == (1.0, None)
