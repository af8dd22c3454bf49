"""Saving a step: the commit protocol.

A save, seen from outside, happens at one moment, the rename of a complete directory:

1. ranks tell each other what they hold, and each computes the same plan of who writes what;
2. rank 0 makes `.tmp-step-n-<nonce>`; every rank writes its one file there, hashing what it
   writes, with no more memory than one bucket, and brings it to the disk;
3. rank 0 writes the manifest, brings it to the disk, and renames the directory to `step-n`;
4. `latest` is replaced by a new text.

After each stage the ranks compare notes, so that a fault on one is a CheckpointError on all.

| what | axis | bytes a rank | when |
|---|---|---|---|
| names, shapes and boxes held | world | a few hundred a shard | first |
| done, or the error's text; length and hash | world | under 1 kB | after each stage |
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penteract.checkpoint.agreement import agreed, together
from penteract.checkpoint.format import (
    CheckpointError,
    Manifest,
    SaveError,
    StoredBox,
    StoredFile,
    StoredTensor,
    to_json,
)
from penteract.checkpoint.plan import Shard, Write, save_plan, written_bytes
from penteract.checkpoint.steps import step_name
from penteract.checkpoint.storage import Files
from penteract.checkpoint.writing import Held, Writing, file_name
from penteract.mesh import Axis
from penteract.placement import Box

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """What a step says besides its tensors, all plain JSON: rank 0's is what is saved."""

    step: int
    config: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


def save(
    directory: Path | str, record: Record, shards: Held, *, axis: Axis, files: Files | None = None
) -> Path:
    """Save one step under `directory`, together with all ranks of `axis`; its path.

    Each tensor of `shards` has the shape of its shard's box (a view will do) and must not change
    until this returns. Rank 0's process holds `lock(directory)`. Returning means that the step is
    on the disk. Raises SaveError on all ranks where any rank could not do its part, naming
    path and bytes needed; earlier steps are then as they were, and nothing half is left.
    """
    directory, files = Path(directory), files or Files()
    told = together(axis, lambda: describe(shards, record, axis))
    known = [shards_from(answer["shards"]) for answer in told]
    plan = save_plan(known)
    name, nonce = step_name(told[0]["step"]), told[0]["nonce"]
    needed = sum(written_bytes(writes) for writes in plan)
    writing = Writing(directory / f".tmp-{name}-{nonce}", needed, files)

    def commit() -> None:
        manifest = _manifest(record, known, plan, written)
        writing.commit(record.step, manifest_text(manifest))

    try:
        agreed(axis, lambda: writing.prepare() if axis.rank == 0 else None)
        written = together(axis, lambda: writing.tensors(axis.rank, plan[axis.rank], shards))
        agreed(axis, lambda: commit() if axis.rank == 0 else None)
    except Exception as error:
        # All ranks have closed their files: the last thing each did was to say so.
        if axis.rank == 0:
            writing.clear()
        if isinstance(error, CheckpointError):
            raise SaveError(str(error)) from error
        raise
    if axis.rank == 0:
        log.info("%s: committed, %d bytes", directory / name, needed)
    return directory / name


def describe(shards: Held, record: Record | None, axis: Axis) -> dict[str, Any]:
    """What this rank holds or wants, as JSON; checks the tensors, and rank 0's record."""
    faults = []
    for shard, tensor in shards:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != shard.box.size or dtype != shard.dtype:
            faults.append(
                f"  {shard.tensor}: a tensor of {list(tensor.shape)} {dtype} for a box of "
                f"{list(shard.box.size)} {shard.dtype}"
            )
    if faults:
        raise CheckpointError("tensors do not fit their shards:\n" + "\n".join(faults))
    if record is not None and axis.rank == 0:
        manifest_text(Manifest(record.step, record.config, record.layout, {}, {}, record.state))
    listed = [[s.tensor, s.shape, s.dtype, s.box.offset, s.box.size] for s, _ in shards]
    step = record.step if record else None
    return {"step": step, "nonce": secrets.token_hex(4), "shards": listed}


def shards_from(listed: Iterable[Sequence[Any]]) -> list[Shard]:
    return [
        Shard(name, tuple(shape), dtype, Box(tuple(offset), tuple(size)))
        for name, shape, dtype, offset, size in listed
    ]


def manifest_text(manifest: Manifest) -> str:
    if not 0 <= manifest.step < 10**18:
        raise CheckpointError(f"step {manifest.step}: need 0 to 10**18 - 1")
    try:
        return to_json(manifest)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"config, layout and state must be plain JSON: {error}") from error


def _manifest(
    record: Record,
    known: Sequence[Sequence[Shard]],
    plan: Sequence[Sequence[Write]],
    written: Sequence[list[Any] | None],
) -> Manifest:
    """Every tensor any rank knows, a tensor without elements too, and where its boxes went."""
    kinds = {shard.tensor: shard for shards in known for shard in shards}
    boxes: dict[str, list[StoredBox]] = {name: [] for name in sorted(kinds)}
    for rank, writes in enumerate(plan):
        for write in writes:
            place = StoredBox(write.box, file_name(rank), write.key)
            boxes[write.shard.tensor].append(place)
    tensors = {
        name: StoredTensor(
            kinds[name].shape,
            kinds[name].dtype,
            tuple(sorted(places, key=lambda place: place.box.offset)),
        )
        for name, places in boxes.items()
    }
    files = {file_name(rank): StoredFile(*said) for rank, said in enumerate(written) if said}
    return Manifest(record.step, record.config, record.layout, tensors, files, record.state)
