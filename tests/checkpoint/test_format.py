"""Manifests and headers: what is written is read back, what is hostile is refused."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import save as save_bytes

from penteract.checkpoint.format import (
    HEADER_LIMIT_BYTES,
    CheckpointError,
    Manifest,
    StoredBox,
    StoredFile,
    StoredTensor,
    check_header_length,
    from_json,
    header_bytes,
    parse_header,
    to_json,
)
from penteract.placement import Box

FILE = "rank-00000.safetensors"


def manifest() -> Manifest:
    halves = (
        StoredBox(Box((0, 0), (2, 3)), FILE, "w@0,0"),
        StoredBox(Box((2, 0), (2, 3)), FILE, "w@2,0"),
    )
    tensors = {
        "w": StoredTensor((4, 3), "bfloat16", halves),
        "scale": StoredTensor((), "float32", (StoredBox(Box((), ()), FILE, "scale"),)),
        "none": StoredTensor((0, 3), "float64", ()),
    }
    files = {FILE: StoredFile(120, "0123456789abcdef" * 2)}
    state = {"cursor": 1 << 40, "schedule": [1.5, None, "x"]}
    return Manifest(1000, {"model": {"hidden": 8}}, {"tp": 2}, tensors, files, state)


def test_a_manifest_is_read_as_it_was_written() -> None:
    assert from_json(to_json(manifest()), "m") == manifest()


def test_every_truncation_is_refused_naming_the_file() -> None:
    text = to_json(manifest())
    for length in range(len(text)):
        with pytest.raises(CheckpointError, match=r"^some/manifest\.json: "):
            from_json(text[:length], "some/manifest.json")


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"[]", b"3", b"null", b"[" * 100_000, b"{}x"])
def test_what_is_not_a_manifest_is_refused(text: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^m: "):
        from_json(text, "m")


def test_another_version_is_refused_before_anything_else() -> None:
    for version in (7, 0, "1", True, 1.0, None):
        text = json.dumps({"format": version, "new": "fields"})
        with pytest.raises(CheckpointError, match=r"found .*, this release reads 1"):
            from_json(text, "m")
    with pytest.raises(CheckpointError, match="found 7, this release reads 1"):
        from_json('{"format": 7}', "m")


BIG = 1 << 62
DIGEST = "0" * 32
HOSTILE: list[tuple[tuple[Any, ...], Any, str]] = [
    (("step",), -1, "step is -1"),
    (("step",), True, "step is True"),
    (("step",), 1.0, "step is 1.0"),
    (("step",), 10**30, "step is 1000"),
    (("state",), [], "state is not an object"),
    (("extra",), 1, "unknown .*extra"),
    (("files",), {"../x": {"bytes": 1, "xxh3": DIGEST}}, "not a plain name"),
    (("files",), {"/etc/x": {"bytes": 1, "xxh3": DIGEST}}, "not a plain name"),
    (("files",), {"..": {"bytes": 1, "xxh3": DIGEST}}, "not a plain name"),
    (("files",), {"a\\b": {"bytes": 1, "xxh3": DIGEST}}, "not a plain name"),
    (("files",), {"a\x1b[2J": {"bytes": 1, "xxh3": DIGEST}}, "not a printable name"),
    (("files",), {"": {"bytes": 1, "xxh3": DIGEST}}, "not a printable name"),
    (("files",), {"manifest.json": {"bytes": 1, "xxh3": DIGEST}}, "not a plain name"),
    (("files",), {}, "not among the files"),
    (("files", FILE, "bytes"), -5, "bytes is -5"),
    (("files", FILE, "xxh3"), "zz", "32 hexadecimal digits"),
    (("tensors", "w", "shape"), [-4, 3], "shape is -4"),
    (("tensors", "w", "shape"), [BIG, BIG], "too large"),
    (("tensors", "none", "shape"), [0, BIG, BIG], "too large"),
    (("tensors", "none", "shape"), [1] * 65, "65 dims"),
    (("tensors", "w", "shape"), "43", "not a list"),
    (("tensors", "w", "shape"), [5, 3], "hold 12 of 15"),
    (("tensors", "w", "dtype"), "float8", "is none of"),
    (("tensors", "w", "dtype"), ["bfloat16"], "not a printable name"),
    (("tensors", "w", "boxes"), [], "hold 0 of 12"),
    (("tensors", "w", "boxes"), {}, "boxes is not a list"),
    (("tensors", "w", "boxes", 1, "offset"), [1, 0], "overlap"),
    (("tensors", "w", "boxes", 1, "offset"), [3, 0], "leaves shape"),
    (("tensors", "w", "boxes", 1, "offset"), [2], "leaves shape"),
    (("tensors", "w", "boxes", 1, "offset"), [-2, 0], "offset is -2"),
    (("tensors", "w", "boxes", 1, "size"), [1, 3], "hold 9 of 12"),
    (("tensors", "w", "boxes", 1, "size"), [BIG, 3], "leaves shape"),
    (("tensors", "w", "boxes", 1, "key"), "w@0,0", "used twice"),
    (("tensors", "w", "boxes", 1, "key"), "__metadata__", "reserves"),
    (("tensors", "w", "boxes", 1, "file"), "../" + FILE, "not a plain name"),
    (("tensors", "w", "boxes", 1), {"offset": [2, 0]}, "missing"),
]


@pytest.mark.parametrize(("place", "value", "reason"), HOSTILE)
def test_hostile_manifests_are_refused(place: tuple[Any, ...], value: Any, reason: str) -> None:
    document = json.loads(to_json(manifest()))
    inner = document
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(CheckpointError, match=reason) as caught:
        from_json(json.dumps(document), "m.json")
    assert str(caught.value).startswith("m.json: ")


def test_missing_and_repeated_fields_are_refused() -> None:
    document = json.loads(to_json(manifest()))
    for name in set(document) - {"format"}:
        with pytest.raises(CheckpointError, match=f"missing .*{name}"):
            from_json(json.dumps({k: v for k, v in document.items() if k != name}), "m")
    text = to_json(manifest()).replace('"none"', '"w"')
    with pytest.raises(CheckpointError, match="'w' stands twice"):
        from_json(text, "m")


def test_state_that_is_no_json_is_an_error_when_written() -> None:
    for value in (float("nan"), object()):
        with pytest.raises((ValueError, TypeError)):
            to_json(Manifest(1, {}, {}, {}, {}, {"x": value}))


def split_file(content: bytes) -> tuple[bytes, int]:
    """(header text, bytes of data) of a safetensors file."""
    length = check_header_length(content[:8], len(content), "f")
    return content[8 : 8 + length], len(content) - 8 - length


def test_headers_of_the_library_are_understood() -> None:
    tensors = {
        "a": torch.zeros(3, 5, dtype=torch.bfloat16),
        "b": torch.tensor(1.0, dtype=torch.float64),
        "c": torch.zeros(0, 2, dtype=torch.int64),
        "d": torch.zeros(7, dtype=torch.bool),
    }
    text, data_bytes = split_file(save_bytes(tensors, {"format": "pt"}))
    assert parse_header(text, data_bytes, "f") == {
        "a": ("BF16", (3, 5)),
        "b": ("F64", ()),
        "c": ("I64", (0, 2)),
        "d": ("BOOL", (7,)),
    }


def test_our_headers_are_aligned_and_read_back() -> None:
    head = header_bytes([("x", "float64", (2,)), ("y@0,3", "bool", (3, 1))])
    assert len(head) % 8 == 0
    text, data_bytes = split_file(head + bytes(19))
    assert parse_header(text, data_bytes, "f") == {"x": ("F64", (2,)), "y@0,3": ("BOOL", (3, 1))}


@pytest.mark.parametrize(
    ("length", "file_bytes"),
    [(HEADER_LIMIT_BYTES + 1, 1 << 40), (1 << 63, 1 << 40), (93, 100), (0, 4)],
)
def test_a_header_length_beyond_limit_or_file_is_refused(length: int, file_bytes: int) -> None:
    prefix = length.to_bytes(8, "little")[:file_bytes]
    with pytest.raises(CheckpointError, match="not safetensors, or truncated"):
        check_header_length(prefix, file_bytes, "f")


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"a": entry()}, "end at byte 8 of 16"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, "start at 4, expected 8"),
        ({"a": entry(), "b": entry(offsets=(0, 8))}, "start at 0, expected 8"),
        ({"a": entry(), "b": entry(offsets=(16, 24))}, "start at 16, expected 8"),
        ({"a": entry(offsets=(0, 16))}, "do not fit shape"),
        ({"a": entry(offsets=(8, 0))}, "do not fit shape"),
        ({"a": entry(offsets=(-8, 0))}, "data_offsets is -8"),
        ({"a": entry(offsets=(0, 8, 16))}, "do not fit shape"),
        ({"a": entry(shape=(-2,))}, "shape is -2"),
        ({"a": entry(shape=(BIG, BIG))}, "too large"),
        ({"a": entry(shape=(2.0,))}, "shape is 2.0"),
        ({"a": entry(dtype="F8_E4M3")}, "is none of"),
        ({"a": {"dtype": "F32"}}, "missing"),
        ({"a": 3}, "not an object"),
        ({"__metadata__": 3}, "not an object"),
        ([], "not an object"),
    ],
)
def test_hostile_headers_are_refused(header: Any, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        parse_header(json.dumps(header).encode(), 16, "f")


def test_a_header_with_a_name_twice_is_refused() -> None:
    one = json.dumps(entry())
    with pytest.raises(CheckpointError, match="'a' stands twice"):
        parse_header(f'{{"a": {one}, "a": {one}}}'.encode(), 8, "f")
