"""Messages between processes of one machine: bytes lie in shared memory, pipes tell where.

Every rank has an *outbox*, a memory-mapped file that its peers map too, and an *inbox*, a named
pipe that its peers write to. Bytes are copied into a block of the outbox, and a message of less
than a hundred bytes goes to the inbox of each reader; few bytes travel in the message itself. Who
has read a block acknowledges it, and it is used again. An outbox grows by what is in flight at
once: no message is too large, and sending never waits for a peer.

What must hold, and why it does:

- *Order of memory.* A reader learns of a block only from a pipe: the copy comes before the write,
  and the read before the use, and the kernel's lock on the pipe orders the two on every processor.
  So it is for the acknowledgement, after which a block is written again. No flag lies in the
  shared memory.
- *No thread and no spinning.* Who waits sleeps in `poll`, on the inboxes of all groups at once, so
  that a wait for one lets the others go on. Only one thread of a process may use them.
- *A full pipe.* What does not fit is kept, and sent by a later wait for whatever it be.
- *Death.* A pipe whose reader has ended says so to those who could write to it.
- *Nothing stays behind.* Files are unlinked as soon as all peers have opened them, before they hold
  anything. What a rank leaves that is killed before, later ranks remove.

Linux and macOS.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import select
import shutil
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

_HEADER = struct.Struct("<HHHiQQqQ")
_WHAT_BYTES = 80  # the longest description of an operation
_INLINE_BYTES = select.PIPE_BUF - _HEADER.size - _WHAT_BYTES  # writes up to PIPE_BUF are atomic
_READ = -2  # the channel of acknowledgements
_ACKNOWLEDGE_BYTES = 1 << 20  # having read so much a rank says so at once
_GROW_BYTES = 1 << 20
_ROOM_BYTES = 1 << 30
_PREFIX = "penteract-"
_LEFT_S = 60.0  # a folder of that age is its owner's no more if nobody reads its inbox

Part = tuple[int, int]  # first byte and the one after the last


class Message(NamedTuple):
    """What a rank writes to an inbox. `block` is -1 where the bytes are `inline`."""

    source: int
    channel: int  # from -1
    number: int  # within the channel
    length: int = 0  # bytes of the payload
    block: int = -1  # where the block begins in the source's outbox
    start: int = 0  # where the payload begins in the block
    what: bytes = b""
    inline: bytes = b""

    def encode(self) -> bytes:
        size = _HEADER.size + len(self.what) + len(self.inline)
        return _HEADER.pack(size, len(self.what), *self[:6]) + self.what + self.inline


def _decode(data: bytes) -> tuple[list[Message], bytes]:
    """The whole messages in `data` and what is left."""
    messages, at = [], 0
    while len(data) - at >= _HEADER.size:
        size, words, *numbers = _HEADER.unpack_from(data, at)
        if len(data) - at < size:
            break
        middle = at + _HEADER.size + words
        what, inline = data[at + _HEADER.size : middle], data[middle : at + size]
        messages.append(Message._make((*numbers, what, inline)))
        at += size
    return messages, data[at:]


class Loop:
    """All mailboxes of this process, so that who waits for one serves the others too."""

    def __init__(self) -> None:
        self._process, self._poll = os.getpid(), select.poll()
        self._boxes: dict[int, Mailbox] = {}  # by their inbox

    def add(self, inbox: int, box: Mailbox) -> None:
        if self._process != os.getpid():  # a forked child leaves its parent's mailboxes alone
            self._process, self._poll, self._boxes = os.getpid(), select.poll(), {}
        self._poll.register(inbox, select.POLLIN)
        self._boxes[inbox] = box

    def remove(self, inbox: int) -> bool:
        if self._boxes.pop(inbox, None) is None:
            return False
        self._poll.unregister(inbox)
        return True

    def step(self, within_s: float) -> bool:
        """Take in what has come, or comes within the time, and send what was kept."""
        full = [box for box in self._boxes.values() if not box.flush()]
        ready = self._poll.poll(1 if full else 1000 * within_s)
        for inbox, _ in ready:
            self._boxes[inbox].drain()
        return bool(ready)


class _Outbox:
    """This rank's file of blocks. A block is free again once all its readers have read it."""

    def __init__(self, path: str) -> None:
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self.unread_bytes = 0
        self._end = 0
        self._space = torch.empty(0, dtype=torch.uint8)
        self._free: dict[int, list[int]] = {}  # by size
        self._readers: dict[int, list[int]] = {}  # by block: how many have not read it; its size

    def put(self, data: Tensor, readers: int) -> int:
        """Copy bytes into a block and return where it begins."""
        step = max(4096, 1 << data.numel().bit_length() >> 3)  # wastes a quarter at most
        size = -(-data.numel() // step) * step
        free = self._free.setdefault(size, [])
        block = free.pop() if free else self._grow(size)
        self._space[block : block + data.numel()].copy_(data)
        self._readers[block] = [readers, size]
        self.unread_bytes += size
        return block

    def read(self, block: int) -> None:
        """One more reader has read `block`."""
        left = self._readers[block]
        left[0] -= 1
        if left[0] == 0:
            del self._readers[block]
            self._free[left[1]].append(block)
            self.unread_bytes -= left[1]

    def unmap(self) -> None:
        self._space = torch.empty(0, dtype=torch.uint8)

    def _grow(self, size: int) -> int:
        block, self._end = self._end, self._end + size
        if self._end > self._space.numel():
            length = -(-self._end // _GROW_BYTES) * _GROW_BYTES
            if sys.platform == "linux":  # a full disk is an error here, not a signal on first use
                os.posix_fallocate(self.file, 0, length)
            else:
                os.ftruncate(self.file, length)
            self._space = _mapped(self.file)
        return block


def _mapped(file: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=torch.uint8)


class Mailbox:
    """One rank's end of a group: `deliver` is called with every message that comes."""

    def __init__(self, loop: Loop, rank: int, deliver: Callable[[Message], None]) -> None:
        self.full: set[int] = set()  # peers whose inbox has no room for what is kept for them
        self.gone: set[int] = set()  # peers that had left when something was sent to them
        self._loop, self._rank, self._deliver = loop, rank, deliver
        self._kept: dict[int, list[bytes]] = {}  # encoded messages, by peer
        self._partial = b""  # of a message
        self._read_bytes: Counter[int] = Counter()  # read, and the writer not told, by peer
        self._doors: dict[int, int] = {}  # the peers' inboxes
        self._files: dict[int, int] = {}  # their outboxes
        self._spaces: dict[int, Tensor] = {}  # and what is mapped of these
        place = _memory()
        _sweep(place)
        self.folder = tempfile.mkdtemp(prefix=_PREFIX, dir=place)
        os.mkfifo(f"{self.folder}/inbox", 0o600)
        self._inbox = os.open(f"{self.folder}/inbox", os.O_RDONLY | os.O_NONBLOCK)
        # A pipe without writers reads as ended, so this rank always has its own open.
        self._own_door = os.open(f"{self.folder}/inbox", os.O_WRONLY | os.O_NONBLOCK)
        self._outbox = _Outbox(f"{self.folder}/outbox")
        loop.add(self._inbox, self)

    def connect(self, peer: int, folder: str) -> None:
        """Open the files of `peer`, which lie in its `folder`."""
        self._doors[peer] = os.open(f"{folder}/inbox", os.O_WRONLY | os.O_NONBLOCK)
        self._files[peer] = os.open(f"{folder}/outbox", os.O_RDWR)
        self._kept[peer] = []

    def unlink(self) -> None:
        """Remove this rank's files, which stay usable by those who have opened them."""
        shutil.rmtree(self.folder)

    def close(self) -> None:
        """Close everything; peers that still wait for this rank see that it has left."""
        if self._loop.remove(self._inbox):
            self._spaces.clear()
            self._outbox.unmap()
            files = (self._inbox, self._own_door, self._outbox.file)
            for file in (*files, *self._doors.values(), *self._files.values()):
                os.close(file)

    @property
    def unread_bytes(self) -> int:
        return self._outbox.unread_bytes

    def send(self, message: Message, data: Tensor, to: Mapping[int, Part]) -> None:
        """Send every peer in `to` the message with its part of the bytes `data`."""
        assert len(message.what) <= _WHAT_BYTES, message.what
        readers = sum(stop > start for start, stop in to.values())
        bulk = any(stop - start > _INLINE_BYTES for start, stop in to.values())
        block = self._outbox.put(data, readers) if bulk else -1
        for peer, (start, stop) in to.items():
            inline = b"" if bulk else data[start:stop].numpy().tobytes()
            part = message._replace(length=stop - start, block=block, start=start, inline=inline)
            self._kept[peer].append(part.encode())
            self._send_to(peer)

    def _send_to(self, peer: int) -> None:
        """Write what is kept for `peer`, several messages at once, as far as its inbox has room."""
        kept = self._kept[peer]
        try:
            while kept:
                sizes = itertools.accumulate(map(len, kept))
                n = sum(1 for _ in itertools.takewhile(lambda size: size <= select.PIPE_BUF, sizes))
                os.write(self._doors[peer], b"".join(kept[:n]))
                del kept[:n]
            self.full.discard(peer)
        except BlockingIOError:
            self.full.add(peer)
        except BrokenPipeError:
            self.gone.add(peer)
            self.full.discard(peer)
            kept.clear()

    def flush(self) -> bool:
        """Send what is kept; False where some of it still does not fit."""
        for peer in tuple(self.full):
            self._send_to(peer)
        return not self.full

    def drain(self) -> None:
        """Take in what lies in the inbox."""
        messages, self._partial = _decode(self._partial + os.read(self._inbox, 1 << 16))
        for message in messages:
            if message.channel == _READ:
                self._outbox.read(message.block)
            else:
                self._deliver(message)

    def payload(self, message: Message, like: Tensor) -> Tensor:
        """The bytes of `message` as a flat tensor of the dtype of `like`.

        They stay where they are, and may be used until `acknowledge`.
        """
        if message.length == 0:
            return like.new_empty(0)
        if message.block < 0:
            return torch.frombuffer(bytearray(message.inline), dtype=like.dtype)
        source, begin = message.source, message.block + message.start
        end = begin + message.length
        if source not in self._spaces or end > self._spaces[source].numel():
            self._spaces[source] = _mapped(self._files[source])
        return self._spaces[source][begin:end].view(like.dtype)

    def acknowledge(self, messages: Iterable[Message]) -> None:
        """Let the blocks of `messages` go. The word travels with the next message, or once it is
        about much.
        """
        for message in messages:
            peer = message.source
            if message.block < 0 or message.length == 0:
                continue
            self._kept[peer].append(Message(self._rank, _READ, 0, block=message.block).encode())
            self._read_bytes[peer] += message.length
            if self._read_bytes[peer] >= _ACKNOWLEDGE_BYTES:
                self._read_bytes[peer] = 0
                self._send_to(peer)

    def has_left(self, peer: int) -> bool:
        """Whether `peer` has ended or closed its mailbox."""
        look = select.poll()
        look.register(self._doors[peer], 0)  # that nobody reads is told without being asked for
        return bool(look.poll(0))


def _memory() -> str:
    """Where files are memory: /dev/shm, unless it is missing or, as in some containers, tiny."""
    shared = "/dev/shm"
    if os.access(shared, os.W_OK):
        place = os.statvfs(shared)
        if place.f_bavail * place.f_frsize >= _ROOM_BYTES:
            return shared
    return tempfile.gettempdir()


def _sweep(place: str) -> None:
    """Remove the folders of ranks that were killed before they could."""
    for folder in Path(place).glob(f"{_PREFIX}*"):
        try:
            if time.time() - folder.stat().st_mtime > _LEFT_S:
                os.close(os.open(folder / "inbox", os.O_WRONLY | os.O_NONBLOCK))
        except OSError as error:
            if error.errno == errno.ENXIO:  # a pipe that nobody reads
                shutil.rmtree(folder, ignore_errors=True)
