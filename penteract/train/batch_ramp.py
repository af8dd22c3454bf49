"""How many sequences a step takes, and how many came before: pure functions of the step."""

from __future__ import annotations

from penteract.config import TrainConfig


def global_batch(step: int, train: TrainConfig) -> int:
    """Sequences of step `step` (from 1)."""
    for until, batch in train.ramp:
        if step <= until:
            return batch
    return train.global_batch


def cursor(step: int, train: TrainConfig) -> int:
    """Sequences consumed once `step` steps are done: the first sample of step + 1."""
    consumed = done = 0
    for until, batch in train.ramp:
        consumed += (min(step, until) - min(step, done)) * batch
        done = until
    return consumed + max(0, step - done) * train.global_batch


def ramp_until(step: int, train: TrainConfig) -> list[tuple[int, int]]:
    """The ramp that says what the first `step` steps took, whatever comes after them."""
    past = [(until, batch) for until, batch in train.ramp if until < step]
    return [*past, (step, global_batch(step, train))]
