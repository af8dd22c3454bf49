"""Kinds of values that configuration keys take, each with what it refuses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field


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


def _recompute(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _recompute_kind(value: str) -> str:
    kind, slash, n = value.partition("/")
    if kind not in RECOMPUTE or (slash and not (kind == "layer" and n.isdecimal() and int(n))):
        raise ValueError(f"should be one of {', '.join(RECOMPUTE)}, or layer/N")
    return value


Recompute = Annotated[
    tuple[Annotated[str, AfterValidator(_recompute_kind)], ...], BeforeValidator(_recompute)
]

MoELayers = Literal["all"] | Count | tuple[Natural, ...]
