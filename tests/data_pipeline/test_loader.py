"""From sample numbers to tokens: batches, resuming, evaluation sets, read-ahead."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penteract.data.indexed import DataError, IndexedFile
from penteract.data.loader import (
    Prefetcher,
    TrainSource,
    ValidSource,
    micro_batches,
    show,
)
from penteract.data.rows import rows_of
from penteract.data.tokenizers import ByteTokenizer
from penteract.data.writer import IndexedWriter
from penteract.errors import UserError
from penteract.testing import run_ranks


def write(prefix: Path, lengths: list[int], first: int = 0) -> Path:
    """Documents whose tokens count up over the file, from `first`."""
    with IndexedWriter(prefix, 60_000) as writer:
        for length in lengths:
            writer.add(np.arange(first, first + length))
            first += length
    return prefix


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Files of 24 samples of seq 8 (193 tokens, documents of 1 to 90) and of 10 (81 tokens)."""
    folder = tmp_path_factory.mktemp("data")
    one = write(folder / "one", [1, 50, 2, 90, 50])
    return one, write(folder / "two", [80, 1], first=1000)


def source(prefixes: tuple[Path, Path], **changes: object) -> TrainSource:
    settings = {"seq": 8, "seed": 3} | changes
    return TrainSource([(prefixes[0], 0.7), (prefixes[1], 0.3)], **settings)


def test_labels_are_the_next_tokens(prefixes: tuple[Path, Path]) -> None:
    """Row 166: a sample reads seq + 1 tokens, and label[i] is token[i + 1], over document ends."""
    samples = source(prefixes).samples(range(200))
    tokens, labels = samples.tokens, samples.labels
    assert tokens.shape == labels.shape == (200, 8)
    assert tokens.dtype == labels.dtype == np.int64
    assert (tokens[:, 1:] == labels[:, :-1]).all()
    assert (labels == tokens + 1).all()
    assert set((tokens[:, 0] % 1000 % 8).tolist()) == {0}


def test_epochs_see_every_sample_once(prefixes: tuple[Path, Path]) -> None:
    train = TrainSource([(prefixes[0], None)], seq=8, seed=3)
    assert train.sizes == [24]
    for epoch in range(3):
        tokens = train.samples(range(24 * epoch, 24 * epoch + 24)).tokens
        assert sorted(tokens[:, 0].tolist()) == list(range(0, 192, 8))


def test_blend_of_sources(prefixes: tuple[Path, Path]) -> None:
    train = source(prefixes)
    tokens = train.samples(range(400)).tokens
    second = np.cumsum(tokens[:, 0] >= 1000)
    assert abs(second - 0.3 * np.arange(1, 401)).max() < 1
    seen = Counter(tokens[tokens[:, 0] >= 1000, 0].tolist())
    assert set(seen.values()) == {12}  # 120 samples of a source of 10: every one 12 times
    weightless = TrainSource([(prefix, None) for prefix in prefixes], seq=8, seed=3)
    assert weightless.blend.weights == (12, 5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 9))
def test_micro_batches_part_the_global_batch(batch: int, micro: int, dp: int) -> None:
    """Row 182: the same content in the same micro-batches; only who computes them differs."""
    ranks = [micro_batches(batch, micro, dp, rank) for rank in range(dp)]
    assert len({len(ranges) for ranges in ranks}) == 1
    filled = [ranges[turn] for turn in range(len(ranks[0])) for ranges in ranks if ranges[turn]]
    assert [len(part) for part in filled[:-1]] == [micro] * (len(filled) - 1)
    assert [i for part in filled for i in part] == list(range(batch))
    assert len(ranks[0]) == -(-batch // (micro * dp))
    for rank, ranges in enumerate(ranks):
        for turn, part in enumerate(ranges):
            j = turn * dp + rank
            assert list(part) == list(range(batch))[j * micro : (j + 1) * micro]


def test_micro_batches_refuse_nothing_sizes() -> None:
    with pytest.raises(ValueError, match="global_batch 0, micro_batch 1 and dp 1 must be"):
        micro_batches(0, 1, 1, 0)


def test_changing_the_batch_size_mid_run(prefixes: tuple[Path, Path]) -> None:
    """Row 184: batches of 6, then of 4, continue the same stream of samples."""
    straight = source(prefixes).samples(range(50)).tokens
    cursor, parts = 0, []
    for batch in (6, 6, 6, 4, 4, 4, 4, 16):
        parts.append(source(prefixes).samples(range(cursor, cursor + batch)).tokens)
        cursor += batch
    assert (np.concatenate(parts) == straight).all()


def test_concurrent_processes_agree(prefixes: tuple[Path, Path]) -> None:
    """Rows 174 and 32: nothing is cached, so processes that start together cannot disagree."""
    before = sorted(path.name for path in prefixes[0].parent.iterdir())

    def take() -> list[list[int]]:
        return source(prefixes).samples(range(100)).tokens.tolist()

    results = run_ranks(take, 4) + run_ranks(take, 4)
    assert results == [take()] * 8
    assert sorted(path.name for path in prefixes[0].parent.iterdir()) == before


def test_too_little_data(prefixes: tuple[Path, Path], tmp_path: Path) -> None:
    """Row 31: refused with the arithmetic."""
    with pytest.raises(DataError, match=r"24 \+ 10 = 34 samples of seq 8, fewer than one .* of 35"):
        source(prefixes, global_batch=35)
    source(prefixes, global_batch=34)
    with pytest.raises(DataError, match=r"two: 81 tokens hold no sample of seq \+ 1 = 82"):
        TrainSource([(prefixes[1], None)], seq=81, seed=0)
    with pytest.raises(UserError, match=r"data\.train names no source"):
        TrainSource([], seq=8, seed=0)


def test_token_outside_the_vocabulary(prefixes: tuple[Path, Path]) -> None:
    with pytest.raises(DataError, match=r"document \d, offset \d+: token id \d+ is outside"):
        source(prefixes, vocab=257).samples(range(10))


def test_describe_and_show(prefixes: tuple[Path, Path]) -> None:
    train = source(prefixes)
    samples = train.samples(range(60))
    file = IndexedFile(prefixes[0])
    rows = zip(train.describe(range(60)), samples.tokens, samples.labels, strict=True)
    for found, row, label in rows:
        base = 1000 if found.source == "two" else 0
        first, last = found.sample * 8, found.sample * 8 + 8
        assert (row[0] - base, label[-1] - base) == (first, last)
        assert found.place.startswith(f"tokens {first} to {last}  documents ")
        if found.source == "one":
            documents = f"{file.document_of(first)} to {file.document_of(last)}"
            assert found.place.endswith(f"documents {documents}")
    assert [found.epoch for found in train.describe(range(60)) if found.source == "two"] == [
        n // 10 for n in range(18)
    ]
    lines = show(train, cursor=12, global_batch=4, tokenizer=ByteTokenizer())
    assert len(lines) == 4
    assert lines[0].startswith("12  ")
    assert f"sample {train.describe([12])[0].sample}  tokens" in lines[0]


def test_fingerprint(prefixes: tuple[Path, Path]) -> None:
    base = source(prefixes).fingerprint()
    assert base == source(prefixes, seed=9).fingerprint()
    assert base != source(prefixes[::-1]).fingerprint()
    assert base != source(prefixes, seq=9).fingerprint()
    other = TrainSource([(prefixes[0], 0.6), (prefixes[1], 0.4)], seq=8, seed=3)
    assert base != other.fingerprint()


def valid_of(prefix: Path, seq: int = 8, **how: Any) -> ValidSource:
    rows = rows_of(IndexedFile(prefix), seq, packing=False, predict_across=False)
    return ValidSource(rows, **how)


def test_evaluation_is_the_same_every_time(prefixes: tuple[Path, Path]) -> None:
    """Row 180: fixed samples in file order, whatever was asked before."""
    valid = valid_of(prefixes[0], sequences=5)
    samples = valid.samples(range(5))
    first, labels = samples.tokens, samples.labels
    assert len(valid) == 5
    assert first[:, 0].tolist() == [0, 8, 16, 24, 32]
    assert (labels == first + 1).all()
    valid.samples([3])
    assert (valid.samples(range(5)).tokens == first).all()
    assert valid.name == "one"


def test_evaluation_that_evaluates_nothing(prefixes: tuple[Path, Path]) -> None:
    """Row 181: no number means all there is; 0 is refused with the configuration."""
    assert len(valid_of(prefixes[0])) == 24
    assert len(valid_of(prefixes[0], sequences=1000)) == 24
    with pytest.raises(DataError, match="hold no sample of seq"):
        valid_of(prefixes[0], seq=500)
    with pytest.raises(DataError, match="holds no sample"):
        valid_of(prefixes[0], valid_fraction=0.0)


def test_held_out_samples_are_never_trained_on(prefixes: tuple[Path, Path]) -> None:
    train = TrainSource([(prefixes[0], None)], seq=8, seed=1, valid_fraction=0.25)
    valid = ValidSource(train.rows[0], valid_fraction=0.25)
    assert (train.sizes, len(valid)) == ([18], 6)
    trained = set(train.samples(range(36)).labels.ravel().tolist())
    assert not trained & set(valid.samples(range(6)).labels.ravel().tolist())
    assert len(trained) + 48 == 192


def test_prefetch_runs_ahead_in_order() -> None:
    asked: list[int] = []

    def load(step: int) -> int:
        asked.append(step)
        return step * step

    with Prefetcher(load, first=4, depth=2, timeout_s=10) as ahead:
        deadline = time.monotonic() + 10
        while len(asked) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)
        assert asked == [4, 5, 6]  # two ready and one in hand, no more
        assert [ahead.get(step) for step in range(4, 9)] == [16, 25, 36, 49, 64]
        threads = threading.active_count()
    assert threading.active_count() == threads - 1


def test_prefetch_measures_the_wait() -> None:
    with Prefetcher(lambda step: time.sleep(0.1), first=1, timeout_s=10) as ahead:
        ahead.get(1)
        assert 50 < ahead.wait_ms < 5000


def test_prefetch_raises_at_the_step_that_failed() -> None:
    def load(step: int) -> int:
        if step == 3:
            raise DataError("bad document")
        return step

    with Prefetcher(load, first=1, timeout_s=10) as ahead:
        assert (ahead.get(1), ahead.get(2)) == (1, 2)
        with pytest.raises(DataError, match="bad document"):
            ahead.get(3)


def test_prefetch_that_is_stuck_is_an_error() -> None:
    """Row 35: an error within the timeout, not a hang."""
    release, begin = threading.Event(), time.monotonic()
    with (
        Prefetcher(lambda step: release.wait(60), first=1, timeout_s=0.2) as ahead,
        pytest.raises(TimeoutError, match=r"step 1 did not arrive within 0\.2 s"),
    ):
        ahead.get(1)
    assert time.monotonic() - begin < 4
    release.set()
