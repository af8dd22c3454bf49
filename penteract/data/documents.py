"""Where text comes from: which files, cut into tasks, and the documents in them.

A `.txt` file is one document, a `.jsonl` file one a line, the Python standard library one a source
file. A document that cannot be used is passed on with the reason, to be skipped and counted.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penteract.data.indexed import DataError
from penteract.errors import UserError

_TASK_BYTES = 1 << 20  # enough to hide the hand-over to a worker, little enough to share out
_TASK_FILES = 256
_ENDINGS = (".txt", ".jsonl")
# Test suites and build settings are left out: distributions differ in them.
_STDLIB_SKIP = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Piece:
    """Bytes [start, stop) of a file; of a `.jsonl`, the lines that start there."""

    path: str
    start: int
    stop: int


@dataclass(frozen=True)
class Document:
    """A text, or the reason why there is none, and where it stands."""

    where: str
    text: str = ""
    fault: str = ""


def list_files(inputs: Sequence[str], source: str | None) -> list[Path]:
    """Files in the order of `inputs`, directories walked by name; or those of `source="stdlib"`."""
    if (source is None) == (not inputs):
        raise UserError("give either input files or --source stdlib")
    if source is not None and source != "stdlib":
        raise UserError(f"source {source!r} is unknown; there is one: stdlib")
    if source is not None:
        return _stdlib_files()
    return [path for name in inputs for path in _expand(name)]


def _expand(name: str) -> list[Path]:
    path = Path(name)
    if not path.exists():
        raise UserError(f"input {name}: no such file or directory")
    if not path.is_dir():
        if path.suffix not in _ENDINGS:
            raise UserError(f"input {name}: the ending must be one of {', '.join(_ENDINGS)}")
        return [path]
    found = [below for below in path.rglob("*") if below.suffix in _ENDINGS and below.is_file()]
    if not found:
        raise UserError(f"input {name}: no file below it ends in {' or '.join(_ENDINGS)}")
    return sorted(found, key=lambda below: below.relative_to(path).as_posix())


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    names: list[str] = []
    for folder, below, files in os.walk(root):
        below[:] = set(below) - _STDLIB_SKIP  # assigned in place, so that they are not walked
        here = Path(folder).relative_to(root)
        names += [
            (here / file).as_posix()
            for file in files
            if file.endswith(".py") and not file.startswith("_sysconfigdata")
        ]
    if not names:
        raise UserError(f"the standard library has no sources at {root}; build from --input files")
    return [root / name for name in sorted(names)]


def plan_tasks(files: Sequence[Path]) -> list[list[Piece]]:
    """Tasks of about 1 MiB: runs of small files, whole `.txt` files, spans of `.jsonl` files."""
    tasks: list[list[Piece]] = [[]]
    room = _TASK_BYTES
    for piece in _pieces(files):
        size = piece.stop - piece.start
        if tasks[-1] and (size > room or len(tasks[-1]) == _TASK_FILES):
            tasks.append([])
            room = _TASK_BYTES
        tasks[-1].append(piece)
        room -= size
    return tasks


def _pieces(files: Sequence[Path]) -> Iterator[Piece]:
    for path in files:
        size = path.stat().st_size
        step = _TASK_BYTES if path.suffix == ".jsonl" else max(size, 1)
        for start in range(0, max(size, 1), step):
            yield Piece(str(path), start, min(start + step, size))


def read_documents(piece: Piece, key: str) -> Iterator[Document]:
    """Documents of a piece in file order. Raises DataError for a file that cannot be read."""
    try:
        if Path(piece.path).suffix == ".jsonl":
            yield from _read_lines(piece, key)
        else:
            yield _decode(piece.path, Path(piece.path).read_bytes())
    except OSError as error:
        raise DataError(f"input {piece.path}: {error.strerror}") from None


def _decode(where: str, content: bytes) -> Document:
    try:
        return Document(where, content.decode())
    except UnicodeDecodeError as error:
        return Document(f"{where} at byte {error.start}", fault="not UTF-8")


def _read_lines(piece: Piece, key: str) -> Iterator[Document]:
    with open(piece.path, "rb") as file:
        if piece.start:
            # A line belongs to the piece in which it starts: step back one byte and past a line's
            # end.
            file.seek(piece.start - 1)
            file.readline()
        while (at := file.tell()) < piece.stop and (line := file.readline()):
            if line.strip():
                yield _parse(f"{piece.path} at byte {at}", line, key)


def _parse(where: str, line: bytes, key: str) -> Document:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return Document(where, fault="not JSON in UTF-8")
    text = record.get(key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        return Document(where, fault=f"without a text under {key!r}")
    try:
        text.encode()
    except UnicodeEncodeError:
        return Document(where, fault="not Unicode (half of a surrogate pair)")
    return Document(where, text)
