"""Messages of tokens that travel while something else is computed, forward and backward.

Autograd runs what was recorded last first. `begin` records a node that starts the messages, `wait`
one that ends with them; what is recorded between the two is computed while they travel. In backward
the second starts the gradients' way back, and the first awaits them, behind the gradients of what
was between. The two are joined by a ticket, a scalar of no value. Before it waits, a computation
that is one of two that take `Turns` lets the other go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penteract.collectives import Operation, Pending
from penteract.parallel.turns import Turns

Send = Callable[[Tensor], Pending]


class Travel:
    """Tensors on their way: `wait` gives what arrives; gradients go the way back."""

    def __init__(self, turns: Turns, there: Send, back: Send, *tensors: Tensor) -> None:
        self.turns, self.there, self.back = turns, there, back
        self.coming: list[Pending] = []  # what arrives, or, in backward, gradients
        self._ticket: Tensor | None = _Begin.apply(*tensors, self)

    def wait(self) -> tuple[Tensor, ...]:
        """What arrives, once."""
        # The graph holds this object: it must not hold the graph.
        ticket, self._ticket = self._ticket, None
        result: tuple[Tensor, ...] = _End.apply(ticket, self)
        return result

    def arrived(self) -> list[Tensor]:
        """What `coming` brings; it is empty then."""
        self.turns.swap()
        found = [pending.wait() for pending in self.coming]
        self.coming = []
        return found


class _Begin(Operation):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *tensors, travel = args
        ctx.travel = travel
        travel.coming = [travel.there(x) for x in tensors]
        # On the device: autograd would run a ticket of the host beside what it is to come after.
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.travel.arrived(), None


class _End(Operation):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, travel: Travel) -> tuple[Tensor, ...]:
        ctx.travel = travel
        return tuple(x.detach() for x in travel.arrived())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.travel.coming = [ctx.travel.back(g) for g in gradients]
        return torch.zeros((), device=gradients[0].device), None
