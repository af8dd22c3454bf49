"""What is said of a step whose loss or gradient is not finite: where, and from which samples."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import torch

from penteract.collectives import exchange
from penteract.mesh import Axis
from penteract.parallel.buffers import Buffers


class NonFiniteError(RuntimeError):
    """The loss or the gradient of a step is NaN or infinite; the weights are those before it."""


def first_parameter(buffers: Buffers, world: Axis) -> str | None:
    """The first parameter, in the order of backward, with such a gradient on any rank.

    All ranks call it together. Of the ranks' reports that of the last pipeline stage counts, and
    there of the earliest place, so that what came first in backward is named rather than all that
    it spread to.
    """
    found: list[tuple[int, int, str]] = []
    for place, slot in enumerate(buffers.slots()):
        bucket = slot.bucket
        parts = (view for s, _, view in bucket.owned(bucket.own_gradient) if s is slot)
        if not all(bool(torch.isfinite(view).all()) for view in parts):
            found.append((-bucket.stage, place, slot.entry.name))
            break
    answers = exchange(json.dumps(found).encode(), world)
    reports = [tuple(report) for answer in answers for report in json.loads(answer)]
    return min(reports)[2] if reports else None


def explain(
    step: int,
    losses: Mapping[str, float],
    norm: float,
    parameter: str | None,
    samples: Sequence[str],
    skipped: int,
    *,
    again: str,
) -> str:
    """The message: numbers, where it began, what helps, and the samples of the step.

    `skipped` updates in a row were not made, that of `step` the last of them; `again` is what came
    of running it again.
    """
    terms = ", ".join(f"{name} = {value}" for name, value in losses.items())
    where = f"; the first such gradient in backward: {parameter}" if parameter else ""
    if all(map(math.isfinite, (norm, *losses.values()))):
        where = f" on this rank, not finite on another{where}"
    missed = "the update was" if skipped == 1 else f"{skipped} updates in a row were"
    listed = "".join(f"\n  {line}" for line in samples)
    return (
        f"step {step}: {terms}, gradient norm = {norm}{where}; {missed} not made{again}. A lower "
        f"optim.lr, a longer optim.warmup or a look at the data may help. Samples:{listed}"
    )
