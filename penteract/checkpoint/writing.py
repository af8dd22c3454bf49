"""The parts of a save that touch the storage: its place, its files, the commit."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penteract.checkpoint.commit import CommitProtocol
from penteract.checkpoint.cover import buckets
from penteract.checkpoint.format import MANIFEST, CheckpointError, header_bytes
from penteract.checkpoint.plan import Shard, Write, written_bytes
from penteract.checkpoint.remote import Place
from penteract.checkpoint.storage import HashedFile

log = logging.getLogger(__name__)

# What is copied, hashed and written at a time, and read at a time.
BUCKET_BYTES = 1 << 25

Held = Sequence[tuple[Shard, torch.Tensor]]


def in_file_order(writes: Sequence[Write]) -> list[Write]:
    """Widest elements first, so that every tensor begins at a multiple of its element's size."""
    return sorted(writes, key=lambda write: (-write.shard.item_bytes, write.key))


@dataclass(frozen=True)
class Writing:
    """The stages of one save that touch the storage."""

    step: Place  # what it will be
    nonce: str
    needed_bytes: int  # by all ranks together
    protocol: CommitProtocol

    @property
    def _home(self) -> Place:
        home: Place = self.protocol.home(self.step, self.nonce)
        return home

    def prepare(self) -> None:
        try:
            self.protocol.prepare(self._home)
            free_bytes = self.protocol.free_bytes(self._home)
            if free_bytes is not None and free_bytes < self.needed_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._refusal(self._home, self.needed_bytes, error) from error

    def tensors(
        self, rank: int, writes: Sequence[Write], contents: Iterable[memoryview]
    ) -> list[Any] | None:
        """Write this rank's file; its [name, bytes, hash], or None where it has nothing to write.

        `contents` are the bytes of `writes`, one after another.
        """
        if not writes:
            return None
        name = self.protocol.file_name(rank, self.nonce)
        path = self._home / name
        header = header_bytes([(w.key, w.shard.dtype, w.box.size) for w in writes])
        try:
            with HashedFile(path, self.protocol.files) as out:
                out.write(header)
                for data in contents:
                    out.write(data)
                stored = out.finish()
        except OSError as error:
            raise self._refusal(path, len(header) + written_bytes(writes), error) from error
        return [name, stored.bytes, stored.xxh3]

    def commit(self, manifest: str, *, point: bool = True) -> None:
        """`point`: `latest` names it from now on."""
        text = manifest.encode()
        try:
            self.protocol.publish(self._home, self.step, text, point=point)
        except OSError as error:
            raise self._refusal(self._home / MANIFEST, len(text), error) from error

    def clear(self) -> None:
        """After a fault. What cannot be removed now is removed before the next save."""
        try:
            self.protocol.tidy(self.step.parent)
        except OSError as error:
            log.warning("%s: could not be cleared away (%s)", self._home, error.strerror)

    def _refusal(self, path: Place, path_bytes: int, error: OSError) -> CheckpointError:
        needs = f"needs {path_bytes} bytes"
        if path_bytes != self.needed_bytes:
            needs += f", the tensors of the whole step {self.needed_bytes}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free_bytes = self.protocol.free_bytes(self._home)
            needs += f", {free_bytes} are free: remove files or keep fewer steps"
        return CheckpointError(f"{path}: cannot save ({error.strerror}): {needs}")


def contents(writes: Sequence[Write], held: Held) -> Iterator[torch.Tensor]:
    """The values of `writes`, row after row, as flat bytes where they lie, a bucket at a time."""
    for write in writes:
        tensor = held[write.source][1].detach()
        for box in buckets(write.box, BUCKET_BYTES // write.shard.item_bytes):
            yield flat_bytes(tensor[box.relative_to(write.shard.box.offset).slices()])


def flat_bytes(part: torch.Tensor) -> torch.Tensor:
    """The values of a tensor, row after row, where they lie."""
    flat = part.contiguous().reshape(-1)  # [elements]
    # One element counts as contiguous whatever its stride; as bytes it needs stride 1.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def on_host(parts: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    """Each of `parts` in turn; it may be that tensor's own memory."""
    return (part.cpu().numpy().data for part in parts)


class Staging:
    """Host memory that what a rank is to write is copied to, kept from one save to the next.

    It is blocks of a bucket, so it exceeds what it has held at most by less than a bucket: a power
    of two, to which torch would round page-locked memory up.
    """

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []

    def copy(self, parts: Iterable[torch.Tensor], size_bytes: int) -> list[memoryview]:
        """The bytes of `parts`, so many, one after another; they stay until the next call."""
        on_gpu, at = torch.cuda.is_initialized(), 0
        # All at once: what is allocated between copies of views leaves holes behind.
        while len(self._blocks) * BUCKET_BYTES < size_bytes:
            block = torch.empty(BUCKET_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
            self._blocks.append(block)
        for part in parts:
            while part.numel():
                number, begin = divmod(at, BUCKET_BYTES)
                head, part = part[: BUCKET_BYTES - begin], part[BUCKET_BYTES - begin :]
                place = self._blocks[number][begin : begin + head.numel()]
                place.copy_(head, non_blocking=True)
                at += head.numel()
        assert at == size_bytes
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        starts = range(0, size_bytes, BUCKET_BYTES)
        return [
            block[: size_bytes - start].numpy().data
            for block, start in zip(self._blocks, starts, strict=False)
        ]
