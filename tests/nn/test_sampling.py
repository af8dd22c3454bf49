"""Drawing the next token, checked by brute force."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penteract.nn.generate import Sampling, choose
from penteract.random import uniform


def allowed(logits: list[float], sampling: Sampling) -> dict[int, float]:
    """{token: probability} that may be drawn, by the definition: one token after another."""
    weights = [math.exp((z - max(logits)) / sampling.temperature) for z in logits]
    likeliest = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    kept: dict[int, float] = {}
    for token in likeliest:
        if sum(kept.values()) / sum(weights) >= sampling.top_p or len(kept) == sampling.top_k:
            break
        kept[token] = weights[token]
    return {token: weight / sum(kept.values()) for token, weight in kept.items()}


@given(
    logits=st.lists(st.floats(-5, 5), min_size=1, max_size=9),
    temperature=st.floats(0.2, 3),
    top_k=st.none() | st.integers(1, 12),
    top_p=st.floats(0.05, 1.0),
    seed=st.integers(0, 9),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_token_is_drawn_by_inverting_the_distribution(
    logits: list[float], temperature: float, top_k: int | None, top_p: float, seed: int
) -> None:
    sampling = Sampling(temperature, top_k, top_p, seed)
    kept = allowed(logits, sampling)
    rows = 16
    drawn = choose(torch.tensor([logits] * rows, dtype=torch.float64), sampling, step=3).tolist()
    draws = uniform(seed, "generate/3", torch.arange(rows)).double().tolist()
    for token, draw in zip(drawn, draws, strict=True):
        assert token in kept
        below = 0.0
        expected, margin = -1, 1.0
        for candidate, probability in kept.items():
            margin = min(margin, abs(draw - below))
            if below <= draw:
                expected = candidate
            below += probability
        if margin > 1e-9:  # at a boundary rounding decides
            assert token == expected


def test_frequencies_are_the_probabilities() -> None:
    logits = torch.tensor([0.1, 2.0, 1.0, -1.0, 0.5])
    n = 40_000
    for sampling in (Sampling(), Sampling(0.7, top_k=3), Sampling(1.5, top_p=0.8)):
        kept = allowed(logits.tolist(), sampling)
        drawn = choose(logits.expand(n, -1), sampling, step=0)
        found = torch.bincount(drawn, minlength=5) / n
        for token in range(5):
            p = kept.get(token, 0.0)
            assert abs(found[token].item() - p) < 5 * math.sqrt(p * (1 - p) / n) + 1e-9


def test_temperature_0_takes_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.9], [5.0, -1.0, 4.9]])
    assert choose(logits, Sampling(0.0), 0).tolist() == [1, 0]
    for temperature in (1e-300, 1e-30, 1e-3):  # and nothing overflows on the way there
        assert choose(logits, Sampling(temperature), 0).tolist() == [1, 0]


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(2000, -1)
    assert set(choose(logits, Sampling(top_p=0.49), 0).tolist()) == {0}
    assert set(choose(logits, Sampling(top_p=0.51), 0).tolist()) == {0, 1}
    assert set(choose(logits, Sampling(top_p=0.81), 0).tolist()) == {0, 1, 2}


def test_a_draw_depends_on_seed_step_and_row_alone() -> None:
    logits = torch.linspace(-1, 1, 50).expand(8, -1)
    eight = choose(logits, Sampling(seed=4), 7)
    assert choose(logits[:3], Sampling(seed=4), 7).tolist() == eight[:3].tolist()
    assert choose(logits, Sampling(seed=4), 8).tolist() != eight.tolist()
    assert choose(logits, Sampling(seed=5), 7).tolist() != eight.tolist()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"temperature": -0.1}, "temperature = -0.1"),
        ({"temperature": math.nan}, "temperature = nan"),
        ({"temperature": math.inf}, "temperature = inf"),
        ({"top_k": 0}, "top_k = 0"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_p": 1.1}, "top_p = 1.1"),
        ({"top_p": math.nan}, "top_p = nan"),
    ],
)
def test_impossible_sampling_is_refused(wrong: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Sampling(**wrong)  # type: ignore[arg-type]
