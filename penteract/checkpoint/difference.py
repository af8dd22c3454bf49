"""Two steps compared, tensor by tensor, whatever layouts wrote them: a bucket of each at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penteract.checkpoint.cover import buckets
from penteract.checkpoint.examine import check_files, reading
from penteract.checkpoint.format import CheckpointError, Manifest
from penteract.checkpoint.reader import Reader
from penteract.checkpoint.remote import Place
from penteract.checkpoint.writing import BUCKET_BYTES
from penteract.placement import whole

# Of a configuration: how and where a run went, which changes nothing of what it is.
HOW = ("parallel", "log", "checkpoint")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TensorDifference:
    """`elements` of one tensor are not equal to the bit.

    They differ by `largest` at most, which is `relative` times the largest magnitude in either
    tensor. Both are infinite where a NaN or an infinity stands on one side only.
    """

    elements: int
    largest: float
    relative: float


@dataclass(frozen=True)
class Difference:
    """Everything in which step b is not step a. Keys are dotted, each with both values."""

    a: Manifest
    b: Manifest
    only_a: list[str]
    only_b: list[str]
    kinds: dict[str, tuple[str, str]]  # tensors of other shapes or types
    equal: list[str]
    tensors: dict[str, TensorDifference]  # worst first
    config: dict[str, tuple[Any, Any]]
    state: dict[str, tuple[Any, Any]]

    @property
    def none(self) -> bool:
        """Whether they are equal, but for `HOW`."""
        config = [key for key in self.config if key.split(".")[0] not in HOW]
        found = (self.only_a, self.only_b, self.kinds, self.tensors, config, self.state)
        return not any(found)


def compare_steps(
    a: Place, b: Place, *, told: Callable[[int], None] = lambda more_bytes: None
) -> Difference:
    """What differs between the step directories; `told` hears of the bytes that were compared.

    Raises CheckpointError where one cannot be read; hashes are not checked.
    """
    with reading(a) as mine, reading(b) as other:
        for path, manifest in ((a, mine), (b, other)):
            if faults := check_files(path, manifest, sorted(manifest.files), hashes=False):
                raise CheckpointError("; ".join(faults))
        both = [name for name in mine.tensors if name in other.tensors]
        kinds = {name: (_kind(mine, name), _kind(other, name)) for name in both}
        same = [name for name in both if kinds[name][0] == kinds[name][1]]
        first, second = Reader(a, mine), Reader(b, other)
        found = {name: _compare(first, second, name, told) for name in same}
    unequal = {name: f for name, f in found.items() if f is not None}
    worst = sorted(unequal, key=lambda name: (-unequal[name].relative, -unequal[name].largest))
    return Difference(
        a=mine,
        b=other,
        only_a=[name for name in mine.tensors if name not in other.tensors],
        only_b=[name for name in other.tensors if name not in mine.tensors],
        kinds={name: pair for name, pair in kinds.items() if pair[0] != pair[1]},
        equal=[name for name in same if name not in unequal],
        tensors={name: unequal[name] for name in worst},
        config={key: (x, y) for key, x, y in unlike(mine.config, other.config)},
        state={key: (x, y) for key, x, y in unlike(mine.state, other.state)},
    )


def _kind(manifest: Manifest, name: str) -> str:
    stored = manifest.tensors[name]
    return f"{list(stored.shape)} {stored.dtype}"


def _compare(
    a: Reader, b: Reader, name: str, told: Callable[[int], None]
) -> TensorDifference | None:
    elements, largest, magnitude = 0, 0.0, 0.0
    limit = BUCKET_BYTES // 32  # four of each value at a time, in float64
    for box in buckets(whole(a.tensors[name].shape), limit):
        if not box.numel:
            continue
        x, y = a.read(name, box), b.read(name, box)
        apart = _bits(x) != _bits(y)
        elements += int(apart.sum())
        magnitude = max(magnitude, _largest(x), _largest(y))
        if apart.any():
            gap = (x.double() - y.double()).abs()[apart]
            largest = max(largest, float(gap.nan_to_num(nan=math.inf, posinf=math.inf).max()))
        told(x.nbytes)
    if not elements:
        return None
    nothing = math.inf if largest else 0.0
    return TensorDifference(elements, largest, largest / magnitude if magnitude else nothing)


def _bits(x: Tensor) -> Tensor:
    return x.view(_BITS[x.element_size()])


def _largest(x: Tensor) -> float:
    """The largest finite magnitude."""
    return float(x.double().abs().nan_to_num(nan=0.0, posinf=0.0).max())


def unlike(a: Any, b: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, value of a, value of b) where two nested dictionaries differ; None: absent."""
    if isinstance(a, dict) and isinstance(b, dict):
        for name in sorted({*a, *b}):
            yield from unlike(a.get(name), b.get(name), f"{key}.{name}".lstrip("."))
    elif a != b:
        yield key, a, b
