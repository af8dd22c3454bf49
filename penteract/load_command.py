"""`penteract loads`: what a run's metrics say of its experts, over time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from penteract.errors import UserError
from penteract.load_picture import Layer, svg, text
from penteract.parallel.pipeline.trace import write_whole


def read(run: Path) -> list[Layer]:
    """Every layer of a run's folder or metrics.jsonl. Where a step stands twice, the later counts.

    A line that a killed run left unfinished is passed over. UserError where none has experts.
    """
    path = run / "metrics.jsonl" if run.is_dir() else run
    rows: dict[str, dict[int, list[Any]]] = {}  # by layer and step: tokens, dropped, entropy
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if b'"experts"' not in line:
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            try:
                _take(value, rows)
            except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
                told = f"{path}, line {number}: its experts are not as a run writes them: {error!r}"
                raise UserError(told) from None
    if not rows:
        raise UserError(
            f"{path}: no line with experts: the model has none, or no step that log.every divides "
            "was reached"
        )
    return [_layer(name, steps, path) for name, steps in rows.items()]


def _take(line: Any, rows: dict[str, dict[int, list[Any]]]) -> None:
    for name, row in line.get("experts", {}).items():
        tokens = np.array(row["tokens"], dtype=np.float64)
        dropped, entropy = float(row["dropped"]), float(row["entropy"])
        counts = ((tokens >= 0) & (tokens < np.inf)).all()
        if tokens.ndim != 1 or not len(tokens) or not counts or not 0 <= dropped <= 1:
            raise ValueError(f"{name} has counts or a share that none can be")
        rows.setdefault(name, {})[int(np.int64(line["step"]))] = [tokens, dropped, entropy]


def _layer(name: str, steps: dict[int, list[Any]], path: Path) -> Layer:
    order = sorted(steps)
    tokens, dropped, entropy = zip(*(steps[step] for step in order), strict=True)
    sizes = sorted({len(row) for row in tokens})
    if len(sizes) > 1:
        raise UserError(
            f"{path}: {name} has {sizes[0]} experts in some steps, {sizes[1]} in others"
        )
    figures = np.array(tokens), np.array(dropped), np.array(entropy)
    return Layer(name, np.array(order), *figures)


def show(run: Path, *, layer: str | None, picture: Path | None) -> None:
    """Write the picture, or print one as text where none is asked for."""
    layers = read(run)
    if layer is not None:
        names = [x.name for x in layers]
        if layer not in names:
            raise UserError(f"{run} has no layer {layer}; those with experts: {', '.join(names)}")
        layers = [layers[names.index(layer)]]
    if picture is None:
        print(text(layers))
        return
    write_whole(picture, svg(layers, str(run)))
    print(f"{picture}: written", file=sys.stderr)
