"""The differentiable collectives: the only communication under autograd.

Over one axis a value is S(dim) split, R replicated with gradients still to be summed over the
ranks, I replicated with identical gradients, or P a partial sum. The gradient of S is S, of R is P,
of P is R, of I is I. Each call is a linear map between such values and its backward is the
transpose: <f(x), g> = <x, f^T(g)>, both summed over the ranks, an I pair counted once.

| call                           | forward        | backward       | type |
|--------------------------------|----------------|----------------|------|
| `replicate(x, axis)`           | identity       | all-reduce     | I→R  |
| `all_reduce(x, axis)`          | all-reduce     | identity       | P→I  |
| `all_gather(x, axis, dim)`     | all-gather     | reduce-scatter | S→R  |
| `reduce_scatter(x, axis, dim)` | reduce-scatter | all-gather     | P→S  |
| `split(x, axis, dim)`          | slice          | all-gather     | I→S  |
| `gather(x, axis, dim)`         | all-gather     | slice          | S→I  |
| `all_to_all(x, axis, sizes…)`  | all-to-all     | all-to-all     | S→S  |
| `shift(x, axis, k)`            | send to +k     | send to −k     | S→S  |

Over an axis of size 1 every call returns `x` itself and needs no process group. Results are
contiguous. What each operation sends, and how sums are taken, stands in `wire`, whose operations
without autograd are to be had from here too: the asynchronous `start_…`, and those in place, whose
names end in `_`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function_unary

from penteract import compat
from penteract.mesh import Axis
from penteract.pending import Pending, done
from penteract.wire import (
    Sizes,
    all_reduce_,
    barrier,
    broadcast_,
    exchange,
    exchange_sizes,
    meet,
    own_part,
    start_all_gather,
    start_all_gather_into,
    start_all_reduce,
    start_all_reduce_,
    start_all_to_all,
    start_receive,
    start_reduce_scatter,
    start_reduce_scatter_,
    start_send,
    start_shift,
    whole_sizes,
)

__all__ = [
    "I",
    "Kind",
    "Kinds",
    "Operation",
    "P",
    "Pending",
    "R",
    "S",
    "all_gather",
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "barrier",
    "broadcast_",
    "declare",
    "done",
    "exchange",
    "gather",
    "meet",
    "reduce_scatter",
    "replicate",
    "shift",
    "split",
    "start_all_gather",
    "start_all_gather_into",
    "start_all_reduce",
    "start_all_reduce_",
    "start_all_to_all",
    "start_receive",
    "start_reduce_scatter",
    "start_reduce_scatter_",
    "start_send",
    "start_shift",
]


@dataclass(frozen=True)
class Kind:
    """How values and gradients lie over one axis: the letter S, R, I or P, and the dim of an S."""

    letter: str
    dim: int | None = None

    def __str__(self) -> str:
        return self.letter if self.dim is None else f"{self.letter}({self.dim})"


def S(dim: int | None = None) -> Kind:
    """Split along `dim`; None where the dim is not known."""
    return Kind("S", dim)


R, I, P = Kind("R"), Kind("I"), Kind("P")  # noqa: E741


def declare(x: Tensor, axis: Axis, kind: Kind) -> Tensor:
    """`x` itself. Under `checking()` it is of `kind` over `axis` from here on.

    For what no rule can derive: inputs, and results of contractions over a split dim, which are P.
    """
    if has_torch_function_unary(x):
        return handle_torch_function(declare, (x,), x, axis, kind)
    return x


Kinds = tuple[Axis, tuple[Kind, ...], Kind]


class Operation(torch.autograd.Function):
    """An autograd function that `checking()` sees as one call, as it sees those of torch.

    One that communicates says with `kinds` over which axis, what its tensors, in order, must be
    there, and what its results are; no rule could derive that.
    """

    _outside: ClassVar[Callable[..., Any]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._outside = staticmethod(compat.outside_graph(super().apply))

    @staticmethod
    def kinds(args: Sequence[Any]) -> Kinds | None:
        """The axis, what the tensors among `args` must be over it, and what the results are."""
        return None

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if has_torch_function_unary(args[0]):
            return handle_torch_function(cls.apply, args[:1], *args)
        kinds = cls.kinds(args)
        if kinds is not None and kinds[0].size > 1:
            return cls._outside(*args)
        return super().apply(*args)


class _Pair(torch.autograd.Function):
    """A linear map and its transpose, each a function of one tensor."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(g), None, None


# A map, its transpose: `_pair(x, there, back)` is there(x) with back(gradient) as its backward.
_pair = compat.outside_graph(_Pair.apply)


def _same(x: Tensor) -> Tensor:
    return x


def replicate(x: Tensor, axis: Axis) -> Tensor:
    """I → R: `x` as it is; its gradients are summed over `axis`."""
    if has_torch_function_unary(x):
        return handle_torch_function(replicate, (x,), x, axis)
    if axis.size == 1:
        return x
    return _pair(x, _same, lambda g: start_all_reduce(g, axis).wait())


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """P → I: the sum of `x` over `axis`, equal to the bit on every rank."""
    if has_torch_function_unary(x):
        return handle_torch_function(all_reduce, (x,), x, axis)
    if axis.size == 1:
        return x
    return _pair(x, lambda x: start_all_reduce(x, axis).wait(), _same)


def all_gather(x: Tensor, axis: Axis, dim: int = 0, *, sizes: Sizes = None) -> Tensor:
    """S(dim) → R: the parts of all ranks joined along `dim`; gradients are reduce-scattered.

    `sizes` are the parts' lengths in rank order, such as `even_sizes(total, axis.size)` where the
    total has a remainder; by default every rank holds as much as this one. ValueError where this
    rank's length is another.
    """
    if has_torch_function_unary(x):
        return handle_torch_function(all_gather, (x,), x, axis, dim, sizes=sizes)
    if axis.size == 1:
        return x
    return _pair(
        x,
        lambda x: start_all_gather(x, axis, dim, sizes=sizes).wait(),
        lambda g: start_reduce_scatter(g, axis, dim, sizes=sizes).wait(),
    )


def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0, *, sizes: Sizes = None) -> Tensor:
    """P → S(dim): this rank's part along `dim` of the sum over `axis`; gradients are gathered.

    The parts are `even_sizes` of x's length unless `sizes` says otherwise. ValueError where they
    do not add up to it.
    """
    if has_torch_function_unary(x):
        return handle_torch_function(reduce_scatter, (x,), x, axis, dim, sizes=sizes)
    if axis.size == 1:
        return x
    sizes = whole_sizes("reduce_scatter", x, axis, dim, sizes)
    return _pair(
        x,
        lambda x: start_reduce_scatter(x, axis, dim, sizes=sizes).wait(),
        lambda g: start_all_gather(g, axis, dim, sizes=sizes).wait(),
    )


def split(x: Tensor, axis: Axis, dim: int = 0, *, sizes: Sizes = None) -> Tensor:
    """I → S(dim): a copy of this rank's part of `x`; gradients are gathered.

    Sizes as in `reduce_scatter`.
    """
    if has_torch_function_unary(x):
        return handle_torch_function(split, (x,), x, axis, dim, sizes=sizes)
    if axis.size == 1:
        return x
    sizes = whole_sizes("split", x, axis, dim, sizes)
    return _pair(
        x,
        lambda x: own_part(x, axis, dim, sizes),
        lambda g: start_all_gather(g, axis, dim, sizes=sizes).wait(),
    )


def gather(x: Tensor, axis: Axis, dim: int = 0, *, sizes: Sizes = None) -> Tensor:
    """S(dim) → I: the parts joined along `dim`; of the gradient, equal everywhere, a rank keeps
    its own slice. Sizes as in `all_gather`.
    """
    if has_torch_function_unary(x):
        return handle_torch_function(gather, (x,), x, axis, dim, sizes=sizes)
    if axis.size == 1:
        return x
    return _pair(
        x,
        lambda x: start_all_gather(x, axis, dim, sizes=sizes).wait(),
        lambda g: own_part(g, axis, dim, sizes),
    )


def all_to_all(
    x: Tensor, axis: Axis, send_sizes: Sizes = None, receive_sizes: Sizes = None
) -> Tensor:
    """S → S: row blocks of `x` to every rank in rank order, theirs joined along dim 0.

    `send_sizes[r]` rows go to rank r, `receive_sizes[r]` come from it; zeros are fine. Without both
    the blocks are all alike. ValueError where sizes do not fit x.
    """
    if has_torch_function_unary(x):
        return handle_torch_function(all_to_all, (x,), x, axis, send_sizes, receive_sizes)
    if axis.size == 1:
        return x
    sent, received = exchange_sizes(x, axis, send_sizes, receive_sizes)
    return _pair(
        x,
        lambda x: start_all_to_all(x, axis, sent, received).wait(),
        lambda g: start_all_to_all(g, axis, received, sent).wait(),
    )


def shift(x: Tensor, axis: Axis, k: int = 1) -> Tensor:
    """S → S: the `x` of the rank k before this one, around the ring; shapes equal on all ranks."""
    if has_torch_function_unary(x):
        return handle_torch_function(shift, (x,), x, axis, k)
    if axis.size == 1:
        return x
    return _pair(
        x, lambda x: start_shift(x, axis, k).wait(), lambda g: start_shift(g, axis, -k).wait()
    )
