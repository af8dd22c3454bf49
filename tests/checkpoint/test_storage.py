"""The file layer and the lock."""

import os
import signal
import time
from pathlib import Path

import pytest
import xxhash

from penteract.checkpoint.format import CheckpointError
from penteract.checkpoint.storage import Files, HashedFile, hash_file, lock


def test_the_hash_made_while_writing_is_that_of_the_file(tmp_path: Path) -> None:
    content = bytes(range(256)) * 50
    with HashedFile(tmp_path / "f", Files()) as out:
        for start in range(0, len(content), 999):
            out.write(content[start : start + 999])
        stored = out.finish()
    assert (tmp_path / "f").read_bytes() == content
    assert stored.bytes == len(content)
    assert stored.xxh3 == xxhash.xxh3_128_hexdigest(content)
    assert stored.xxh3 == hash_file(tmp_path / "f", bucket_bytes=1000)


def test_writing_never_replaces_a_file_by_accident(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("old")
    with pytest.raises(FileExistsError):
        HashedFile(tmp_path / "f", Files())


def test_one_writer_a_directory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with lock(run):
        with pytest.raises(CheckpointError, match=rf"pid {os.getpid()} on "), lock(run):
            pass
        with lock(tmp_path / "other"):
            pass
    with lock(run):
        pass


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        with lock(tmp_path):
            (tmp_path / "held").touch()
            time.sleep(60)
        os._exit(0)
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    with pytest.raises(CheckpointError, match=f"pid {child} on"), lock(tmp_path):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with lock(tmp_path):
        pass
