"""The directory of steps: which one is chosen, which may go."""

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch

from penteract.checkpoint.examine import inspect, read_manifest, verify
from penteract.checkpoint.format import CheckpointError
from penteract.checkpoint.io import Record, save
from penteract.checkpoint.plan import Shard
from penteract.checkpoint.steps import find_step, latest_good, pointed, retain, steps, tidy
from penteract.checkpoint.storage import Files
from penteract.mesh import single
from penteract.placement import whole


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


def flip(step: Path) -> Path:
    file = step / "rank-00000.safetensors"
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


def test_leftovers_of_dead_writers_go_at_the_next_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = put(tmp_path, 1)
    shutil.copytree(one, tmp_path / ".tmp-step-00000002-ab12")
    shutil.copytree(one, tmp_path / ".old-step-00000001-ab12")
    (tmp_path / ".latest-ab12").write_text("step")
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
    tidy(tmp_path, Files())
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
