"""What is trained: a model, its batches, and its loss. Everything else is the trainer's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from penteract.nn.sequences import Noise


def _none(step: int) -> list[str]:
    return []


@dataclass(frozen=True)
class Task:
    """A training task as one rank sees it. `Batch` is whatever `batches` makes and `loss` takes.

    `loss(batch, scale, noise)` returns named scalars, each a sum over the batch times `scale`, and
    the trainer passes scale = 1 / (count over all ranks and micro-batches). Every rank returns
    equally many micro-batches for a step; one with nothing in it counts 0.
    """

    model: nn.Module
    batches: Callable[[int], Sequence[Any]]  # step -> this rank's micro-batches
    loss: Callable[[Any, Tensor, Noise | None], dict[str, Tensor]]
    count: Callable[[Any], Tensor | float]  # what a batch's loss is a sum over: its counted tokens
    tokens: Callable[[int], int]  # tokens of a step, over all ranks
    flops: Callable[[int], float] = lambda step: 0.0  # model FLOPs of a step, over all ranks
    validation: Mapping[str, Callable[[], Iterable[Any]]] = field(default_factory=dict)
    cursor: Callable[[int], int] = lambda step: step  # samples consumed after a step
    describe: Callable[[int], list[str]] = _none  # the samples of a step, for messages
    state: Mapping[str, Any] = field(default_factory=dict)  # saved with every checkpoint
    notes: Sequence[str] = ()  # for the user, at the start of a run
    close: Callable[[], None] = lambda: None
