"""Saving a step: the commit protocol, at once or while training goes on.

A save, seen from outside, happens at one moment, the rename of a complete directory:

1. ranks tell each other what they hold, and each computes the same plan of who writes what;
2. rank 0 makes `.tmp-step-n-<nonce>`; every rank writes its one file there, hashing what it
   writes, with no more memory than one bucket, and brings it to the disk;
3. rank 0 writes the manifest, brings it to the disk, and renames the directory to `step-n`;
4. `latest` is replaced by a new text.

At a URL there is no rename: files have their names at once, and the manifest is the commit
(`commit.py` has both). After each stage the ranks compare notes, so that a fault on one is a
CheckpointError on all.

`start_save` keeps its callers for stage 1, the directory, and a copy of what this rank is to write.
A thread writes the file from the copy, and on rank 0 a second one does stages 3 and 4. Neither
sends messages: between two steps all ranks ask `Saving.finished`, where they compare notes.

| what | axis | bytes a rank | when |
|---|---|---|---|
| names, shapes and boxes held | world | a few hundred a shard | first |
| done, or the error's text; length and hash | world | under 1 kB | after each stage |
| done, running or a fault | world | 1 | each time that `finished` is asked |
"""

from __future__ import annotations

import copy
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from penteract.checkpoint.agreement import agreed, together
from penteract.checkpoint.background import Background, State
from penteract.checkpoint.commit import protocol_of
from penteract.checkpoint.format import (
    CheckpointError,
    LateSaveError,
    Manifest,
    SaveError,
    StoredBox,
    StoredFile,
    StoredTensor,
    to_json,
)
from penteract.checkpoint.plan import Shard, Write, save_plan, written_bytes
from penteract.checkpoint.remote import Place, place
from penteract.checkpoint.steps import step_name
from penteract.checkpoint.storage import Storage
from penteract.checkpoint.writing import (
    Held,
    Staging,
    Writing,
    contents,
    in_file_order,
    on_host,
)
from penteract.collectives import exchange
from penteract.mesh import Axis
from penteract.placement import Box

log = logging.getLogger(__name__)

LOOK_S = 0.05  # how often ranks that wait for a save ask each other


@dataclass(frozen=True)
class Record:
    """What a step says besides its tensors, all plain JSON: rank 0's is what is saved."""

    step: int
    config: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


def save(
    directory: Place | str,
    record: Record,
    shards: Held,
    *,
    axis: Axis,
    files: Storage | None = None,
) -> Place:
    """Save one step under `directory`, together with all ranks of `axis`; its path.

    Each tensor of `shards` has the shape of its shard's box (a view will do) and must not change
    until this returns. Rank 0's process holds `lock(directory)`. Returning means that the step is
    on the disk. Raises SaveError on all ranks where any rank could not do its part, naming
    path and bytes needed; earlier steps are then as they were, and nothing half is left.
    """
    step = _Step(place(directory), record, shards, axis, files)
    with step.faults():
        agreed(axis, step.prepare)
        written = together(axis, lambda: step.write(on_host(contents(step.mine, shards))))
        agreed(axis, lambda: step.commit(written))
    return step.path


def start_save(
    directory: Place | str,
    record: Record,
    shards: Held,
    *,
    staging: Staging,
    axis: Axis,
    files: Storage | None = None,
    then: Callable[[], object] = lambda: None,
) -> Saving:
    """As `save`, but return once `staging` has what this rank is to write.

    The tensors may change then; `staging` is in use until the save has finished. Rank 0 calls
    `then` in the background when the step is on the disk.
    """
    # The manifest is written later, when a state that it shares with the run would be another.
    step = _Step(place(directory), copy.deepcopy(record), shards, axis, files)
    staged: list[memoryview] = []

    def begin() -> None:
        step.prepare()
        parts = contents(step.mine, shards)
        staged.extend(staging.copy(parts, written_bytes(step.mine)))

    with step.faults():
        agreed(axis, begin)
    return Saving(step, staged, then)


class Saving:
    """A save that goes on in the background. All ranks together ask about it, or wait for it."""

    def __init__(
        self, step: _Step, staged: Sequence[memoryview], then: Callable[[], object]
    ) -> None:
        self._step, self._then, self._committing = step, then, False

        def write(go_on: Callable[[], None]) -> list[Any] | None:
            def data() -> Iterator[memoryview]:
                for part in staged:
                    go_on()
                    yield part

            return step.write(data())

        self._job: Background[Any] = Background(write)

    @property
    def path(self) -> Place:
        return self._step.path

    def finished(self, *, late: bool = False) -> bool:
        """Whether the step is on the disk. Once it is true, it may not be asked again.

        Raises SaveError, as `save` does, after a fault on any rank or where it is `late` on any.
        """
        state, axis = self._job.state, self._step.axis
        late = late and state == State.RUNNING
        states = exchange(bytes([State.FAULT if late else state]), axis)
        worst = max(state for (state,) in states)
        if worst == State.RUNNING:
            return False

        with self._step.faults(self._job):
            written = together(axis, self._job.result)
            if worst == State.FAULT:
                raise LateSaveError(f"{self.path}: given up, its files take too long to write")
            if not self._committing:
                self._committing = True
                self._job = Background(lambda go_on: self._step.commit(written, self._then))
                return False
        return True

    def wait(self, within_s: float) -> None:
        """Until the step is on the disk. Raises SaveError as `finished`, or after `within_s`."""
        end = time.monotonic() + within_s
        while not self.finished(late=time.monotonic() > end):
            self._job.wait(LOOK_S)

    def abandon(self) -> None:
        """Stop writing, without the other ranks; the next save removes what is left of this one."""
        self._job.stop()


class _Step:
    """A save that all ranks have planned alike."""

    def __init__(
        self,
        directory: Place,
        record: Record,
        shards: Held,
        axis: Axis,
        files: Storage | None,
    ) -> None:
        told = together(axis, lambda: describe(shards, record, axis))
        self.record, self.axis = record, axis
        self.known = [shards_from(answer["shards"]) for answer in told]
        self.plan = [in_file_order(writes) for writes in save_plan(self.known)]
        self.mine = self.plan[axis.rank]
        self.path = directory / step_name(told[0]["step"])
        needed_bytes = sum(written_bytes(writes) for writes in self.plan)
        protocol = protocol_of(directory, files)
        self.writing = Writing(self.path, told[0]["nonce"], needed_bytes, protocol)

    def prepare(self) -> None:
        if self.axis.rank == 0:
            self.writing.prepare()

    def write(self, data: Iterable[memoryview]) -> list[Any] | None:
        return self.writing.tensors(self.axis.rank, self.mine, data)

    def commit(
        self, written: Sequence[list[Any] | None], then: Callable[[], object] = lambda: None
    ) -> None:
        if self.axis.rank:
            return
        manifest = manifest_of(self.record, self.known, self.plan, written)
        self.writing.commit(manifest_text(manifest))
        log.info("%s: committed, %d bytes", self.path, self.writing.needed_bytes)
        then()

    @contextmanager
    def faults(self, job: Background[Any] | None = None) -> Iterator[None]:
        """For what the ranks do together: after a fault nothing half is left."""
        try:
            yield
        except Exception as error:
            # All ranks have closed their files: the last thing each did was to say so. Where a job
            # could not be stopped the disk hangs, and would hang this too.
            if self.axis.rank == 0 and not (job and job.state == State.RUNNING):
                self.writing.clear()
            if isinstance(error, CheckpointError) and not isinstance(error, SaveError):
                raise SaveError(str(error)) from error
            raise


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


def manifest_of(
    record: Record,
    known: Sequence[Sequence[Shard]],
    plan: Sequence[Sequence[Write]],
    written: Sequence[list[Any] | None],
) -> Manifest:
    """Every tensor any rank knows, a tensor without elements too, and where its boxes went."""
    kinds = {shard.tensor: shard for shards in known for shard in shards}
    boxes: dict[str, list[StoredBox]] = {name: [] for name in sorted(kinds)}
    for said, writes in zip(written, plan, strict=True):
        for write in writes:
            assert said is not None
            boxes[write.shard.tensor].append(StoredBox(write.box, said[0], write.key))
    tensors = {
        name: StoredTensor(
            kinds[name].shape,
            kinds[name].dtype,
            tuple(sorted(places, key=lambda place: place.box.offset)),
        )
        for name, places in boxes.items()
    }
    files = {said[0]: StoredFile(*said[1:]) for said in written if said}
    return Manifest(record.step, record.config, record.layout, tensors, files, record.state)
