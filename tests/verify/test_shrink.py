"""A shrunken model is small, valid, and uneven where the large one is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penteract.config import Config, resolve
from penteract.config_file import from_dict, to_dict
from penteract.verify.shrink import pattern, shrink, smallest

SIZES = (1, 2, 3, 4, 6, 8)
LLAMA_70B = {
    "family": "llama", "layers": 80, "hidden": 8192, "ffn": 28672, "heads": 64, "kv_heads": 8,
    "vocab": 128256, "qk_norm": True, "tied": True, "dropout": 0.1,
}  # fmt: skip


def made(model: dict[str, Any], seq: int = 4096, batch: int = 1024, micro: int = 2) -> Config:
    train = {"steps": 2, "global_batch": batch, "micro_batch": micro}
    return resolve(from_dict({"model": model, "data": {"seq": seq}, "train": train}))


def test_a_large_model_becomes_small_and_keeps_its_features() -> None:
    small, changes = shrink(made(LLAMA_70B), [1, 8, 2])
    model = small.model
    assert (model.layers, model.heads, model.kv_heads, model.head_size) == (2, 64, 8, 4)
    assert (model.qk_norm, model.tied, model.dropout) == (True, True, 0.1)
    assert model.hidden == model.heads * (model.head_size or 0)
    assert model.ffn <= 64
    assert (model.vocab or 0) <= 64
    assert small.data.seq == 8
    assert small.train.global_batch == 16
    assert "model.hidden 8192 -> 256" in changes
    assert "data.seq 4096 -> 8" in changes


@pytest.mark.parametrize(
    ("window", "expected"), [(1024, 2), (4095, 7), (100, 1), (4096, 4096), (None, None)]
)
def test_a_window_keeps_its_share_of_a_sequence(window: int | None, expected: int | None) -> None:
    small, changes = shrink(made({**LLAMA_70B, "window": window}), [8])
    assert (small.data.seq, small.model.window) == (8, expected)
    assert (f"model.window {window} -> {expected}" in changes) == (window != expected)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    kv_heads, ratio = draw(st.integers(1, 16)), draw(st.integers(1, 16))
    model = {
        "family": draw(st.sampled_from(["llama", "gpt2"])),
        "layers": draw(st.integers(1, 99)),
        "hidden": draw(st.integers(1, 5000)),
        "ffn": draw(st.integers(1, 9999)),
        "heads": kv_heads * ratio,
        "kv_heads": kv_heads,
        "head_size": 2 * draw(st.integers(1, 64)),
        "vocab": draw(st.integers(1, 99999)),
        "window": draw(st.none() | st.integers(1, 3000)),
    }
    numbers = (draw(st.integers(1, 3000)) for _ in range(3))
    return made(model, *numbers)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(configs(), st.sets(st.sampled_from(SIZES)))
def test_sizes_keep_what_a_layout_can_tell(config: Config, sizes: set[int]) -> None:
    small, _ = shrink(config, sizes)
    facts = tuple(sorted(sizes - {1}))
    model, old = small.model, config.model
    pairs = [(model.ffn, old.ffn), (model.heads, old.heads), (model.kv_heads, old.kv_heads)]
    pairs += [(model.vocab, old.vocab), (small.data.seq, config.data.seq)]
    if old.heads * (old.head_size or 0) != old.hidden:
        pairs.append((model.hidden, old.hidden))
    for new_size, old_size in pairs:
        assert new_size is not None
        assert old_size is not None
        assert new_size <= old_size
        assert pattern(new_size, facts) == pattern(old_size, facts)
    assert (model.layers - old.layers) % 2 == 0
    assert min(2, old.layers) <= model.layers <= 3
    assert (model.heads == model.kv_heads) == (old.heads == old.kv_heads)
    assert small.train.global_batch <= config.train.global_batch
    assert small.train.micro_batch <= config.train.micro_batch
    counts = [-(-c.train.global_batch // c.train.micro_batch) for c in (small, config)]
    assert pattern(counts[0], facts) == pattern(counts[1], facts)
    ragged = [c.train.global_batch % c.train.micro_batch > 0 for c in (small, config)]
    assert ragged[0] == ragged[1]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(configs(), st.sets(st.sampled_from(SIZES)))
def test_shrinking_again_changes_nothing_and_the_result_is_valid(
    config: Config, sizes: set[int]
) -> None:
    small, _ = shrink(config, sizes)
    assert resolve(from_dict(to_dict(small))) == small
    again, changes = shrink(small, sizes)
    assert again == small, changes


@pytest.mark.parametrize(
    ("n", "sizes", "least", "expected"),
    [(50257, (8,), 24, 25), (50304, (8,), 24, 24), (7, (8,), 24, 7), (100, (3, 4), 6, 8)],
)
def test_the_smallest_number_with_the_same_facts(
    n: int, sizes: tuple[int, ...], least: int, expected: int
) -> None:
    assert smallest(n, sizes, least) == expected
