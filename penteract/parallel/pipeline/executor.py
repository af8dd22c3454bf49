"""Executes a rank's list of actions. It knows no schedule by name and reorders nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penteract.parallel.buffers import Buffers
from penteract.parallel.pipeline.schedules import Action

Forward = Callable[[int, int], dict[str, Tensor]]  # (stage, micro-batch) -> scaled loss terms


def execute(actions: Sequence[Action], forward: Forward, buffers: Buffers) -> dict[str, Tensor]:
    """Run the actions; gradients are in `buffers` afterwards. Returns each loss term's sum.

    All terms of a forward are roots of its backward. The buffers are told of every backward, and
    which is the last, so that they reduce what it completes.
    """
    last = max((i for i, action in enumerate(actions) if action.kind == "B"), default=-1)
    alive: dict[tuple[int, int], dict[str, Tensor]] = {}
    totals: dict[str, Tensor] = {}
    for i, action in enumerate(actions):
        key = action.stage, action.micro_batch
        if action.kind == "F":
            alive[key] = forward(*key)
            continue
        terms = alive.pop(key)
        buffers.begin_backward(last=i == last)
        torch.autograd.backward(list(terms.values()))
        buffers.end_backward()
        for name, term in terms.items():
            totals[name] = totals.get(name, 0) + term.detach()
    assert not alive, f"forwards without a backward: {sorted(alive)}"
    return totals
