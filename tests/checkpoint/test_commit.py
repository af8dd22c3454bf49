"""The commit protocol: a full disk, a lost machine or a killed rank at any moment of a save."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from checkpoint.storage_faults import Dead, Dying, FullDisk, Held, labelled, wholes

from penteract.checkpoint.agreement import PeerError
from penteract.checkpoint.examine import verify
from penteract.checkpoint.format import CheckpointError
from penteract.checkpoint.io import Record, load, read_tensor, save
from penteract.checkpoint.steps import latest_good
from penteract.checkpoint.storage import Files
from penteract.mesh import single
from penteract.testing import run_ranks, world_axis

ONE = single("world")


def blank(held: Held) -> Held:
    return [(shard, torch.zeros_like(tensor)) for shard, tensor in held]


MODEL = {"embed": labelled((7, 4)), "norm": labelled((5,), start=100), "up": labelled((6, 10), 200)}


def save_as(directory: Path, step: int, files: Files | None = None) -> None:
    save(directory, Record(step), wholes(MODEL), axis=world_axis(), files=files)


@pytest.mark.parametrize("full_rank", [0, 1])
def test_a_full_disk_on_one_rank_is_an_error_on_all(tmp_path: Path, full_rank: int) -> None:
    run_ranks(save_as, 2, tmp_path, 1)

    def body() -> str:
        files = FullDisk(150) if world_axis().rank == full_rank else Files()
        with pytest.raises(CheckpointError) as caught:
            save_as(tmp_path, 2, files)
        save_as(tmp_path, 3)  # the run may go on
        return str(caught.value)

    texts = run_ranks(body, 2)
    assert texts[0] == texts[1]
    file = tmp_path / r"\.tmp-step-00000002-[0-9a-f]+" / f"rank-0000{full_rank}.safetensors"
    needs = f"rank {full_rank}: {file}: cannot save .No space left on device.: "
    with pytest.raises(CheckpointError, match=f"{needs}needs [0-9]+ bytes, the tensors of "):
        raise CheckpointError(texts[0])
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "latest",
        "step-00000001",
        "step-00000003",
    ]


def test_a_full_disk_at_any_moment_leaves_the_earlier_step(tmp_path: Path) -> None:
    held = wholes({"w": labelled((10, 10))})
    endless = FullDisk(1 << 30)
    step = save(tmp_path, Record(1), held, axis=ONE, files=endless)
    used_bytes = (1 << 30) - endless.room_bytes
    for room_bytes in [0, 7, 100, 400, 600, used_bytes - 20, used_bytes - 1]:
        for number in (1, 2):  # the same step again, and the next
            files = FullDisk(room_bytes)
            with pytest.raises(CheckpointError, match=r"No space left.* are free"):
                save(tmp_path, Record(number), held, axis=ONE, files=files)
            assert not any(p.name.startswith(".") for p in tmp_path.iterdir())
            assert torch.equal(read_tensor(step, "w"), held[0][1])
        # Only `latest` was left to write: the new step is whole, though success was not told.
        assert (latest_good(tmp_path) != step) == (room_bytes >= used_bytes - 14)


def test_a_step_that_cannot_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    class Small(Files):
        def free_bytes(self, path: Path) -> int:
            return 399

        def create(self, path: Path) -> BinaryIO:
            raise AssertionError("nothing is written")

    held = wholes({"w": labelled((10, 10))})
    with pytest.raises(CheckpointError, match="needs 400 bytes, 399 are free"):
        save(tmp_path, Record(1), held, axis=ONE, files=Small())
    assert not list(tmp_path.iterdir())


def operations(directory: Path, steps: Sequence[int]) -> int:
    """How many file operations the last of these saves takes."""
    for step in steps:
        files = Dying(10**9)
        save(directory, Record(step), wholes({"w": labelled((4, 4))}), axis=ONE, files=files)
    return files.done


@pytest.mark.parametrize("again", [False, True])
def test_death_at_every_operation_leaves_a_whole_step(tmp_path: Path, again: bool) -> None:
    """The old or the new one, never a half one, and nothing older than the old one."""
    new = 2 if again else 3
    first = [1, 2]
    count = operations(tmp_path / "count", [*first, new])
    assert count > 10
    outcomes = []
    for last in range(count):
        directory = tmp_path / str(last)
        for step in first:
            save(directory, Record(step), wholes({"w": labelled((4, 4))}), axis=ONE)
        changed = {"w": labelled((4, 4), start=99)}
        with pytest.raises(Dead):
            save(directory, Record(new), wholes(changed), axis=ONE, files=Dying(last))
        found = latest_good(directory, hashes=True)
        assert found is not None, last
        held = blank(wholes(changed))
        number = load(found, held).step
        is_new = torch.equal(held[0][1], changed["w"])
        assert is_new or torch.equal(held[0][1], labelled((4, 4))), last
        assert number == (new if is_new else 2)
        outcomes.append(is_new)
        save(directory, Record(4), wholes(changed), axis=ONE)
        left = {path.name for path in directory.iterdir()}
        assert left <= {"latest", *(f"step-0000000{n}" for n in range(1, 5))}
        assert not verify(directory / "step-00000002")
        assert latest_good(directory) == directory / "step-00000004"
        shutil.rmtree(directory)
    # The commit is one moment: old before it, new after it.
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_while_it_writes(tmp_path: Path, victim: int) -> None:
    run_ranks(save_as, 2, tmp_path, 1)

    class Killed(Files):
        def write(self, file: BinaryIO, data: memoryview) -> None:
            super().write(file, data[: len(data) // 2])
            os.kill(os.getpid(), 9)

    def body() -> None:
        save_as(tmp_path, 2, Killed() if world_axis().rank == victim else Files())

    with pytest.raises((RuntimeError, EOFError)):
        run_ranks(body, 2, timeout_s=20)
    assert latest_good(tmp_path, hashes=True) == tmp_path / "step-00000001"
    held = blank(wholes(MODEL))
    load(tmp_path / "step-00000001", held)
    assert all(torch.equal(tensor, MODEL[shard.tensor]) for shard, tensor in held)
    run_ranks(save_as, 2, tmp_path, 2)
    assert latest_good(tmp_path, hashes=True) == tmp_path / "step-00000002"
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_the_log_says_committed_only_after_the_commit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    seen: list[bool] = []

    class Watching(Files):
        def rename(self, source: Path, target: Path) -> None:
            seen.append("committed" in caplog.text)
            super().rename(source, target)

    save(tmp_path, Record(1), wholes(MODEL), axis=ONE, files=Watching())
    assert seen == [False, False]
    assert f"{tmp_path / 'step-00000001'}: committed" in caplog.text


def test_a_fault_that_is_not_of_storage_keeps_its_own_type(tmp_path: Path) -> None:
    class Broken(Files):
        def create(self, path: Path) -> BinaryIO:
            raise AssertionError("a bug")

    def body() -> None:
        broken = world_axis().rank == 1
        with pytest.raises(AssertionError if broken else PeerError, match="a bug"):
            save_as(tmp_path, 1, Broken() if broken else Files())

    run_ranks(body, 2)
    assert list(tmp_path.iterdir()) == []
