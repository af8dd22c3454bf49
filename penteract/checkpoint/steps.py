"""The directory that holds the steps of a run: which are there, which is good, which may go.

    step-00001000/                  complete: it was renamed into place as a whole
    step-00001000/pinned            where it is there, `retain` leaves the step
    latest                          text: the name of the newest step; a help for people and tools
    .tmp-step-00001000-<nonce>/     a save that is running, or died
    rewound-step-00001000-<nonce>/  one that a run went back before, pinned or being read then
    .old-step-00001000-<nonce>/     a step that is being replaced by the same step saved again
    .lock                           held by the one writer

At a URL a step is complete where it has a manifest, and there are no names with a dot but `.lock`.
Steps are ordered by number, never by time: clocks go backwards.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from penteract.checkpoint.agreement import together
from penteract.checkpoint.commit import LATEST, OLD, STEP, protocol_of
from penteract.checkpoint.examine import PINNED, read_manifest, reading, verify
from penteract.checkpoint.format import MANIFEST, CheckpointError, to_json
from penteract.checkpoint.remote import Place, place
from penteract.checkpoint.storage import Storage
from penteract.mesh import Axis, single

log = logging.getLogger(__name__)


def step_name(step: int) -> str:
    """The directory's name of step number `step`."""
    return f"step-{step:08d}"


def steps(directory: Place | str) -> list[tuple[int, Place]]:
    """(number, path) of the steps in `directory`, by number; complete or not is not asked.

    A step that a killed writer had moved aside, and whose successor did not get its place, counts.
    """
    directory = place(directory)
    if not directory.is_dir():
        return []
    found: dict[str, Place] = {}
    for name in sorted((path.name for path in directory.iterdir()), reverse=True):
        aside = OLD.fullmatch(name)  # "step-" is after ".old-": it comes first
        found.setdefault(aside[1] if aside else name, directory / name)
    numbered = {name: int(match[1]) for name in found if (match := STEP.fullmatch(name))}
    return sorted((n, found[name]) for name, n in numbered.items() if name == step_name(n))


def latest_good(
    directory: Place | str,
    *,
    hashes: bool = False,
    fall_back: bool = False,
    axis: Axis | None = None,
    told: Callable[[int], None] = lambda more_bytes: None,
) -> Place | None:
    """The newest step of `directory` that can be loaded, or None where no step was ever saved.

    Together with all ranks of `axis`: rank 0 says which steps there are, and files are dealt over
    the ranks; `hashes` reads them whole. A step without a manifest was never finished and is
    passed over with a log line. So is a damaged one under `fall_back`; else CheckpointError names
    its damaged files, and the newest good step. It is raised too where no step is good. `told`
    hears of the bytes that this rank looks at.
    """
    directory, axis = place(directory), axis or single("world")
    deal = (axis.rank, axis.size)
    damaged: list[str] = []
    found = together(axis, lambda: _listed(directory) if axis.rank == 0 else [])[0]
    for number, name, finished in found:
        path = directory / name
        if not finished:
            _warn(f"{path}: passed over: it has no manifest, its save never finished", axis)
            continue
        answers = together(axis, partial(verify, path, hashes=hashes, deal=deal, told=told))
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


def _listed(directory: Place) -> list[tuple[int, str, bool]]:
    """(number, name, whether it has a manifest) of the steps, newest first."""
    return [(n, path.name, (path / MANIFEST).exists()) for n, path in reversed(steps(directory))]


def _warn(message: str, axis: Axis) -> None:
    if axis.rank == 0:
        log.warning("%s", message)


def find_step(path: Place | str) -> Place:
    """`path` if it is a step, else the newest good step in it. Raises CheckpointError."""
    path = place(path)
    if (path / MANIFEST).exists():
        return path
    found = latest_good(path)
    if found is None:
        raise CheckpointError(
            f"{path}: neither a step (with a {MANIFEST}) nor a directory of steps"
        )
    return found


def pointed(directory: Place | str) -> Place | None:
    """The step that `latest` names; None where there is no such file or it is out of date."""
    directory = place(directory)
    try:
        name = (directory / LATEST).read_text(errors="replace").strip()
    except FileNotFoundError:
        return None
    path = directory / name
    return path if STEP.fullmatch(name) and path.is_dir() else None


def pin(path: Place) -> None:
    """Have `retain` leave the step `path` for ever. Raises CheckpointError where there is none."""
    with reading(path):
        protocol_of(path).files.touch(path / PINNED)


def unpin(path: Place) -> None:
    """Let `retain` remove the step `path` again."""
    with reading(path):
        (path / PINNED).unlink(missing_ok=True)


def retain(
    directory: Place | str,
    keep: int | None,
    *,
    keep_every: int | None = None,
    files: Storage | None = None,
) -> list[Place]:
    """Remove steps older than the newest `keep` good ones (None keeps all); what was removed.

    Damaged and unfinished steps do not count, so the newest good one always stays. So does the one
    that `latest` names, those whose number `keep_every` divides, those that are pinned, and those
    that a process is reading. Only the holder of the lock may call this.
    """
    if keep is None:
        return []
    if keep < 1:
        raise CheckpointError(f"cannot keep {keep} steps: keep at least 1, or leave keep out")
    directory = place(directory)
    older = steps(directory)
    good = 0
    while older and good < keep:
        _, path = older.pop()
        good += not verify(path, hashes=False)
    removed, protocol = [], protocol_of(directory, files)
    for number, path in older:
        if path == pointed(directory) or (keep_every and number % keep_every == 0):
            continue
        try:
            removed += [path] if protocol.remove(path, step_name(number)) else []
        except OSError as error:
            log.warning("%s: could not be removed (%s)", path, error.strerror)
    return removed


def go_back(path: Place, state: Mapping[str, Any], *, files: Storage | None = None) -> list[Place]:
    """Make `path` the newest step of its directory, and give it another `state`; what of newer
    steps was set aside.

    Those are removed, the newest first, or where one is pinned or being read renamed to
    `rewound-…`, which counts as no step; who reads one finds its files gone. At every moment the
    newest step is a whole one of before or after. Only the holder of the lock may call this.
    """
    directory, nonce = path.parent, secrets.token_hex(4)
    protocol, manifest = protocol_of(directory, files), read_manifest(path)
    if manifest.state != state:
        text = to_json(dataclasses.replace(manifest, state=dict(state)))
        protocol.replace(directory, path / MANIFEST, text.encode())
    protocol.replace(directory, directory / LATEST, f"{path.name}\n".encode())
    aside = []
    for number, newer in reversed(steps(directory)):
        if number <= manifest.step:
            break
        if not protocol.remove(newer, step_name(number)):
            aside.append(directory / f"rewound-{newer.name}-{nonce}")
            protocol.move(newer, aside[-1])
    return aside
