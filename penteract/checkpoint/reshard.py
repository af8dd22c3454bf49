"""A step written again in other files: fewer, more or smaller ones, or its weights alone.

The tensors are laid end to end and cut where a file is full, so files have even bytes, and a tensor
that ranks had in parts is whole again but for those cuts. Reading and writing go by boxes, with no
more memory than one bucket; the commit is that of a save. Any layout loads the step, as before.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from penteract.checkpoint.commit import protocol_of
from penteract.checkpoint.cover import buckets
from penteract.checkpoint.examine import check_files, reading
from penteract.checkpoint.format import CheckpointError, SaveError, header_bytes
from penteract.checkpoint.plan import Shard, Write, even_plan, written_bytes
from penteract.checkpoint.reader import Reader
from penteract.checkpoint.remote import Place
from penteract.checkpoint.saving import Record, manifest_of, manifest_text
from penteract.checkpoint.steps import step_name, steps
from penteract.checkpoint.storage import lock
from penteract.checkpoint.writing import BUCKET_BYTES, Writing, flat_bytes, in_file_order
from penteract.placement import whole

MOST_FILES = 100_000  # their numbers have five digits


def reshard(
    source: Place,
    directory: Place,
    *,
    files: int = 1,
    max_bytes: int | None = None,
    drop: tuple[str, ...] = (),
    told: Callable[[int], None] = lambda more_bytes: None,
) -> Place:
    """Write the step `source` again under `directory`; the new step's path.

    In `files` files, or in as few as are at most `max_bytes` long. Tensors whose names begin with
    one of `drop` are left out. `told` hears of the bytes that are hashed, then of those written.
    Raises CheckpointError where a file of `source` is not as it was saved, the step is there
    already, or cannot be cut so; SaveError where it cannot be written.
    """
    if directory.name.startswith("step-"):
        raise CheckpointError(f"{directory}: give the folder that the step is to stand in")
    with reading(source) as manifest:
        name = step_name(manifest.step)
        _refuse(directory / name)
        shards = [
            Shard(tensor, stored.shape, stored.dtype, whole(stored.shape))
            for tensor, stored in manifest.tensors.items()
            if not tensor.startswith(drop)
        ]
        plan = even_plan(shards, files) if max_bytes is None else _plan_of_size(shards, max_bytes)
        if not all(plan):
            raise CheckpointError(
                f"{source}: its {sum(map(written_bytes, plan))} bytes of tensors cannot be cut "
                f"into {len(plan)} files: a row of a tensor is never cut"
            )
        names = sorted(manifest.files)
        if faults := check_files(source, manifest, names, hashes=True, told=told):
            raise CheckpointError("; ".join(faults))
        reader = Reader(source, manifest)

        def contents(write: Write) -> Iterator[memoryview]:
            for box in buckets(write.box, BUCKET_BYTES // write.shard.item_bytes):
                data = flat_bytes(reader.read(write.shard.tensor, box)).numpy().data
                yield data
                told(data.nbytes)

        record = Record(manifest.step, manifest.config, {"files": len(plan)}, manifest.state)
        with lock(directory):
            _refuse(directory / name)
            _write(directory / name, record, shards, plan, contents)
    return directory / name


def _refuse(target: Place) -> None:
    if protocol_of(target).taken(target):
        raise CheckpointError(f"{target}: is there already: choose another folder, or remove it")


def _write(
    step: Place,
    record: Record,
    shards: Sequence[Shard],
    plan: Sequence[Sequence[Write]],
    contents: Callable[[Write], Iterator[memoryview]],
) -> None:
    needed = sum(map(written_bytes, plan))
    writing = Writing(step, secrets.token_hex(4), needed, protocol_of(step))
    try:
        writing.prepare()
        parts = [in_file_order(part) for part in plan]
        written = [
            writing.tensors(file, part, chain.from_iterable(map(contents, part)))
            for file, part in enumerate(parts)
        ]
        manifest = manifest_of(record, [shards], parts, written)
        newest = all(number <= record.step for number, _ in steps(writing.step.parent))
        writing.commit(manifest_text(manifest), point=newest)
    except Exception as error:
        writing.clear()
        if isinstance(error, CheckpointError):
            raise SaveError(str(error)) from error
        raise


def _plan_of_size(shards: Sequence[Shard], max_bytes: int) -> list[list[Write]]:
    """Into as few files as have at most `max_bytes` each, header included."""
    total = sum(shard.box.numel * shard.item_bytes for shard in shards)
    files = max(1, -(-total // max_bytes))
    while files < MOST_FILES:
        plan = even_plan(shards, files)
        largest = max(map(_file_bytes, plan))
        if largest <= max_bytes:
            return plan
        if not all(plan):
            break
        files = max(files + 1, files * largest // max_bytes)
    raise CheckpointError(
        f"{total} bytes of tensors cannot be cut into files of at most {max_bytes} bytes with "
        f"their headers: a row of a tensor is never cut, and there are at most {MOST_FILES} files"
    )


def _file_bytes(writes: Sequence[Write]) -> int:
    entries = [(write.key, write.shard.dtype, write.box.size) for write in writes]
    return len(header_bytes(entries)) + written_bytes(writes)
