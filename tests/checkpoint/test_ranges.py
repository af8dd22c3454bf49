"""What is read at a URL, and sent there: ranges and parts, and no more memory than they need."""

from __future__ import annotations

import random
from pathlib import Path

import fsspec
import pytest
import torch
from checkpoint.test_io import assert_equal, blank, labelled, wholes
from memory import peak_while

from penteract.checkpoint import io, reader, remote, writing
from penteract.checkpoint.examine import read_manifest, verify
from penteract.checkpoint.format import DTYPES
from penteract.checkpoint.io import Record, Shard, load, read_tensor, save
from penteract.checkpoint.remote import Remote
from penteract.mesh import single
from penteract.placement import Box
from penteract.testing import run_ranks

ONE = single("world")


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(name, bytes) of every range that is read."""
    seen: list[tuple[str, int]] = []
    real = Remote.read

    def read(self: Remote, begin: int, end: int) -> bytes:
        seen.append((self.name, end - begin))
        return real(self, begin, end)

    monkeypatch.setattr(Remote, "read", read)
    return seen


@pytest.mark.parametrize(
    ("box", "gap", "expected"),
    [
        (Box((0, 0), (64, 32)), 1 << 18, [64 * 32]),
        (Box((16, 0), (8, 32)), 1 << 18, [8 * 32]),
        (Box((16, 8), (1, 4)), 1 << 18, [4]),
        (Box((16, 8), (8, 4)), 0, [4] * 8),
        (Box((16, 8), (8, 4)), 1 << 18, [8 * 32]),  # sooner read than asked for eight times
    ],
)
def test_only_the_ranges_of_a_box_are_read(
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    requests: list[tuple[str, int]],
    box: Box,
    gap: int,
    expected: list[int],
) -> None:
    monkeypatch.setattr(reader, "GAP_BYTES", gap)
    x = labelled((64, 32))
    step = save(url, Record(1), wholes({"w": x, "other": labelled((300, 300))}), axis=ONE)
    values = torch.zeros(box.size)
    load(
        step, [(Shard("w", (64, 32), "float32", box), values)], skip=("other",), check_hashes=False
    )
    assert torch.equal(values, x[box.slices()])
    header = sum(size for _, size in requests[:2])  # looked at by the check, and by the read
    assert header < 500
    assert [size for _, size in requests[4:]] == [4 * count for count in expected]


def test_every_box_of_every_type(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "RANGE_BYTES", 64)
    draw = random.Random(3)
    shapes = [(), (1,), (9,), (5, 7), (1, 6), (4, 3, 5), (2, 1, 3, 4), (0, 3), (3, 0)]
    tensors = {
        f"{dtype}.{'x'.join(map(str, shape))}": labelled(shape, dtype)
        for dtype in DTYPES
        for shape in shapes
    }
    held = wholes(tensors)
    step = save(url, Record(1), held, axis=ONE)
    back = blank(held)
    load(step, back)
    assert_equal(back, tensors)
    (name,) = read_manifest(step).files
    opened = reader.open_tensors(step / name)
    for gap in (0, 30, 1 << 18):
        monkeypatch.setattr(reader, "GAP_BYTES", gap)
        for key, x in tensors.items():
            if not x.numel():
                continue  # has no place in a file
            ends = [sorted(draw.choices(range(n + 1), k=2)) for n in x.shape]
            part = tuple(slice(*pair) for pair in ends)
            assert torch.equal(opened.get_slice(key)[part], x[part]), (key, part)


def test_an_upload_is_sent_in_parts(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PART_BYTES", 1000)
    monkeypatch.setattr(remote, "PIECE_BYTES", 100)
    system = fsspec.get_filesystem_class(url.split(":")[0])
    monkeypatch.setattr(system, "longest", 0, raising=False)
    x = labelled((100, 100))
    step = save(url, Record(1), wholes({"w": x}), axis=ONE)
    assert torch.equal(read_tensor(step, "w"), x)
    assert verify(step) == []
    assert 1000 <= system.longest < 1100 or url.startswith("memory")


def test_memory_is_a_bucket_besides_the_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, shape, url = 1 << 20, (4096, 4096), f"file://{tmp_path}/run"  # 64 MiB
    monkeypatch.setattr(io, "BUCKET_BYTES", bucket)
    monkeypatch.setattr(writing, "BUCKET_BYTES", bucket)
    monkeypatch.setattr(reader, "RANGE_BYTES", bucket)

    def body() -> tuple[int, int]:
        tensor = torch.ones(shape).T  # a view, so that saving has to copy
        saving = peak_while(lambda: save(url, Record(1), wholes({"w": tensor}), axis=ONE))
        part = Box((0, 1), (4096, 4095))  # not contiguous in the file, so that reading has to copy
        wanted = [(Shard("w", shape, "float32", part), tensor[:, 1:])]
        return saving, peak_while(lambda: load(f"{url}/step-00000001", wanted))

    ((saving, loading),) = run_ranks(body, 1)
    assert saving < 16 * bucket
    assert loading < 16 * bucket
