"""How far two arrays are apart, where, and whether it looks like a known mistake. Pure.

A relative difference is |a - b| over the largest magnitude of the tensor in the reference, or over
`FLOOR` of the largest in the model of that kind where that is more: some gradients are zero but for
rounding, and rounding is no difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
K = TypeVar("K")

FLOOR = 1e-4
SAME_FACTOR = 1e-6  # how far ratios may be apart that are one factor
ROUGHLY, MOSTLY = 0.05, 0.5  # and how far, for what share of them, where there is about one


@dataclass(frozen=True)
class Gap:
    """The largest difference of an array from the reference's."""

    size: float  # |found - wanted|, infinite where one is no number
    at: tuple[int, ...]  # where, counted in the logical tensor
    found: float
    wanted: float
    factor: float | None  # found = factor * wanted everywhere, if there is such a factor
    about: float | None = None  # else a factor that holds roughly and mostly

    def __str__(self) -> str:
        return f"{self.found:.6g} for {self.wanted:.6g}"

    def hint(self, sizes: Mapping[str, int]) -> str:
        """` (twice; tp is 2)`, or about that, or nothing; `sizes` are those of the axes."""
        if self.factor is None and self.about is not None:
            said = in_words(self.about, sizes, within=ROUGHLY)
            return said.replace("(", "(about ", 1)
        return in_words(self.factor, sizes)


def gap(found: Array, wanted: Array, offset: tuple[int, ...] | None = None) -> Gap:
    """The largest difference of two arrays of one shape, which begin at `offset` of the tensor."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    if found.size == 0:
        return Gap(0.0, (), 0.0, 0.0, None)
    away = distance(found, wanted)
    place = np.unravel_index(int(away.argmax()), away.shape)
    start = offset or (0,) * found.ndim
    at = tuple(int(a) + b for a, b in zip(place, start, strict=True))
    worst = float(away[place])
    factor = about = None
    if worst:
        factor = common_factor(found, wanted)
        about = common_factor(found, wanted, within=ROUGHLY, share=MOSTLY)
        about = about if about and whole_factor(about, within=ROUGHLY) else None
    return Gap(worst, at, float(found[place]), float(wanted[place]), factor, about)


def distance(found: Array, wanted: Array) -> Array:
    """|found - wanted|, infinite where either is no number."""
    away = np.asarray(np.abs(found - wanted))
    return np.where(np.isfinite(away), away, math.inf)


def common_factor(
    found: Array, wanted: Array, *, within: float = SAME_FACTOR, share: float = 1.0
) -> float | None:
    """The number by which a share of `wanted` was multiplied, or None."""
    size = np.abs(wanted)
    clear = size > 1e-3 * size.max()
    if not clear.any() or not np.isfinite(found).all():
        return None
    ratios = found[clear] / wanted[clear]
    middle = float(np.median(ratios))
    near = np.abs(ratios - middle) <= within * abs(middle)
    return middle if near.mean() >= share and middle not in (0.0, 1.0) else None


def in_words(factor: float | None, sizes: Mapping[str, int], *, within: float = SAME_FACTOR) -> str:
    """` (twice; tp is 2)` for a factor and the sizes of the axes; nothing where there is none."""
    if factor is None:
        return ""
    n = whole_factor(factor, within=within)
    if n is None:
        return f" ({factor:.6g} times)"
    said = {2: "twice", -2: "half"}.get(n, f"{n} times" if n > 0 else f"1/{-n}")
    axes = [name for name, size in sizes.items() if size == abs(n)]
    return f" ({said}; {axes[0]} is {abs(n)})" if axes else f" ({said})"


def whole_factor(factor: float, *, within: float = SAME_FACTOR) -> int | None:
    """n for a factor of n, -n for 1/n, n of 2 or more; None for another factor."""
    if factor <= 0:
        return None
    n = round(max(factor, 1 / factor))
    wanted = n if factor > 1 else 1 / max(n, 1)
    if n < 2 or abs(factor - wanted) > within * wanted:
        return None
    return n if factor > 1 else -n


def scales(tensors: Mapping[K, Array]) -> dict[K, float]:
    """What differences in each tensor are divided by; `tensors` are all of one kind."""
    largest = {name: float(np.abs(x).max()) if x.size else 0.0 for name, x in tensors.items()}
    floor = FLOOR * max(largest.values(), default=0.0)
    return {name: max(size, floor) for name, size in largest.items()}


def relative(size: float, scale: float) -> float:
    """`size` over `scale`; nothing over nothing is 0."""
    if size == 0.0:
        return 0.0
    return size / scale if scale else math.inf
