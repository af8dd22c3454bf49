"""Saving and loading: any layout into any layout, bit for bit, or one clear refusal."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from memory import peak_while
from safetensors.torch import load_file, save_file

from penteract.checkpoint import io, reader, writing
from penteract.checkpoint.examine import verify
from penteract.checkpoint.format import DTYPES, CheckpointError
from penteract.checkpoint.io import Record, Shard, load, read_manifest, read_tensor, save
from penteract.checkpoint.steps import latest_good
from penteract.mesh import single
from penteract.placement import Box, flat_range_boxes, split_range, whole
from penteract.testing import run_ranks, world_axis

GOLDEN = Path(__file__).parent.parent / "data" / "checkpoint" / "step-00000003"
ONE = single("world")
Held = list[tuple[Shard, torch.Tensor]]


def labelled(shape: tuple[int, ...], dtype: str = "float32", start: int = 1) -> torch.Tensor:
    """A tensor whose elements tell where they belong."""
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count).reshape(shape).to(getattr(torch, dtype))


def wholes(tensors: dict[str, torch.Tensor]) -> Held:
    return [
        (Shard(name, tuple(t.shape), str(t.dtype)[6:], whole(tuple(t.shape))), t)
        for name, t in tensors.items()
    ]


def blank(held: Held) -> Held:
    return [(shard, torch.zeros_like(tensor)) for shard, tensor in held]


def assert_equal(held: Held, expected: dict[str, torch.Tensor]) -> None:
    for shard, tensor in held:
        assert torch.equal(tensor, expected[shard.tensor][shard.box.slices()]), shard


MODEL = {
    "embed": labelled((7, 4)),
    "norm": labelled((5,), start=100),
    "scale": torch.tensor(3.5),
    "up": labelled((6, 10), start=200),
    "half": labelled((3, 5), "bfloat16"),
    "tiny": labelled((1, 1, 2), "float64"),
}
# What a data-parallel run with sharded optimizer state holds on one rank: weights whole, moments
# and masters as a flat range of each tensor's elements.
STATE = {f"m/{name}": labelled(tuple(t.shape), start=500) for name, t in MODEL.items()}


def layout_of(rank: int, size: int, sharded: bool) -> Held:
    held = wholes(MODEL)
    for name, tensor in STATE.items():
        shape = tuple(tensor.shape)
        part = split_range(tensor.numel(), size, rank) if sharded else (0, tensor.numel())
        for box in flat_range_boxes(shape, *part):
            held.append((Shard(name, shape, "float32", box), tensor[box.slices()]))
    return held


def save_as(directory: Path, sharded: bool = True, step: int = 1) -> None:
    axis = world_axis()
    record = Record(step, {"hidden": 4}, {"dp": axis.size}, {"cursor": 12345678901})
    save(directory, record, layout_of(axis.rank, axis.size, sharded), axis=axis)


def load_as(step: Path, sharded: bool) -> dict[str, Any]:
    axis = world_axis()
    held = blank(layout_of(axis.rank, axis.size, sharded))
    manifest = load(step, held, axis=axis)
    assert_equal(held, MODEL | STATE)
    return manifest.state


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = {
        f"{dtype}.{'x'.join(map(str, shape))}": labelled(shape, dtype)
        for dtype in DTYPES
        for shape in [(), (1,), (3, 5), (0,), (4, 0, 2), (2, 3, 4)]
    }
    tensors["nan"] = torch.tensor([float("nan"), float("inf"), -0.0]).to(torch.bfloat16)
    step = save(tmp_path, Record(7), wholes(tensors), axis=ONE)
    held = blank(wholes(tensors))
    assert load(step, held).step == 7
    for (_, got), want in zip(held, tensors.values(), strict=True):
        assert got.reshape(-1).view(torch.uint8).equal(want.reshape(-1).view(torch.uint8))
    read = load_file(step / "rank-00000.safetensors")
    assert all(torch.equal(read[n], t) for n, t in tensors.items() if t.numel() and n != "nan")
    assert torch.equal(read_tensor(step, "int64.2x3x4"), tensors["int64.2x3x4"])
    assert read_tensor(step, "bool.4x0x2").shape == (4, 0, 2)
    with pytest.raises(CheckpointError, match="no tensor 'other'"):
        read_tensor(step, "other")


@pytest.mark.parametrize("bucket_bytes", [8, 40, 1 << 20])
def test_views_are_saved_and_filled_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket_bytes: int
) -> None:
    monkeypatch.setattr(io, "BUCKET_BYTES", bucket_bytes)
    monkeypatch.setattr(writing, "BUCKET_BYTES", bucket_bytes)
    storage = labelled((12, 9), "float64")
    left, turned = storage[2:8, 1:4], storage[8:, 4:].T
    shape = (6, 8)
    held = [
        (Shard("w", shape, "float64", Box((0, 0), (6, 3))), left),
        (Shard("w", shape, "float64", Box((0, 3), (5, 4))), turned),
        (Shard("w", shape, "float64", Box((5, 3), (1, 4))), storage[0:1, 0:4]),
        (Shard("w", shape, "float64", Box((0, 7), (6, 1))), storage[0:6, 8:9]),
    ]
    logical = torch.empty(shape, dtype=torch.float64)
    for shard, tensor in held:
        logical[shard.box.slices()] = tensor
    step = save(tmp_path, Record(1), held, axis=ONE)
    assert torch.equal(read_tensor(step, "w"), logical)
    parameter = torch.nn.Parameter(torch.zeros(12, 9, dtype=torch.float64))
    load(step, [(Shard("w", shape, "float64", whole(shape)), parameter.detach()[3:9, 1:])])
    assert torch.equal(parameter[3:9, 1:], logical)
    assert parameter.sum() == logical.sum()


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 1), (3, 2), (4, 3)])
def test_any_number_of_ranks_loads_into_any_other(tmp_path: Path, before: int, after: int) -> None:
    run_ranks(save_as, before, tmp_path)
    step = latest_good(tmp_path)
    assert step is not None
    assert verify(step) == []
    for sharded in (True, False):
        states = run_ranks(load_as, after, step, sharded)
        assert states == [{"cursor": 12345678901}] * after
    read = {name: read_tensor(step, name) for name in read_manifest(step).tensors}
    assert all(torch.equal(read[n], t) for n, t in (MODEL | STATE).items())
    assert len(read) == len(MODEL | STATE)


def test_ranks_share_the_writing(tmp_path: Path) -> None:
    def body() -> None:
        axis = world_axis()
        save(tmp_path, Record(1), wholes({"w": labelled((300, 20))}), axis=axis)

    run_ranks(body, 3)
    sizes = [file.bytes for file in read_manifest(tmp_path / "step-00000001").files.values()]
    assert len(sizes) == 3
    assert max(sizes) - min(sizes) < 100


def test_every_mismatch_is_listed_and_nothing_is_loaded(tmp_path: Path) -> None:
    step = save(tmp_path, Record(1), wholes(MODEL), axis=ONE)
    wrong = {
        "embed": torch.zeros(8, 4),
        "norm": torch.zeros(5),
        "scale": torch.tensor(0.0),
        "up": torch.zeros(6, 10),
        "half": torch.zeros(3, 5),
        "head": torch.zeros(7, 4),
    }
    with pytest.raises(CheckpointError) as caught:
        load(step, wholes(wrong))
    assert str(caught.value).splitlines() == [
        f"{step} is not of this model:",
        "  embed: checkpoint [7, 4] float32, wanted [8, 4] float32",
        "  half: checkpoint [3, 5] bfloat16, wanted [3, 5] float32",
        "  head: not in the checkpoint (wanted [7, 4] float32)",
        "  tiny: in the checkpoint, not in the model",
    ]
    assert not any(tensor.any() for tensor in wrong.values())


def test_a_deleted_key_fails_hard_on_every_rank(tmp_path: Path) -> None:
    tensors = {name: t for name, t in MODEL.items() if name != "norm"}
    step = save(tmp_path, Record(1), wholes(tensors), axis=ONE)

    def body() -> str:
        axis = world_axis()
        # Only rank 1 wants the missing tensor, as a pipeline stage would.
        held = blank(wholes(MODEL if axis.rank == 1 else tensors))
        with pytest.raises(CheckpointError, match="norm: not in the checkpoint") as caught:
            load(step, held, axis=axis)
        assert not any(tensor.any() for _, tensor in held)
        return str(caught.value)

    assert len(set(run_ranks(body, 2))) == 1


def test_some_names_may_be_left_unread(tmp_path: Path) -> None:
    step = save(tmp_path, Record(1), wholes(MODEL | STATE), axis=ONE)
    with pytest.raises(CheckpointError, match="m/embed: in the checkpoint, not in the model"):
        load(step, blank(wholes(MODEL)))
    held = blank(wholes(MODEL))
    load(step, held, skip=("m/",))
    assert_equal(held, MODEL)
    held = blank(wholes(MODEL))
    load(step, held, unread=STATE.keys())
    assert_equal(held, MODEL)
    with pytest.raises(
        CheckpointError, match=r"is not of this model:\n  m/up: in the checkp[^\n]*$"
    ):
        load(step, held, unread=STATE.keys() - {"m/up"} | {"m", "m/u"})  # names, not prefixes


@pytest.mark.parametrize("damage", ["truncate", "flip", "key", "gone"])
def test_a_damaged_file_is_named_and_nothing_is_loaded(tmp_path: Path, damage: str) -> None:
    run_ranks(save_as, 2, tmp_path)
    step = tmp_path / "step-00000001"
    file = step / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    if damage == "truncate":
        file.write_bytes(content[:-1])
    elif damage == "flip":
        content[-1] ^= 1
        file.write_bytes(content)
    elif damage == "key":
        file.write_bytes(content.replace(b"m/up", b"m/ip"))
    else:
        file.unlink()

    def body() -> None:
        axis = world_axis()
        held = blank(layout_of(axis.rank, axis.size, True))
        with pytest.raises(CheckpointError, match=str(file)):
            load(step, held, axis=axis)
        assert not any(tensor.any() for _, tensor in held)

    run_ranks(body, 2)


def test_a_hostile_header_is_refused_before_the_library_opens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = save(tmp_path, Record(1), wholes({"w": labelled((4,))}), axis=ONE)
    file = step / "rank-00000.safetensors"
    content = file.read_bytes()
    manifest = json.loads((step / "manifest.json").read_text())
    monkeypatch.delattr(reader, "safe_open")
    for bad in (
        (1 << 40).to_bytes(8, "little") + content[8:],
        content.replace(b'"shape":[4]', b'"shape":[9]'),
        content.replace(b'"data_offsets":[0,16]', b'"data_offsets":[0,17]'),
    ):
        assert bad != content
        file.write_bytes(bad)
        manifest["files"][file.name]["bytes"] = len(bad)
        (step / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match=str(file)):
            load(step, blank(wholes({"w": labelled((4,))})), check_hashes=False)


def test_tensors_that_do_not_fit_their_shards_are_refused(tmp_path: Path) -> None:
    def body() -> None:
        axis = world_axis()
        tensor = torch.zeros(3, 2 if axis.rank else 4)
        held = [(Shard("w", (3, 4), "float32", whole((3, 4))), tensor)]
        for act in (
            lambda: save(tmp_path, Record(1), held, axis=axis),
            lambda: load(tmp_path, held, axis=axis),
        ):
            with pytest.raises(CheckpointError, match=r"rank 1: .*\n  w: a tensor of \[3, 2\]"):
                act()

    run_ranks(body, 2)
    assert list(tmp_path.iterdir()) == []


def test_a_record_that_is_no_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for state in ({"x": torch.zeros(1)}, {"x": float("nan")}):
        with pytest.raises(CheckpointError, match="must be plain JSON"):
            save(tmp_path, Record(1, state=state), wholes(MODEL), axis=ONE)
    with pytest.raises(CheckpointError, match="step -1"):
        save(tmp_path, Record(-1), wholes(MODEL), axis=ONE)
    assert list(tmp_path.iterdir()) == []


def test_memory_is_a_bucket_besides_the_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, shape = 1 << 20, (4096, 4096)  # 64 MiB
    monkeypatch.setattr(io, "BUCKET_BYTES", bucket)
    monkeypatch.setattr(writing, "BUCKET_BYTES", bucket)

    def body() -> tuple[int, int]:
        tensor = torch.ones(shape).T  # a view, so that saving has to copy
        held = wholes({"w": tensor})
        saving = peak_while(lambda: save(tmp_path, Record(1), held, axis=ONE))
        part = Box((0, 1), (4096, 4095))  # not contiguous in the file, so that reading has to copy
        wanted = [(Shard("w", shape, "float32", part), tensor[:, 1:])]
        return saving, peak_while(lambda: load(tmp_path / "step-00000001", wanted))

    ((saving, loading),) = run_ranks(body, 1)
    assert saving < 16 * bucket
    assert loading < 16 * bucket


def test_an_old_checkpoint_still_loads() -> None:
    """Saved once by format 1 and kept: whatever changes, it must load."""
    assert verify(GOLDEN) == []
    expected = {"w": labelled((4, 3)), "norm": labelled((3,), "bfloat16"), "n": torch.tensor(9)}
    held = blank(wholes(expected))
    manifest = load(GOLDEN, held)
    assert_equal(held, expected)
    assert manifest.state == {"cursor": 24, "tokens": 768}
    assert manifest.layout == {"dp": 2}


def test_files_of_the_library_and_ours_are_the_same_format(tmp_path: Path) -> None:
    tensors = {"a": labelled((3, 2)), "b": labelled((4,), "bfloat16")}
    step = save(tmp_path, Record(1), wholes(tensors), axis=ONE)
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    ours = (step / "rank-00000.safetensors").read_bytes()
    assert ours[-32:] == (tmp_path / "theirs").read_bytes()[-32:]
