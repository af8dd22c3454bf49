"""How far a layout may be from the reference, by the type in which both compute."""

from __future__ import annotations

# Relative differences as `penteract/verify/compare.py` counts them. A layout adds the same numbers
# in another order; in float64 nothing but a fault is seen at 1e-9, in narrower types rounding is.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 5e-2}


def tolerance(dtype: str) -> float:
    """The largest relative difference that counts as equal in `dtype`."""
    return TOLERANCES[dtype]
