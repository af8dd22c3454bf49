"""Kinds of values that configuration keys take, each with what it refuses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import NoDecode


def _not_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("should be a number, not true or false")
    return value


Count = Annotated[int, BeforeValidator(_not_bool), Field(gt=0, lt=2**53)]
Natural = Annotated[int, BeforeValidator(_not_bool), Field(ge=0, lt=2**53)]
Real = Annotated[float, BeforeValidator(_not_bool), Field(allow_inf_nan=False)]
Positive = Annotated[Real, Field(gt=0)]
Fraction = Annotated[Real, Field(ge=0, lt=1)]

RECOMPUTE = ("layer", "attention", "mlp", "core", "experts", "expert_act")


def _one(value: object) -> object:
    """A list of one may be given as what is in it."""
    return (value,) if isinstance(value, str) else value


Patterns = Annotated[tuple[str, ...], BeforeValidator(_one)]


def _recompute_kind(value: str) -> str:
    kind, slash, n = value.partition("/")
    if kind not in RECOMPUTE or (slash and not (kind == "layer" and n.isdecimal() and int(n))):
        raise ValueError(f"should be one of {', '.join(RECOMPUTE)}, or layer/N")
    return value


Recompute = Annotated[
    tuple[Annotated[str, AfterValidator(_recompute_kind)], ...], BeforeValidator(_one)
]


def _moe_layers(value: object) -> object:
    """A command line gives text: all, 2, or 1,3 and [1, 3]."""
    if not isinstance(value, str) or value == "all":
        return value
    words = value.strip("[]").split(",")
    try:
        numbers = tuple(int(word) for word in words)
    except ValueError:
        raise ValueError('should be "all", n for every n-th, or a list of numbers') from None
    return numbers if len(numbers) > 1 or value.startswith("[") else numbers[0]


# Not decoded, or the command line would make a list of any value.
MoELayers = Annotated[
    Literal["all"] | Count | tuple[Natural, ...], NoDecode, BeforeValidator(_moe_layers)
]
