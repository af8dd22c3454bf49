"""What an exchange keeps for backward falls as 1/cp, and what it holds besides is as documented."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from parallel.context.attention_case import COMMS, Case, D, inputs_of, local
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penteract.parallel.context.all_to_all import halves
from penteract.parallel.context.cut import Cut
from penteract.parallel.context.exchange import attend
from penteract.parallel.context.exchanges import Comm, exchange_of
from penteract.parallel.context.kernels import kernel_of
from penteract.testing import run_ranks, world_axis

CASES = (  # those of one length in every group of kept bytes: even heads, and no padding on 4 ranks
    Case((48,), (8, 4)),
    Case((16, 32), (8, 4), window=7),
    Case((13, 3, 32), (8, 4), sinks=False, kernel=("plain", None)),
)
ODD = (Case((13,), (8, 4)), Case((48,), (5, 1)), Case((9, 2, 1), (6, 3), window=3), Case(()))


def kept_here(comm: Comm, case: Case, dtype: torch.dtype, inner: int | None) -> int:
    """Bytes of the storages that backward keeps, each once."""
    axis = world_axis("cp")
    exchange = exchange_of(comm, axis, inner=inner)
    cut, x = Cut.of(case.lengths, axis.size), inputs_of(case, dtype)
    q, k, v = (local(x[n], cut, axis.rank, 0.0).requires_grad_() for n in ("q", "k", "v"))
    sinks = x["sinks"].clone().requires_grad_() if case.sinks else None
    plan, storages = exchange.plan(cut, case.window, q), dict[int, int]()

    def pack(y: Tensor) -> Tensor:
        storages[y.untyped_storage().data_ptr()] = y.untyped_storage().nbytes()
        return y

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
        out = attend(
            q, k, v, exchange=exchange, plan=plan, kernel=kernel_of(*case.kernel), sinks=sinks
        )
    if sinks is not None:
        storages.pop(sinks.untyped_storage().data_ptr())
    assert out.requires_grad
    return sum(storages.values())


def kept_bytes(rows: int, a: int, g: int, dtype: torch.dtype) -> int:
    """q and the output, k and v, and the log-sum-exp, of so many rows."""
    wide = torch.promote_types(dtype, torch.float32).itemsize
    return rows * ((2 * a + 2 * g) * D * dtype.itemsize + a * wide)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_kept_falls_as_the_ranks(dtype: torch.dtype) -> None:
    ways = [(comm, case) for comm in COMMS for case in CASES]
    found = {}
    for cp in (1, 2, 4):
        ranks = run_ranks(lambda: [kept_here(comm, case, dtype, None) for comm, case in ways], cp)
        for i, way in enumerate(ways):
            found[cp, way] = {kept[i] for kept in ranks}
    for way in ways:
        a, g = way[1].heads
        whole = kept_bytes(48, a, g, dtype)
        assert [found[cp, way] for cp in (1, 2, 4)] == [{whole}, {whole // 2}, {whole // 4}], way


@pytest.mark.parametrize("cp", [2, 4])
def test_rows_of_padding_and_uneven_heads_are_all_that_is_more(cp: int) -> None:
    ways = [(comm, case) for comm in COMMS for case in ODD]
    ranks = run_ranks(lambda: [kept_here(c, case, torch.float32, None) for c, case in ways], cp)
    for i, (comm, case) in enumerate(ways):
        (a, g), rows = case.heads, Cut.of(case.lengths, cp).t_local
        inner = {"all_to_all": cp, "hierarchical": cp // 2}.get(comm, 1)
        for rank in range(cp):
            said = kept_bytes(rows, a, g, torch.float32)
            if inner > 1:  # some heads of the rows of all
                me = rank % inner
                held = [(len(h.queries[me]), len(h.keys[me])) for h in halves(a, g, inner)]
                said = sum(kept_bytes(inner * rows, *heads, torch.float32) for heads in held)
            assert ranks[rank][i] == said, (comm, case, rank)


class Live(TorchDispatchMode):
    """Counts the storages of each size that are alive together, at most."""

    def __init__(self) -> None:
        super().__init__()
        self._refs: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most: Counter[int] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                ref = StorageWeakRef(x.untyped_storage())
                self._refs[ref.cdata] = ref, x.untyped_storage().nbytes()
        alive = {c: (ref, n) for c, (ref, n) in self._refs.items() if not ref.expired()}
        self._refs = alive
        self.most |= Counter(n for _, n in alive.values())
        return out


T, HEADS = 64, (10, 2)  # so that no other tensor is as large as keys and values of one rank or all


def held_here(comm: Comm) -> list[tuple[int, int]]:
    """In forward and in backward, how many tensors there are together at most as large as keys and
    values of one rank, and of all.
    """
    axis, (a, g) = world_axis("cp"), HEADS
    exchange, cut, rows = exchange_of(comm, axis), Cut.of((T,), axis.size), T // axis.size
    q, k, v, d_out = (torch.randn(rows, heads, D) for heads in (a, g, g, a))
    plan, kernel = exchange.plan(cut, None, q), kernel_of("flash")
    block = rows * 2 * g * D * 4
    with Live() as live:
        _, saved = exchange.forward(q, k, v, None, plan, kernel)
    with Live() as back:
        exchange.backward(d_out, saved, None, plan, kernel)
    return [(mode.most[block], mode.most[axis.size * block]) for mode in (live, back)]


@pytest.mark.parametrize("cp", [2, 4])
def test_a_ring_holds_two_blocks_of_any_number_of_ranks(cp: int) -> None:
    """The one that it computes and the one that comes. Backward besides: this rank's gradient, that
    of the block, and what is sent and comes; on fewer ranks these do not meet.
    """
    for forward, backward in run_ranks(lambda: held_here("ring"), cp):
        assert forward == (2, 0)
        assert backward == (4 if cp == 2 else 6, 0)


@pytest.mark.parametrize("cp", [2, 4])
def test_a_gather_holds_all_blocks_twice(cp: int) -> None:
    """As they came, and in the order of the sequences; this rank's own while they are sent."""
    for forward, backward in run_ranks(lambda: held_here("all_gather"), cp):
        assert forward == (1, 2)
        assert backward[1] == 2
