"""`penteract checkpoint`: what is in checkpoints, whether they are whole, and other files of them.

Each command is a function; everything it needs is imported inside it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penteract.checkpoint.difference import Difference
    from penteract.checkpoint.remote import Place

LINE_S = 10.0
ROWS, FEW = 6, 2  # lines of a table, and of other lists, unless all are asked for


def inspect(arguments: argparse.Namespace) -> int:
    """Describe a checkpoint."""
    from penteract.checkpoint.io import find_step, inspect

    print("\n".join(inspect(find_step(arguments.checkpoint))))
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """Read a checkpoint whole and check every hash."""
    from penteract.checkpoint.io import find_step, verify

    path = find_step(arguments.checkpoint)
    with progress("reading", sum(f.stat().st_size for f in path.iterdir())) as told:
        faults = verify(path, told=told)
    print("\n".join(faults) if faults else f"{path}: every file is as it was written")
    return 1 if faults else 0


def reshard(arguments: argparse.Namespace) -> int:
    """Write a checkpoint again in fewer, more or smaller files, or its weights alone."""
    from penteract.checkpoint.io import find_step, place, read_manifest
    from penteract.checkpoint.model import STATE_PREFIXES
    from penteract.checkpoint.reshard import reshard

    source, drop = find_step(arguments.checkpoint), STATE_PREFIXES if arguments.weights_only else ()
    manifest = read_manifest(source)
    kept = [x.bytes for name, x in manifest.tensors.items() if not name.startswith(drop)]
    with progress("writing", sum(f.bytes for f in manifest.files.values()) + sum(kept)) as told:
        path = reshard(
            source,
            place(arguments.out),
            files=arguments.files or 1,
            max_bytes=arguments.max_bytes,
            drop=drop,
            told=told,
        )
    sizes = [file.bytes for file in read_manifest(path).files.values()]
    many = f"{len(sizes)} files, {min(sizes)} to {max(sizes)} bytes each"
    said = many if len(sizes) > 1 else f"a file of {sizes[0]} bytes"
    print(f"{path}: {len(kept)} tensors in {said}", file=sys.stderr)
    return 0


def diff(arguments: argparse.Namespace) -> int:
    """Compare two checkpoints tensor by tensor; exit code 1 where they differ."""
    from penteract.checkpoint.difference import compare_steps
    from penteract.checkpoint.io import find_step, read_manifest

    a, b = find_step(arguments.a), find_step(arguments.b)
    with progress("comparing", sum(x.bytes for x in read_manifest(a).tensors.values())) as told:
        found = compare_steps(a, b, told=told)
    if arguments.json:
        print(json.dumps(_as_json(a, b, found), indent=1))
    else:
        print("\n".join(_lines(a, b, found, everything=arguments.all)))
    return 0 if found.none else 1


def pin(arguments: argparse.Namespace) -> int:
    """Keep a step for ever, whatever checkpoint.keep says."""
    from penteract.checkpoint.io import find_step
    from penteract.checkpoint.steps import pin

    path = find_step(arguments.checkpoint)
    pin(path)
    print(f"{path}: pinned: no run removes it", file=sys.stderr)
    return 0


def unpin(arguments: argparse.Namespace) -> int:
    """Let checkpoint.keep remove a step again."""
    from penteract.checkpoint.io import find_step
    from penteract.checkpoint.steps import unpin

    path = find_step(arguments.checkpoint)
    unpin(path)
    print(f"{path}: not pinned", file=sys.stderr)
    return 0


@contextlib.contextmanager
def progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A function to be told of more bytes done: a bar on a terminal, else a line now and then."""
    import rich.console
    import rich.progress

    bar = rich.progress.Progress(
        *rich.progress.Progress.get_default_columns(),
        rich.progress.DownloadColumn(),
        console=rich.console.Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    done, next_line = 0, time.monotonic() + LINE_S

    def told(more_bytes: int) -> None:
        nonlocal done, next_line
        done += more_bytes
        bar.update(task, completed=done)
        if bar.disable and time.monotonic() >= next_line:
            next_line = time.monotonic() + LINE_S
            print(f"{what}: {done / max(total_bytes, 1):.0%}", file=sys.stderr, flush=True)

    with bar:
        task = bar.add_task(what, total=total_bytes)
        yield told


def _as_json(a: Place, b: Place, found: Difference) -> dict[str, Any]:
    from dataclasses import asdict

    sides = ((a, found.a), (b, found.b))
    said = [{"path": str(path), "step": m.step, "layout": m.layout} for path, m in sides]
    return {
        "equal": found.none,
        "a": said[0],
        "b": said[1],
        "tensors": {
            "equal": found.equal,
            "different": {name: asdict(x) for name, x in found.tensors.items()},
            "other_kind": found.kinds,
            "only_a": found.only_a,
            "only_b": found.only_b,
        },
        "config": found.config,
        "state": found.state,
    }


def _lines(a: Place, b: Place, found: Difference, *, everything: bool) -> Iterator[str]:
    """For people: what is equal, then what differs, the worst first."""
    from penteract.checkpoint.difference import HOW

    few, rows = (None, None) if everything else (FEW, ROWS)
    for side, path, manifest in (("a", a, found.a), ("b", b, found.b)):
        layout = " ".join(f"{key}={value}" for key, value in manifest.layout.items())
        yield f"{side}: {path}, step {manifest.step}, {_ascii(layout) or 'no layout'}"
    yield f"{len(found.equal)} tensors are equal to the bit, {len(found.tensors)} differ"
    for side, names in (("a", found.only_a), ("b", found.only_b)):
        yield from _first([f"only in {side}: {name}" for name in names], few)
    kinds = [f"{name}: a {x}, b {y}" for name, (x, y) in found.kinds.items()]
    yield from _first(kinds, few)
    yield from _first(list(_table(found)), rows and rows + 1)
    config = {f"config {key}": x for key, x in found.config.items() if key.split(".")[0] not in HOW}
    how = {f"config {key}": x for key, x in found.config.items() if key.split(".")[0] in HOW}
    state = {f"state {key}": x for key, x in found.state.items()}
    for values in (config, state):
        yield from _first([_pair(key, *values[key]) for key in values], few)
    said = [_pair(key, *how[key]) + " (does not count)" for key in how]
    yield from _first(said, few)
    yield "equal" if found.none else "different"


def _table(found: Difference) -> Iterator[str]:
    """The tensors that differ, below a line of headings."""
    if not found.tensors:
        return
    width = max(len(name) for name in found.tensors)
    yield f"{'tensor':{width}}  {'largest':>8}  {'relative':>8}  elements"
    for name, x in found.tensors.items():
        shape = found.a.tensors[name].shape
        of = "x".join(map(str, shape)) or "scalar"
        yield f"{name:{width}}  {x.largest:8.2e}  {x.relative:8.2e}  {x.elements} of {of}"


def _pair(key: str, a: object, b: object) -> str:
    return f"{_ascii(key)}: {_short(a)}, {_short(b)}"


def _short(value: object) -> str:
    text = json.dumps(value)  # which keeps control characters off the terminal
    return text if len(text) <= 60 else f"{text[:57]}..."


def _ascii(text: str) -> str:
    return ascii(text)[1:-1]


def _first(lines: Sequence[str], count: int | None) -> Iterator[str]:
    """At most `count` of the lines, and how many more there are."""
    yield from lines[:count]
    if count is not None and len(lines) > count:
        yield f"  and {len(lines) - count} more (--all)"
