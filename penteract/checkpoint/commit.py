"""How a step gets its place and loses it: on a disk by renames, at a URL by its manifest.

A disk renames a whole directory at one moment. An object store has no rename, but an object is the
old or the new one at every moment: there the manifest, written last, is the commit. The other files
of a step have the save's nonce in their names, so none that an earlier attempt left is ever taken
for one of a later; and a step that is saved again is the old one until its manifest is replaced.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penteract.checkpoint.examine import PINNED, read_manifest
from penteract.checkpoint.format import MANIFEST, CheckpointError
from penteract.checkpoint.remote import Objects, Place, Remote
from penteract.checkpoint.storage import Files, HashedFile, Storage, unused

log = logging.getLogger(__name__)

LATEST = "latest"
STEP = re.compile(r"step-([0-9]{8,18})")
OLD = re.compile(r"\.old-(step-[0-9]{8,18})-[0-9a-f]+")
_LEFTOVER = re.compile(r"\.tmp-step-[0-9]{8,18}-[0-9a-f]+|\.(?:latest|new)-[0-9a-f]+")
_WRITTEN = re.compile(r"rank-[0-9]{5}(?:-([0-9a-f]+))?\.safetensors")


class CommitProtocol(Protocol):
    """What differs between a disk and a URL. Steps and folders are of the kind that each has."""

    @property
    def files(self) -> Storage: ...

    def home(self, step: Any, nonce: str) -> Any:
        """Where a save writes its files."""

    def file_name(self, rank: int, nonce: str) -> str: ...

    def taken(self, step: Any) -> bool:
        """Whether there is a step already."""

    def prepare(self, home: Any) -> None: ...

    def free_bytes(self, home: Any) -> int | None:
        """What can still be written, where that is known."""

    def publish(self, home: Any, step: Any, manifest: bytes, *, point: bool = True) -> None:
        """The files in `home` become the step, at one moment; then `point` `latest` to it.

        If it is there already, the old or the new one is whole at every moment.
        """

    def tidy(self, directory: Any) -> None:
        """Clear away what dead writers left, with a log line each. Only the one writer may."""

    def replace(self, directory: Any, file: Any, data: bytes) -> None:
        """Write a small file in a folder of steps or below, old or new at every moment."""

    def move(self, step: Any, target: Any) -> None:
        """Give a step another name, under which it is none."""

    def remove(self, step: Any, name: str) -> bool:
        """Remove a step, unless it is pinned or being read; whether it is gone."""


def protocol_of(directory: Place, files: Storage | None = None) -> CommitProtocol:
    if isinstance(directory, Remote):
        assert files is None or isinstance(files, Objects)
        return Manifests(files or Objects())
    assert files is None or isinstance(files, Files)
    return Renames(files or Files())


@dataclass(frozen=True)
class Renames:
    """On a disk."""

    files: Files

    def home(self, step: Path, nonce: str) -> Path:
        return step.with_name(f".tmp-{step.name}-{nonce}")

    def file_name(self, rank: int, nonce: str) -> str:
        return f"rank-{rank:05d}.safetensors"

    def taken(self, step: Path) -> bool:
        return step.exists()

    def prepare(self, home: Path) -> None:
        self.files.make_directory(home.parent)
        self.tidy(home.parent)
        self.files.make_directory(home)

    def free_bytes(self, home: Path) -> int | None:
        return self.files.free_bytes(next(path for path in home.parents if path.exists()))

    def publish(self, home: Path, step: Path, manifest: bytes, *, point: bool = True) -> None:
        """A step that is there already is moved aside first and removed last."""
        files, directory, nonce = self.files, step.parent, home.name.rpartition("-")[2]
        with HashedFile(home / MANIFEST, files) as out:
            out.write(manifest)
            out.finish()
        files.sync_directory(home)
        aside = directory / f".old-{step.name}-{nonce}"
        replacing = step.exists()
        if (step / PINNED).exists():
            files.create(home / PINNED).close()
            files.sync_directory(home)
        if replacing:
            files.rename(step, aside)
        files.rename(home, step)
        files.sync_directory(directory)
        if point:
            self.replace(directory, directory / LATEST, f"{step.name}\n".encode())
        if replacing:
            files.remove(aside)

    def replace(self, directory: Path, file: Path, data: bytes) -> None:
        fresh = directory / f".new-{secrets.token_hex(4)}"
        with HashedFile(fresh, self.files) as out:
            out.write(data)
            out.finish()
        self.files.rename(fresh, file)
        self.files.sync_directory(file.parent)

    def move(self, step: Path, target: Path) -> None:
        self.files.rename(step, target)
        self.files.sync_directory(step.parent)

    def tidy(self, directory: Path) -> None:
        """A step that was moved aside goes back to its place, unless its successor is there."""
        if not directory.is_dir():
            return
        for path in sorted(directory.iterdir()):
            aside = OLD.fullmatch(path.name)
            if aside and not (directory / aside[1]).exists():
                log.warning("%s: moved back, the save that was to replace it did not finish", path)
                self.files.rename(path, directory / aside[1])
                self.files.sync_directory(directory)
            elif aside or _LEFTOVER.fullmatch(path.name):
                log.warning("%s: removed, left by a save that did not finish", path)
                self.files.remove(path)

    def remove(self, step: Path, name: str) -> bool:
        with contextlib.ExitStack() as stack:
            if (step / MANIFEST).exists() and not stack.enter_context(unused(step / MANIFEST)):
                return False
            if (step / PINNED).exists():
                return False
            # Renamed first: a removal that is cut short must not leave half a step under its name.
            gone = step.with_name(f".tmp-{name}-{secrets.token_hex(4)}")
            self.files.rename(step, gone)
            self.files.remove(gone)
        return True


@dataclass(frozen=True)
class Manifests:
    """At a URL. Nobody can be seen reading there."""

    files: Objects

    def home(self, step: Remote, nonce: str) -> Remote:
        return step

    def file_name(self, rank: int, nonce: str) -> str:
        return f"rank-{rank:05d}-{nonce}.safetensors"

    def taken(self, step: Remote) -> bool:
        return (step / MANIFEST).exists()

    def prepare(self, home: Remote) -> None:
        self.tidy(home.parent)

    def free_bytes(self, home: Remote) -> int | None:
        return None

    def publish(self, home: Remote, step: Remote, manifest: bytes, *, point: bool = True) -> None:
        self.files.put(step / MANIFEST, manifest)
        if point:
            self.files.put(step.parent / LATEST, f"{step.name}\n".encode())
        self._drop_replaced(step, [path.name for path in step.iterdir()])

    def tidy(self, directory: Remote) -> None:
        """One listing of everything; a manifest is read only where two saves left files."""
        steps = defaultdict(list)
        for path in directory.find():
            step, _, name = path.partition("/")
            if STEP.fullmatch(step):
                steps[step].append(name)
        for step, names in sorted(steps.items()):
            if MANIFEST in names:
                self._drop_replaced(directory / step, names)
            else:
                log.warning("%s: removed, it was never finished", directory / step)
                self.files.remove(directory / step)

    def _drop_replaced(self, step: Remote, names: Iterable[str]) -> None:
        """Of the files `names` in a step remove those that another save wrote than its manifest."""
        written = {name: match[1] for name in names if (match := _WRITTEN.fullmatch(name))}
        if len(set(written.values())) < 2:
            return
        try:
            named = read_manifest(step).files
        except CheckpointError:  # damaged: which are its own cannot be said
            return
        for name in sorted(written.keys() - named.keys()):
            self.files.remove(step / name)

    def replace(self, directory: Remote, file: Remote, data: bytes) -> None:
        self.files.put(file, data)

    def move(self, step: Remote, target: Remote) -> None:
        self.files.copy(step, target)
        self._remove(step)

    def remove(self, step: Remote, name: str) -> bool:
        if (step / PINNED).exists():
            return False
        self._remove(step)
        return True

    def _remove(self, step: Remote) -> None:
        if (step / MANIFEST).exists():
            # First: what a removal that is cut short leaves is no step, and goes with `tidy`.
            self.files.remove(step / MANIFEST)
        if step.exists():
            self.files.remove(step)
