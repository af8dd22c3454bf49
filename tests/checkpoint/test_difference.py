"""Two steps compared: whatever layouts wrote them, every planted difference is found."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from memory import peak_while

from penteract.checkpoint import difference as module
from penteract.checkpoint.difference import TensorDifference, compare_steps, unlike
from penteract.checkpoint.format import CheckpointError
from penteract.checkpoint.io import Record, Shard, save
from penteract.mesh import single
from penteract.placement import flat_range_boxes, split_range, whole
from penteract.testing import run_ranks, world_axis

CONFIG = {"optim": {"lr": 0.1}, "parallel": {"tp": 1}, "train": {"steps": 3}}


def tensors() -> dict[str, torch.Tensor]:
    return {
        "a": torch.arange(1, 61, dtype=torch.float32).reshape(12, 5),
        "b": torch.arange(30).to(torch.bfloat16).reshape(5, 6),
        "c": torch.tensor(-8.0, dtype=torch.float64),
        "d": torch.arange(7),
        "e": torch.tensor([True, False]),
        "f": torch.zeros(0, 2),
    }


def put(directory: Path, values: dict[str, torch.Tensor], ranks: int = 1, **record: Any) -> Path:
    def body() -> None:
        axis, held = world_axis(), []
        for name, x in values.items():
            shape, part = tuple(x.shape), split_range(x.numel(), axis.size, axis.rank)
            for box in flat_range_boxes(shape, *part) if x.numel() else [whole(shape)]:
                held.append((Shard(name, shape, str(x.dtype)[6:], box), x[box.slices()]))
        how = {"config": CONFIG, "state": {"cursor": 4}, **record}
        save(directory, Record(1, layout={"dp": axis.size}, **how), held, axis=axis)

    run_ranks(body, ranks)
    return directory / "step-00000001"


@pytest.mark.parametrize("bucket_bytes", [32, 1 << 25])
def test_layouts_make_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket_bytes: int
) -> None:
    monkeypatch.setattr(module, "BUCKET_BYTES", bucket_bytes)
    values = tensors()
    values["a"][0, :2] = torch.tensor([math.nan, math.inf])
    found = compare_steps(put(tmp_path / "a", values, 3), put(tmp_path / "b", values, 2))
    assert found.none
    assert found.equal == list("abcdef")


@pytest.mark.parametrize("bucket_bytes", [32, 1 << 25])
def test_every_difference_is_measured_and_the_worst_is_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket_bytes: int
) -> None:
    monkeypatch.setattr(module, "BUCKET_BYTES", bucket_bytes)
    values = tensors()
    values["a"][3, 2] += 0.5
    values["a"][11, 4] -= 15.0
    values["b"][4, 5] = 29.125  # the next value in bfloat16
    values["c"] = -values["c"]
    values["d"][0] = 3
    values["e"][1] = True
    found = compare_steps(put(tmp_path / "a", tensors(), 2), put(tmp_path / "b", values))
    assert not found.none
    assert found.tensors == {
        "c": TensorDifference(1, 16.0, 2.0),
        "e": TensorDifference(1, 1.0, 1.0),
        "d": TensorDifference(1, 3.0, 0.5),
        "a": TensorDifference(2, 15.0, 0.25),
        "b": TensorDifference(1, 0.125, 0.125 / 29.125),
    }
    assert list(found.tensors) == ["c", "e", "d", "a", "b"]
    assert found.equal == ["f"]


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    values = {"w": torch.tensor([math.nan, 0.0, math.inf, 1.0]), "x": torch.tensor([0.0])}
    other = {name: x.clone() for name, x in values.items()}
    other["x"][0] = -0.0
    a, b = put(tmp_path / "a", values), put(tmp_path / "b", other)
    assert compare_steps(a, b).tensors == {"x": TensorDifference(1, 0.0, 0.0)}
    for number, (place, value) in enumerate([(0, 2.0), (3, math.nan), (2, 4.0), (2, -math.inf)]):
        other["w"] = values["w"].clone()
        other["w"][place] = value
        found = compare_steps(a, put(tmp_path / f"{number}", other)).tensors["w"]
        assert found == TensorDifference(1, math.inf, math.inf)


def test_names_shapes_types_configuration_and_state(tmp_path: Path) -> None:
    values = tensors()
    values["z"] = values.pop("a")
    values["b"] = values["b"].float()
    values["d"] = torch.arange(8)
    config = {**CONFIG, "optim": {"lr": 0.2, "eps": 1.0}, "parallel": {"tp": 2}}
    a = put(tmp_path / "a", tensors())
    found = compare_steps(a, put(tmp_path / "b", values, config=config, state={"cursor": 5}))
    assert (found.only_a, found.only_b) == (["a"], ["z"])
    assert found.kinds == {"b": ("[5, 6] bfloat16", "[5, 6] float32"),
                           "d": ("[7] int64", "[8] int64")}  # fmt: skip
    assert found.equal == ["c", "e", "f"]
    assert found.config == {"optim.eps": (None, 1.0), "optim.lr": (0.1, 0.2), "parallel.tp": (1, 2)}
    assert found.state == {"cursor": (4, 5)}


@pytest.mark.parametrize(
    ("record", "none"),
    [
        ({"state": {"cursor": 5}}, False),
        ({"config": {**CONFIG, "optim": {"lr": 0.2}}}, False),
        ({"config": {**CONFIG, "paralleled": 1}}, False),
        ({"config": {**CONFIG, "parallel": {"tp": 2}, "log": {"dir": "x"}}}, True),
        ({}, True),
    ],
)
def test_where_and_how_a_run_went_does_not_count(
    tmp_path: Path, record: dict[str, Any], none: bool
) -> None:
    a, b = put(tmp_path / "a", tensors()), put(tmp_path / "b", tensors(), **record)
    assert compare_steps(a, b).none == none


def test_one_tensor_more_is_a_difference(tmp_path: Path) -> None:
    a = put(tmp_path / "a", tensors())
    b = put(tmp_path / "b", {**tensors(), "g": torch.ones(1)})
    assert not compare_steps(a, b).none
    assert not compare_steps(b, a).none


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    a, b = (put(tmp_path / name, tensors()) for name in "ab")
    file = b / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=str(file)):
        compare_steps(a, b)


def test_memory_is_some_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, shape = 1 << 20, (4096, 4096)  # 64 MiB
    monkeypatch.setattr(module, "BUCKET_BYTES", bucket)

    def body() -> int:
        shard = Shard("w", shape, "float32", whole(shape))
        paths = [
            save(tmp_path / name, Record(1), [(shard, torch.full(shape, x))], axis=single("world"))
            for name, x in (("a", 1.0), ("b", 2.0))
        ]
        return peak_while(lambda: compare_steps(*paths))

    assert run_ranks(body, 1)[0] < 16 * bucket


def test_nested_values() -> None:
    a = {"x": {"y": 1, "z": [1, 2]}, "same": {"k": None}}
    b = {"x": {"y": 2, "z": [1]}, "same": {}, "new": {"deep": True}}
    assert list(unlike(a, b)) == [
        ("new", None, {"deep": True}),
        ("x.y", 1, 2),
        ("x.z", [1, 2], [1]),
    ]
