"""The bytes that leave a rank are those that `traffic` says, for every exchange."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from parallel.context.attention_case import COMMS, Case, D, inputs_of, local

from penteract.mesh import single
from penteract.parallel.context.cut import Cut
from penteract.parallel.context.exchange import attend
from penteract.parallel.context.exchanges import Comm, exchange_of
from penteract.parallel.context.kernels import kernel_of
from penteract.parallel.context.traffic import Sent, Sizes, attention_bytes
from penteract.testing import run_ranks, world_axis

HEADS = ((4, 2), (8, 4), (4, 1), (6, 3), (5, 1), (6, 2), (1, 1), (0, 0))
LENGTHS = ((24,), (13,), (5, 1, 0, 6), (1,), ())
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def sent_here(comm: Comm, inner: int | None, case: Case, dtype: torch.dtype) -> Sent:
    """What this rank sent, counted by its axis."""
    axis = world_axis("cp")
    exchange = exchange_of(comm, axis, inner=inner)
    cut, x = Cut.of(case.lengths, axis.size), inputs_of(case, dtype)
    q, k, v = (local(x[n], cut, axis.rank, 0.0).requires_grad_() for n in ("q", "k", "v"))
    plan = exchange.plan(cut, case.window, q)
    sinks = x["sinks"].clone().requires_grad_()
    before = sum(axis.traffic.bytes.values())
    kernel = kernel_of(*case.kernel)
    out = attend(q, k, v, exchange=exchange, plan=plan, kernel=kernel, sinks=sinks)
    between = sum(axis.traffic.bytes.values())
    torch.autograd.grad(out, [q, k, v, sinks], torch.ones_like(out))
    return Sent(between - before, sum(axis.traffic.bytes.values()) - between)


CASES = [(heads, LENGTHS[i % 5], DTYPES[i % 3]) for i, heads in enumerate(HEADS * 2)]


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_every_exchange_sends_what_is_said(cp: int) -> None:
    ways: list[tuple[Comm, int | None]] = [(comm, None) for comm in COMMS]
    if cp == 4:
        ways += [("hierarchical", 1), ("hierarchical", 4)]
    chosen = list(product(ways, CASES))

    def of_rank() -> list[Sent]:
        return [
            sent_here(comm, inner, Case(lengths, heads, window=3), dtype)
            for (comm, inner), (heads, lengths, dtype) in chosen
        ]

    by_rank = run_ranks(of_rank, cp)
    for i, ((comm, inner), ((a, g), lengths, dtype)) in enumerate(chosen):
        sizes = Sizes(Cut.of(lengths, cp).t_local, a, g, D, dtype)
        for rank in range(cp):
            said = attention_bytes(comm, sizes, cp=cp, rank=rank, inner=inner)
            assert by_rank[rank][i] == said, (comm, inner, sizes, rank)


@pytest.mark.parametrize(("e", "dtype"), [(2, torch.bfloat16), (4, torch.float32)])
def test_the_table_of_the_documentation(e: int, dtype: torch.dtype) -> None:
    """In units of (n−1)/n · u, where heads are even over ranks."""
    t, a, g, d, n = 64, 8, 4, 16, 4
    sizes = Sizes(t // n, a, g, d, dtype)
    unit = (n - 1) * (t // n * d) // n

    def sent(comm: Comm, rank: int = 1, g: int = g, inner: int | None = None) -> Sent:
        local_sizes = Sizes(t // n, a, g, d, dtype)
        return attention_bytes(comm, local_sizes, cp=n, rank=rank, inner=inner)

    assert sent("ring") == sent("all_gather") == (n * 2 * g * e * unit, n * 2 * g * (e + 4) * unit)
    assert sent("all_to_all") == ((2 * a + 2 * g) * e * unit,) * 2
    # Fewer key/value heads than ranks: one for each rank.
    assert sent("all_to_all", g=2) == ((2 * a + 2 * n) * e * unit,) * 2
    # Of no groups, and of one: the two that it is made of.
    assert sent("hierarchical", inner=1) == sent("ring")
    assert sent("hierarchical", inner=4) == sent("all_to_all")
    inside = (2 - 1) * (t // n * d) // 2
    ring = (2 - 1) * 2 * (t // n) * 2 * (g // 2) * d
    wanted = (
        (2 * a + 2 * g) * e * inside + ring * e,
        (2 * a + 2 * g) * e * inside + ring * (e + 4),
    )
    assert sent("hierarchical", inner=2) == wanted
    assert attention_bytes("all_to_all", sizes, cp=1, rank=0) == (0, 0)


def test_one_rank_sends_nothing() -> None:
    assert exchange_of("all_to_all", single("cp")).axis.size == 1
    assert sent_here("all_to_all", None, Case(), torch.float32) == (0, 0)
