"""Loading steps, into any layout; and everything else of checkpoints that other packages use."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import Any

import torch

from penteract.checkpoint.agreement import agreed, together
from penteract.checkpoint.cover import buckets
from penteract.checkpoint.examine import check_files, inspect, read_manifest, reading, verify
from penteract.checkpoint.format import CheckpointError, Manifest, SaveError
from penteract.checkpoint.plan import Read, Shard, compare, load_plan
from penteract.checkpoint.reader import open_tensors
from penteract.checkpoint.remote import Place, place
from penteract.checkpoint.saving import Record, describe, save, shards_from
from penteract.checkpoint.steps import find_step, latest_good, retain
from penteract.checkpoint.storage import lock
from penteract.checkpoint.writing import BUCKET_BYTES, Held
from penteract.mesh import Axis, single
from penteract.placement import whole

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
    "place",
    "read_manifest",
    "read_tensor",
    "retain",
    "save",
    "verify",
]

log = logging.getLogger(__name__)


def load(
    path: Place | str,
    wanted: Held,
    *,
    axis: Axis | None = None,
    check_hashes: bool = True,
    skip: tuple[str, ...] = (),
    unread: Collection[str] = (),
    told: Callable[[int], None] = lambda more_bytes: None,
) -> Manifest:
    """Fill the tensors of `wanted` from the step directory `path`; the step's manifest.

    Together with all ranks of `axis`, whatever layout the step was saved from. The names wanted on
    all ranks together must be the stored ones, but for stored names that begin with one of `skip`
    or are among `unread`; shapes and dtypes must be the same. Raises CheckpointError on all ranks,
    listing every mismatch or damaged file, before any tensor is changed. `check_hashes` reads
    every file once, the ranks sharing the files out. No run's retention removes the step meanwhile.
    `told` hears of the bytes that this rank hashes, then of those it reads.
    """
    path, axis = place(path), axis or single("world")
    every = together(axis, lambda: describe(wanted, None, axis))
    shards = [shard for answer in every for shard in shards_from(answer["shards"])]
    with contextlib.ExitStack() as stack:
        manifest = agreed(axis, lambda: stack.enter_context(reading(path)))
        if mismatches := compare(manifest.tensors, shards, skip=skip, unread=unread):
            raise CheckpointError(f"{path} is not of this model:\n" + "\n".join(mismatches))
        reads = agreed(axis, lambda: load_plan(manifest.tensors, [s for s, _ in wanted]))
        mine = sorted(manifest.files)[axis.rank :: axis.size]
        agreed(axis, lambda: _check(path, manifest, mine, hashes=check_hashes, told=told))
        agreed(axis, lambda: _fill(path, reads, wanted, told))
    return manifest


def _check(path: Place, manifest: Manifest, names: Sequence[str], **how: Any) -> None:
    """`check_files`, with CheckpointError for the faults."""
    if faults := check_files(path, manifest, names, **how):
        raise CheckpointError("; ".join(faults))


def _fill(
    path: Place,
    reads: Sequence[Read],
    wanted: Held,
    told: Callable[[int], None] = lambda more_bytes: None,
) -> None:
    """Copy each read's box into its target, a bucket at a time. Files were checked before."""
    for file, in_file in groupby(reads, key=lambda read: read.file):
        told(0)
        with open_tensors(path / file) as opened:
            for read in in_file:
                shard, target = wanted[read.target]
                source = opened.get_slice(read.key)
                for box in buckets(read.box, BUCKET_BYTES // shard.item_bytes):
                    values = source[box.relative_to(read.stored.offset).slices()]
                    into = target.detach()[box.relative_to(shard.box.offset).slices()]
                    into.copy_(values)
                    told(values.nbytes)


def read_tensor(path: Place | str, name: str) -> torch.Tensor:
    """The whole logical tensor `name` of the step directory `path`. Raises CheckpointError.

    Hashes are not checked; `verify` does that.
    """
    path = place(path)
    manifest = read_manifest(path)
    stored = manifest.tensors.get(name)
    if stored is None:
        raise CheckpointError(f"{path}: no tensor {name!r} among {len(manifest.tensors)}")
    names = sorted({place.file for place in stored.boxes})
    _check(path, manifest, names, hashes=False)
    shard = Shard(name, stored.shape, stored.dtype, whole(stored.shape))
    tensor = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    _fill(path, load_plan(manifest.tensors, [shard]), [(shard, tensor)])
    return tensor
