"""Every exchange gives the output and the gradients of the formula."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import combinations, product

import pytest
import torch
from parallel.context.attention_case import (
    COMMS,
    Arrays,
    Case,
    attend_here,
    axis_of,
    differences,
    expected,
    inputs_of,
    joined,
    local,
    packed,
    run_cases,
)

from penteract.errors import UserError
from penteract.mesh import single
from penteract.parallel.context.cut import Cut
from penteract.parallel.context.exchange import Exchange, attend
from penteract.parallel.context.exchanges import Comm, exchange_of, group_size
from penteract.parallel.context.kernels import Backend, kernel_of
from penteract.parallel.context.ring import Ring
from penteract.testing import run_ranks, world_axis

TOLERANCE = 1e-11
RANKS = (2, 3, 4)
Kernel = tuple[Backend, float | None]
LENGTHS: tuple[tuple[int, ...], ...] = (
    (24,),  # of which 2·cp divides
    (13,),  # not
    (6, 6),  # equal samples
    (5, 1, 0, 11, 1, 1),  # packed
    (1,),  # fewer tokens than ranks
    (),
)
HEADS = ((4, 2), (4, 1), (6, 3), (5, 1), (1, 1), (0, 0))
WINDOWS = (None, 1, 3, 50)
KERNELS: tuple[Kernel, ...] = (("flash", None), ("plain", None), ("plain", 1.5))
FACTORS = (LENGTHS, HEADS, WINDOWS, (True, False), KERNELS)
Setting = Callable[[str, object], None]


def every_case() -> Iterator[Case]:
    return (Case(*values) for values in product(*FACTORS))


@cache
def sample() -> tuple[Case, ...]:
    """Few cases that hold every pair of values of two factors, greedily chosen."""

    def pairs(values: tuple[object, ...]) -> set[object]:
        return set(combinations(enumerate(values), 2))

    candidates = {values: pairs(values) for values in product(*FACTORS)}
    missing = set().union(*candidates.values())
    chosen = []
    while missing:
        best = max(candidates, key=lambda values: len(candidates[values] & missing))
        chosen.append(best)
        missing -= candidates[best]
    return tuple(Case(*values) for values in chosen)


def check(case: Case, ranks: Sequence[Arrays], what: object) -> None:
    for name, worst in differences(joined(case, ranks), expected(case)).items():
        assert worst <= TOLERANCE, f"{what}, {case}: {name} differs by {worst:.3g}"


def run_and_check(comm: Comm, cp: int, cases: Iterable[Case], inner: int | None = None) -> None:
    listed = list(cases)
    for case, ranks in zip(listed, twice(listed, comm, cp, inner), strict=True):
        check(case, ranks, (comm, cp, inner))


def twice(cases: Sequence[Case], comm: Comm, cp: int, inner: int | None) -> list[list[Arrays]]:
    """With and without overlap, to the same bits."""

    def of_rank() -> list[Arrays]:
        axis = world_axis("cp")
        exchanges = [exchange_of(comm, axis, inner=inner, overlap=x) for x in (True, False)]
        found = []
        for case in cases:
            both = [attend_here(case, exchange) for exchange in exchanges]
            for name, x in both[0].items():
                assert torch.equal(x, both[1][name]), f"{case}: {name} differs without overlap"
            found.append(packed(both[0]))
        return found

    return [list(ranks) for ranks in zip(*run_ranks(of_rank, cp), strict=True)]


@pytest.mark.parametrize("cp", RANKS)
@pytest.mark.parametrize("comm", COMMS)
def test_pairwise_sample(comm: Comm, cp: int, record_property: Setting) -> None:
    cases = sample()
    run_and_check(comm, cp, cases)
    of = len(list(every_case())) * len(RANKS) * len(COMMS)
    record_property("exchanges", {"run": len(cases), "of": of})


@pytest.mark.slow
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("cp", RANKS)
@pytest.mark.parametrize("comm", COMMS)
def test_full_product(
    comm: Comm, cp: int, heads: tuple[int, int], record_property: Setting
) -> None:
    cases = [case for case in every_case() if case.heads == heads]
    run_and_check(comm, cp, cases)
    of = len(list(every_case())) * len(RANKS) * len(COMMS)
    record_property("exchanges", {"run": len(cases), "of": of})


def test_the_sample_holds_every_pair() -> None:
    cases = sample()
    assert len(cases) < 50
    for a, b in (("lengths", "heads"), ("window", "kernel"), ("heads", "sinks")):
        values = {(getattr(case, a), getattr(case, b)) for case in cases}
        every = {(getattr(case, a), getattr(case, b)) for case in every_case()}
        assert values == every


def test_one_rank_is_the_formula() -> None:
    for case in sample():
        check(case, [packed(attend_here(case, exchange_of("all_to_all", single("cp"))))], "alone")


@pytest.mark.parametrize(("cp", "inner"), [(4, 1), (4, 2), (4, 4)])
def test_groups_of_any_size(cp: int, inner: int) -> None:
    run_and_check("hierarchical", cp, sample()[::3], inner)


@pytest.mark.slow
@pytest.mark.parametrize("inner", [2, 4])
def test_groups_of_eight_ranks(inner: int) -> None:
    run_and_check("hierarchical", 8, sample(), inner)


@pytest.mark.parametrize("comm", COMMS)
def test_views_of_one_projection(comm: Comm) -> None:
    """As a layer makes them: rows of q, k and v do not lie one behind the other."""
    cases = [Case(), Case(heads=(6, 3), window=3, kernel=("plain", None)), Case((8, 8), (5, 1))]

    def of_rank() -> list[Arrays]:
        exchange = exchange_of(comm, world_axis("cp"))
        return [packed(attend_here(case, exchange, fused=True)) for case in cases]

    for case, *ranks in zip(cases, *run_ranks(of_rank, 4), strict=True):
        check(case, ranks, comm)


# In bfloat16 the kernel rounds probabilities and each tensor, 2^-8 of its value at most; the sums
# over blocks and ranks must add nothing to that.
NARROW = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2}


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("comm", COMMS)
def test_narrow_types(comm: Comm, dtype: torch.dtype) -> None:
    cases = [
        Case(lengths, (4, 2), window, kernel=(backend, None))
        for lengths, window in (((40,), None), ((17, 1, 30), 9))
        for backend in ("flash", "plain")
    ]
    for case, ranks in zip(cases, run_cases(cases, comm, 4, dtype=dtype), strict=True):
        found = differences(joined(case, ranks), expected(case, dtype))
        assert max(found.values()) < NARROW[dtype], (case, found)


@pytest.mark.parametrize("comm", COMMS)
def test_sums_over_blocks_and_ranks_are_taken_in_float32(comm: Comm) -> None:
    """The plain kernel's output and gradient of the values are rounded to bfloat16 once, at the
    end: each number by its own size. Ranks with the same key/value head round their shares.
    """
    lengths, dtype = ((40,), (80,), (33, 1, 60)), torch.bfloat16
    cases = [Case(each, (4, 2), kernel=("plain", None)) for each in lengths]
    names = ("out",) if comm == "all_to_all" else ("out", "dv")
    for case, ranks in zip(cases, run_cases(cases, comm, 4, dtype=dtype), strict=True):
        found, wanted = joined(case, ranks), expected(case, dtype)
        for name in names:
            worst = ((found[name] - wanted[name]).abs() - wanted[name].abs() / 2**8).max()
            assert worst <= 1e-5, (case, name)


def one_layer(case: Case, exchange: Exchange, x: list[torch.Tensor]) -> torch.Tensor:
    cut = Cut.of(case.lengths, exchange.axis.size)
    plan = exchange.plan(cut, case.window, x[0])
    q, k, v = x[:3]
    return attend(q, k, v, exchange=exchange, plan=plan, kernel=kernel_of(*case.kernel))


@pytest.mark.parametrize("comm", COMMS)
def test_layers_one_after_another_do_not_take_each_other_s_messages(comm: Comm) -> None:
    """Messages have no names: layers with other windows, other sizes, and blocks that are skipped
    share a communicator.
    """
    windows, heads, lengths = (None, 1, 3, None), (4, 4), (13, 2, 6)
    cases = [Case(lengths, heads, window, sinks=False) for window in windows]

    def of_rank() -> list[Arrays]:
        exchange = exchange_of(comm, world_axis("cp"))
        whole, cut = inputs_of(cases[0]), Cut.of(lengths, exchange.axis.size)
        rows = [local(whole[n], cut, exchange.axis.rank, 0.0) for n in ("q", "k", "v")]
        leaves = [x.requires_grad_() for x in rows]
        stream, found = leaves[0], []
        for case in cases:
            stream = stream + one_layer(case, exchange, [stream, *leaves[1:]])
            found.append(stream)
        d_out = local(whole["d_out"], cut, exchange.axis.rank, 0.0)
        gradients = torch.autograd.grad(stream, leaves, d_out)
        named = {f"out {i}": x.detach() for i, x in enumerate(found)}
        zipped = zip(("dq", "dk", "dv"), gradients, strict=True)
        return [packed(named | dict(zipped))]

    alone = joined(cases[0], of_rank())
    ranks = [found[0] for found in run_ranks(of_rank, 4)]
    for name, worst in differences(joined(cases[0], ranks), alone).items():
        assert worst <= TOLERANCE, f"{name} differs by {worst:.3g}"


def test_groups_have_the_largest_divisor_up_to_the_root() -> None:
    sizes = {1: 1, 2: 1, 3: 1, 4: 2, 6: 2, 8: 2, 9: 3, 12: 3, 16: 4, 7: 1}
    assert {cp: group_size("hierarchical", cp) for cp in sizes} == sizes
    assert [group_size("hierarchical", 8, n) for n in (1, 2, 4, 8)] == [1, 2, 4, 8]
    with pytest.raises(UserError, match="cp_inner = 3 does not divide cp = 8"):
        exchange_of("hierarchical", axis_of(8, 0), inner=3)


@pytest.mark.parametrize("cp", [1, 2, 3])
def test_groups_of_one_rank_are_the_ring(cp: int) -> None:
    """And a size of groups is nothing where heads are not exchanged in them."""
    axis = axis_of(cp, 0)
    assert exchange_of("hierarchical", axis) == Ring(axis)
    assert exchange_of("hierarchical", axis, inner=1, overlap=False) == Ring(axis, False)
    for comm in COMMS[:3] if cp > 1 else COMMS:
        assert group_size(comm, cp, 5) == (cp if comm == "all_to_all" else 1)
