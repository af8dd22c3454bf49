"""Every operation on a disk that writing a checkpoint makes, in one object, and the lock.

The object exists so that a test can fail or kill a save at each of its operations in turn. At a URL
`remote.Objects` stands for it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol

import xxhash

from penteract.checkpoint.format import CheckpointError, StoredFile
from penteract.checkpoint.remote import Objects, Place, Remote, place


class Storage(Protocol):
    """What writing a file takes, on a disk or at a URL."""

    def create(self, path: Any) -> BinaryIO: ...
    def write(self, file: BinaryIO, data: memoryview) -> None: ...
    def sync(self, file: BinaryIO) -> None: ...
    def close(self, file: BinaryIO) -> None: ...
    def touch(self, path: Any) -> None: ...


class Files:
    """The real file system."""

    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def free_bytes(self, path: Path) -> int | None:
        """Of the file system that a directory is on, where it says."""
        usage = shutil.disk_usage(path)
        return usage.free if usage.total else None

    def create(self, path: Path) -> BinaryIO:
        """A new file, unbuffered: what a write returned from is in the kernel's hands."""
        return path.open("xb", buffering=0)

    def write(self, file: BinaryIO, data: memoryview) -> None:
        while data:  # one call may take only a part
            data = data[file.write(data) :]

    def sync(self, file: BinaryIO) -> None:
        os.fsync(file.fileno())

    def close(self, file: BinaryIO) -> None:
        file.close()

    def touch(self, path: Path) -> None:
        """An empty file, if there is none."""
        path.touch()
        self.sync_directory(path.parent)

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems keep directories in order by themselves and refuse this.
            if error.errno != errno.EINVAL:
                raise
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Atomic; a file at `target` is replaced."""
        source.replace(target)

    def remove(self, path: Path) -> None:
        """A file, or a directory with all that is in it."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


class HashedFile:
    """A new file whose hash is made while it is written."""

    def __init__(self, path: Place, files: Storage) -> None:
        self._files = files
        self._file = files.create(path)
        self._hash = xxhash.xxh3_128()
        self._bytes = 0

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.close(self._file)

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self._bytes += view.nbytes
        self._files.write(self._file, view)

    def finish(self) -> StoredFile:
        """Bring the file to the disk; its length and hash."""
        self._files.sync(self._file)
        return StoredFile(self._bytes, self._hash.hexdigest())


def hash_file(
    path: Place,
    bucket_bytes: int = 1 << 22,
    *,
    told: Callable[[int], None] = lambda more_bytes: None,
) -> str:
    """xxh3 of 128 bits over a whole file, in hexadecimal; memory of one bucket."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(bucket_bytes))
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(buffer):
            digest.update(buffer[:read])
            told(read)
    return digest.hexdigest()


LOOK_S = 1.0  # a step that is held for longer is being removed
# What file systems without locks answer.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@contextmanager
def in_use(path: Place) -> Iterator[None]:
    """Hold the file `path` as one of any number of readers.

    Raises CheckpointError where it is removed just now. Where a file system has no locks nothing
    is held.
    """
    with path.open("rb") as file:
        try:
            if not _shared(file) or (
                isinstance(path, Path) and not _is(path, os.fstat(file.fileno()))
            ):
                raise CheckpointError(f"{path.parent}: is being removed by a run")
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield


def _shared(file: Any) -> bool:
    """Lock a file with other readers; who has it `unused` may only be looking, for a moment."""
    end = time.monotonic() + LOOK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        else:
            return True


@contextmanager
def unused(path: Path) -> Iterator[bool]:
    """Whether no process has the file `path` `in_use`; none can before this ends."""
    with path.open("r+b") as file:  # some network file systems want this for an exclusive lock
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


@contextmanager
def lock(directory: Place | str) -> Iterator[Callable[[], bool]]:
    """Hold `directory` as its one writer; a run holds it on one rank for as long as it may save.

    The lock belongs to the process (and to children it forks) and goes when they end, however
    they end. What it yields says whether the directory is still the one that is held: it could
    have been removed, or its disk unmounted. Raises CheckpointError naming the holder where another
    process has it. At a URL nothing is held: that it can be written to is found out, before
    anything is computed.
    """
    directory = place(directory)
    me = f"pid {os.getpid()} on {socket.gethostname()}\n".encode()
    if isinstance(directory, Remote):
        try:
            Objects().put(directory / ".lock", me)
        except OSError as error:
            raise CheckpointError(f"{directory}: cannot write there ({error.strerror})") from error
        yield lambda: True
        return
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / ".lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            raise CheckpointError(
                f"{directory}: another run writes checkpoints here ({holder or 'unknown'}): "
                "stop it, or choose another directory"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, me, 0)
        here = directory.stat()
        yield lambda: _is(directory, here)
    finally:
        os.close(descriptor)


def _is(path: Path, stat: os.stat_result) -> bool:
    """Whether there is still the same file or directory."""
    try:
        return os.path.samestat(path.stat(), stat)
    except OSError:
        return False
