"""The checkpoint format: `manifest.json` and the header of its safetensors files. Pure.

A step directory holds safetensors files and one manifest, written last. The manifest says, for
every logical tensor, its shape, its dtype and which boxes of it lie under which key of which file;
for every file its length and hash; and what else a run needs to go on, as plain JSON. A directory
without a manifest is not a checkpoint.

Whatever is read is taken to be hostile until checked: nothing here allocates from a number that
was not compared with the length of the file first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penteract.checkpoint.cover import first_overlap
from penteract.errors import UserError
from penteract.placement import Box

FORMAT = 1
MANIFEST = "manifest.json"
MANIFEST_LIMIT_BYTES = 1 << 30
HEADER_LIMIT_BYTES = 100_000_000
MOST_DIMS = 64  # of a torch tensor
# Torch's name of a dtype -> safetensors' code and bytes an element.
DTYPES = {
    "bool": ("BOOL", 1),
    "int32": ("I32", 4),
    "int64": ("I64", 8),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
}
_ITEM_BYTES = dict(DTYPES.values())


UNEQUAL = "unequal"  # key of the state of a step that was saved although copies differed


class CheckpointError(UserError):
    """A checkpoint that cannot be trusted or loaded; the message names file and reason."""


class SaveError(CheckpointError):
    """A checkpoint that could not be written: a fault of the machine, not of the user's input."""


class StoreError(CheckpointError):
    """A store at a URL that cannot be asked: nothing is known of what is there."""


class LateSaveError(SaveError):
    """Its files take too long to write; what would be written after them could hang, too."""


@dataclass(frozen=True)
class StoredBox:
    """One box of a logical tensor, stored under `key` in `file`."""

    box: Box
    file: str
    key: str


@dataclass(frozen=True)
class StoredTensor:
    """A logical tensor: `boxes` cover `shape` exactly once."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[StoredBox, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1]


@dataclass(frozen=True)
class StoredFile:
    """Length and hash (xxh3, 128 bits, hexadecimal) of one file."""

    bytes: int
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    """Everything about one step but the numbers themselves."""

    step: int
    config: dict[str, Any]
    layout: dict[str, Any]
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, StoredFile]
    state: dict[str, Any]


def to_json(manifest: Manifest) -> str:
    """The manifest's text. Raises ValueError where state or config is not plain JSON."""
    tensors = {
        name: {
            "shape": tensor.shape,
            "dtype": tensor.dtype,
            "boxes": [
                {"offset": b.box.offset, "size": b.box.size, "file": b.file, "key": b.key}
                for b in tensor.boxes
            ],
        }
        for name, tensor in manifest.tensors.items()
    }
    document = {
        "format": FORMAT,
        "step": manifest.step,
        "config": manifest.config,
        "layout": manifest.layout,
        "state": manifest.state,
        "tensors": tensors,
        "files": {n: {"bytes": f.bytes, "xxh3": f.xxh3} for n, f in manifest.files.items()},
    }
    return json.dumps(document, indent=1, allow_nan=False)


def from_json(text: str | bytes, where: str) -> Manifest:
    """Read and check a manifest; `where` is the file that errors name. Raises CheckpointError."""
    reader = _Reader(where)
    document = reader.mapping(reader.parse(text), "the manifest")
    version = document.get("format")
    if type(version) is not int or version != FORMAT:
        raise CheckpointError(
            f"{where}: format version: found {version!r}, this release reads {FORMAT}"
        )
    names = {"format", "step", "config", "layout", "state", "tensors", "files"}
    reader.keys(document, names, "the manifest")
    files = {
        reader.file_name(name): reader.stored_file(value, f"file {name!r}")
        for name, value in reader.mapping(document["files"], "files").items()
    }
    tensors = {
        reader.tensor_name(name): reader.stored_tensor(value, f"tensor {name!r}", files)
        for name, value in reader.mapping(document["tensors"], "tensors").items()
    }
    reader.distinct_keys(tensors)
    return Manifest(
        step=reader.count(document["step"], "step"),
        config=reader.mapping(document["config"], "config"),
        layout=reader.mapping(document["layout"], "layout"),
        tensors=tensors,
        files=files,
        state=reader.mapping(document["state"], "state"),
    )


class _Reader:
    """Strict reading of one JSON file; every refusal names it."""

    def __init__(self, where: str) -> None:
        self.where = where

    def refuse(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {reason}")

    def parse(self, text: str | bytes) -> Any:
        try:
            return json.loads(text, object_pairs_hook=self._pairs)
        except RecursionError:
            raise self.refuse("not a manifest: nested too deeply") from None
        except CheckpointError:
            raise
        except ValueError as error:
            raise self.refuse(f"not complete JSON ({error})") from None

    def _pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise self.refuse(f"the name {key!r} stands twice")
            result[key] = value
        return result

    def mapping(self, value: Any, what: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.refuse(f"{what} is not an object")
        return value

    def keys(self, value: dict[str, Any], names: set[str], what: str) -> None:
        if value.keys() != names:
            missing, extra = sorted(names - value.keys()), sorted(value.keys() - names)
            raise self.refuse(f"{what}: missing {missing}, unknown {extra}")

    def count(self, value: Any, what: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
            raise self.refuse(f"{what} is {str(value)[:40]}: need an integer from 0 to 2**63 - 1")
        return value

    def counts(self, value: Any, what: str) -> tuple[int, ...]:
        if not isinstance(value, list):
            raise self.refuse(f"{what} is not a list")
        return tuple(self.count(item, what) for item in value)

    def text(self, value: Any, what: str) -> str:
        if not isinstance(value, str) or not value or not value.isprintable():
            raise self.refuse(f"{what} is not a printable name: {str(value)[:40]!r}")
        return value

    def file_name(self, value: Any) -> str:
        """A plain name: what is read must lie in the step's own directory."""
        name = self.text(value, "a file name")
        if any(c in name for c in "/\\:\0") or name in (".", "..", MANIFEST):
            raise self.refuse(f"file {name!r} is not a plain name in the step's directory")
        return name

    def tensor_name(self, value: Any) -> str:
        name = self.text(value, "a tensor name")
        if name == "__metadata__":
            raise self.refuse("a tensor is called '__metadata__', which safetensors reserves")
        return name

    def stored_file(self, value: Any, what: str) -> StoredFile:
        self.keys(self.mapping(value, what), {"bytes", "xxh3"}, what)
        digest = self.text(value["xxh3"], f"{what}: xxh3")
        if len(digest) != 32 or set(digest) - set("0123456789abcdef"):
            raise self.refuse(f"{what}: xxh3 is not 32 hexadecimal digits")
        return StoredFile(self.count(value["bytes"], f"{what}: bytes"), digest)

    def shape(self, value: Any, item_bytes: int, what: str) -> tuple[int, ...]:
        shape = self.counts(value, f"{what}: shape")
        if len(shape) > MOST_DIMS:
            raise self.refuse(f"{what}: {len(shape)} dims, the most is {MOST_DIMS}")
        if math.prod(max(n, 1) for n in shape) * item_bytes >= 1 << 63:
            raise self.refuse(f"{what}: shape {list(shape)} is too large to address")
        return shape

    def stored_tensor(self, value: Any, what: str, files: Mapping[str, StoredFile]) -> StoredTensor:
        self.keys(self.mapping(value, what), {"shape", "dtype", "boxes"}, what)
        dtype = self.text(value["dtype"], f"{what}: dtype")
        if dtype not in DTYPES:
            raise self.refuse(f"{what}: dtype {dtype!r} is none of {', '.join(DTYPES)}")
        shape = self.shape(value["shape"], DTYPES[dtype][1], what)
        if not isinstance(value["boxes"], list):
            raise self.refuse(f"{what}: boxes is not a list")
        boxes = tuple(self.stored_box(item, shape, what) for item in value["boxes"])
        for stored in boxes:
            if stored.file not in files:
                raise self.refuse(f"{what}: file {stored.file!r} is not among the files")
        self.exact_cover([stored.box for stored in boxes], shape, what)
        return StoredTensor(shape, dtype, boxes)

    def stored_box(self, value: Any, shape: tuple[int, ...], what: str) -> StoredBox:
        self.keys(self.mapping(value, f"{what}: a box"), {"offset", "size", "file", "key"}, what)
        offset = self.counts(value["offset"], f"{what}: offset")
        size = self.counts(value["size"], f"{what}: size")
        inside = len(offset) == len(size) == len(shape) and all(
            o + n <= whole for o, n, whole in zip(offset, size, shape, strict=True)
        )
        if not inside:
            raise self.refuse(
                f"{what}: box at {list(offset)} of size {list(size)} leaves shape {list(shape)}"
            )
        key = self.tensor_name(value["key"])
        return StoredBox(Box(offset, size), self.file_name(value["file"]), key)

    def exact_cover(self, boxes: Sequence[Box], shape: tuple[int, ...], what: str) -> None:
        """In bounds, disjoint and of the right volume together: every element exactly once."""
        clash = first_overlap(boxes)
        if clash is not None:
            raise self.refuse(f"{what}: boxes overlap: {clash[0]} and {clash[1]}")
        held, whole = sum(box.numel for box in boxes), math.prod(shape)
        if held != whole:
            raise self.refuse(f"{what}: boxes are missing: they hold {held} of {whole} elements")

    def distinct_keys(self, tensors: Mapping[str, StoredTensor]) -> None:
        seen: set[tuple[str, str]] = set()
        for name, tensor in tensors.items():
            for stored in tensor.boxes:
                if (stored.file, stored.key) in seen:
                    place = f"key {stored.key!r} of file {stored.file!r}"
                    raise self.refuse(f"tensor {name!r}: {place} is used twice")
                seen.add((stored.file, stored.key))


def header_bytes(entries: Sequence[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """A safetensors header for (key, dtype, shape) entries whose data follow in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for key, dtype, shape in entries:
        code, item_bytes = DTYPES[dtype]
        end = begin + math.prod(shape) * item_bytes
        assert key not in header, f"key {key!r} twice in one file"
        header[key] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data start at a multiple of 8, so that views are aligned
    if len(text) > HEADER_LIMIT_BYTES:
        raise CheckpointError(f"{len(entries)} tensors do not fit a safetensors header of 100 MB")
    return len(text).to_bytes(8, "little") + text


def check_header_length(prefix: bytes, file_bytes: int, where: str) -> int:
    """Bytes of the header that follows the first 8 bytes `prefix`. Raises CheckpointError."""
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > HEADER_LIMIT_BYTES or length > file_bytes - 8:
        raise CheckpointError(
            f"{where}: a header of {length} bytes in a file of {file_bytes}: "
            f"not safetensors, or truncated (the most is {HEADER_LIMIT_BYTES})"
        )
    return length


def parse_header(
    text: bytes, data_bytes: int, where: str
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """key -> (safetensors dtype code, shape), checked as by `parse_spans`."""
    spans = parse_spans(text, data_bytes, where)
    return {key: (code, shape) for key, (code, shape, _) in spans.items()}


def parse_spans(
    text: bytes, data_bytes: int, where: str
) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """key -> (safetensors dtype code, shape, where its data begin); `data_bytes` follow the header.

    Every tensor's bytes must lie in the file, be as many as its shape says, and together with the
    others' leave no gap and no overlap. Raises CheckpointError.
    """
    reader = _Reader(where)
    header = reader.mapping(reader.parse(text), "the header")
    reader.mapping(header.pop("__metadata__", {}), "__metadata__")
    entries: dict[str, tuple[str, tuple[int, ...], int]] = {}
    spans: list[tuple[int, int, str]] = []
    for key, value in header.items():
        what = f"tensor {key!r}"
        reader.keys(reader.mapping(value, what), {"dtype", "shape", "data_offsets"}, what)
        code = reader.text(value["dtype"], f"{what}: dtype")
        if code not in _ITEM_BYTES:
            raise reader.refuse(f"{what}: dtype {code!r} is none of {', '.join(_ITEM_BYTES)}")
        shape = reader.shape(value["shape"], _ITEM_BYTES[code], what)
        span = reader.counts(value["data_offsets"], f"{what}: data_offsets")
        if len(span) != 2 or span[1] - span[0] != math.prod(shape) * _ITEM_BYTES[code]:
            raise reader.refuse(f"{what}: offsets {list(span)} do not fit shape {list(shape)}")
        entries[key] = code, shape, span[0]
        spans.append((span[0], span[1], key))
    end = 0
    for begin, stop, key in sorted(spans):
        if begin != end:
            raise reader.refuse(f"tensor {key!r}: data start at {begin}, expected {end}")
        end = stop
    if end != data_bytes:
        raise reader.refuse(f"the tensors end at byte {end} of {data_bytes}")
    return entries
