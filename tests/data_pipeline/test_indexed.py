"""Token files: the golden bytes, round trips, damage named precisely, 64-bit positions."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penteract.data.indexed import DataError, IndexedFile, token_dtype
from penteract.data.writer import IndexedWriter

GOLDEN = bytes.fromhex(
    "4d4d49444944580000 0100000000000000 08 0400000000000000 0500000000000000"
    "07000000 03000000 09000000 05000000"
    "0000000000000000 0e00000000000000 1400000000000000 2600000000000000"
    "0000000000000000 0100000000000000 0200000000000000 0300000000000000 0400000000000000"
)


def write(prefix: Path, documents: list[list[int]], vocab: int = 300) -> Path:
    with IndexedWriter(prefix, vocab) as writer:
        for document in documents:
            writer.add(np.array(document, np.int64))
    return prefix


def four(prefix: Path) -> Path:
    return write(prefix, [list(range(n)) for n in (7, 3, 9, 5)])


def raw(
    prefix: Path, lengths: list[int], offsets: list[int], documents: list[int], tokens: list[int]
) -> Path:
    """An index with any contents over u16 tokens."""
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(lengths), len(documents))
    arrays = (np.array(lengths, "<i4"), np.array(offsets, "<i8"), np.array(documents, "<i8"))
    Path(f"{prefix}.idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
    Path(f"{prefix}.bin").write_bytes(np.array(tokens, "<u2").tobytes())
    return prefix


def test_golden_bytes(tmp_path: Path) -> None:
    four(tmp_path / "x")
    assert len(GOLDEN) == 122
    assert (tmp_path / "x.idx").read_bytes() == GOLDEN
    assert (tmp_path / "x.bin").stat().st_size == 2 * 24
    file = IndexedFile(tmp_path / "x", vocab=9)
    assert (file.tokens, file.lengths.tolist()) == (24, [7, 3, 9, 5])
    assert file.documents.tolist() == [0, 1, 2, 3, 4]
    assert sorted(os.listdir(tmp_path)) == ["x.bin", "x.idx"]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 99_999), min_size=1, max_size=9), min_size=1, max_size=9))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]) -> None:
    prefix = write(tmp_path_factory.mktemp("x") / "x", documents, vocab=100_000)
    file = IndexedFile(prefix, vocab=100_000)
    stream = [token for document in documents for token in document]
    owner = [i for i, document in enumerate(documents) for _ in document]
    assert file.dtype == np.int32
    assert file.tokens == len(stream) == file.lengths.sum()
    for start in range(len(stream) + 1):
        for stop in range(start, len(stream) + 1):
            got = file.read(start, stop)
            assert got.dtype == np.int64
            assert got.tolist() == stream[start:stop]
            began = [i for i in range(start, stop) if i == 0 or owner[i - 1] != owner[i]]
            assert file.boundaries(start, stop).tolist() == began
    assert [file.document_of(i) for i in range(len(stream))] == owner


def test_dtype_follows_vocabulary() -> None:
    assert (token_dtype(65_499), token_dtype(65_500)) == (np.uint16, np.int32)


def test_stored_offsets_are_honoured(tmp_path: Path) -> None:
    # Rows out of order and with a gap, a row of no tokens, a document of two rows.
    prefix = raw(tmp_path / "x", [2, 0, 3, 1], [8, 8, 0, 14], [0, 3, 4], [5, 6, 7, 99, 1, 2, 99, 8])
    file = IndexedFile(prefix, vocab=10)
    assert file.read(0, 6).tolist() == [1, 2, 5, 6, 7, 8]
    assert file.read(1, 4).tolist() == [2, 5, 6]
    assert [file.document_of(i) for i in range(6)] == [0, 0, 0, 0, 0, 1]
    assert file.document_lengths().tolist() == [5, 1]
    assert file.boundaries(0, 6).tolist() == [0, 5]
    for documents in ([0, 1, 4], [0, 2, 4]):  # the row of no tokens begins one, or ends one
        raw(prefix, [2, 0, 3, 1], [8, 8, 0, 14], documents, [5, 6, 7, 99, 1, 2, 99, 8])
        file = IndexedFile(prefix)
        found = [file.boundaries(i, i + 1).tolist() for i in range(6)]
        assert found == [[0], [], [2], [], [], []]


def test_positions_beyond_31_bits(tmp_path: Path) -> None:
    """Three documents of 2**30 tokens in a sparse file, then a short one (row 171)."""
    long = 2**30
    lengths, offsets = [long, long, long, 5], [0, 2 * long, 4 * long, 6 * long]
    prefix = raw(tmp_path / "x", lengths, offsets, [0, 1, 2, 3, 4], [])
    with open(f"{prefix}.bin", "r+b") as file:
        file.truncate(6 * long + 10)
        file.seek(6 * long - 4)
        file.write(np.arange(1, 8, dtype="<u2").tobytes())
    big = IndexedFile(prefix, vocab=300)
    assert big.tokens == 3 * long + 5 > 2**31
    assert big.read(3 * long - 2, 3 * long + 5).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert [big.document_of(i) for i in (2**31 - 1, 2**31, 3 * long - 1, 3 * long)] == [1, 2, 2, 3]
    assert big.document_lengths().tolist() == lengths
    assert big.boundaries(1, 3 * long + 5).tolist() == [long, 2 * long, 3 * long]
    assert big.boundaries(long, 2 * long).tolist() == [long]
    os.truncate(f"{prefix}.bin", 2 * long - 2)
    with pytest.raises(DataError, match=f"document 0, sequence 0: {long} tokens"):
        IndexedFile(prefix)


def edit(path: Path, at: int, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(content)


DAMAGE = [
    ("idx", 0, b"PK\3\4", r"x\.idx: starts with .*an index starts with"),
    ("idx", 9, b"\2", r"x\.idx: version 2; this reader knows version 1"),
    ("idx", 17, b"\7", r"x\.idx: dtype code 7 is a float type"),
    ("idx", 17, b"\x63", r"x\.idx: dtype code 99 is unknown"),
    ("idx", 17, b"\1", r"x\.bin: 48 bytes, but its index describes 24 tokens of 1 bytes = 24"),
    ("idx", 17, b"\4", r"x\.idx: document 1, sequence 1: 3 tokens of 4 bytes at byte offset 14"),
    ("idx", 18, b"\5", r"x\.idx: 122 bytes; its header says 5 sequences and 5 .* need 134"),
    ("idx", 26, b"\4", r"x\.idx: 122 bytes; its header says 4 sequences and 4 .* need 114"),
    ("idx", 24, b"\xff", r"x\.idx: 122 bytes; its header says \d{17} seq"),
    ("idx", 34 + 8, b"\xff\xff\xff\xff", r"document 2, sequence 2: -1 tokens"),
    ("idx", 34 + 8, b"\x20", r"document 2, sequence 2: 32 tokens of 2 bytes at byte offset 20 do"),
    ("idx", 50 + 23, b"\x80", r"document 2, sequence 2: 9 tokens .* offset -\d+"),
    ("idx", 50 + 23, b"\x7f", r"document 2, sequence 2: 9 tokens .* offset 91\d+"),
    ("idx", 82, b"\1", r"boundaries run from 1 to 4; with 4 sequences they must run from 0 to 4"),
    ("idx", 82 + 32, b"\3", r"boundaries run from 0 to 3"),
    ("idx", 82 + 8, b"\3", r"document 1 starts at sequence 3 and ends at 2"),
    ("idx", 82 + 16, b"\1", r"document 1 \(from sequence 1, token 7 of the stream\) is empty"),
]


@pytest.mark.parametrize(("ending", "at", "content", "message"), DAMAGE)
def test_damage_is_named(
    tmp_path: Path, ending: str, at: int, content: bytes, message: str
) -> None:
    prefix = four(tmp_path / "x")
    edit(Path(f"{prefix}.{ending}"), at, content)
    with pytest.raises(DataError, match=message):
        IndexedFile(prefix)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    prefix = four(tmp_path / "x")
    for path in (Path(f"{prefix}.idx"), Path(f"{prefix}.bin")):
        whole = path.read_bytes()
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            with pytest.raises(DataError, match=r"x\.(idx|bin)"):
                IndexedFile(prefix)
        path.write_bytes(whole)
    IndexedFile(prefix)


def test_modes_are_tolerated_and_other_tails_not(tmp_path: Path) -> None:
    prefix = four(tmp_path / "x")
    Path(f"{prefix}.idx").write_bytes(GOLDEN + b"\0\1\0\1")
    assert IndexedFile(prefix).documents.tolist() == [0, 1, 2, 3, 4]
    Path(f"{prefix}.idx").write_bytes(GOLDEN + b"\0\1\0")
    with pytest.raises(DataError, match="125 bytes"):
        IndexedFile(prefix)


def test_missing_empty_and_misnamed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.bin: no such file"):
        IndexedFile(tmp_path / "none")
    prefix = four(tmp_path / "x")
    with pytest.raises(DataError, match="give the prefix without"):
        IndexedFile(f"{prefix}.bin")
    Path(f"{prefix}.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"x\.bin: 0 bytes"):
        IndexedFile(prefix)
    raw(tmp_path / "y", [], [], [0], [1])
    with pytest.raises(DataError, match="0 sequences and 0 documents: empty"):
        IndexedFile(tmp_path / "y")
    raw(tmp_path / "z", [2, 0, 0], [0, 4, 4], [0, 1, 3], [1, 2])
    with pytest.raises(DataError, match=r"document 1 \(from sequence 1, token 2 .* is empty"):
        IndexedFile(tmp_path / "z")


def test_token_outside_the_vocabulary(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", [[1, 2, 3], [4, 5, 280, 7], [8]])
    file = IndexedFile(prefix, vocab=257)
    assert file.read(0, 5).tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(DataError, match=r"x\.bin: document 1, offset 2: token id 280 .* of 257"):
        file.read(2, 8)
    assert IndexedFile(prefix).read(5, 6).tolist() == [280]
    with pytest.raises(DataError, match="tokens 5 to 9 asked for, the file has 8"):
        file.read(5, 9)


def test_writer_refuses_bad_tokens(tmp_path: Path) -> None:
    for documents, message in (
        ([[1], [2, 300]], "document 1, offset 1: token id 300"),
        ([[1], [-2]], "document 1, offset 0: token id -2"),
        ([[1], []], "a document has 1 to"),
        ([], "no documents to write"),
    ):
        with pytest.raises(DataError, match=message):
            write(tmp_path / "x", documents)
        assert os.listdir(tmp_path) == []


def test_failed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    prefix = four(tmp_path / "x")

    def interrupted() -> None:
        with IndexedWriter(prefix, 300) as writer:
            writer.add(np.array([1]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (tmp_path / "x.idx").read_bytes() == GOLDEN
    assert sorted(os.listdir(tmp_path)) == ["x.bin", "x.idx"]


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x", 300) as first:
        with (
            pytest.raises(DataError, match="another process is writing"),
            IndexedWriter(tmp_path / "x", 300),
        ):
            pass
        first.add(np.array([1, 2]))
    # What a killed writer left is no obstacle, and its bytes do not leak into the next file.
    (tmp_path / "x.bin.part").write_bytes(b"left over" * 100)
    write(tmp_path / "x", [[3]])
    assert IndexedFile(tmp_path / "x").read(0, 1).tolist() == [3]
    assert sorted(os.listdir(tmp_path)) == ["x.bin", "x.idx"]


def test_fingerprint_follows_the_content(tmp_path: Path) -> None:
    one, same = IndexedFile(four(tmp_path / "x")), IndexedFile(four(tmp_path / "y"))
    assert one.fingerprint() == same.fingerprint()
    edit(tmp_path / "y.bin", 47, b"\1")
    assert one.fingerprint() != same.fingerprint()
