"""Schedules: pure functions from sizes to the list of actions that a rank executes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Action:
    """Forward (F) or backward (B) of one stage on one micro-batch."""

    kind: Literal["F", "B"]
    stage: int
    micro_batch: int


def accumulate(micro_batches: int) -> list[Action]:
    """One rank, one stage: each micro-batch forward, then backward; one is alive at a time."""
    return [Action(kind, 0, m) for m in range(micro_batches) for kind in ("F", "B")]
