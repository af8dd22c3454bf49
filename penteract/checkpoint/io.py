"""Saving and loading steps: the commit protocol, and reading boxes into any layout.

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

import contextlib
import errno
import logging
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from penteract.checkpoint.agreement import agreed, together
from penteract.checkpoint.cover import buckets
from penteract.checkpoint.examine import check_files, inspect, read_manifest, reading, verify
from penteract.checkpoint.format import (
    MANIFEST,
    CheckpointError,
    Manifest,
    SaveError,
    StoredBox,
    StoredFile,
    StoredTensor,
    header_bytes,
    to_json,
)
from penteract.checkpoint.plan import (
    Read,
    Shard,
    Write,
    compare,
    load_plan,
    save_plan,
    written_bytes,
)
from penteract.checkpoint.steps import find_step, latest_good, publish, retain, step_name, tidy
from penteract.checkpoint.storage import Files, HashedFile, lock
from penteract.mesh import Axis, single
from penteract.placement import Box, whole

__all__ = [
    "CheckpointError",
    "Manifest",
    "Record",
    "SaveError",
    "Shard",
    "agreed",
    "find_step",
    "inspect",
    "latest_good",
    "load",
    "lock",
    "read_manifest",
    "read_tensor",
    "retain",
    "save",
    "verify",
]

log = logging.getLogger(__name__)

# What is copied, hashed and written at a time, and read at a time.
BUCKET_BYTES = 1 << 25

Held = Sequence[tuple[Shard, torch.Tensor]]


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
    told = together(axis, lambda: _describe(shards, record, axis))
    known = [_shards_from(answer["shards"]) for answer in told]
    plan = save_plan(known)
    name, nonce = step_name(told[0]["step"]), told[0]["nonce"]
    needed = sum(written_bytes(writes) for writes in plan)
    contents = partial(_contents, held=shards)
    writing = Writing(directory / f".tmp-{name}-{nonce}", needed, files)
    try:
        agreed(axis, lambda: writing.prepare() if axis.rank == 0 else None)
        written = together(axis, lambda: writing.tensors(axis.rank, plan[axis.rank], contents))
        manifest = manifest_of(record, known, plan, written)
        agreed(axis, lambda: writing.commit(manifest) if axis.rank == 0 else None)
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


def _describe(shards: Held, record: Record | None, axis: Axis) -> dict[str, Any]:
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
        _manifest_text(Manifest(record.step, record.config, record.layout, {}, {}, record.state))
    listed = [[s.tensor, s.shape, s.dtype, s.box.offset, s.box.size] for s, _ in shards]
    step = record.step if record else None
    return {"step": step, "nonce": secrets.token_hex(4), "shards": listed}


def _shards_from(listed: Iterable[Sequence[Any]]) -> list[Shard]:
    return [
        Shard(name, tuple(shape), dtype, Box(tuple(offset), tuple(size)))
        for name, shape, dtype, offset, size in listed
    ]


def _manifest_text(manifest: Manifest) -> str:
    if not 0 <= manifest.step < 10**18:
        raise CheckpointError(f"step {manifest.step}: need 0 to 10**18 - 1")
    try:
        return to_json(manifest)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"config, layout and state must be plain JSON: {error}") from error


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _in_file_order(writes: Sequence[Write]) -> list[Write]:
    """Widest elements first, so that every tensor begins at a multiple of its element's size."""
    return sorted(writes, key=lambda write: (-write.shard.item_bytes, write.key))


def manifest_of(
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
            place = StoredBox(write.box, _file_name(rank), write.key)
            boxes[write.shard.tensor].append(place)
    tensors = {
        name: StoredTensor(
            kinds[name].shape,
            kinds[name].dtype,
            tuple(sorted(places, key=lambda place: place.box.offset)),
        )
        for name, places in boxes.items()
    }
    files = {_file_name(rank): StoredFile(*said) for rank, said in enumerate(written) if said}
    return Manifest(record.step, record.config, record.layout, tensors, files, record.state)


@dataclass(frozen=True)
class Writing:
    """The stages of one save that touch the disk, in its temporary directory."""

    temporary: Path
    needed_bytes: int  # by all ranks together
    files: Files

    def prepare(self) -> None:
        try:
            self.files.make_directory(self.temporary.parent)
            tidy(self.temporary.parent, self.files)
            self.files.make_directory(self.temporary)
        except OSError as error:
            raise self._refusal(self.temporary, self.needed_bytes, error) from error

    def tensors(
        self, rank: int, writes: Sequence[Write], contents: Callable[[Write], Iterable[memoryview]]
    ) -> list[Any] | None:
        """Write this rank's file; its [bytes, hash], or None where it has nothing to write."""
        if not writes:
            return None
        path = self.temporary / _file_name(rank)
        writes = _in_file_order(writes)
        header = header_bytes([(w.key, w.shard.dtype, w.box.size) for w in writes])
        try:
            with HashedFile(path, self.files) as out:
                out.write(header)
                for data in chain.from_iterable(map(contents, writes)):
                    out.write(data)
                stored = out.finish()
        except OSError as error:
            raise self._refusal(path, len(header) + written_bytes(writes), error) from error
        return [stored.bytes, stored.xxh3]

    def commit(self, manifest: Manifest) -> None:
        path = self.temporary / MANIFEST
        text = _manifest_text(manifest).encode()
        try:
            with HashedFile(path, self.files) as out:
                out.write(text)
                out.finish()
            self.files.sync_directory(self.temporary)
            publish(self.temporary.parent, self.temporary, manifest.step, self.files)
        except OSError as error:
            raise self._refusal(path, len(text), error) from error

    def clear(self) -> None:
        """After a fault. What cannot be removed now is removed before the next save."""
        try:
            if self.temporary.parent.is_dir():
                tidy(self.temporary.parent, self.files)
        except OSError as error:
            log.warning("%s: could not be cleared away (%s)", self.temporary, error.strerror)

    def _refusal(self, path: Path, path_bytes: int, error: OSError) -> CheckpointError:
        advice = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            there = next(place for place in self.temporary.parents if place.exists())
            free_bytes = shutil.disk_usage(there).free
            advice = f", {free_bytes} are free: remove files or keep fewer steps"
        return CheckpointError(
            f"{path}: cannot save ({error.strerror}): needs {path_bytes} bytes, "
            f"the tensors of the whole step {self.needed_bytes}{advice}"
        )


def _contents(write: Write, held: Held) -> Iterator[memoryview]:
    """The values of `write.box`, row after row, as bytes on the host, a bucket at a time."""
    for box in buckets(write.box, BUCKET_BYTES // write.shard.item_bytes):
        part = held[write.source][1].detach()[box.relative_to(write.shard.box.offset).slices()]
        yield bytes_of(part)


def bytes_of(part: torch.Tensor) -> memoryview:
    """The values of a tensor, row after row, on the host."""
    flat = part.contiguous().to("cpu").reshape(-1)  # [elements]
    # One element counts as contiguous whatever its stride; as bytes it needs stride 1.
    flat = flat.as_strided((flat.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def load(
    path: Path | str,
    wanted: Held,
    *,
    axis: Axis | None = None,
    check_hashes: bool = True,
    skip: tuple[str, ...] = (),
    unread: Collection[str] = (),
) -> Manifest:
    """Fill the tensors of `wanted` from the step directory `path`; the step's manifest.

    Together with all ranks of `axis`, whatever layout the step was saved from. The names wanted on
    all ranks together must be the stored ones, but for stored names that begin with one of `skip`
    or are among `unread`; shapes and dtypes must be the same. Raises CheckpointError on all ranks,
    listing every mismatch or damaged file, before any tensor is changed. `check_hashes` reads
    every file once, the ranks sharing the files out. No run's retention removes the step meanwhile.
    """
    path, axis = Path(path), axis or single("world")
    told = together(axis, lambda: _describe(wanted, None, axis))
    shards = [shard for answer in told for shard in _shards_from(answer["shards"])]
    with contextlib.ExitStack() as stack:
        manifest = agreed(axis, lambda: stack.enter_context(reading(path)))
        if mismatches := compare(manifest.tensors, shards, skip=skip, unread=unread):
            raise CheckpointError(f"{path} is not of this model:\n" + "\n".join(mismatches))
        reads = agreed(axis, lambda: load_plan(manifest.tensors, [s for s, _ in wanted]))
        agreed(axis, lambda: _check_dealt(path, manifest, axis, check_hashes=check_hashes))
        agreed(axis, lambda: _fill(path, reads, wanted))
    return manifest


def _check_dealt(path: Path, manifest: Manifest, axis: Axis, *, check_hashes: bool) -> None:
    """Check this rank's deal of the files."""
    mine = sorted(manifest.files)[axis.rank :: axis.size]
    faults = check_files(path, manifest, mine, hashes=check_hashes)
    if faults:
        raise CheckpointError("; ".join(faults))


def _fill(path: Path, reads: Sequence[Read], wanted: Held) -> None:
    """Copy each read's box into its target, a bucket at a time. Files were checked before."""
    for file, in_file in groupby(reads, key=lambda read: read.file):
        with safe_open(path / file, framework="pt") as opened:
            for read in in_file:
                shard, target = wanted[read.target]
                source = opened.get_slice(read.key)
                for box in buckets(read.box, BUCKET_BYTES // shard.item_bytes):
                    values = source[box.relative_to(read.stored.offset).slices()]
                    into = target.detach()[box.relative_to(shard.box.offset).slices()]
                    into.copy_(values)


def read_tensor(path: Path | str, name: str) -> torch.Tensor:
    """The whole logical tensor `name` of the step directory `path`. Raises CheckpointError.

    Hashes are not checked; `verify` does that.
    """
    path = Path(path)
    manifest = read_manifest(path)
    stored = manifest.tensors.get(name)
    if stored is None:
        raise CheckpointError(f"{path}: no tensor {name!r} among {len(manifest.tensors)}")
    names = sorted({place.file for place in stored.boxes})
    if faults := check_files(path, manifest, names, hashes=False):
        raise CheckpointError("; ".join(faults))
    shard = Shard(name, stored.shape, stored.dtype, whole(stored.shape))
    tensor = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    _fill(path, load_plan(manifest.tensors, [shard]), [(shard, tensor)])
    return tensor
