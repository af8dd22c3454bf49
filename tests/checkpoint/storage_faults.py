"""Storage that fails, or dies, at a chosen moment; and small tensors to save."""

import errno
import os
from pathlib import Path
from typing import BinaryIO

import torch

from penteract.checkpoint.io import Shard
from penteract.checkpoint.remote import Objects, Remote
from penteract.checkpoint.storage import Files
from penteract.placement import whole

Held = list[tuple[Shard, torch.Tensor]]


def labelled(shape: tuple[int, ...], start: int = 1) -> torch.Tensor:
    """A tensor whose elements tell where they belong."""
    return torch.arange(start, start + torch.Size(shape).numel()).reshape(shape).float()


def wholes(tensors: dict[str, torch.Tensor]) -> Held:
    return [
        (Shard(name, tuple(t.shape), "float32", whole(tuple(t.shape))), t)
        for name, t in tensors.items()
    ]


class FullDisk(Files):
    """A disk with room for so many bytes."""

    def __init__(self, room_bytes: int) -> None:
        self.room_bytes = room_bytes

    def write(self, file: BinaryIO, data: memoryview) -> None:
        if data.nbytes > self.room_bytes:
            super().write(file, data[: self.room_bytes])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room_bytes -= data.nbytes
        super().write(file, data)


class Dead(BaseException):
    """The process is gone: nothing catches this, and nothing works after it."""


class Dying(Files):
    """A machine that loses power at operation number `last`.

    What was not synced is lost with it: files are cut in half, and names that their directory did
    not bring to the disk vanish.
    """

    def __init__(self, last: int) -> None:
        self.last = last
        self.done = 0
        self.dirty: set[Path] = set()
        self.unnamed: set[Path] = set()

    def step(self) -> None:
        if self.done == self.last:
            for path in self.dirty:
                if path.exists():
                    os.truncate(path, path.stat().st_size // 2)
            for path in self.unnamed:
                path.unlink(missing_ok=True)
            self.dirty, self.unnamed = set(), set()
            raise Dead
        self.done += 1

    def make_directory(self, path: Path) -> None:
        self.step()
        super().make_directory(path)

    def create(self, path: Path) -> BinaryIO:
        self.step()
        self.unnamed.add(path)
        return super().create(path)

    def write(self, file: BinaryIO, data: memoryview) -> None:
        self.dirty.add(Path(file.name))
        self.step()
        super().write(file, data)

    def sync(self, file: BinaryIO) -> None:
        self.step()
        super().sync(file)
        self.dirty.discard(Path(file.name))

    def sync_directory(self, path: Path) -> None:
        self.step()
        super().sync_directory(path)
        self.unnamed = {file for file in self.unnamed if file.parent != path}

    def rename(self, source: Path, target: Path) -> None:
        self.step()
        super().rename(source, target)
        moved = {p: target / p.relative_to(source) for p in self.dirty if p.is_relative_to(source)}
        self.dirty = {moved.get(p, p) for p in self.dirty}
        moved = {
            p: target / p.relative_to(source) for p in self.unnamed if p.is_relative_to(source)
        }
        self.unnamed = {moved.get(p, p) for p in self.unnamed}

    def remove(self, path: Path) -> None:
        self.step()
        if path.is_dir():  # die half-way: some of its files are gone
            next(iter(sorted(path.iterdir()))).unlink()
            self.step()
        super().remove(path)


class DyingObjects(Objects):
    """A process that is killed at operation number `last` at a URL, in the middle of it."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.done = 0

    def step(self) -> None:
        if self.done == self.last:
            raise Dead
        self.done += 1

    def create(self, path: Remote) -> BinaryIO:
        self.step()
        return super().create(path)

    def write(self, file: BinaryIO, data: memoryview) -> None:
        super().write(file, data[: len(data) // 2])
        self.step()
        super().write(file, data[len(data) // 2 :])

    def sync(self, file: BinaryIO) -> None:
        self.step()
        super().sync(file)

    def put(self, path: Remote, data: bytes) -> None:
        self.step()
        super().put(path, data)

    def remove(self, path: Remote) -> None:
        self.step()
        if below := path.find():  # die half-way: some of its files are gone
            (path / below[-1]).unlink()
            self.step()
        if path.exists():
            super().remove(path)

    def copy(self, source: Remote, target: Remote) -> None:
        self.step()
        first = next(source.iterdir())  # die half-way: one of its files is there
        super().put(target / first.name, first.read_bytes())
        self.step()
        super().copy(source, target)
