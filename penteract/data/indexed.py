"""Token files: `PREFIX.bin` holds tokens row after row, `PREFIX.idx` says where each starts.

Index, little-endian: `MMIDIDX\\0\\0`, u64 version 1, u8 dtype code, u64 N sequences, u64 M
boundaries, then N i32 lengths, N i64 byte offsets into `.bin`, M i64 boundaries (sequence numbers,
first 0, last N). A document is one or more sequences. `PREFIX.mask`, where there is one, is a byte
for every token of the stream: 1 where it is an answer to be learnt. Everything is memory-mapped and
int64 throughout. Documents and sequences are counted from 0 in every message.
"""

from __future__ import annotations

import bisect
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from penteract.errors import UserError

Ints = NDArray[np.int64]

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")  # 34 bytes
TOKEN_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOAT_CODES = (6, 7)
_ROWS = 1 << 20  # rows of the index that are checked at a time, to bound memory


class DataError(UserError):
    """Token data that cannot be used; the message names file, document and offset."""


def token_dtype(vocab: int) -> np.dtype[Any]:
    """Storage type of tokens: u16 where the vocabulary is under 65,500, else i32."""
    return np.dtype("<u2" if vocab < 65_500 else "<i4")


class IndexedFile:
    """A token file seen as one stream of `tokens` tokens, documents joined in file order.

    `lengths` [N] and `documents` [M] are the index's own arrays, mapped, not read; so is `mask`
    [tokens], None without one. `vocab` turns on a check of every token that is read. Raises
    DataError for a missing, damaged or empty file.
    """

    def __init__(self, prefix: str | os.PathLike[str], vocab: int | None = None) -> None:
        self.prefix = os.fspath(prefix)
        self.name = Path(self.prefix).name
        self.vocab = vocab
        self.bin_bytes = _size(self.prefix, ".bin")
        self._map_index()
        contiguous = self._check_sequences()
        # In the usual case rows follow each other in `.bin`, so the stored offsets already are the
        # starts of the rows in the stream, and nothing of the size of the index is held in memory.
        self._contiguous = contiguous
        self._starts: Ints = self.offsets if contiguous else self._summed_lengths()
        self._stream_bytes = int(self._starts[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
        self.tokens = self._stream_bytes // self.dtype.itemsize
        self._check_documents()
        self._check_dtype()
        self._bin = np.asarray(np.memmap(f"{self.prefix}.bin", self.dtype, "r"))
        self.mask = self._map_mask()

    def _map_mask(self) -> NDArray[np.uint8] | None:
        path = f"{self.prefix}.mask"
        if not os.path.exists(path):
            return None
        size = os.path.getsize(path)
        if size != self.tokens:
            raise DataError(
                f"{path}: {size} bytes for {self.tokens} tokens; it must have one a token: "
                f"truncated, or another file's mask"
            )
        mask: NDArray[np.uint8] = np.asarray(np.memmap(path, np.uint8, "r"))
        return mask

    def _map_index(self) -> None:
        path = f"{self.prefix}.idx"
        size = _size(self.prefix, ".idx")
        with open(path, "rb") as file:
            header = file.read(HEADER.size)
        if header[:9] != MAGIC[: len(header)]:
            raise DataError(f"{path}: starts with {header[:9]!r}, an index starts with {MAGIC!r}")
        if len(header) < HEADER.size:
            raise DataError(f"{path}: {size} bytes; the header alone has {HEADER.size}: truncated")
        _, version, code, n, m = HEADER.unpack(header)
        if version != 1:
            raise DataError(f"{path}: version {version}; this reader knows version 1")
        if code not in TOKEN_DTYPES:
            kind = "a float type, no token ids" if code in _FLOAT_CODES else "unknown"
            raise DataError(f"{path}: dtype code {code} is {kind}; known are {list(TOKEN_DTYPES)}")
        self.dtype = np.dtype(TOKEN_DTYPES[code])
        need = HEADER.size + 12 * n + 8 * m
        if size not in (need, need + n):  # some multimodal writers append a mode byte per sequence
            raise DataError(
                f"{path}: {size} bytes; its header says {n} sequences and {m} document boundaries, "
                f"which need {need} (or {need + n} with modes): truncated or damaged"
            )
        if n == 0 or m < 2:
            raise DataError(f"{path}: {n} sequences and {max(m - 1, 0)} documents: empty")
        raw = np.asarray(np.memmap(path, np.uint8, "r", HEADER.size))
        self.lengths = raw[: 4 * n].view("<i4")  # [N]
        self.offsets: Ints = raw[4 * n : 12 * n].view("<i8")  # [N] bytes
        self.documents: Ints = raw[12 * n : 12 * n + 8 * m].view("<i8")  # [M]
        if self.documents[0] != 0 or self.documents[-1] != n:
            raise DataError(
                f"{path}: document boundaries run from {self.documents[0]} to "
                f"{self.documents[-1]}; with {n} sequences they must run from 0 to {n}"
            )

    def _check_sequences(self) -> bool:
        """Every row inside `.bin`; returns whether the rows follow each other without a gap."""
        item, contiguous, expected = self.dtype.itemsize, True, 0
        for low in range(0, len(self.lengths), _ROWS):
            lengths = self.lengths[low : low + _ROWS].astype(np.int64)
            offsets = self.offsets[low : low + _ROWS]
            outside = (lengths < 0) | (offsets < 0) | (offsets > self.bin_bytes)
            # Written as a difference so that a damaged offset near 2**63 cannot overflow.
            outside |= (lengths * item > self.bin_bytes - offsets) | (offsets % item != 0)
            if outside.any():
                self._refuse_sequence(low + int(outside.argmax()))
            ends = offsets + lengths * item
            contiguous &= bool(offsets[0] == expected and (offsets[1:] == ends[:-1]).all())
            expected = int(ends[-1])
        return contiguous

    def _refuse_sequence(self, row: int) -> None:
        document = bisect.bisect_right(self.documents, row) - 1
        raise DataError(
            f"{self.prefix}.idx: document {document}, sequence {row}: {self.lengths[row]} tokens "
            f"of {self.dtype.itemsize} bytes at byte offset {self.offsets[row]} do not lie in "
            f"{self.prefix}.bin, which has {self.bin_bytes} bytes: one is truncated or damaged"
        )

    def _summed_lengths(self) -> Ints:
        ends = np.cumsum(self.lengths, dtype=np.int64)
        return (ends - self.lengths) * self.dtype.itemsize

    def _check_documents(self) -> None:
        for low in range(0, len(self.documents) - 1, _ROWS):
            bounds = self.documents[low : low + _ROWS + 1]
            if (bounds[:-1] > bounds[1:]).any():
                at = low + int((bounds[:-1] > bounds[1:]).argmax())
                raise DataError(
                    f"{self.prefix}.idx: document {at} starts at sequence {self.documents[at]} and "
                    f"ends at {self.documents[at + 1]}: boundaries must not fall"
                )
            empty = np.diff(self._start_bytes(bounds)) == 0
            if empty.any():
                at = low + int(empty.argmax())
                offset = int(self._start_bytes(self.documents[at : at + 1])[0])
                raise DataError(
                    f"{self.prefix}.idx: document {at} (from sequence {self.documents[at]}, token "
                    f"{offset // self.dtype.itemsize} of the stream) is empty"
                )

    def _check_dtype(self) -> None:
        """Refuses a file without gaps whose size speaks for tokens of another size."""
        last = int(self.offsets[-1])
        sizes = {s for s in (1, 2, 4, 8) if last + int(self.lengths[-1]) * s == self.bin_bytes}
        sizes &= {s for s in (1, 2, 4, 8) if self.tokens * s == self.bin_bytes}
        if (self._contiguous or sizes) and self._stream_bytes != self.bin_bytes:
            raise DataError(
                f"{self.prefix}.bin: {self.bin_bytes} bytes, but its index describes {self.tokens} "
                f"tokens of {self.dtype.itemsize} bytes = {self._stream_bytes}: wrong dtype, "
                f"or another file's index"
            )

    def _start_bytes(self, rows: Ints) -> Ints:
        """Start of each row in the stream, in bytes; row N is the end."""
        last = len(self._starts) - 1
        return np.where(rows > last, self._stream_bytes, self._starts[np.minimum(rows, last)])

    def _row_of(self, position: int) -> int:
        # numpy's searchsorted would copy the whole array first, since it is not aligned in the
        # file.
        return bisect.bisect_right(self._starts, position * self.dtype.itemsize) - 1

    def document_of(self, position: int) -> int:
        """The document that holds token `position` of the stream."""
        self._check_range(position, position + 1)
        return bisect.bisect_right(self.documents, self._row_of(position)) - 1

    def boundaries(self, start: int, stop: int) -> Ints:
        """The tokens of [start, stop) of the stream with which a document begins, rising."""
        self._check_range(start, stop)
        # Rows from `low` on start at `start` or later, those from `high` on at `stop` or later.
        item = self.dtype.itemsize
        low, high = (bisect.bisect_left(self._starts, x * item) for x in (start, stop))
        first, last = (bisect.bisect_left(self.documents, row) for row in (low, high))
        return self._start_bytes(self.documents[first:last]) // self.dtype.itemsize

    def document_lengths(self) -> Ints:
        """Tokens of every document, [M - 1]."""
        return np.diff(self._start_bytes(self.documents)) // self.dtype.itemsize

    def read(self, start: int, stop: int) -> Ints:
        """Tokens [start, stop) of the stream, across document ends, as int64 [stop - start].

        Raises DataError naming file, document and offset for an id outside the vocabulary.
        """
        self._check_range(start, stop)
        rows = self._bin[start:stop] if self._contiguous else self._read_rows(start, stop)
        out = rows.astype(np.int64)
        if self.vocab is not None and len(out) and (out.min() < 0 or out.max() >= self.vocab):
            self._refuse_token(start + int(((out < 0) | (out >= self.vocab)).argmax()))
        return out

    def _read_rows(self, start: int, stop: int) -> NDArray[Any]:
        out, done, row = np.empty(stop - start, self.dtype), 0, self._row_of(start)
        while done < len(out):
            skip = start + done - int(self._starts[row]) // self.dtype.itemsize
            take = min(int(self.lengths[row]) - skip, len(out) - done)
            first = int(self.offsets[row]) // self.dtype.itemsize + skip
            out[done : done + take] = self._bin[first : first + take]
            done, row = done + take, row + 1
        return out

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.tokens:
            raise DataError(
                f"{self.prefix}: tokens {start} to {stop} asked for, the file has {self.tokens}"
            )

    def _refuse_token(self, position: int) -> None:
        document = self.document_of(position)
        first = int(self._start_bytes(self.documents[document : document + 1])[0])
        offset = position - first // self.dtype.itemsize
        vocab, self.vocab = self.vocab, None
        token = self.read(position, position + 1)[0]
        self.vocab = vocab
        raise DataError(
            f"{self.prefix}.bin: document {document}, offset {offset}: token id {token} is outside "
            f"the vocabulary of {vocab}: was the file made with another tokenizer?"
        )

    def fingerprint(self) -> str:
        """A cheap content hash: sizes, and the first and last MiB of each file."""
        hasher, span = xxhash.xxh3_128(), 1 << 20
        for ending in (".idx", ".bin", *([] if self.mask is None else [".mask"])):
            size = _size(self.prefix, ending)
            hasher.update(struct.pack("<Q", size))
            with open(self.prefix + ending, "rb") as file:
                hasher.update(file.read(span))
                file.seek(max(size - span, 0))
                hasher.update(file.read(span))
        return hasher.hexdigest()


def _size(prefix: str, ending: str) -> int:
    path = prefix + ending
    if not os.path.exists(path):
        hint = (
            " (give the prefix without .bin or .idx)" if prefix.endswith((".bin", ".idx")) else ""
        )
        raise DataError(f"{path}: no such file{hint}")
    size = os.path.getsize(path)
    if size == 0:
        raise DataError(f"{path}: 0 bytes: empty, or its writing was cut off")
    return size
