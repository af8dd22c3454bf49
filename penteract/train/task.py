"""What is trained: a model, its batches, and its loss. Everything else is the trainer's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from penteract.nn.sequences import Training
from penteract.parallel.pipeline.actions import Action, Schedule, Step
from penteract.parallel.pipeline.executor import Output, Shape
from penteract.parallel.pipeline.schedules import schedule
from penteract.parallel.turns import Turns


def _none(step: int) -> list[str]:
    return []


Forward = Callable[[int, Any, Tensor | None, Tensor, Training | None], Output]
Loss = Callable[[Any, Tensor, Training | None], Mapping[str, Tensor]]


def whole(loss: Loss) -> Forward:
    """The forward of a task of one stage, which computes `loss(batch, scale, training)`."""
    return lambda stage, batch, stream, scale, training: Output(None, loss(batch, scale, training))


def _one_stage(micro_batches: int) -> Schedule:
    return schedule("1f1b", ranks=1, micro_batches=micro_batches)


def _no_stream(stage: int, batch: Any) -> None:
    return None


@dataclass(frozen=True)
class Pipeline:
    """How a task's stages lie on the ranks of a pipeline, and in which order they work."""

    placement: tuple[int, ...] = (0,)  # the pipeline rank of each stage
    schedule: Callable[[int], Schedule] = _one_stage  # number of micro-batches -> schedule
    boundary: Callable[[int, Any], Shape | None] = _no_stream  # of a stage's stream on a batch
    turns: Turns | None = None  # that a paired forward and backward take

    def forwards(self, micro_batches: int) -> Schedule:
        """For evaluation: groups of as many micro-batches as there are stages, stage by stage."""
        n, ranks = len(self.placement), max(self.placement) + 1
        programs: list[list[Step]] = [[] for _ in range(ranks)]
        for first in range(0, micro_batches, n):
            group = range(first, min(first + n, micro_batches))
            for stage, rank in enumerate(self.placement):
                programs[rank] += [Action("F", stage, i) for i in group]
        whole = tuple(tuple(program) for program in programs)
        return Schedule("forwards", ranks, micro_batches, self.placement, whole)


@dataclass(frozen=True)
class Task:
    """A training task as one rank sees it. `Batch` is whatever `batches` makes and `forward` takes.

    `forward(stage, batch, stream, scale, training)` runs one of the stages that `model` holds on
    the stream so far. It returns the stream after it and named scalars, each a sum over the batch
    times `scale`; the trainer passes scale = 1 / (count over all ranks and micro-batches). A task
    of one stage is `whole(loss)`. Every rank returns equally many micro-batches for a step, ranks
    of one pipeline the same ones; one with nothing in it counts 0.
    """

    model: nn.Module
    batches: Callable[[int], Sequence[Any]]  # step -> this rank's micro-batches
    forward: Forward
    count: Callable[[Any], Tensor | float]  # what a batch's loss is a sum over: its counted tokens
    tokens: Callable[[int], int]  # tokens of a step, over all ranks
    real: Callable[[Any], Tensor | float] | None = None  # a batch's tokens that are no padding
    flops: Callable[[int], float] = lambda step: 0.0  # model FLOPs of a step, over all ranks
    validation: Mapping[str, Callable[[], Iterable[Any]]] = field(default_factory=dict)
    cursor: Callable[[int], int] = lambda step: step  # samples consumed after a step
    describe: Callable[[int], list[str]] = _none  # the samples of a step, for messages
    state: Mapping[str, Any] = field(default_factory=dict)  # saved with every checkpoint
    notes: Sequence[str] = ()  # for the user, at the start of a run
    pipeline: Pipeline = Pipeline()
    terms: Sequence[str] = ("loss",)  # that some stage's forward returns
    auxiliary: Sequence[str] = ()  # that its routers add to, of `penteract.nn.moe.SUMS`
    close: Callable[[], None] = lambda: None
