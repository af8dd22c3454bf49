"""Looking at one step without loading it: its manifest, its faults, its contents in words."""

from __future__ import annotations

import math
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from penteract.checkpoint.format import (
    DTYPES,
    MANIFEST,
    MANIFEST_LIMIT_BYTES,
    UNEQUAL,
    CheckpointError,
    Manifest,
    check_header_length,
    from_json,
    parse_header,
)
from penteract.checkpoint.remote import Place, place
from penteract.checkpoint.storage import hash_file, in_use

PINNED = "pinned"


def read_manifest(path: Place | str) -> Manifest:
    """The checked manifest of the step directory `path`.

    Raises CheckpointError, or ConnectionError where a URL cannot be asked.
    """
    file = place(path) / MANIFEST
    try:
        size = file.stat().st_size
        if size > MANIFEST_LIMIT_BYTES:
            raise CheckpointError(f"{file}: {size} bytes, the most is {MANIFEST_LIMIT_BYTES}")
        text = file.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{file}: not there: {path} is not a complete step") from None
    except ConnectionError:  # no damage: the step may be good
        raise
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    return from_json(text, str(file))


@contextmanager
def reading(path: Place | str) -> Iterator[Manifest]:
    """The manifest of the step directory `path`, which no run's retention removes meanwhile.

    Raises CheckpointError.
    """
    manifest = read_manifest(path)
    with in_use(place(path) / MANIFEST):
        yield manifest


def check_files(
    path: Place | str,
    manifest: Manifest,
    names: Iterable[str],
    *,
    hashes: bool,
    told: Callable[[int], None] = lambda more_bytes: None,
) -> list[str]:
    """What is wrong with these files of a step, one line each; `hashes` reads them whole.

    `told` hears of the bytes that were looked at, as it goes; of 0 where a file is begun.

    Without hashes: each is a regular file of the right length, and its header lists the keys,
    dtypes and shapes that the manifest says. The library opens only files that passed.
    """
    expected: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = defaultdict(dict)
    for tensor in manifest.tensors.values():
        for stored in tensor.boxes:
            entry = DTYPES[tensor.dtype][0], stored.box.size
            expected[stored.file][stored.key] = entry
    faults = []
    for name in names:
        told(0)
        try:
            _check_file(place(path) / name, manifest, expected[name], hashes=hashes, told=told)
        except CheckpointError as error:
            faults.append(str(error))
        except ConnectionError:  # no damage
            raise
        except OSError as error:
            faults.append(f"{place(path) / name}: cannot be read ({error.strerror})")
    return faults


def _check_file(
    file: Place,
    manifest: Manifest,
    expected: dict[str, tuple[str, tuple[int, ...]]],
    *,
    hashes: bool,
    told: Callable[[int], None],
) -> None:
    said = manifest.files[file.name]
    # A link could lead out of the step's directory.
    found = file.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{file}: not a regular file")
    if found.st_size != said.bytes:
        raise CheckpointError(
            f"{file}: {found.st_size} bytes, the manifest says {said.bytes}: truncated or replaced"
        )
    with file.open("rb") as opened:
        length = check_header_length(opened.read(8), said.bytes, str(file))
        entries = parse_header(opened.read(length), said.bytes - 8 - length, str(file))
    if entries != expected:
        names = sorted(expected.keys() | entries.keys())
        differ = next(name for name in names if expected.get(name) != entries.get(name))
        raise CheckpointError(
            f"{file}: key {differ!r} is {entries.get(differ)}, "
            f"the manifest says {expected.get(differ)}"
        )
    if not hashes:
        told(said.bytes)
        return
    digest = hash_file(file, told=told)
    if digest != said.xxh3:
        raise CheckpointError(
            f"{file}: its content has changed since it was saved: "
            f"xxh3 {digest}, the manifest says {said.xxh3}"
        )


def verify(
    path: Place | str,
    *,
    hashes: bool = True,
    deal: tuple[int, int] = (0, 1),
    told: Callable[[int], None] = lambda more_bytes: None,
) -> list[str]:
    """Every fault of the step directory `path`, one line each; none: it can be loaded.

    With a deal of (rank, ranks), of the files that are this rank's to look at. `told` is that of
    `check_files`.
    """
    path = place(path)
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    mine = sorted(manifest.files)[deal[0] :: deal[1]]
    faults = check_files(path, manifest, mine, hashes=hashes, told=told)
    if unequal := manifest.state.get(UNEQUAL):
        faults.append(f"{path}: copies were not equal when it was saved: {unequal}")
    if path.name.startswith("step-") and path.name.removeprefix("step-").isdecimal():
        named = int(path.name.removeprefix("step-"))
        if named != manifest.step:
            faults.append(f"{path}: the manifest is of step {manifest.step}")
    return faults


def inspect(path: Place | str) -> list[str]:
    """The step directory `path` in words, for people: totals, layout, tensors, files."""
    manifest = read_manifest(path)
    pinned = ["pinned: no run removes it"] if (place(path) / PINNED).exists() else []
    elements = sum(math.prod(tensor.shape) for tensor in manifest.tensors.values())
    tensor_bytes = sum(tensor.bytes for tensor in manifest.tensors.values())
    lines = [
        f"step {manifest.step}: {len(manifest.tensors)} tensors, {elements} elements, "
        f"{tensor_bytes} bytes in {len(manifest.files)} files",
        "layout: " + (_pairs(manifest.layout) or "not said"),
        "state: " + (_pairs(manifest.state) or "none"),
        *pinned,
        "tensors:",
    ]
    width = max((len(name) for name in manifest.tensors), default=0)
    for name, tensor in manifest.tensors.items():
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        where = sorted({stored.file for stored in tensor.boxes})
        places = where[0] if len(where) == 1 else f"{len(tensor.boxes)} boxes, {len(where)} files"
        lines.append(f"  {name:{width}}  {shape}  {tensor.dtype}  {tensor.bytes} bytes  {places}")
    lines.append("files:")
    for name, file in manifest.files.items():
        lines.append(f"  {name}  {file.bytes} bytes  xxh3 {file.xxh3}")
    return lines


def _pairs(values: dict[str, object]) -> str:
    # A manifest is anybody's text: `ascii` keeps control characters off the terminal.
    return " ".join(ascii(f"{key}={value}")[1:-1] for key, value in sorted(values.items()))
