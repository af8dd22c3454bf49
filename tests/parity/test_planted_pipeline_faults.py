"""Faults that a pipeline invites, planted: `test_pipeline` would see each, and says where."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from parity.matrix import Cell
from parity.training import first_difference
from torch import Tensor

from penteract.errors import UserError
from penteract.mesh import Axis, single
from penteract.optim import norm as norm_module
from penteract.parallel.buffers import Buffers
from penteract.parallel.pipeline import executor as executor_module
from penteract.parallel.pipeline.actions import Schedule
from penteract.parallel.pipeline.executor import Executor, Shape
from penteract.parallel.pipeline.lowering import Lowering, Message, check, lower
from penteract.parallel.pipeline.schedules import schedule
from penteract.train import pipeline as pipeline_module
from penteract.train import run as run_module

PLAIN = Cell(
    "gpt2", dp=1, micro_batch=1, global_batch=4, bucket_bytes=256, dropout=0.1, pp=2, seq=4
)
SPLIT = dataclasses.replace(PLAIN, schedule="zb-h1", zero=2, dp=2, global_batch=8)
LOOP = dataclasses.replace(PLAIN, model="deep", chunks=2, schedule="interleaved")

Fault = Callable[[pytest.MonkeyPatch], None]


def gradient_not_sent(patch: pytest.MonkeyPatch) -> None:
    """What comes back to the stage before is nothing."""
    send = executor_module.start_send

    def emptied(x: Tensor, channel: Axis) -> Any:
        return send(x * (channel.ranks[0] < channel.ranks[1]), channel)

    patch.setattr(executor_module, "start_send", emptied)


def swapped(lowering: Lowering) -> Lowering:
    """The first two receives of rank 1 from rank 0 change places, in every list."""

    def other(m: Message, pair: Sequence[Message]) -> Message:
        return pair[1] if m == pair[0] else pair[0] if m == pair[1] else m

    posts = [m for one in lowering[1] for m in one.post if m.source == 0]
    program = tuple(
        dataclasses.replace(one, post=tuple(other(m, posts[:2]) for m in one.post))
        for one in lowering[1]
    )
    return (lowering[0], program, *lowering[2:])


def receives_swapped(patch: pytest.MonkeyPatch) -> None:
    lower = run_module.lower
    patch.setattr(run_module, "lower", lambda plan: swapped(lower(plan)))


def layer_lost(patch: pytest.MonkeyPatch) -> None:
    cut = pipeline_module.cut

    def careless(*args: Any, **options: Any) -> tuple[tuple[str, ...], ...]:
        first, *others = cut(*args, **options)
        return (first[:-1], *others)

    patch.setattr(pipeline_module, "cut", careless)


def weight_gradient_dropped(patch: pytest.MonkeyPatch) -> None:
    """The first of every queue is forgotten."""
    begin = Buffers.begin_backward

    def forgetful(self: Buffers, stage: int = 0, *, last: bool, held: Any = None) -> None:
        begin(self, stage, last=last, held=None if held is None else Forgetful(held))

    class Forgetful(list[Any]):
        def __init__(self, held: list[Any]) -> None:
            super().__init__()
            self.held, self.first = held, True

        def append(self, item: Any) -> None:
            if not self.first:
                self.held.append(item)
            self.first = False

    patch.setattr(Buffers, "begin_backward", forgetful)


def tied_copies_apart(patch: pytest.MonkeyPatch) -> None:
    """Each holder learns from its own gradient."""
    finish = Buffers.finish

    def alone(self: Buffers) -> list[str]:
        self.more_axes["tied"] = single("tied")
        return finish(self)

    patch.setattr(Buffers, "finish", alone)


def tied_counted_twice(patch: pytest.MonkeyPatch) -> None:
    norm = norm_module.gradient_norm

    def double(buffers: Buffers, axes: Any, **options: Any) -> Tensor:
        with pytest.MonkeyPatch.context() as inside:
            inside.setitem(buffers.more_axes, "tied", single("tied"))
            return norm(buffers, axes, **options)

    patch.setattr(run_module, "gradient_norm", double)


def norm_of_a_stage(patch: pytest.MonkeyPatch) -> None:
    norm = norm_module.gradient_norm

    def local(buffers: Buffers, axes: Any, **options: Any) -> Tensor:
        return norm(buffers, {**axes, "pp": single("pp")}, **options)

    patch.setattr(run_module, "gradient_norm", local)


def reduced_too_early(patch: pytest.MonkeyPatch) -> None:
    """A stage's gradients are summed after its first micro-batch, once."""
    begin, seen = Buffers.begin_backward, set[tuple[int, int]]()

    def early(self: Buffers, stage: int = 0, *, last: bool, held: Any = None) -> None:
        first = (id(self), stage) not in seen
        seen.add((id(self), stage))
        begin(self, stage, last=first, held=held)

    patch.setattr(Buffers, "begin_backward", early)


def stage_of_another_micro_batch(patch: pytest.MonkeyPatch) -> None:
    """A last stage pairs each stream with the data of the next micro-batch."""
    run = Executor.run

    def shifted(
        self: Executor, program: Any, forward: Any, boundary: Callable[[int, int], Shape | None],
        *others: Any,
    ) -> dict[str, Tensor]:  # fmt: skip
        m = 1 + max(a.step.micro_batch for a in program)
        other = lambda stage, i, x: forward(stage, (i + (stage > 0)) % m, x)  # noqa: E731
        return run(self, program, other, boundary, *others)

    patch.setattr(Executor, "run", shifted)


@pytest.mark.parametrize(
    ("fault", "cell", "shows"),
    [
        (gradient_not_sent, PLAIN, "gradients"),
        (receives_swapped, LOOP, "loss"),
        (layer_lost, PLAIN, "loss"),
        (weight_gradient_dropped, SPLIT, "gradients"),
        (tied_copies_apart, PLAIN, "gradients"),
        (tied_counted_twice, PLAIN, "norm"),
        (norm_of_a_stage, PLAIN, "norm"),
        (reduced_too_early, dataclasses.replace(PLAIN, dp=2), "gradients"),
        (stage_of_another_micro_batch, PLAIN, "loss"),
    ],
)
def test_a_planted_fault_is_seen(
    monkeypatch: pytest.MonkeyPatch, fault: Fault, cell: Cell, shows: str
) -> None:
    assert first_difference(cell) is None
    fault(monkeypatch)
    assert first_difference(cell) == shows


def test_the_checker_refuses_swapped_receives() -> None:
    plan: Schedule = schedule("interleaved", ranks=2, chunks=2, micro_batches=4)
    with pytest.raises(UserError, match="rank"):
        check(plan, swapped(lower(plan)))
