"""Dropout as a function of step, micro-batch, layer, global token and channel: no state."""

from __future__ import annotations

from torch import Tensor

from penteract.nn.sequences import Training
from penteract.random import keep_runs


def dropout(
    x: Tensor, rate: float, *, name: str, rows: Tensor, training: Training | None
) -> Tensor:
    """x [t, h] with each element zeroed with probability `rate`, the others divided by 1 - rate.

    `rows` [t] numbers the tokens in the whole micro-batch; what −1, padding, gets does not matter.
    The identity without `training` (evaluation).
    """
    if training is None or rate == 0.0:
        return x
    keep = keep_runs(
        training.seed, training.stream(name), rows * x.shape[1], x.shape[1], 1.0 - rate
    )  # [t, h]: row i holds the elements from rows[i]·h of the global mask
    return x * keep.to(x.dtype).div_(1.0 - rate)
