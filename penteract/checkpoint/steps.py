"""The directory that holds the steps of a run: which are there, which is good, which may go.

    step-00001000/                  complete: it was renamed into place as a whole
    step-00001000/pinned            where it is there, `retain` leaves the step
    latest                          text: the name of the newest step; a help for people and tools
    .tmp-step-00001000-<nonce>/     a save that is running, or died
    rewound-step-00001000-<nonce>/  one that a run went back before, pinned or being read then
    .old-step-00001000-<nonce>/     a step that is being replaced by the same step saved again
    .lock                           held by the one writer

Steps are ordered by number, never by time: clocks go backwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import secrets
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from penteract.checkpoint.agreement import together
from penteract.checkpoint.examine import PINNED, read_manifest, reading, verify
from penteract.checkpoint.format import MANIFEST, CheckpointError, to_json
from penteract.checkpoint.storage import Files, HashedFile, unused
from penteract.mesh import Axis, single

log = logging.getLogger(__name__)

LATEST = "latest"
_STEP = re.compile(r"step-([0-9]{8,18})")
_OLD = re.compile(r"\.old-(step-[0-9]{8,18})-[0-9a-f]+")
_LEFTOVER = re.compile(r"\.tmp-step-[0-9]{8,18}-[0-9a-f]+|\.latest-[0-9a-f]+")


def step_name(step: int) -> str:
    """The directory's name of step number `step`."""
    return f"step-{step:08d}"


def steps(directory: Path | str) -> list[tuple[int, Path]]:
    """(number, path) of the steps in `directory`, by number; complete or not is not asked.

    A step that a killed writer had moved aside, and whose successor did not get its place, counts.
    """
    directory = Path(directory)
    if not directory.is_dir():
        return []
    found: dict[str, Path] = {}
    for path in sorted(directory.iterdir(), reverse=True):  # "step-" after ".old-": it comes first
        aside = _OLD.fullmatch(path.name)
        found.setdefault(aside[1] if aside else path.name, path)
    numbered = {name: int(match[1]) for name in found if (match := _STEP.fullmatch(name))}
    return sorted((n, found[name]) for name, n in numbered.items() if name == step_name(n))


def latest_good(
    directory: Path | str,
    *,
    hashes: bool = False,
    fall_back: bool = False,
    axis: Axis | None = None,
) -> Path | None:
    """The newest step of `directory` that can be loaded, or None where no step was ever saved.

    Together with all ranks of `axis`: rank 0 says which steps there are, and files are dealt over
    the ranks; `hashes` reads them whole. A step without a manifest was never finished and is
    passed over with a log line. So is a damaged one under `fall_back`; else CheckpointError names
    its damaged files, and the newest good step. It is raised too where no step is good.
    """
    directory, axis = Path(directory), axis or single("world")
    deal = (axis.rank, axis.size)
    damaged: list[str] = []
    found = together(axis, lambda: _listed(directory) if axis.rank == 0 else [])[0]
    for number, name, finished in found:
        path = directory / name
        if not finished:
            _warn(f"{path}: passed over: it has no manifest, its save never finished", axis)
            continue
        answers = together(axis, partial(verify, path, hashes=hashes, deal=deal))
        faults = dict.fromkeys(fault for answer in answers for fault in answer)
        if not faults:
            break
        damaged.append(f"step {number} is damaged: " + "; ".join(faults))
        if fall_back:
            _warn(damaged[-1], axis)
    else:
        if damaged:
            raise CheckpointError(f"{directory}: no good step is left:\n" + "\n".join(damaged))
        return None
    if damaged and not fall_back:
        raise CheckpointError("\n".join([*damaged, f"the newest good step is {path}"]))
    return path


def _listed(directory: Path) -> list[tuple[int, str, bool]]:
    """(number, name, whether it has a manifest) of the steps, newest first."""
    return [(n, path.name, (path / MANIFEST).exists()) for n, path in reversed(steps(directory))]


def _warn(message: str, axis: Axis) -> None:
    if axis.rank == 0:
        log.warning("%s", message)


def find_step(path: Path | str) -> Path:
    """`path` if it is a step, else the newest good step in it. Raises CheckpointError."""
    path = Path(path)
    if (path / MANIFEST).exists():
        return path
    found = latest_good(path)
    if found is None:
        raise CheckpointError(
            f"{path}: neither a step (with a {MANIFEST}) nor a directory of steps"
        )
    return found


def pointed(directory: Path | str) -> Path | None:
    """The step that `latest` names; None where there is no such file or it is out of date."""
    directory = Path(directory)
    try:
        name = (directory / LATEST).read_text(errors="replace").strip()
    except FileNotFoundError:
        return None
    path = directory / name
    return path if _STEP.fullmatch(name) and path.is_dir() else None


def tidy(directory: Path, files: Files) -> None:
    """Clear away what dead writers left, with a log line each. Only the holder of the lock may.

    A step that had been moved aside goes back to its place, unless its successor is there.
    """
    for path in sorted(directory.iterdir()):
        aside = _OLD.fullmatch(path.name)
        if aside and not (directory / aside[1]).exists():
            log.warning("%s: moved back, the save that was to replace it did not finish", path)
            files.rename(path, directory / aside[1])
            files.sync_directory(directory)
        elif aside or _LEFTOVER.fullmatch(path.name):
            log.warning("%s: removed, left by a save that did not finish", path)
            files.remove(path)


def publish(directory: Path, temporary: Path, step: int, files: Files) -> Path:
    """Give a complete temporary directory its name, atomically, and point `latest` to it.

    A step of that number that is there already is moved aside first and removed last, so that at
    every moment the old or the new one is whole.
    """
    target = directory / step_name(step)
    nonce = temporary.name.rpartition("-")[2]
    aside = directory / f".old-{target.name}-{nonce}"
    replacing = target.exists()
    if (target / PINNED).exists():
        files.create(temporary / PINNED).close()
        files.sync_directory(temporary)
    if replacing:
        files.rename(target, aside)
    files.rename(temporary, target)
    files.sync_directory(directory)
    _point(directory, target, nonce, files)
    if replacing:
        files.remove(aside)
    return target


def _point(directory: Path, target: Path, nonce: str, files: Files) -> None:
    """Have `latest` name the step `target`."""
    pointer = directory / f".latest-{nonce}"
    with HashedFile(pointer, files) as out:
        out.write(f"{target.name}\n".encode())
        out.finish()
    files.rename(pointer, directory / LATEST)
    files.sync_directory(directory)


def pin(path: Path) -> None:
    """Have `retain` leave the step `path` for ever. Raises CheckpointError where there is none."""
    with reading(path):
        (path / PINNED).touch()
        Files().sync_directory(path)


def unpin(path: Path) -> None:
    """Let `retain` remove the step `path` again."""
    with reading(path):
        (path / PINNED).unlink(missing_ok=True)


def retain(
    directory: Path | str,
    keep: int | None,
    *,
    keep_every: int | None = None,
    files: Files | None = None,
) -> list[Path]:
    """Remove steps older than the newest `keep` good ones (None keeps all); what was removed.

    Damaged and unfinished steps do not count, so the newest good one always stays. So does the one
    that `latest` names, those whose number `keep_every` divides, those that are pinned, and those
    that a process is reading. Only the holder of the lock may call this.
    """
    if keep is None:
        return []
    if keep < 1:
        raise CheckpointError(f"cannot keep {keep} steps: keep at least 1, or leave keep out")
    directory, files = Path(directory), files or Files()
    older = steps(directory)
    good = 0
    while older and good < keep:
        _, path = older.pop()
        good += not verify(path, hashes=False)
    removed = []
    for number, path in older:
        if path == pointed(directory) or (keep_every and number % keep_every == 0):
            continue
        try:
            removed += [path] if _remove(path, number, files) else []
        except OSError as error:
            log.warning("%s: could not be removed (%s)", path, error.strerror)
    return removed


def go_back(path: Path, state: Mapping[str, Any], *, files: Files | None = None) -> list[Path]:
    """Make `path` the newest step of its directory, and give it another `state`; what of newer
    steps was set aside.

    Those are removed, the newest first, or where one is pinned or being read renamed to
    `rewound-…`, which counts as no step. At every moment the newest step is a whole one of before
    or after. Only the holder of the lock may call this.
    """
    files, directory, nonce = files or Files(), path.parent, secrets.token_hex(4)
    manifest = read_manifest(path)
    if manifest.state != state:
        fresh = path / f".{MANIFEST}-{nonce}"
        with HashedFile(fresh, files) as out:
            out.write(to_json(dataclasses.replace(manifest, state=dict(state))).encode())
            out.finish()
        files.rename(fresh, path / MANIFEST)
        files.sync_directory(path)
    _point(directory, path, nonce, files)
    aside = []
    for number, newer in reversed(steps(directory)):
        if number <= manifest.step:
            break
        if not _remove(newer, number, files):
            aside.append(directory / f"rewound-{newer.name}-{nonce}")
            files.rename(newer, aside[-1])
    files.sync_directory(directory)
    return aside


def _remove(path: Path, number: int, files: Files) -> bool:
    """Remove a step, unless it is pinned or being read; whether it is gone."""
    with contextlib.ExitStack() as stack:
        if (path / MANIFEST).exists() and not stack.enter_context(unused(path / MANIFEST)):
            return False
        if (path / PINNED).exists():
            return False
        # Renamed first: a removal that is cut short must not leave half a step under its name.
        gone = path.with_name(f".tmp-{step_name(number)}-{secrets.token_hex(4)}")
        files.rename(path, gone)
        files.remove(gone)
    return True
