"""The tensors of one step, read box by box."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from penteract.checkpoint.format import DTYPES, Manifest, check_header_length, parse_spans
from penteract.checkpoint.remote import Place, Remote
from penteract.placement import Box, copies

OPEN_FILES = 256  # at most; a process may have 1024
RANGE_BYTES = 1 << 24  # of one request, at most
GAP_BYTES = 1 << 18  # sooner read than spared by another request
_DTYPES = {code: getattr(torch, name) for name, (code, _) in DTYPES.items()}


def open_tensors(file: Place) -> Any:
    """The tensors of a file that was checked, to be read slice by slice."""
    return safe_open(file, framework="pt") if isinstance(file, Path) else _Ranged(file)


class Reader:
    """Reads any box of a step's tensors, whichever files it lies in. `check_files` comes first."""

    def __init__(self, path: Place, manifest: Manifest) -> None:
        self.tensors = manifest.tensors
        self._open = lru_cache(OPEN_FILES)(lambda file: open_tensors(path / file))

    def read(self, name: str, box: Box) -> Tensor:
        """A new tensor of the box's size on the host."""
        stored = self.tensors[name]
        values = torch.empty(box.size, dtype=getattr(torch, stored.dtype))
        for index, part in copies([place.box for place in stored.boxes], box):
            place = stored.boxes[index]
            source = self._open(place.file).get_slice(place.key)
            into = values[part.relative_to(box.offset).slices()]
            into.copy_(source[part.relative_to(place.box.offset).slices()])
        return values


class _Ranged:
    """As `safe_open`, at a URL: the header is read, and then the ranges that slices lie in."""

    def __init__(self, file: Remote) -> None:
        self._file, size = file, file.stat().st_size
        length = check_header_length(file.read(0, min(8, size)), size, str(file))
        self._data_begin = 8 + length
        header = file.read(8, self._data_begin)
        self._spans = parse_spans(header, size - self._data_begin, str(file))

    def __enter__(self) -> _Ranged:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held open."""

    def get_slice(self, key: str) -> _Slices:
        code, shape, begin = self._spans[key]
        return _Slices(self._file, self._data_begin + begin, shape, _DTYPES[code])


class _Slices:
    """A tensor at byte `begin` of a file. Slices of it, without steps, are read row by row, where
    rows of the first dim are too long to read whole, else as many rows at a time as a range has.
    """

    def __init__(
        self, file: Remote, begin: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self._file, self._begin, self._shape, self._dtype = file, begin, shape, dtype

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        size = [s.stop - s.start for s in part]
        values = torch.empty(size, dtype=self._dtype)
        if not part:
            return _Slices(self._file, self._begin, (1,), self._dtype)[slice(0, 1),].view(())
        if not values.numel():
            return values
        row_bytes = math.prod(self._shape[1:]) * self._dtype.itemsize
        spare_bytes = row_bytes - values[0].nbytes
        if spare_bytes and (size[0] == 1 or spare_bytes > GAP_BYTES):
            for row, into in zip(range(part[0].start, part[0].stop), values, strict=True):
                begin = self._begin + row * row_bytes
                into.copy_(_Slices(self._file, begin, self._shape[1:], self._dtype)[part[1:]])
            return values
        many = max(1, RANGE_BYTES // row_bytes)
        for row in range(0, size[0], many):
            into = values[row : row + many]
            begin = self._begin + (part[0].start + row) * row_bytes
            data = bytearray(self._file.read(begin, begin + len(into) * row_bytes))
            rows = torch.frombuffer(data, dtype=self._dtype)
            rows = rows.view(len(into), *self._shape[1:])  # [many, *shape[1:]]
            into.copy_(rows[(slice(None), *part[1:])])
        return values
