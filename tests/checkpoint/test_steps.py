"""The directory of steps: which one is chosen, which may go."""

import contextlib
import errno
import json
import logging
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from penteract.checkpoint import io, storage
from penteract.checkpoint.agreement import agreed
from penteract.checkpoint.commit import Renames
from penteract.checkpoint.examine import inspect, read_manifest, reading, verify
from penteract.checkpoint.format import CheckpointError
from penteract.checkpoint.io import Record, save
from penteract.checkpoint.plan import Shard
from penteract.checkpoint.steps import (
    find_step,
    latest_good,
    pin,
    pointed,
    retain,
    steps,
    unpin,
)
from penteract.checkpoint.storage import Files, unused
from penteract.mesh import single
from penteract.placement import Box, whole
from penteract.testing import run_ranks, world_axis


def put(directory: Path, step: int) -> Path:
    tensor = torch.full((4, 3), float(step))
    shard = Shard("w", (4, 3), "float32", whole((4, 3)))
    record = Record(step, layout={"dp": 1}, state={"cursor": step})
    return save(directory, record, [(shard, tensor)], axis=single("world"))


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir() if p.name.startswith("step-"))


def truncate(step: Path) -> Path:
    file = step / "rank-00000.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    return file


def flip(step: Path, rank: int = 0) -> Path:
    file = step / f"rank-{rank:05d}.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    return file


def test_no_step_is_none(tmp_path: Path) -> None:
    assert latest_good(tmp_path / "absent") is None
    assert latest_good(tmp_path) is None
    assert pointed(tmp_path) is None
    with pytest.raises(CheckpointError, match="neither a step"):
        find_step(tmp_path)


def test_the_newest_is_found_whatever_the_pointer_says(tmp_path: Path) -> None:
    put(tmp_path, 2)
    ten = put(tmp_path, 10)
    assert latest_good(tmp_path) == ten == pointed(tmp_path) == find_step(tmp_path)
    assert find_step(ten) == ten
    for text in ("step-00000002", "step-00000099", "../elsewhere", "\0", ""):
        (tmp_path / "latest").write_text(text)
        assert latest_good(tmp_path) == ten
        assert pointed(tmp_path) == (tmp_path / text if text.endswith("02") else None)
    (tmp_path / "latest").unlink()
    assert latest_good(tmp_path) == ten


def test_numbers_order_steps_not_names_or_clocks(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000, 5):
        os.utime(put(tmp_path, step), (step % 7, step % 7))
    assert [n for n, _ in steps(tmp_path)] == [5, 99_999_999, 100_000_000]
    assert latest_good(tmp_path) == tmp_path / "step-100000000"


def test_a_truncated_file_is_named_and_falling_back_is_a_choice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = put(tmp_path, 1)
    file = truncate(put(tmp_path, 2))
    with pytest.raises(CheckpointError, match=f"{file}: .*truncated"):
        latest_good(tmp_path)
    with pytest.raises(CheckpointError, match=f"the newest good step is {one}$"):
        latest_good(tmp_path)
    assert caplog.text == ""
    assert latest_good(tmp_path, fall_back=True) == one
    assert str(file) in caplog.text
    truncate(one)
    with pytest.raises(CheckpointError, match="no good step is left"):
        latest_good(tmp_path, fall_back=True)


def test_a_flipped_bit_is_found_by_hashing(tmp_path: Path) -> None:
    one = put(tmp_path, 1)
    two = put(tmp_path, 2)
    file = flip(two)
    assert latest_good(tmp_path) == two  # lengths and headers only
    assert verify(two, hashes=False) == []
    assert [str(file) in fault and "xxh3" in fault for fault in verify(two)] == [True]
    with pytest.raises(CheckpointError, match="has changed since it was saved"):
        latest_good(tmp_path, hashes=True)
    assert latest_good(tmp_path, hashes=True, fall_back=True) == one


def test_ranks_share_the_hashing_and_agree(tmp_path: Path) -> None:
    """Two of three steps are damaged, each in the file of another rank."""

    def body() -> tuple[Path | None, str]:
        axis = world_axis()
        part = Shard("w", (4, 3), "float32", Box((2 * axis.rank, 0), (2, 3)))
        for step in (1, 2, 3):
            save(tmp_path, Record(step), [(part, torch.ones(2, 3))], axis=axis)
        for step in (2, 3):
            if axis.rank == 0:
                flip(tmp_path / f"step-{step:08d}", step - 2)
        agreed(axis, lambda: None)
        good = latest_good(tmp_path, hashes=True, fall_back=True, axis=axis)
        with pytest.raises(CheckpointError) as caught:
            latest_good(tmp_path, hashes=True, axis=axis)
        assert latest_good(tmp_path, axis=axis) == tmp_path / "step-00000003"
        return good, str(caught.value)

    (one, said), other = run_ranks(body, 2)
    assert (one, said) == other
    assert one == tmp_path / "step-00000001"
    files = [f"step-0000000{n}/rank-0000{n - 2}.safetensors" for n in (3, 2)]
    assert [file in line for file, line in zip(files, said.splitlines(), strict=False)] == [
        True
    ] * 2
    assert said.count("safetensors") == 2
    assert said.splitlines()[-1] == f"the newest good step is {one}"


def test_a_step_without_manifest_is_passed_over_with_a_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = put(tmp_path, 1)
    two = put(tmp_path, 2)
    (two / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert latest_good(tmp_path) == one
    assert f"{two}: passed over" in caplog.text


def test_other_faults_of_a_step_are_found(tmp_path: Path) -> None:
    step = put(tmp_path, 1)
    renamed = tmp_path / "step-00000007"
    shutil.copytree(step, renamed)
    assert verify(renamed) == [f"{renamed}: the manifest is of step 1"]
    file = step / "rank-00000.safetensors"
    content = file.read_bytes()
    file.rename(tmp_path / "away")
    file.symlink_to(tmp_path / "away")
    assert verify(step) == [f"{file}: not a regular file"]
    file.unlink()
    assert "cannot be read" in verify(step)[0]
    file.write_bytes(content.replace(b'"w"', b'"v"'))
    assert "key 'v'" in verify(step, hashes=False)[0]
    document = json.loads((step / "manifest.json").read_text())
    (step / "manifest.json").write_text(json.dumps(document | {"format": 7}))
    assert "found 7, this release reads 1" in verify(step)[0]


def test_keeping_the_last_n(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        put(tmp_path, step)
    (tmp_path / "notes").mkdir()  # what is not a step is nobody's generation
    assert retain(tmp_path, None) == []
    assert retain(tmp_path, 9) == []
    assert retain(tmp_path, 2) == [tmp_path / "step-00000001", tmp_path / "step-00000002"]
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    assert (tmp_path / "notes").is_dir()
    with pytest.raises(CheckpointError, match="cannot keep 0 steps"):
        retain(tmp_path, 0)


def test_damaged_steps_do_not_count_and_the_newest_good_one_stays(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        path = put(tmp_path, step)
        os.utime(path, (100 - step, 100 - step))
    truncate(path)
    (tmp_path / "step-00000003" / "manifest.json").unlink()
    retain(tmp_path, 1)
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]
    assert latest_good(tmp_path, fall_back=True) == tmp_path / "step-00000002"


def test_the_step_that_the_pointer_names_stays(tmp_path: Path) -> None:
    for step in (5, 6, 7):
        put(tmp_path, step)
    put(tmp_path, 1)  # a new run's first step, in a directory with later ones
    retain(tmp_path, 1)
    assert names(tmp_path) == ["step-00000001", "step-00000007"]


def test_steps_kept_for_ever(tmp_path: Path) -> None:
    """Those that keep_every divides and those that are pinned, however old and damaged."""
    for step in range(1, 9):
        put(tmp_path, step)
    pin(tmp_path / "step-00000002")
    truncate(tmp_path / "step-00000003")
    gone = retain(tmp_path, 1, keep_every=3)
    assert [path.name[-1] for path in gone] == ["1", "4", "5", "7"]
    assert [name[-1] for name in names(tmp_path)] == ["2", "3", "6", "8"]
    assert verify(tmp_path / "step-00000002") == []
    assert "pinned: no run removes it" in inspect(tmp_path / "step-00000002")
    unpin(tmp_path / "step-00000002")
    unpin(tmp_path / "step-00000002")
    assert retain(tmp_path, 1, keep_every=3) == [tmp_path / "step-00000002"]
    for act in (pin, unpin):
        with pytest.raises(CheckpointError, match="is not a complete step"):
            act(tmp_path / "step-00000004")


def test_a_pinned_step_that_is_saved_again_stays_pinned(tmp_path: Path) -> None:
    pin(put(tmp_path, 1))
    put(tmp_path, 2)
    put(tmp_path, 1)
    put(tmp_path, 2)
    assert retain(tmp_path, 1) == []
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_step_that_is_being_read_stays(tmp_path: Path) -> None:
    """By this process or another, and until the last reader ends."""
    one = put(tmp_path, 1)
    put(tmp_path, 2)
    with reading(one) as manifest, reading(one):
        assert manifest.step == 1
        assert retain(tmp_path, 1) == []

    def body() -> None:
        axis = world_axis()
        with reading(one) if axis.rank else contextlib.nullcontext():
            agreed(axis, lambda: None)
            assert axis.rank or retain(tmp_path, 1) == []
            agreed(axis, lambda: None)
        agreed(axis, lambda: None)
        assert axis.rank or retain(tmp_path, 1) == [one]

    run_ranks(body, 2)
    assert names(tmp_path) == ["step-00000002"]


def test_a_load_holds_the_step_from_its_first_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, 1)
    put(tmp_path, 2)
    removed = []

    def fill(*arguments: object) -> None:
        removed.extend(retain(tmp_path, 1))

    monkeypatch.setattr(io, "_fill", fill)
    shard = Shard("w", (4, 3), "float32", whole((4, 3)))
    io.load(tmp_path / "step-00000001", [(shard, torch.zeros(4, 3))])
    assert removed == []
    assert retain(tmp_path, 1) == [tmp_path / "step-00000001"]


def test_a_step_that_is_being_removed_is_not_read(tmp_path: Path) -> None:
    one = put(tmp_path, 1)
    with unused(one / "manifest.json") as free:
        assert free
        with pytest.raises(CheckpointError, match=f"{one}: is being removed"), reading(one):
            pass


def test_a_step_that_is_only_looked_at_is_read(tmp_path: Path) -> None:
    """As `retain` looks whether it is pinned."""
    one, looked = put(tmp_path, 1), threading.Event()

    def look() -> None:
        with unused(one / "manifest.json"):
            looked.set()
            time.sleep(0.1)

    looker = threading.Thread(target=look)
    looker.start()
    looked.wait()
    with reading(one) as manifest:
        assert manifest.step == 1
    looker.join()


def test_a_step_that_went_while_it_was_opened_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = put(tmp_path, 1)
    real = storage.fcntl.flock

    def late(*args: object) -> None:
        if one.exists():
            one.rename(tmp_path / ".tmp-step-00000001-0")
        real(*args)

    monkeypatch.setattr(storage.fcntl, "flock", late)
    with pytest.raises(CheckpointError, match="is being removed"), reading(one):
        pass


def test_without_locks_a_step_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = put(tmp_path, 1)

    def refuse(*_: object) -> None:
        raise OSError(refuse.number, "")

    monkeypatch.setattr(storage.fcntl, "flock", refuse)
    refuse.number = errno.ENOSYS
    with reading(one) as manifest:
        assert manifest.step == 1
    refuse.number = errno.EIO
    with pytest.raises(OSError), reading(one):
        pass


def test_leftovers_of_dead_writers_go_at_the_next_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = put(tmp_path, 1)
    shutil.copytree(one, tmp_path / ".tmp-step-00000002-ab12")
    shutil.copytree(one, tmp_path / ".old-step-00000001-ab12")
    (tmp_path / ".latest-ab12").write_text("step")
    (tmp_path / ".new-ab12").write_text("manifest")
    (tmp_path / "step-00000001.backup").mkdir()
    put(tmp_path, 3)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"step-00000001", "step-00000003", "step-00000001.backup", "latest"}
    assert ".tmp-step-00000002-ab12: removed" in caplog.text


def test_a_step_left_aside_counts_and_moves_back(tmp_path: Path) -> None:
    one = put(tmp_path, 1)
    aside = tmp_path / ".old-step-00000001-ab12"
    one.rename(aside)
    assert latest_good(tmp_path) == aside
    Renames(Files()).tidy(tmp_path)
    assert latest_good(tmp_path) == one


def test_what_inspect_says(tmp_path: Path) -> None:
    step = put(tmp_path, 12)
    digest = read_manifest(step).files["rank-00000.safetensors"].xxh3
    assert inspect(step) == [
        "step 12: 1 tensors, 12 elements, 48 bytes in 1 files",
        "layout: dp=1",
        "state: cursor=12",
        "tensors:",
        "  w  4x3  float32  48 bytes  rank-00000.safetensors",
        "files:",
        f"  rank-00000.safetensors  {(step / 'rank-00000.safetensors').stat().st_size} bytes"
        f"  xxh3 {digest}",
    ]
