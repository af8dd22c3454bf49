"""Places at URLs, `s3://bucket/run/checkpoints`: what checkpoints read there, and write.

`Remote` has the few methods of `pathlib.Path` that checkpoints use, so what reads a step does not
know where it lies. fsspec and the package of the protocol do the rest, retries too. Its file system
is asked for anew at each operation: fsspec keeps one for the process, and another after a fork.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from fsspec.core import url_to_fs
from fsspec.registry import get_filesystem_class

from penteract.checkpoint.format import CheckpointError

# What an upload sends at a time. S3 takes 10,000 such parts: files of 320 GB.
PART_BYTES = 1 << 25
PIECE_BYTES = 1 << 22  # a part is at most so much longer
_URL = re.compile(r"([a-z][a-z0-9+.-]+)://[^*?\[]*[^*?\[/]", re.IGNORECASE)
_MODES = {"file": stat.S_IFREG, "directory": stat.S_IFDIR}


@contextlib.contextmanager
def _faults(url: str | None = None) -> Iterator[None]:
    """Every package has errors of its own: make them FileNotFoundError or ConnectionError."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url) from error
    except Exception as error:
        number, text = getattr(error, "errno", None), getattr(error, "strerror", None)
        said = text or str(error) or type(error).__name__
        raise ConnectionError(number or errno.EIO, said, url) from error


@dataclass(frozen=True)
class Remote:
    """A folder or an object at a URL. Every method may raise ConnectionError."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> Remote:
        return Remote(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> Remote:
        return Remote(self.url.rpartition("/")[0])

    @contextlib.contextmanager
    def system(self) -> Iterator[tuple[Any, str]]:
        """fsspec's file system, and the path in it; whatever is raised within is an OSError."""
        # An object store has no folders to make; the one on a disk that fsspec has does.
        options = {"auto_mkdir": True} if self.url.startswith(("file:", "local:")) else {}
        with _faults(self.url):
            fs, path = url_to_fs(self.url, **options)
            fs.invalidate_cache()  # other ranks and runs write there too
            yield fs, path

    def stat(self) -> os.stat_result:
        """Only kind and size are said."""
        with self.system() as (fs, path):
            found = fs.info(path)
        mode = stat.S_IFLNK if found.get("islink") else _MODES.get(found["type"], 0)
        return os.stat_result((mode, 0, 0, 0, 0, 0, found["size"] or 0, 0, 0, 0))

    lstat = stat

    # Not fsspec's own `exists` and `isdir`: they take any fault for a no.
    def exists(self) -> bool:
        return bool(self._mode())

    def is_dir(self) -> bool:
        return stat.S_ISDIR(self._mode())

    def _mode(self) -> int:
        try:
            return self.stat().st_mode
        except FileNotFoundError:
            return 0

    def iterdir(self) -> Iterator[Remote]:
        with self.system() as (fs, path):
            found = [name.rstrip("/") for name in fs.ls(path, detail=False)]
        names = {name.rpartition("/")[2] for name in found if name != path.rstrip("/")}
        return (self / name for name in sorted(names))

    def find(self) -> list[str]:
        """The names of all objects below, relative to this folder."""
        if not self.exists():
            return []
        with self.system() as (fs, path):
            begin = f"{path.rstrip('/')}/"
            return [name.removeprefix(begin) for name in fs.find(path) if name.startswith(begin)]

    def read(self, begin: int, end: int) -> bytes:
        """These bytes, in one request."""
        with self.system() as (fs, path):
            data = bytes(fs.cat_file(path, start=begin, end=end))
        if len(data) != end - begin:
            text = f"{len(data)} bytes came of {begin} to {end}"
            raise ConnectionError(errno.EIO, text, self.url)
        return data

    def read_bytes(self) -> bytes:
        with self.system() as (fs, path):
            return bytes(fs.cat_file(path))

    def read_text(self, *, errors: str) -> str:
        return self.read_bytes().decode(errors=errors)

    def open(self, mode: str = "rb", buffering: int = -1) -> io.RawIOBase:
        """To be read from its begin to its end."""
        assert mode == "rb"
        return _Ranges(self, self.stat().st_size)

    def unlink(self, *, missing_ok: bool = False) -> None:
        if missing_ok and not self.exists():
            return
        with self.system() as (fs, path):
            fs.rm_file(path)


Place = Path | Remote


def place(path: str | Place) -> Place:
    """A path, or a folder at a URL. Raises CheckpointError where fsspec cannot go there."""
    if not isinstance(path, str):
        return path
    if "://" not in path:
        return Path(path)
    match = _URL.fullmatch(path.rstrip("/"))
    if match is None:
        raise CheckpointError(f"{path}: need PROTOCOL://PATH, without any of * ? [")
    try:
        get_filesystem_class(match[1])
    except ValueError:
        raise CheckpointError(f"{path}: fsspec knows no protocol {match[1]!r}") from None
    except ImportError as error:  # it says what to install
        raise CheckpointError(f"{path}: {error}") from error
    return Remote(match[0])


class _Ranges(io.RawIOBase):
    """An object that is read in order: a request for each read, and nothing read ahead."""

    def __init__(self, source: Remote, size: int) -> None:
        self._source, self._size, self._at = source, size, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self._size - self._at)
        if count:
            buffer[:count] = self._source.read(self._at, self._at + count)
            self._at += count
        return count

    def fileno(self) -> int:
        raise OSError(errno.EOPNOTSUPP, "no locks at a URL")  # as file systems without them say


class Objects:
    """Every operation that writing a checkpoint at a URL makes; beside `storage.Files`."""

    def create(self, path: Remote) -> BinaryIO:
        """An object that is sent part by part, and there as a whole once it is synced."""
        with path.system() as (fs, name):
            return cast(BinaryIO, fs.open(name, "wb", block_size=PART_BYTES))

    def write(self, file: BinaryIO, data: memoryview) -> None:
        with _faults():
            while data:
                data = data[file.write(data[:PIECE_BYTES]) :]

    def sync(self, file: BinaryIO) -> None:
        with _faults():
            file.close()

    def close(self, file: BinaryIO) -> None:
        """Of one that is synced, or that is no longer wanted: then no more of it is sent."""
        if file.closed:
            return
        upload = cast(Any, file)
        # Not all have `discard`, or can be closed so; their faults are no news.
        with contextlib.suppress(Exception):
            upload.discard()
            upload.closed = True
        with contextlib.suppress(OSError):
            self.sync(file)

    def put(self, path: Remote, data: bytes) -> None:
        """An object, old or new at every moment."""
        with path.system() as (fs, name):
            fs.pipe_file(name, data)

    def touch(self, path: Remote) -> None:
        self.put(path, b"")

    def copy(self, source: Remote, target: Remote) -> None:
        """All below a folder."""
        with source.system() as (fs, name):
            fs.copy(f"{name}/", f"{url_to_fs(target.url)[1]}/", recursive=True)

    def remove(self, path: Remote) -> None:
        """An object, or all below a folder."""
        with path.system() as (fs, name):
            fs.rm(name, recursive=True)
