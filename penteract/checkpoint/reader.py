"""The tensors of one step, read box by box."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from penteract.checkpoint.format import Manifest
from penteract.placement import Box, copies

OPEN_FILES = 256  # at most; a process may have 1024


class Reader:
    """Reads any box of a step's tensors, whichever files it lies in. `check_files` comes first."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.tensors = manifest.tensors
        self._open = lru_cache(OPEN_FILES)(lambda file: safe_open(path / file, framework="pt"))

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
