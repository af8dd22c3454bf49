"""Rows of conversations: whole, once each, padded, and only answers count."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penteract.config import ConfigError
from penteract.data.indexed import DataError, IndexedFile
from penteract.data.loader import TrainSource, ValidSource, show
from penteract.data.rows import ConversationRows
from penteract.data.samples import Samples
from penteract.data.writer import IndexedWriter

Conversations = list[list[int]]  # their masks; token j of conversation i is 100·(i + 1) + j


def write(prefix: Path, conversations: Conversations) -> Path:
    with IndexedWriter(prefix, 60_000, masked=True) as writer:
        for i, mask in enumerate(conversations):
            writer.add(100 * (i + 1) + np.arange(len(mask)), np.array(mask, np.uint8))
    return prefix


def rows(prefix: Path, seq: int) -> Samples:
    """All rows of a file."""
    source = ConversationRows(IndexedFile(prefix), seq)
    return source.samples(range(len(source)))


def pieces(samples: Samples) -> list[tuple[list[int], list[int], list[int]]]:
    """Tokens, labels and weights of each piece, padding too."""
    ends = np.cumsum(samples.lengths)[:-1]
    arrays = (samples.tokens, samples.labels, samples.weights.astype(int))
    cut = [[x.tolist() for x in np.split(array.ravel(), ends)] for array in arrays]
    return list(zip(*cut, strict=True))


def check(samples: Samples, conversations: Conversations, seq: int) -> None:
    """Every conversation is there once, whole or cut; only its answers' labels count."""
    seen = []
    for tokens, labels, weights in pieces(samples):
        if not any(tokens):
            assert not any(labels + weights), "padding counts"
            continue
        i = tokens[0] // 100 - 1
        seen.append(i)
        mask = conversations[i][:seq]
        assert tokens == [100 * (i + 1) + j for j in range(len(mask))]
        assert labels == [*tokens[1:], 0]
        assert weights == [*mask[1:], 0]
    assert sorted(seen) == list(range(len(conversations))), "lost or doubled"
    assert sum(samples.lengths) == samples.tokens.size
    ends = np.cumsum(samples.lengths).tolist()
    assert set(range(seq, samples.tokens.size + 1, seq)) <= set(ends)


def test_rows_by_example(tmp_path: Path) -> None:
    conversations = [[0, 0, 1], [0, 1, 1, 1, 0], [1, 1], [0, 0, 1, 1, 1, 1, 1, 1, 1]]
    samples = rows(write(tmp_path / "x", conversations), 7)
    # The fourth is cut to 7; the second goes with the third; the first is alone.
    assert samples.tokens.tolist() == [
        [100, 101, 102, 0, 0, 0, 0],
        [200, 201, 202, 203, 204, 300, 301],
        [400, 401, 402, 403, 404, 405, 406],
    ]
    assert samples.labels.tolist() == [
        [101, 102, 0, 0, 0, 0, 0],
        [201, 202, 203, 204, 0, 301, 0],
        [401, 402, 403, 404, 405, 406, 0],
    ]
    assert samples.weights.tolist() == [
        [0, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 1, 0],
        [0, 1, 1, 1, 1, 1, 0],
    ]
    assert samples.weights.dtype == np.float32
    assert samples.lengths == (3, 4, 5, 2, 7)
    source = ConversationRows(IndexedFile(tmp_path / "x"), 7)
    assert source.note() == (
        "4 conversations in 3 rows of 7 tokens, filled 81.0 %, 58.8 % of their tokens are the "
        "assistant's; 1 are longer and lose 2 tokens"
    )
    assert [source.place(i) for i in range(3)] == [
        "conversations 0", "conversations 1 2", "conversations 3",
    ]  # fmt: skip


masks = st.lists(st.integers(0, 1), min_size=1, max_size=12)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(masks, min_size=1, max_size=15), st.integers(2, 9))
def test_any_conversations(
    tmp_path_factory: pytest.TempPathFactory, conversations: Conversations, seq: int
) -> None:
    prefix = tmp_path_factory.mktemp("x") / "x"
    write(prefix, [*conversations, [0, 1]])  # so that something counts
    samples = rows(prefix, seq)
    check(samples, [*conversations, [0, 1]], seq)
    train = TrainSource([(prefix, None)], seq=seq, seed=5, packing=True)
    wanted = range(3 * len(samples.tokens))
    taken = train.samples(wanted)
    assert taken.lengths == train.lengths(wanted)
    for row, found in enumerate(train.describe(wanted)):
        assert (taken.tokens[row] == samples.tokens[found.sample]).all()
        assert (taken.weights[row] == samples.weights[found.sample]).all()
    assert samples.weights.sum() == ConversationRows(IndexedFile(prefix), seq)._counted
    counts = np.bincount([x.sample for x in train.describe(wanted)])
    assert counts.tolist() == [3] * len(samples.tokens)


def test_chats_and_texts_in_one_blend(tmp_path: Path) -> None:
    chats = write(tmp_path / "chats", [[0, 1, 1], [0, 1]])
    with IndexedWriter(tmp_path / "text", 60_000) as writer:
        writer.add_documents(np.arange(17), np.array([3, 14]))
    sources = [(chats, 0.5), (tmp_path / "text", 0.5)]
    train = TrainSource(sources, seq=5, seed=1, packing=True)
    shown = train.describe(range(12))
    assert {x.source for x in shown} == {"chats", "text"}
    lengths = [train.lengths([x.index]) for x in shown]
    assert train.lengths(range(12)) == train.samples(range(12)).lengths == sum(lengths, ())
    assert all(n == (3, 2) for n, x in zip(lengths, shown, strict=True) if x.source == "chats")
    line = next(x for x in show(train, cursor=0, global_batch=12) if "chats" in x)
    assert line.endswith("sample 0  conversations 0 1")
    assert train.samples([]).tokens.shape == (0, 5)
    assert train.samples([]).lengths == ()


def test_validation_is_held_out_by_rows(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", [[0, 1, 1, 1]] * 10)
    train = TrainSource([(prefix, None)], seq=4, seed=1, packing=True, valid_fraction=0.2)
    valid = ValidSource(train.rows[0], valid_fraction=0.2)
    seen = set(train.samples(range(8)).tokens[:, 0].tolist())
    held = set(valid.samples(range(2)).tokens[:, 0].tolist())
    assert (len(seen), len(held)) == (8, 2)
    assert not seen & held
    assert valid.samples([0]).weights.tolist() == [[1, 1, 1, 0]]


def test_what_is_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", [[0, 1, 1], [0, 1]])
    with pytest.raises(ConfigError, match=r"holds conversations .* need data\.packing = true"):
        TrainSource([(prefix, None)], seq=4, seed=0)
    with pytest.raises(DataError, match="no conversation has an answer in its first 1 tokens"):
        rows(prefix, 1)
    mask = tmp_path / "x.mask"
    mask.write_bytes(b"\0\1\1\0")
    with pytest.raises(DataError, match=r"x\.mask: 4 bytes for 5 tokens"):
        rows(prefix, 4)
    mask.write_bytes(b"\0\1\1\0\2")
    with pytest.raises(DataError, match="other bytes than 0 and 1"):
        rows(prefix, 4)


def test_the_fingerprint_knows_the_mask(tmp_path: Path) -> None:
    before = IndexedFile(write(tmp_path / "x", [[0, 1, 1], [0, 1]])).fingerprint()
    assert IndexedFile(write(tmp_path / "x", [[0, 1, 1], [0, 1]])).fingerprint() == before
    assert IndexedFile(write(tmp_path / "x", [[0, 0, 1], [0, 1]])).fingerprint() != before


def test_a_mask_does_not_outlive_its_tokens(tmp_path: Path) -> None:
    """A text built over chats has no mask; a writer that is stopped leaves none."""
    prefix = write(tmp_path / "x", [[0, 1, 1]])
    with (
        pytest.raises(DataError, match="outside the vocabulary"),
        IndexedWriter(tmp_path / "x", 2, masked=True) as writer,
    ):
        writer.add(np.arange(3), np.array([0, 1, 1], np.uint8))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx", "x.mask"]
    assert IndexedFile(prefix).tokens == 3
    (tmp_path / "x.mask.part").write_bytes(b"\1")  # of a writer that was killed
    with IndexedWriter(prefix, 300) as writer:
        writer.add(np.arange(4))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]
    assert IndexedFile(prefix).mask is None
