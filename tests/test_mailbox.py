"""Messages cut anywhere are put together, and the outbox is used again."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penteract import mailbox
from penteract.mailbox import Loop, Mailbox, Message, _decode, _Outbox

MESSAGES = st.lists(
    st.builds(
        Message,
        source=st.integers(0, 65535),
        channel=st.integers(-2, 1 << 20),
        number=st.integers(0, 1 << 60),
        length=st.integers(0, 1 << 60),
        block=st.integers(-1, 1 << 60),
        start=st.integers(0, 1 << 60),
        what=st.binary(max_size=80),
        inline=st.binary(max_size=40),
    ),
    max_size=6,
)


@settings(derandomize=True, deadline=None)
@given(MESSAGES, st.integers(1, 200))
def test_messages_cut_anywhere_are_put_together(messages: list[Message], cut: int) -> None:
    data = b"".join(message.encode() for message in messages)
    found, rest = [], b""
    for at in range(0, len(data), cut):
        more, rest = _decode(rest + data[at : at + cut])
        found += more
    assert (found, rest) == (messages, b"")


def test_a_block_is_free_again_once_all_have_read_it(tmp_path: Path) -> None:
    outbox = _Outbox(str(tmp_path / "outbox"))
    data = torch.arange(5000, dtype=torch.int16).view(torch.uint8)  # 10000 bytes
    first = outbox.put(data, 2)
    outbox.read(first)
    second = outbox.put(data, 1)
    assert second != first
    outbox.read(first)
    assert outbox.put(data, 1) == first
    assert outbox.unread_bytes == 2 * 12288  # rounded up to pages
    os.close(outbox.file)


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 100_000, 3 << 20])
def test_blocks_waste_little_and_do_not_overlap(tmp_path: Path, length: int) -> None:
    outbox = _Outbox(str(tmp_path / "outbox"))
    blocks = [outbox.put(torch.full((length,), i, dtype=torch.uint8), 1) for i in range(5)]
    assert outbox.unread_bytes <= 5 * (length * 5 // 4 + 4096)
    whole = mailbox._mapped(outbox.file)
    for i, block in enumerate(blocks):
        assert (whole[block : block + length] == i).all()
    os.close(outbox.file)


def test_a_full_inbox_is_no_obstacle() -> None:
    """More messages than a pipe holds are kept, and come in order."""
    loop, found = Loop(), list[Message]()
    boxes = [Mailbox(loop, 0, found.append), Mailbox(loop, 1, found.append)]
    boxes[0].connect(1, boxes[1].folder)
    boxes[1].connect(0, boxes[0].folder)
    for box in boxes:
        box.unlink()
    data = torch.zeros(3000, dtype=torch.uint8)
    sent = [Message(0, -1, i, what=b"test") for i in range(200)]
    for message in sent:
        boxes[0].send(message, data, {1: (0, 3000)})
    assert boxes[0].full == {1}
    while len(found) < 200:
        loop.step(0.0)
    assert [message.number for message in found] == list(range(200))
    assert not boxes[0].full
    assert not boxes[0].has_left(1)
    boxes[1].close()
    assert boxes[0].has_left(1)
    boxes[0].send(sent[0], data, {1: (0, 3000)})
    assert boxes[0].gone == {1}
    boxes[0].close()


def test_a_message_fits_what_is_written_at_once() -> None:
    longest = Message(1, 0, 0, what=b"x" * 80, inline=b"x" * mailbox._INLINE_BYTES)
    assert len(longest.encode()) == select.PIPE_BUF


def test_a_forked_child_leaves_the_mailboxes_of_its_parent_alone() -> None:
    loop = Loop()
    theirs = Mailbox(loop, 0, lambda message: None)
    theirs.unlink()
    child = os.fork()
    if child == 0:
        mine = Mailbox(loop, 0, lambda message: None)
        mine.unlink()
        os._exit(list(loop._boxes.values()) != [mine])
    assert os.waitpid(child, 0)[1] == 0
    assert list(loop._boxes.values()) == [theirs]
    theirs.close()


def test_without_room_in_memory_the_files_are_temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "_ROOM_BYTES", 1 << 62)
    assert mailbox._memory() != "/dev/shm"


def test_what_killed_ranks_left_is_removed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "_memory", lambda: str(tmp_path))
    alive = Mailbox(Loop(), 0, lambda message: None)
    for name in ("penteract-dead", "penteract-young", "other"):
        (tmp_path / name).mkdir()
        os.mkfifo(tmp_path / name / "inbox")
    for name in ("penteract-dead", "other", Path(alive.folder).name):
        os.utime(tmp_path / name, (0, 0))
    mailbox._sweep(str(tmp_path))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"penteract-young", "other", Path(alive.folder).name}
    alive.unlink()
    alive.close()
