"""A step written again: the same tensors to the bit, in as many files as asked for."""

import errno
import math
from pathlib import Path

import pytest
import torch
from memory import peak_while
from safetensors.torch import load_file

from penteract.checkpoint import reshard as module
from penteract.checkpoint.examine import read_manifest, verify
from penteract.checkpoint.format import CheckpointError, SaveError
from penteract.checkpoint.io import Record, Shard, load, read_tensor, save
from penteract.checkpoint.reshard import reshard
from penteract.checkpoint.steps import pointed
from penteract.checkpoint.storage import Files, lock
from penteract.mesh import single
from penteract.placement import flat_range_boxes, split_range, whole
from penteract.testing import run_ranks, world_axis

TENSORS = {
    "embed": torch.arange(24_000, dtype=torch.float32).reshape(1000, 24),
    "half": torch.arange(900).to(torch.bfloat16).reshape(90, 10),
    "scale": torch.tensor(2.5, dtype=torch.float64),
    "none": torch.zeros(0, 3),
    "count": torch.tensor([1 << 60, -3]),
    "exp_avg/embed": torch.arange(24_000, dtype=torch.float32).reshape(1000, 24).neg(),
}


def put(directory: Path, ranks: int) -> Path:
    """TENSORS as step 7; each of the ranks has a flat range of every one."""

    def body() -> None:
        axis, held = world_axis(), []
        for name, x in TENSORS.items():
            shape, part = tuple(x.shape), split_range(x.numel(), axis.size, axis.rank)
            for box in flat_range_boxes(shape, *part) if x.numel() else [whole(shape)]:
                held.append((Shard(name, shape, str(x.dtype)[6:], box), x[box.slices()]))
        record = Record(7, {"model": {"hidden": 24}}, {"dp": axis.size}, {"cursor": 12})
        save(directory, record, held, axis=axis)

    run_ranks(body, ranks)
    return directory / "step-00000007"


def sizes(step: Path) -> list[int]:
    return [file.bytes for file in read_manifest(step).files.values()]


def assert_same(step: Path, expected: dict[str, torch.Tensor]) -> None:
    assert verify(step) == []
    assert read_manifest(step).tensors.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(read_tensor(step, name), x), name


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("files", [1, 2, 7])
@pytest.mark.parametrize("bucket_bytes", [104, 1 << 25])
def test_any_files_from_any_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, files: int, bucket_bytes: int
) -> None:
    monkeypatch.setattr(module, "BUCKET_BYTES", bucket_bytes)
    source = put(tmp_path / "a", ranks)
    step = reshard(source, tmp_path / "b", files=files)
    assert step == tmp_path / "b/step-00000007" == pointed(tmp_path / "b")
    assert_same(step, TENSORS)
    assert len(sizes(step)) == files
    assert max(sizes(step)) < 1.1 * min(sizes(step))
    mine, other = read_manifest(source), read_manifest(step)
    assert (mine.step, mine.config, mine.state) == (other.step, other.config, other.state)
    assert other.layout == {"files": files}
    assert_same(source, TENSORS)


def test_one_file_is_one_that_every_safetensors_reader_knows(tmp_path: Path) -> None:
    """Tensors that ranks had in parts are whole again, under their own names."""
    step = reshard(put(tmp_path / "a", 3), tmp_path / "b")
    read = load_file(step / "rank-00000.safetensors")
    assert read.keys() == TENSORS.keys() - {"none"}
    assert all(torch.equal(read[name], TENSORS[name]) for name in read)


@pytest.mark.parametrize("max_bytes", [3000, 50_000, 193_000, 10**9])
def test_a_largest_file(tmp_path: Path, max_bytes: int) -> None:
    step = reshard(put(tmp_path / "a", 2), tmp_path / "b", max_bytes=max_bytes)
    assert_same(step, TENSORS)
    total = sum(x.nbytes for x in TENSORS.values())
    assert max(sizes(step)) <= max_bytes
    assert len(sizes(step)) <= math.ceil(1.2 * total / max_bytes)


def test_weights_alone(tmp_path: Path) -> None:
    weights = {name: x for name, x in TENSORS.items() if "/" not in name}
    step = reshard(put(tmp_path / "a", 2), tmp_path / "b", drop=("exp_avg/",))
    assert_same(step, weights)
    held = [
        (Shard(name, tuple(x.shape), str(x.dtype)[6:], whole(tuple(x.shape))), torch.zeros_like(x))
        for name, x in weights.items()
    ]
    load(step, held)
    assert all(torch.equal(x, weights[shard.tensor]) for shard, x in held)


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_source_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    source = put(tmp_path / "a", 3)
    file = source / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(content if damage == "flip" else content[:-1])
    with pytest.raises(CheckpointError, match=str(file)):
        reshard(source, tmp_path / "b", files=2)
    assert not (tmp_path / "b").exists()


def test_what_is_refused(tmp_path: Path) -> None:
    source = put(tmp_path / "a", 1)
    step = reshard(source, tmp_path / "b", files=2)
    before = sizes(step)
    for folder in (tmp_path / "b", tmp_path / "a"):
        with pytest.raises(CheckpointError, match="step-00000007: is there already"):
            reshard(source, folder)
    assert sizes(step) == before
    with pytest.raises(CheckpointError, match="give the folder that the step is to stand in"):
        reshard(source, tmp_path / "step-00000007")
    with pytest.raises(CheckpointError, match="cannot be cut into 5000 files: a row"):
        reshard(source, tmp_path / "c", files=5000)
    for max_bytes in (1, 90, 200):
        with pytest.raises(CheckpointError, match=f"files of at most {max_bytes} bytes with"):
            reshard(source, tmp_path / "c", max_bytes=max_bytes)
    with pytest.raises(CheckpointError, match="is not a complete step"):
        reshard(tmp_path / "absent", tmp_path / "c")
    assert not (tmp_path / "c").exists()
    with lock(tmp_path / "c"), pytest.raises(CheckpointError, match="another run writes"):
        reshard(source, tmp_path / "c")


def test_an_older_step_is_not_the_latest(tmp_path: Path) -> None:
    shard = Shard("w", (2,), "float32", whole((2,)))
    newer = save(tmp_path / "b", Record(8), [(shard, torch.ones(2))], axis=single("world"))
    step = reshard(put(tmp_path / "a", 1), tmp_path / "b")
    assert verify(step) == []
    assert pointed(tmp_path / "b") == newer


@pytest.mark.parametrize("operation", ["create", "write", "sync", "sync_directory"])
def test_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    source = put(tmp_path / "a", 1)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Files, operation, fail)
        with pytest.raises(SaveError, match=r"cannot save \(No space left on device\)"):
            reshard(source, tmp_path / "b", files=2)
    assert [path.name for path in (tmp_path / "b").iterdir()] == [".lock"]
    assert_same(reshard(source, tmp_path / "b"), TENSORS)


def test_memory_is_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, shape = 1 << 20, (4096, 4096)  # 64 MiB
    monkeypatch.setattr(module, "BUCKET_BYTES", bucket)

    def body() -> int:
        shard = Shard("w", shape, "float32", whole(shape))
        source = save(tmp_path / "a", Record(1), [(shard, torch.ones(shape))], axis=single("world"))
        return peak_while(lambda: reshard(source, tmp_path / "b", files=3))

    assert run_ranks(body, 1)[0] < 16 * bucket
    assert len(sizes(tmp_path / "b/step-00000001")) == 3


def test_progress_is_told_to_the_last_byte(tmp_path: Path) -> None:
    source, told = put(tmp_path / "a", 2), list[int]()
    reshard(source, tmp_path / "b", files=2, told=told.append)
    assert sum(told) == sum(sizes(source)) + sum(x.nbytes for x in TENSORS.values())
