"""The learning rate as a function of the step. Step 1 is the first update."""

from __future__ import annotations

import math

from penteract.config import OptimConfig


def learning_rate(step: int, optim: OptimConfig) -> float:
    """Linear warm-up to `lr`, then the schedule's shape down to `min_lr` at step `decay`."""
    assert optim.decay is not None, "an unresolved configuration"
    assert optim.cooldown is not None
    peak, floor, warmup, decay = optim.lr, optim.min_lr, optim.warmup, optim.decay
    if step < warmup:
        return peak * step / warmup
    if optim.schedule == "constant":
        return peak
    if optim.schedule == "inverse_sqrt":
        return max(floor, peak * math.sqrt(max(warmup, 1) / max(step, 1)))
    start = decay - optim.cooldown if optim.schedule == "wsd" else warmup
    if step >= decay:
        return floor
    done = max(0.0, (step - start) / (decay - start))
    shape = (1 + math.cos(math.pi * done)) / 2 if optim.schedule == "cosine" else 1 - done
    return floor + (peak - floor) * shape
