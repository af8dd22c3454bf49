"""How far a layout may be from the reference, by the type in which both compute.

A layout adds the same numbers in another order. In float64 nothing but a fault is seen at 1e-9. In
narrower types rounding is seen, and the limits come from `benchmarks/rounding.py`, which measures
right layouts; docs/rounding.md tells how. All are relative differences as
`penteract/verify/compare.py` counts them, so a value that is twice what it should be is 1 away.

float32: four to five times the worst that was measured of each kind in two steps with up to 16
layers and hidden 256. Past each of these the limits grow with the square root, as sums of
independent roundings do (16 steps were measured too), and stay below what planted faults do.

bfloat16: five times the worst loss, norm and weights of two steps, and twice the worst gradients,
for every size. There is no room for more: the gradients of normalised queries and keys are off by
half their size when nothing is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True)
class Limits:
    """The largest relative difference of each kind that counts as equal."""

    loss: float
    gradients: float  # activations and their gradients too
    norm: float
    weights: float

    def __str__(self) -> str:
        if len({self.loss, self.gradients, self.norm, self.weights}) == 1:
            return f"{self.loss:g}"
        return (
            f"loss {self.loss:g}, gradients {self.gradients:g}, norm {self.norm:g}, weights "
            f"{self.weights:g}"
        )


LIMITS = {
    "float64": Limits(1e-9, 1e-9, 1e-9, 1e-9),
    "float32": Limits(1e-6, 1.5e-4, 2.5e-5, 1e-5),
    "bfloat16": Limits(1e-3, 0.9, 2e-2, 0.25),
}
LARGEST_GROWTH = 300.0  # float32 gradients at 0.05: a fault that is seen at all is seen there
LAYERS, HIDDEN, STEPS = 16, 256, 2  # up to which limits are constant


def tolerance(dtype: str, *, layers: int = 1, hidden: int = 1, steps: int = 1) -> Limits:
    """The limits of a type; in float32 they rise with the sizes."""
    limits = LIMITS[dtype]
    if dtype != "float32":
        return limits
    beyond = max(1.0, layers / LAYERS) * max(1.0, hidden / HIDDEN) * max(1.0, steps / STEPS)
    growth = min(sqrt(beyond), LARGEST_GROWTH)
    return Limits(
        limits.loss * growth,
        limits.gradients * growth,
        limits.norm * growth,
        limits.weights * growth,
    )
