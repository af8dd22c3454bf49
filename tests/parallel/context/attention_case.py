"""Attention of one micro-batch, over the ranks of an axis and by the reference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from reference import attention as reference
from torch import Tensor

from penteract.mesh import Axis
from penteract.parallel.context.cut import Cut
from penteract.parallel.context.exchange import Exchange, attend
from penteract.parallel.context.exchanges import Comm, exchange_of
from penteract.parallel.context.kernels import Backend, kernel_of
from penteract.testing import run_ranks, world_axis

D = 6
COMMS: tuple[Comm, ...] = ("ring", "all_gather", "all_to_all", "hierarchical")
Values = dict[str, Tensor]
Arrays = dict[str, NDArray[np.float64]]


def work(cut: Cut, rank: int, *, window: int | None = None) -> int:
    """Pairs of a query of a rank and a key that it attends to."""
    seen = cut.positions(rank)[cut.rows(rank) >= 0] + 1
    return int((seen if window is None else seen.clip(max=window)).sum())


@dataclass(frozen=True)
class Case:
    """What attends to what, and by which backend."""

    lengths: tuple[int, ...] = (5, 1, 0, 11)
    heads: tuple[int, int] = (4, 2)  # of queries, of keys and values
    window: int | None = None
    sinks: bool = True
    kernel: tuple[Backend, float | None] = ("flash", None)  # and the soft cap

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@cache
def inputs(
    lengths: tuple[int, ...], heads: tuple[int, int], sinks: bool, dtype: torch.dtype
) -> Values:
    """Of all ranks, with sinks large enough that they take most of what some rows have."""
    (a, g), t = heads, sum(lengths)
    draw = torch.Generator().manual_seed(t + 100 * a + g)
    shapes = {"q": (t, a, D), "k": (t, g, D), "v": (t, g, D), "d_out": (t, a, D)}
    made = {n: torch.randn(s, generator=draw, dtype=torch.float64) for n, s in shapes.items()}
    made["q"] *= 2
    if sinks:
        made["sinks"] = torch.linspace(4, -1, a, dtype=torch.float64)
    return {name: x.to(dtype) for name, x in made.items()}


def inputs_of(case: Case, dtype: torch.dtype = torch.float64) -> Values:
    return inputs(case.lengths, case.heads, case.sinks, dtype)


@cache
def _expected(
    lengths: tuple[int, ...],
    heads: tuple[int, int],
    sinks: bool,
    dtype: torch.dtype,
    *limits: float | None,
) -> Values:
    window, softcap = limits
    x = inputs(lengths, heads, sinks, dtype)
    return reference.results(
        x, lengths, window=None if window is None else int(window), softcap=softcap
    )


def expected(case: Case, dtype: torch.dtype = torch.float64) -> Values:
    """By the reference, of inputs rounded to `dtype`; kept for the cases that share it."""
    window = case.window if case.window and case.window < max(case.lengths, default=0) else None
    return _expected(case.lengths, case.heads, case.sinks, dtype, window, case.kernel[1])


def local(x: Tensor, cut: Cut, rank: int, fill: float) -> Tensor:
    """This rank's rows of x [t, ...]."""
    rows = torch.from_numpy(cut.rows(rank))
    taken = x.new_full((len(rows), *x.shape[1:]), fill)
    taken[rows >= 0] = x[rows[rows >= 0]]
    return taken


def attend_here(
    case: Case, exchange: Exchange, dtype: torch.dtype = torch.float64, *, fused: bool = False
) -> Values:
    """This rank's rows of the output and of the gradients, and its part of those of the sinks.

    Rows of padding hold NaN. With `fused`, queries, keys and values are views of one tensor.
    """
    cut, x = Cut.of(case.lengths, exchange.axis.size), inputs_of(case, dtype)
    q, k, v = (local(x[n], cut, exchange.axis.rank, float("nan")) for n in ("q", "k", "v"))
    a, g = case.heads
    if fused:
        leaves = [torch.cat([q, k, v], 1).requires_grad_()]
        q, k, v = leaves[0].split([a, g, g], 1)
    else:
        q, k, v = leaves = [y.requires_grad_() for y in (q, k, v)]
    sinks = x["sinks"].clone().requires_grad_() if case.sinks else None
    plan = exchange.plan(cut, case.window, q)
    kernel = kernel_of(*case.kernel)
    out = attend(q, k, v, exchange=exchange, plan=plan, kernel=kernel, sinks=sinks)
    d_out = local(x["d_out"], cut, exchange.axis.rank, 1.0)
    wanted = leaves if sinks is None else [*leaves, sinks]
    found = torch.autograd.grad(out, wanted, d_out)
    dq, dk, dv = found[0].split([a, g, g], 1) if fused else found[:3]
    named = {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}
    assert {y.dtype for y in named.values()} == {dtype}
    return named if sinks is None else named | {"dsinks": found[-1]}


def packed(values: Values) -> Arrays:
    """To send to another process: arrays are copied, while tensors become files that are shared."""
    return {name: x.double().numpy() for name, x in values.items()}


def joined(case: Case, ranks: Sequence[Arrays]) -> Values:
    """The rows of all ranks as those of the micro-batch; those of padding must be 0."""
    cut = Cut.of(case.lengths, len(ranks))
    whole = {}
    for name in ranks[0]:
        parts = [torch.from_numpy(arrays[name]) for arrays in ranks]
        if name == "dsinks":
            whole[name] = torch.stack(parts).sum(0)
            continue
        for rank, part in enumerate(parts):
            padding = torch.from_numpy(cut.rows(rank)) < 0
            assert (part[padding] == 0).all(), f"{name}: a row of padding is not 0"
        whole[name] = torch.cat(parts)[torch.from_numpy(cut.restore())]
    return whole


def differences(found: Values, wanted: Values) -> dict[str, float]:
    """Of each tensor, the largest difference in shares of the largest value."""
    assert found.keys() == wanted.keys()
    result = {}
    for name, x in wanted.items():
        assert found[name].shape == x.shape, name
        if x.numel():
            largest = max(x.abs().max().item(), 0.01)
            worst = (found[name].double() - x).abs().max() / largest
            result[name] = float("inf") if worst.isnan() else worst.item()
    return result


def run_cases(
    cases: Iterable[Case],
    comm: Comm,
    cp: int,
    *,
    inner: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> list[list[Arrays]]:
    """What each case gives on each of `cp` ranks."""
    listed = list(cases)

    def of_rank() -> list[Arrays]:
        exchange = exchange_of(comm, world_axis("cp"), inner=inner)
        return [packed(attend_here(case, exchange, dtype)) for case in listed]

    by_rank = run_ranks(of_rank, cp) if cp > 1 else [of_rank()]
    return [list(ranks) for ranks in zip(*by_rank, strict=True)]


def axis_of(n: int, rank: int) -> Axis:
    """An axis that only has a size: nothing can be sent over it."""
    return Axis("cp", n, rank, tuple(range(n)))
