"""Packing: where samples are cut into documents, and which of their labels count."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penteract.data.indexed import DataError, IndexedFile, Ints
from penteract.data.loader import TrainSource, show
from penteract.data.rows import rows_of
from penteract.data.samples import Samples
from penteract.data.synthetic import SyntheticSource
from penteract.data.tokenizers import ByteTokenizer
from penteract.data.writer import IndexedWriter

END = ByteTokenizer().vocab - 1
GOLDEN_TOKENS = [[10, 11, 23, 39, 15, 28], [38, 22, 9, 21, 43, 26]]


def write(prefix: Path, lengths: list[int], token: int | None = None) -> Path:
    """Documents whose tokens count up over the file, or are all the same."""
    stream = np.arange(sum(lengths)) if token is None else np.full(sum(lengths), token)
    with IndexedWriter(prefix, 60_000) as writer:
        writer.add_documents(stream, np.array(lengths, np.int64))
    return prefix


def rows(prefix: Path, seq: int, **changes: bool) -> Samples:
    """All samples of a file, in its order."""
    how = {"packing": True, "predict_across": False, **changes}
    source = rows_of(IndexedFile(prefix), seq, **how)
    return source.samples(range(len(source)))


def expected(owner: Ints, seq: int) -> tuple[list[int], list[list[int]]]:
    """Lengths and weights, token by token, of a stream whose token i is of document owner[i]."""
    lengths, weights = [], []
    for first in range(0, len(owner) - seq, seq):
        lengths += np.unique(owner[first : first + seq], return_counts=True)[1].tolist()
        here, after = owner[first : first + seq], owner[first + 1 : first + seq + 1]
        weights.append((here == after).astype(int).tolist())
    return lengths, weights


@pytest.mark.parametrize(
    ("documents", "lengths", "weights"),
    [
        # Two rows of seq 4 are the first 8 tokens; the ninth is the last label.
        ([9], [4, 4], [[1, 1, 1, 1], [1, 1, 1, 1]]),  # longer than several rows
        ([4, 5], [4, 4], [[1, 1, 1, 0], [1, 1, 1, 1]]),  # ends exactly where a row does
        ([8, 1], [4, 4], [[1, 1, 1, 1], [1, 1, 1, 0]]),  # only the last label is another's
        ([3, 6], [3, 1, 4], [[1, 1, 0, 1], [1, 1, 1, 1]]),  # a row ends with a piece of one token
        ([5, 4], [4, 1, 3], [[1, 1, 1, 1], [0, 1, 1, 1]]),  # a row begins with one
        ([1, 1, 1, 6], [1, 1, 1, 1, 4], [[0, 0, 0, 1], [1, 1, 1, 1]]),  # of one token, at the start
        ([1] * 9, [1] * 8, [[0, 0, 0, 0], [0, 0, 0, 0]]),  # no label counts
        ([2, 4, 3], [2, 2, 2, 2], [[1, 0, 1, 1], [1, 0, 1, 1]]),
    ],
)
def test_boundaries_by_example(
    tmp_path: Path, documents: list[int], lengths: list[int], weights: list[list[int]]
) -> None:
    """Row 71: the last token of a document does not predict the first of the next."""
    samples = rows(write(tmp_path / "x", documents), 4)
    assert samples.tokens.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert samples.labels.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert list(samples.lengths) == lengths
    assert samples.weights.tolist() == weights
    across = rows(tmp_path / "x", 4, predict_across=True)
    assert (across.lengths, across.weights.tolist()) == (samples.lengths, [[1] * 4] * 2)
    whole = rows(tmp_path / "x", 4, packing=False)
    assert (whole.lengths, whole.weights.tolist()) == ((4, 4), [[1] * 4] * 2)
    assert (across.tokens == whole.tokens).all()


def test_the_end_token_inside_a_text_ends_nothing(tmp_path: Path) -> None:
    """Row 72: documents are the index's, whatever their tokens are."""
    samples = rows(write(tmp_path / "x", [6, 7], token=END), 4)
    assert set(samples.tokens.ravel()) == {END}
    assert samples.lengths == (4, 2, 2, 4)
    assert samples.weights.tolist() == [[1, 1, 1, 1], [1, 0, 1, 1], [1, 1, 1, 1]]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 7))
def test_any_documents(
    tmp_path_factory: pytest.TempPathFactory, documents: list[int], seq: int
) -> None:
    """Lengths and weights as counted token by token, of any samples in any order."""
    prefix = write(tmp_path_factory.mktemp("x") / "x", [*documents, seq])
    owner = np.repeat(np.arange(len(documents) + 1), [*documents, seq])
    samples = rows(prefix, seq)
    lengths, weights = expected(owner, seq)
    assert list(samples.lengths) == lengths
    assert samples.weights.tolist() == weights
    assert samples.weights.dtype == np.float32
    check(samples, seq)
    train = TrainSource([(prefix, None)], seq=seq, seed=1, packing=True)
    wanted = range(2 * len(samples.tokens))
    taken = train.samples(wanted)
    alone = Samples.joined([train.samples([i]) for i in wanted])
    assert taken.lengths == alone.lengths == train.lengths(wanted)
    assert (taken.weights == alone.weights).all()
    for row, found in zip(taken.weights, train.describe(wanted), strict=True):
        assert row.tolist() == weights[found.sample]
        first, last = found.place.partition("documents ")[2].split(" to ")
        assert row.sum() == seq - (int(last) - int(first))


def check(samples: Samples, seq: int) -> None:
    """What holds of all samples."""
    n = len(samples.tokens)
    assert samples.tokens.shape == samples.labels.shape == samples.weights.shape == (n, seq)
    assert set(np.unique(samples.weights)) <= {0, 1}
    ends = np.cumsum(samples.lengths)
    assert min(samples.lengths, default=1) >= 1
    assert set(range(seq, n * seq + 1, seq)) <= set(ends.tolist())  # no piece in two rows
    assert (ends[-1] if len(ends) else 0) == n * seq


def test_blended_sources_keep_their_documents(tmp_path: Path) -> None:
    sources = [(write(tmp_path / "a", [3, 14]), 0.5), (write(tmp_path / "b", [17]), 0.5)]
    train = TrainSource(sources, seq=4, seed=3, packing=True)
    shown = [(x.source, x.sample) for x in train.describe(range(16))]
    lengths = [(3, 1) if place == ("a", 0) else (4,) for place in shown]
    assert ("a", 0) in shown
    assert train.lengths(range(16)) == train.samples(range(16)).lengths == sum(lengths, ())
    assert TrainSource(sources, seq=4, seed=3).lengths(range(16)) == (4,) * 16
    assert train.samples([]).lengths == train.lengths([]) == ()
    assert train.fingerprint() == TrainSource(sources, seq=4, seed=3).fingerprint()


def test_shown_documents_are_those_of_the_sample(tmp_path: Path) -> None:
    """The last one is that of the last label."""
    train = TrainSource([(write(tmp_path / "x", [4, 1, 4]), None)], seq=4, seed=0, packing=True)
    lines = {line.partition("sample ")[2] for line in show(train, cursor=0, global_batch=2)}
    assert lines == {
        "0  tokens 0 to 4  documents 0 to 1",
        "1  tokens 4 to 8  documents 1 to 2",
    }


def test_an_empty_document_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a document has 1 to"):
        write(tmp_path / "x", [3, 0, 2])


def test_boundaries_read_no_more_of_a_large_index_than_they_need(tmp_path: Path) -> None:
    """A sample of a million documents: the index is searched, not walked or copied."""
    lengths = np.random.default_rng(0).integers(1, 9, 1_000_000)
    file = IndexedFile(write(tmp_path / "x", lengths.tolist(), token=7))
    starts = np.cumsum(lengths) - lengths

    class Counting:
        """An array that counts what is taken of it."""

        def __init__(self, array: Ints) -> None:
            self.array, self.taken = array, 0

        def __len__(self) -> int:
            return len(self.array)

        def __getitem__(self, at: int | slice) -> Ints:
            part = self.array[at]
            self.taken += np.size(part)
            return part

    file.documents = Counting(file.documents)  # type: ignore[assignment]
    for first in (0, 1, 1_234_567, int(starts[-1]) - 50):
        file.documents.taken = 0  # type: ignore[attr-defined]
        found = file.boundaries(first, first + 50)
        assert found.dtype == np.int64
        assert found.tolist() == starts[(starts >= first) & (starts < first + 50)].tolist()
        assert file.documents.taken < 50 + 2 * 21  # type: ignore[attr-defined]
    assert file.boundaries(5, 5).tolist() == []
    with pytest.raises(DataError, match="asked for, the file has"):
        file.boundaries(0, file.tokens + 1)


# --- made samples


def test_made_samples_without_packing_are_what_they_were() -> None:
    samples = SyntheticSource(seq=6, vocab=50, seed=3).samples([0, 7])
    assert samples.tokens.tolist() == GOLDEN_TOKENS
    assert (samples.tokens[:, 1:] == samples.labels[:, :-1]).all()
    assert (samples.lengths, samples.weights.tolist()) == ((6, 6), [[1] * 6] * 2)
    packed = SyntheticSource(seq=6, vocab=50, seed=3, packing=True).samples([0, 7])
    assert (packed.tokens == samples.tokens).all()
    assert (packed.labels == samples.labels).all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seq=st.integers(1, 40), seed=st.integers(0, 2**63), n=st.integers(0, 9))
def test_made_documents_are_a_function_of_seed_and_number(seq: int, seed: int, n: int) -> None:
    source = SyntheticSource(seq=seq, vocab=11, seed=seed, packing=True)
    samples = source.samples(range(n))
    check(samples, seq)
    assert source.lengths(range(n)) == samples.lengths
    for i in reversed(range(n)):
        other = SyntheticSource(seq=seq, vocab=99, seed=seed, packing=True).samples([i])
        assert (other.weights[0] == samples.weights[i]).all()
        ends = [end for end in np.cumsum(other.lengths) if end < seq]
        assert not other.weights[0, np.array(ends, int) - 1].any()
    assert SyntheticSource(seq=seq, vocab=11, seed=seed).lengths(range(n)) == (seq,) * n


@pytest.mark.parametrize("seq", [5, 8, 64])
def test_made_documents_are_ragged_and_some_samples_masked(seq: int) -> None:
    n = 600
    samples = SyntheticSource(seq=seq, vocab=11, seed=0, packing=True).samples(range(n))
    lengths = np.array(samples.lengths)
    assert (lengths == 1).sum() > n
    assert (lengths == seq).sum() > 0.02 * n
    counted = samples.weights.sum(1)
    assert 0.15 * n < (counted == 0).sum() < 0.35 * n  # masked, or nothing but single tokens
    assert 0.15 * n < (counted == 1).sum() < 0.45 * n
    assert 0.4 * n < (counted > 1).sum()
    last = samples.weights[counted > 1, -1]
    assert 0.35 < last.mean() < 0.65  # the last document goes on, or does not
