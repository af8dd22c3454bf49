"""What is computed between the start and the end of a journey runs while it travels."""

from typing import Any

import torch
from torch import Tensor

from penteract.collectives import Pending, done
from penteract.parallel.expert.travel import Travel
from penteract.parallel.turns import Turns


class Noted(torch.autograd.Function):
    """The identity, which says when it runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[str]) -> Tensor:
        ctx.log = log
        log.append("computed")
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        ctx.log.append("computed")
        return g, None


class Watched(Pending):
    def __init__(self, x: Tensor, log: list[str]) -> None:
        super().__init__((), lambda: x)
        self.log = log

    def wait(self) -> Tensor:
        self.log.append("awaited")
        return super().wait()


def test_both_directions_hide_behind_what_is_between() -> None:
    log: list[str] = []

    def send(factor: float) -> Any:
        def begin(x: Tensor) -> Pending:
            log.append("sent")
            return Watched(x * factor, log)

        return begin

    x = torch.ones(2, requires_grad=True)
    other = torch.ones(2, requires_grad=True)
    travel = Travel(Turns(), send(2.0), send(3.0), x)
    between = Noted.apply(other, log)
    (arrived,) = travel.wait()
    assert log == ["sent", "computed", "awaited"]
    log.clear()
    (arrived + between).sum().backward()
    assert log == ["sent", "computed", "awaited"]
    assert torch.equal(x.grad, torch.full((2,), 3.0))


def test_what_has_no_gradient_gets_none_back() -> None:
    x = torch.ones(2)
    weights = torch.ones(3, requires_grad=True)
    travel = Travel(Turns(), done, done, x, weights)
    arrived, _ = travel.wait()
    assert arrived.grad_fn is not None  # the graph is alike on every rank
    (arrived.sum() * weights.sum()).backward()
    assert torch.equal(weights.grad, torch.full((3,), 2.0))
