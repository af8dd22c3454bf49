"""Writing token files: under temporary names, renamed once all is there."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from penteract.data.indexed import (
    HEADER,
    MAGIC,
    TOKEN_DTYPES,
    DataError,
    Ints,
    token_dtype,
)

_MAX_LENGTH = 2**31 - 1  # lengths are stored as i32
_BESIDE = (".json", ".mask")  # what may stand beside the two files


class IndexedWriter:
    """Writes a token file under temporary names and renames it when the `with` block ends well.

    A block left by an exception leaves nothing behind. One writer a prefix: a second one is refused
    with DataError while the first lives. `sidecar`, if set, becomes `PREFIX.json`. With `masked`
    every document comes with its mask, and `PREFIX.mask` is written too.
    """

    def __init__(self, prefix: str | os.PathLike[str], vocab: int, *, masked: bool = False) -> None:
        self.prefix = os.fspath(prefix)
        self.vocab = vocab
        self.masked = masked
        self.dtype = token_dtype(vocab)
        self.sidecar: dict[str, Any] | None = None
        self._lengths: list[NDArray[np.int32]] = []
        self._offsets: list[Ints] = []
        self._documents: list[Ints] = [np.zeros(1, np.int64)]
        self._rows = 0
        self._bytes = 0

    def __enter__(self) -> Self:
        Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
        self._file = _open_alone(self._part(".bin"))
        for ending in _BESIDE:  # of a writer that was killed
            Path(self._part(ending)).unlink(missing_ok=True)
        self._mask = open(self._part(".mask") if self.masked else os.devnull, "wb")
        return self

    def _part(self, ending: str) -> str:
        return f"{self.prefix}{ending}.part"

    def add(self, tokens: Ints, mask: NDArray[Any] | None = None) -> None:
        """Appends one document, its end-of-document token included."""
        self.add_documents(tokens, np.array([len(tokens)], np.int64), mask)

    def add_documents(
        self, tokens: NDArray[Any], lengths: Ints, mask: NDArray[Any] | None = None
    ) -> None:
        """Appends documents of `lengths` tokens, one after the other in `tokens`; `mask` is theirs,
        1 or 0 for each token.
        """
        assert int(lengths.sum()) == len(tokens), (int(lengths.sum()), len(tokens))
        assert self.masked == (mask is not None), "a mask for every document, or for none"
        assert mask is None or (mask.shape == tokens.shape and mask.max(initial=0) <= 1), mask
        if len(lengths) == 0:
            return
        if lengths.min() < 1 or lengths.max() > _MAX_LENGTH:
            raise DataError(f"a document has 1 to {_MAX_LENGTH} tokens, not {lengths.tolist()}")
        if tokens.min() < 0 or tokens.max() >= self.vocab:
            at = int(((tokens < 0) | (tokens >= self.vocab)).argmax())
            ends = np.cumsum(lengths)
            document = int(np.searchsorted(ends, at, side="right"))
            raise DataError(
                f"{self.prefix}: document {self._rows + document}, offset "
                f"{at - ends[document] + lengths[document]}: token id {tokens[at]} is outside the "
                f"vocabulary of {self.vocab}"
            )
        starts = self._bytes + (np.cumsum(lengths) - lengths) * self.dtype.itemsize
        self._file.write(tokens.astype(self.dtype).tobytes())
        if mask is not None:
            self._mask.write(mask.astype(np.uint8).tobytes())
        self._lengths.append(lengths.astype("<i4"))
        self._offsets.append(starts.astype("<i8"))
        self._documents.append(self._rows + 1 + np.arange(len(lengths), dtype="<i8"))
        self._rows += len(lengths)
        self._bytes += len(tokens) * self.dtype.itemsize

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._file, self._mask:
            try:
                if kind is None:
                    self._commit()
                    return
            except BaseException:
                self._discard()
                raise
            self._discard()

    def _discard(self) -> None:
        # The tokens' name is the lock between writers, so it goes last and while the lock is still
        # held.
        for ending in (*_BESIDE, ".idx", ".bin"):
            Path(self._part(ending)).unlink(missing_ok=True)

    def _commit(self) -> None:
        if not self._rows:
            raise DataError(f"{self.prefix}: no documents to write")
        _sync(self._file)
        if self.masked:
            _sync(self._mask)
        boundaries = sum(map(len, self._documents))
        code = next(code for code, kind in TOKEN_DTYPES.items() if np.dtype(kind) == self.dtype)
        with open(self._part(".idx"), "wb") as file:
            file.write(HEADER.pack(MAGIC, 1, code, self._rows, boundaries))
            for arrays in (self._lengths, self._offsets, self._documents):
                file.writelines(array.tobytes() for array in arrays)
            _sync(file)
        if self.sidecar is not None:
            with open(self._part(".json"), "wb") as file:
                file.write(json.dumps(self.sidecar, indent=1).encode() + b"\n")
                _sync(file)
        # Old and new files must never stand side by side: the old tokens go first and the new ones
        # come last, which also lets the next writer in.
        Path(f"{self.prefix}.bin").unlink(missing_ok=True)
        for ending in _BESIDE:
            Path(f"{self.prefix}{ending}").unlink(missing_ok=True)
            if os.path.exists(self._part(ending)):
                os.replace(self._part(ending), f"{self.prefix}{ending}")
        os.replace(self._part(".idx"), f"{self.prefix}.idx")
        os.replace(self._part(".bin"), f"{self.prefix}.bin")


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _open_alone(path: str) -> BinaryIO:
    """Opens `path` empty for writing under a lock that the system drops when the process dies."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between opening and locking, the former writer may have renamed or removed the file.
        if not os.path.exists(path) or not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            raise BlockingIOError
        file.truncate()
    except BlockingIOError:
        file.close()
        raise DataError(f"{path}: another process is writing this token file") from None
    return file
