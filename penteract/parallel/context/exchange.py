"""Context parallelism: attention over sequences that lie on several ranks.

Each rank holds some rows of every sequence (`cut`): queries, keys and values. An exchange brings
what is missing; attention itself is `blocks` and `kernels`. One autograd function goes around all.

With n = cp ranks, t tokens, a query and g key/value heads of size d on a rank (after tp), e bytes a
number, w at least float32's 4, and u = t/n · d, a rank sends for each attention layer, in units
of (n−1)/n · u:

| exchange     | forward             | backward            | holds beside its own rows, in u      |
|--------------|---------------------|---------------------|--------------------------------------|
| ring         | n·2g·e              | n·2g·(e + w)        | 2 blocks of 2g·e; and 4 of 2g·w      |
| all_gather   | n·2g·e              | n·2g·(e + w)        | 2n·2g·e; 2n·2g·w                     |
| all_to_all   | (2a + 2g')·e        | (2a + 2g')·e        | (2a + 2g')·e                         |
| hierarchical | all_to_all inside n', a ring over n/n' groups of n' ranks                         |

g' is g, or more where heads are fewer than ranks: each rank is then sent the one that it needs, so
that g' = n where g divides n. The second figure of what is held is of backward: the ring's four are
this rank's gradient, that of the block, and what is sent and comes. Each of layer, attention and
core that is recomputed sends forward's once more.

| exchange     | what overlaps                                                                  |
|--------------|--------------------------------------------------------------------------------|
| ring         | a block travels while attention on the last one runs, gradients likewise       |
| all_gather   | attention to the own rows runs before the others' come, and in backward last,  |
|              | while gradients travel                                                         |
| all_to_all   | half of the heads travel while attention on the others runs, where a rank gets |
|              | at least two key/value heads                                                   |

What must hold: all ranks of the axis have the same micro-batch, and compute its attention in the
same order. Sources: Liu et al., arXiv:2310.01889 (ring); Llama 3, arXiv:2407.21783, section 3.3.2
(all_gather); Jacobs et al., arXiv:2309.14509 (all_to_all); Fang and Zhao, arXiv:2405.07719
(hierarchical).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from penteract.collectives import Kinds, Operation, Pending, R, S
from penteract.mesh import Axis
from penteract.parallel.context.cut import Cut
from penteract.parallel.context.kernels import Kernel

Found = tuple[Tensor, Tensor, Tensor, Tensor | None]  # gradients of q, k, v and the sinks


def begun(pending: Pending, *, overlap: bool) -> Pending:
    """A message that has begun, awaited here where nothing is to run beside it."""
    if not overlap:
        pending.wait()
    return pending


class Exchange(Protocol):
    """One way to attend over an axis. What depends on the lengths only is planned beforehand."""

    @property
    def axis(self) -> Axis:
        """All ranks over which sequences lie."""

    def plan(self, cut: Cut, window: int | None, like: Tensor) -> Any:
        """What `forward` and `backward` need of the micro-batch, on the device of `like`."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: Any, kernel: Kernel
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The output of this rank's rows, [t/cp, a, d], and what backward needs."""

    def backward(
        self,
        d_out: Tensor,
        saved: Sequence[Tensor],
        sinks: Tensor | None,
        plan: Any,
        kernel: Kernel,
    ) -> Found:
        """The gradients of this rank's rows; of the sinks, this rank's part of their sum."""


class _Attention(Operation):
    @staticmethod
    def kinds(args: Sequence[Any]) -> Kinds | None:
        sinks, exchange = args[3:5]
        if exchange.axis.size == 1:
            return None  # as any operation
        rows = (S(0),) * 3
        return exchange.axis, rows if sinks is None else (*rows, R), S(0)

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        exchange: Exchange,
        plan: Any,
        kernel: Kernel,
    ) -> Tensor:
        out, saved = exchange.forward(q, k, v, sinks, plan, kernel)
        ctx.save_for_backward(*saved, *(() if sinks is None else (sinks,)))
        ctx.with_sinks, ctx.how = sinks is not None, (exchange, plan, kernel)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        exchange, plan, kernel = ctx.how
        saved = list(ctx.saved_tensors)
        sinks = saved.pop() if ctx.with_sinks else None
        found = exchange.backward(d_out, saved, sinks, plan, kernel)
        return (*found, None, None, None)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    exchange: Exchange,
    plan: Any,
    kernel: Kernel,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of this rank's rows q [t/cp, a, d] over k, v [t/cp, g, d] of all → as q.

    `a` is a multiple of `g`. `plan` is the exchange's of the micro-batch; `sinks` [a] are scores of
    a key that every query sees and that has no value.
    """
    result: Tensor = _Attention.apply(q, k, v, sinks, exchange, plan, kernel)
    return result
