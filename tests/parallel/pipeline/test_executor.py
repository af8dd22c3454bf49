"""A list of actions is executed as it stands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from penteract.mesh import single
from penteract.parallel.buckets import Sharding
from penteract.parallel.buffers import Buffers
from penteract.parallel.parameters import adopt
from penteract.parallel.pipeline.executor import execute
from penteract.parallel.pipeline.schedules import Action, accumulate


class Recorded(Buffers):
    """Buffers that note when they were told of the last micro-batch."""

    def __init__(self, model: nn.Module, events: list[str]) -> None:
        super().__init__(model, Sharding.whole(single("dp-cp")), seed=0)
        self.events = events

    def begin_backward(self, *, last: bool) -> None:
        if last:
            self.events.append("last")
        super().begin_backward(last=last)


def run(actions: list[Action]) -> tuple[list[str], dict[str, Tensor], Tensor]:
    """(what happened in order, summed terms, gradient of w); a term is w·(m + 1), another w / 2."""
    events: list[str] = []
    model = nn.Linear(1, 1, bias=False).double()
    adopt(model)
    buffers = Recorded(model, events)

    def forward(stage: int, m: int) -> dict[str, Tensor]:
        events.append(f"F{m}")
        w = model.weight.sum()
        w.register_hook(lambda _: events.append(f"B{m}"))
        return {"loss": w * (m + 1), "z": w * 0.5}

    buffers.begin()
    terms = execute(actions, forward, buffers)
    buffers.finish()
    return events, terms, next(iter(buffers.slots())).gradient


def test_accumulation_keeps_one_micro_batch_alive() -> None:
    assert accumulate(2) == [
        Action("F", 0, 0),
        Action("B", 0, 0),
        Action("F", 0, 1),
        Action("B", 0, 1),
    ]
    events, terms, gradient = run(accumulate(3))
    assert events == ["F0", "B0", "F1", "B1", "F2", "last", "B2"]
    assert gradient.item() == 1 + 2 + 3 + 3 * 0.5, "all terms are roots of the backward"
    assert (terms["loss"] / terms["z"]).item() == pytest.approx((1 + 2 + 3) / 1.5)
    assert not terms["loss"].requires_grad


def test_the_executor_keeps_the_order_it_is_given() -> None:
    order = [Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 1), Action("B", 0, 0)]
    events, _, gradient = run(order)
    assert events == ["F0", "F1", "B1", "last", "B0"]
    assert gradient.item() == 1 + 2 + 2 * 0.5


def test_nothing_to_do_is_no_gradient() -> None:
    events, terms, gradient = run([])
    assert (events, terms) == ([], {})
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_a_forward_without_its_backward_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="without a backward"):
        run([Action("F", 0, 0)])
