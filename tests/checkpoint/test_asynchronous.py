"""Saving in the background: what is saved is the state of its step, and no fault is lost."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from checkpoint.storage_faults import Dead, Dying, FullDisk, Held, labelled, wholes
from checkpoint.test_io import layout_of
from memory import anonymous_bytes, peak_while

from penteract.checkpoint import background, writing
from penteract.checkpoint.agreement import PeerError
from penteract.checkpoint.background import Background, State, Stopped
from penteract.checkpoint.examine import read_manifest, verify
from penteract.checkpoint.format import CheckpointError, SaveError
from penteract.checkpoint.io import Record, load, read_tensor, save
from penteract.checkpoint.saving import Saving, start_save
from penteract.checkpoint.steps import latest_good
from penteract.checkpoint.storage import Files
from penteract.checkpoint.writing import Staging, on_host
from penteract.mesh import single
from penteract.testing import run_ranks, world_axis

ONE = single("world")
WITHIN_S = 20.0


class Gate(Files):
    """Storage that lets nothing be written before it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def create(self, path: Path) -> BinaryIO:
        assert self.opened.wait(WITHIN_S)
        return super().create(path)


def start(directory: Path, step: int, held: Held, **more: Any) -> Saving:
    how = {"axis": world_axis(), "staging": Staging(), **more}
    return start_save(directory, Record(step), held, **how)


def ask_until_done(saving: Saving) -> None:
    """As a run does after each of its steps."""
    while not saving.finished():
        time.sleep(0.01)


def files(step: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in step.iterdir()}


def three_in_a_row(directory: Path) -> None:
    """Each in one staging, while the tensors and the state that they were saved from change."""
    axis, staging, cursor = world_axis(), Staging(), {"cursor": 0}
    held = layout_of(axis.rank, axis.size, True)
    held = [(shard, tensor.clone()) for shard, tensor in held]
    for step in (1, 2, 3):
        record, gate = Record(step, state=cursor), Gate()
        save(directory / "at-once", record, held, axis=axis)
        saving = start_save(directory / "later", record, held, axis=axis, staging=staging,
                            files=gate)  # fmt: skip
        assert not saving.finished()
        for _, tensor in held:
            tensor += 1
        cursor["cursor"] += 100
        gate.opened.set()
        saving.wait(WITHIN_S)


@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_three_in_a_row_are_the_three_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, bucket_bytes: int
) -> None:
    monkeypatch.setattr(writing, "BUCKET_BYTES", bucket_bytes)
    run_ranks(three_in_a_row, ranks, tmp_path)
    found = [files(tmp_path / f"later/step-0000000{step}") for step in (1, 2, 3)]
    assert found == [files(tmp_path / f"at-once/step-0000000{step}") for step in (1, 2, 3)]
    assert len({step["rank-00000.safetensors"] for step in found}) == 3
    states = [read_manifest(tmp_path / f"later/step-0000000{step}").state for step in (1, 2, 3)]
    assert states == [{"cursor": cursor} for cursor in (0, 100, 200)]


def test_a_copy_that_is_none_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what is staged is the live memory."""
    monkeypatch.setattr(Staging, "copy", lambda self, parts, size: list(on_host(parts)))
    run_ranks(three_in_a_row, 1, tmp_path)
    first = [files(tmp_path / name / "step-00000001") for name in ("later", "at-once")]
    assert first[0] != first[1]


@pytest.mark.parametrize("full_rank", [0, 1])
def test_a_full_disk_on_one_rank_is_an_error_on_all(tmp_path: Path, full_rank: int) -> None:
    model = {"up": labelled((60, 10))}

    def body() -> str:
        axis, staging = world_axis(), Staging()
        start(tmp_path, 1, wholes(model), staging=staging).wait(WITHIN_S)
        disk = FullDisk(150) if axis.rank == full_rank else Files()
        saving = start(tmp_path, 2, wholes(model), staging=staging, files=disk)
        with pytest.raises(SaveError) as caught:
            ask_until_done(saving)
        assert axis.rank or not list(tmp_path.glob(".tmp*"))
        start(tmp_path, 3, wholes(model), staging=staging).wait(WITHIN_S)  # the run may go on
        return str(caught.value)

    texts = run_ranks(body, 2)
    assert texts[0] == texts[1]
    assert f"rank-0000{full_rank}.safetensors: cannot save (No space left on device)" in texts[0]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["latest", "step-00000001", "step-00000003"]


def test_a_fault_stops_ranks_that_are_still_writing(tmp_path: Path) -> None:
    """The other rank would need an hour for its file."""

    class Slow(Files):
        def write(self, file: BinaryIO, data: memoryview) -> None:
            super().write(file, data)
            time.sleep(0.5)

    def body() -> None:
        disk = FullDisk(0) if world_axis().rank else Slow()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writing, "BUCKET_BYTES", 8)
            saving = start(tmp_path, 1, wholes({"w": labelled((300, 100))}), files=disk)
            with pytest.raises(SaveError, match=r"rank 1: .*No space left"):
                saving.wait(WITHIN_S)

    began = time.monotonic()
    run_ranks(body, 2)
    assert time.monotonic() - began < WITHIN_S
    assert list(tmp_path.iterdir()) == []


def test_a_fault_in_the_commit_is_an_error_on_all(tmp_path: Path) -> None:
    class Stuck(Files):
        def rename(self, source: Path, target: Path) -> None:
            raise PermissionError(13, "Permission denied", str(target))

    def body() -> None:
        with pytest.raises(SaveError, match=r"manifest.json: cannot save .Permission denied"):
            start(tmp_path, 1, wholes({"w": labelled((4, 4))}), files=Stuck()).wait(WITHIN_S)

    run_ranks(body, 2)
    assert list(tmp_path.iterdir()) == []


def test_a_fault_that_is_not_of_storage_keeps_its_own_type(tmp_path: Path) -> None:
    class Broken(Files):
        def create(self, path: Path) -> BinaryIO:
            raise AssertionError("a bug")

    def body() -> None:
        broken = world_axis().rank == 1
        with pytest.raises(AssertionError if broken else PeerError, match="a bug"):
            start(tmp_path, 1, wholes({"w": labelled((4, 4))}),
                  files=Broken() if broken else Files()).wait(WITHIN_S)  # fmt: skip

    run_ranks(body, 2)
    assert list(tmp_path.iterdir()) == []


def test_no_room_for_the_copy_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    def body() -> None:
        class Small(Staging):
            def copy(self, parts: Any, size_bytes: int) -> list[memoryview]:
                raise MemoryError("no room")

        small = world_axis().rank == 1
        with pytest.raises(MemoryError if small else PeerError, match="no room"):
            start(tmp_path, 1, wholes({"w": labelled((4, 4))}),
                  staging=Small() if small else Staging())  # fmt: skip

    run_ranks(body, 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("again", [False, True])
def test_death_at_every_operation_leaves_a_whole_step(tmp_path: Path, again: bool) -> None:
    old, new = labelled((4, 4)), labelled((4, 4), start=99)
    number = 2 if again else 3

    def saved(directory: Path, disk: Files) -> None:
        save(directory, Record(2), wholes({"w": old}), axis=ONE)
        start(directory, number, wholes({"w": new}), files=disk).wait(WITHIN_S)

    endless = Dying(10**9)
    saved(tmp_path / "count", endless)
    assert endless.done > 10
    outcomes = []
    for last in range(endless.done):
        directory = tmp_path / str(last)
        with pytest.raises(Dead):
            saved(directory, Dying(last))
        found = latest_good(directory, hashes=True)
        assert found is not None, last
        outcomes.append(torch.equal(read_tensor(found, "w"), new))
        assert outcomes[-1] or torch.equal(read_tensor(found, "w"), old), last
        start(directory, 4, wholes({"w": new})).wait(WITHIN_S)
        assert latest_good(directory, hashes=True) == directory / "step-00000004"
        assert not [path for path in directory.iterdir() if path.name.startswith(".")]
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_while_it_writes(tmp_path: Path, victim: int) -> None:
    model = {"up": labelled((60, 10))}

    class Killed(Files):
        def write(self, file: BinaryIO, data: memoryview) -> None:
            super().write(file, data[: len(data) // 2])
            os.kill(os.getpid(), 9)

    def body() -> None:
        start(tmp_path, 1, wholes(model)).wait(WITHIN_S)
        disk = Killed() if world_axis().rank == victim else Files()
        start(tmp_path, 2, wholes(model), files=disk).wait(WITHIN_S)

    with pytest.raises((RuntimeError, EOFError)):
        run_ranks(body, 2, timeout_s=20)
    assert latest_good(tmp_path, hashes=True) == tmp_path / "step-00000001"


def test_what_comes_when(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Committed is said after the commit; `then` is called after it; finished is true after it."""
    caplog.set_level("INFO")
    seen: list[Any] = []

    class Watching(Gate):
        def rename(self, source: Path, target: Path) -> None:
            seen.append("committed" in caplog.text)
            super().rename(source, target)

    gate, step = Watching(), tmp_path / "step-00000001"
    then = lambda: seen.append((verify(step), "committed" in caplog.text))  # noqa: E731
    saving = start(tmp_path, 1, wholes({"w": labelled((4, 4))}), files=gate, then=then)
    for _ in range(10):
        assert not saving.finished()
        time.sleep(0.01)
    assert not step.exists()
    gate.opened.set()
    ask_until_done(saving)
    assert seen == [False, False, ([], True)]
    assert saving.path == step


def test_one_rank_that_is_late_ends_the_wait_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "STOP_S", 0.2)

    def body() -> None:
        disk = Gate() if world_axis().rank else Files()
        saving = start(tmp_path, 1, wholes({"up": labelled((60, 10))}), files=disk)
        with pytest.raises(SaveError, match="step-00000001: given up"):
            saving.wait(0.2)

    began = time.monotonic()
    run_ranks(body, 2)
    assert time.monotonic() - began < WITHIN_S / 2
    assert latest_good(tmp_path) is None


def test_what_is_abandoned_is_removed_by_the_next_save(tmp_path: Path) -> None:
    held = wholes({"up": labelled((60, 10))})
    gate = Gate()
    saving = start(tmp_path, 1, held, files=gate)
    threading.Timer(0.1, gate.opened.set).start()
    saving.abandon()
    assert list(tmp_path.glob(".tmp*"))
    start(tmp_path, 2, held).wait(WITHIN_S)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000002"]


def test_memory_is_what_a_rank_writes_once_and_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = 1 << 20
    monkeypatch.setattr(writing, "BUCKET_BYTES", bucket)

    def body() -> list[int]:
        replicated = wholes({"w": torch.ones(4096, 4096).T})  # 64 MiB on both ranks
        staging, growths = Staging(), []
        for step in (1, 2, 3):
            begin = partial(start, tmp_path, step, replicated, staging=staging)
            growths.append(peak_while(lambda begin=begin: begin().wait(WITHIN_S)))
        return growths

    for first, *others in run_ranks(body, 2):
        assert (30 << 20) < first < (32 << 20) + 16 * bucket
        assert max(others) < 16 * bucket
    assert anonymous_bytes() > 0
    assert verify(tmp_path / "step-00000003") == []


def test_what_was_saved_in_the_background_loads(tmp_path: Path) -> None:
    def body() -> bool:
        axis = world_axis()
        held = layout_of(axis.rank, axis.size, True)
        saving = start(tmp_path, 5, held)
        saving.wait(WITHIN_S)
        blank = [(shard, torch.zeros_like(tensor)) for shard, tensor in held]
        load(saving.path, blank, axis=axis)
        return all(torch.equal(x, y) for (_, x), (_, y) in zip(held, blank, strict=True))

    assert run_ranks(body, 2) == [True, True]


# --- the job alone


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_job_has_a_value_or_a_fault(release: threading.Event) -> None:
    def job(go_on: Callable[[], None]) -> int:
        release.wait(WITHIN_S)
        return 5

    def broken(go_on: Callable[[], None]) -> None:
        raise CheckpointError("no")

    running = Background(job)
    assert running.state == State.RUNNING
    release.set()
    running.wait(WITHIN_S)
    assert (running.state, running.result()) == (State.DONE, 5)
    failing = Background(broken)
    failing.wait(WITHIN_S)
    assert failing.state == State.FAULT
    with pytest.raises(CheckpointError, match="no"):
        failing.result()


def test_a_job_that_is_stopped_has_none() -> None:
    def job(go_on: Callable[[], None]) -> int:
        for _ in range(10_000):
            go_on()
            time.sleep(0.01)
        raise Stopped  # not reached in time

    running = Background(job)
    assert running.result() is None
    assert running.state == State.DONE
