"""Faults that context parallelism invites: the comparison with the formula would see each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parallel.context.attention_case import (
    Case,
    Values,
    attend_here,
    differences,
    expected,
    inputs_of,
    joined,
    local,
    packed,
)
from reference import attention as reference
from reference.plain import rotate
from torch import Tensor

from penteract.collectives import done
from penteract.mesh import Axis
from penteract.nn.rope import apply_rotary
from penteract.nn.sequences import Sequences
from penteract.parallel.context import all_gather as all_gather_module
from penteract.parallel.context import ring as ring_module
from penteract.parallel.context.all_gather import AllGather
from penteract.parallel.context.all_to_all import AllToAll
from penteract.parallel.context.blocks import Gradient, Merged
from penteract.parallel.context.cut import Cut
from penteract.parallel.context.exchange import attend
from penteract.parallel.context.exchanges import Comm, exchange_of
from penteract.parallel.context.kernels import Plain
from penteract.parallel.context.ring import Ring
from penteract.testing import run_ranks, world_axis

CP, SEEN = 4, 1e-6
CASE = Case((21, 1, 0, 14), (4, 2), kernel=("plain", None))
MQA = dataclasses.replace(CASE, heads=(4, 1))
WINDOW = dataclasses.replace(CASE, window=3)
Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]


def nothing(patch: Patch) -> None:
    """No fault."""


def last_block_skipped(patch: Patch) -> None:
    plan = Ring.plan

    def less(self: Ring, *arguments: Any) -> Any:
        turns = plan(self, *arguments)
        return (*turns[:-1], dataclasses.replace(turns[-1], groups=(), is_whole=False))

    patch.setattr(Ring, "plan", less)


def gradients_not_sent_home(patch: Patch) -> None:
    """The last of a forward's n − 1 messages, and a backward's 2(n − 1)."""
    start, calls = ring_module.start_shift, list[Tensor]()

    def counted(x: Tensor, axis: Axis) -> Any:
        calls.append(x)
        return done(x) if len(calls) == 3 * (axis.size - 1) else start(x, axis)

    patch.setattr(ring_module, "start_shift", counted)


def blocks_merged_as_a_mean(patch: Patch) -> None:
    def mean(self: Merged, query: Any, out: Tensor, lse: Tensor) -> None:
        whole_out, whole_lse = self._whole()
        had_out, had = query.of(whole_out), query.of(whole_lse)
        fresh = had.isinf()[..., None]
        had_out.copy_(torch.where(fresh, out, (had_out + out) / 2))
        had.copy_(torch.logaddexp(had, lse))

    patch.setattr(Merged, "_merge", mean)


def causal_for_keys_of_a_lower_rank(patch: Patch) -> None:
    blocks = Cut.blocks

    def causal(self: Cut, query_rank: int, key_rank: int, **options: Any) -> Any:
        found = blocks(self, query_rank, key_rank, **options)
        lower = key_rank < query_rank
        return [dataclasses.replace(b, mask="causal") if lower else b for b in found]

    patch.setattr(Cut, "blocks", causal)


def full_for_a_rank_s_own_keys(patch: Patch) -> None:
    blocks = Cut.blocks

    def full(self: Cut, query_rank: int, key_rank: int, **options: Any) -> Any:
        found = blocks(self, query_rank, key_rank, **options)
        return [dataclasses.replace(b, mask="full") for b in found]

    patch.setattr(Cut, "blocks", full)


def sinks_left_out(patch: Patch) -> None:
    result = Merged.result
    patch.setattr(Merged, "result", lambda self, sinks: result(self, None))


def sinks_in_every_block(patch: Patch) -> None:
    """As many times exp(score) as there are ranks."""
    result = Merged.result
    patch.setattr(Merged, "result", lambda self, sinks: result(self, sinks + math.log(CP)))


def gradients_of_sinks_left_out(patch: Patch) -> None:
    patch.setattr(Gradient, "sinks", lambda self, sinks: torch.zeros_like(sinks))


def one_document(patch: Patch) -> None:
    patched = {cls: cls.plan for cls in (Ring, AllGather)}
    for cls, plan in patched.items():

        def merged(self: Any, cut: Cut, *arguments: Any, plan: Any = plan) -> Any:
            return plan(self, Cut.of((cut.tokens,), cut.cp), *arguments)

        patch.setattr(cls, "plan", merged)


def window_left_out(patch: Patch) -> None:
    for cls in (Ring, AllGather):

        def whole(self: Any, cut: Cut, window: Any, like: Tensor, plan: Any = cls.plan) -> Any:
            return plan(self, cut, None, like)

        patch.setattr(cls, "plan", whole)


def padding_not_written(patch: Patch) -> None:
    """What fresh memory may hold."""
    zeros = torch.zeros_like

    def other(x: Tensor, **options: Any) -> Tensor:
        return zeros(x, **options).fill_(float("nan"))

    whole = Merged._whole

    def unwritten(self: Merged) -> tuple[Tensor, Tensor]:
        with Patch.context() as inner:
            inner.setattr(torch, "zeros_like", other)
            return whole(self)

    patch.setattr(Merged, "_whole", unwritten)


def rows_gathered_in_rank_order(patch: Patch) -> None:
    plan = AllGather.plan

    def unsorted(self: AllGather, *arguments: Any) -> Any:
        found = plan(self, *arguments)
        return found._replace(restore=torch.arange(len(found.restore)))

    patch.setattr(AllGather, "plan", unsorted)


def gradients_cut_and_not_summed(patch: Patch) -> None:
    def own(x: Tensor, axis: Axis) -> Any:
        return done(x.unflatten(0, (axis.size, -1))[axis.rank])

    patch.setattr(all_gather_module, "start_reduce_scatter", own)


def gradients_of_copies_of_a_head_not_summed(patch: Patch) -> None:
    def last(self: Tensor, dim: int, index: Tensor, x: Tensor) -> Tensor:
        return self.index_copy_(dim, index, x)

    patch.setattr(Tensor, "index_add_", last)


def groups_in_rank_order(patch: Patch) -> None:
    plan = AllToAll.plan

    def unsorted(self: AllToAll, *arguments: Any) -> Any:
        found = plan(self, *arguments)
        return found._replace(order=torch.arange(len(found.order)))

    patch.setattr(AllToAll, "plan", unsorted)


def sinks_of_other_heads(patch: Patch) -> None:
    """On every rank the score of the first head."""
    forward = Ring.forward
    score = inputs_of(CASE)["sinks"][0]

    def first(self: Ring, q: Tensor, k: Tensor, v: Tensor, sinks: Any, *rest: Any) -> Any:
        return forward(self, q, k, v, score.expand_as(sinks), *rest)

    patch.setattr(Ring, "forward", first)


def gradients_without_the_whole_row(patch: Patch) -> None:
    """Each block's backward by its own log-sum-exp."""
    backward = Plain.backward

    def alone(
        self: Plain, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Any
    ) -> Any:
        own, lse = self.forward(q, k, v, rest[-1])
        return backward(self, d_out, q, k, v, own, lse, rest[-1])

    patch.setattr(Plain, "backward", alone)


FAULTS: list[tuple[Comm, Case, Fault]] = [
    ("ring", CASE, last_block_skipped),
    ("ring", CASE, gradients_not_sent_home),
    ("ring", CASE, blocks_merged_as_a_mean),
    ("ring", CASE, causal_for_keys_of_a_lower_rank),
    ("ring", CASE, full_for_a_rank_s_own_keys),
    ("ring", CASE, sinks_left_out),
    ("ring", CASE, sinks_in_every_block),
    ("ring", CASE, gradients_of_sinks_left_out),
    ("ring", CASE, one_document),
    ("ring", WINDOW, window_left_out),
    ("ring", CASE, gradients_without_the_whole_row),
    ("all_gather", CASE, rows_gathered_in_rank_order),
    ("all_gather", CASE, gradients_cut_and_not_summed),
    ("all_gather", CASE, full_for_a_rank_s_own_keys),
    ("all_gather", CASE, one_document),
    ("all_gather", WINDOW, window_left_out),
    ("all_gather", dataclasses.replace(CASE, lengths=(14, 1)), padding_not_written),
    ("all_to_all", MQA, gradients_of_copies_of_a_head_not_summed),
    ("all_to_all", CASE, groups_in_rank_order),
    ("all_to_all", CASE, sinks_of_other_heads),
    ("hierarchical", CASE, groups_in_rank_order),
    ("hierarchical", CASE, last_block_skipped),
]


@pytest.mark.parametrize("comm", ["ring", "all_gather", "all_to_all", "hierarchical"])
def test_each_is_seen(comm: Comm) -> None:
    """In the output, in a gradient, or in a row of padding; and without one nothing is."""
    tried = [(case, fault) for name, case, fault in FAULTS if name == comm]
    tried += [(case, nothing) for case in (CASE, MQA, WINDOW)]

    def of_rank() -> list[Any]:
        exchange, found = exchange_of(comm, world_axis("cp")), []
        for case, fault in tried:
            with Patch.context() as patch:
                fault(patch)
                values = attend_here(case, exchange)
            found.append(packed(values))
        return found

    for (case, fault), *ranks in zip(tried, *run_ranks(of_rank, CP), strict=True):
        worst = largest(case, ranks)
        assert (worst <= 1e-11) if fault is nothing else (worst > SEEN), (
            f"{fault.__name__}: {worst}"
        )


def largest(case: Case, ranks: list[Any]) -> float:
    """The largest difference, infinite where a row of padding is not 0."""
    try:
        return max(differences(joined(case, ranks), expected(case)).values())
    except AssertionError as error:
        if "padding" not in str(error):
            raise
        return math.inf


@pytest.mark.parametrize("comm", ["ring", "all_gather", "all_to_all"])
def test_positions_are_of_the_sequence_and_not_of_the_rank(comm: Comm) -> None:
    case = Case((21, 1, 0, 14), (4, 2), sinks=False)
    x = inputs_rotated(case)
    wanted = reference.attention(x["turned"], case.lengths)

    def of_rank() -> list[Any]:
        exchange, found = exchange_of(comm, world_axis("cp")), []
        cut, rank = Cut.of(case.lengths, CP), exchange.axis.rank
        q, k, v = (local(x["plain"][n], cut, rank, 0.0) for n in ("q", "k", "v"))
        right = torch.from_numpy(cut.positions(rank))
        for positions in (right, torch.arange(cut.t_local)):
            rows = torch.from_numpy(cut.rows(rank))
            sequences = Sequences(case.lengths, positions, rows, torch.ones(len(rows)), rows >= 0)
            tables = sequences.rotary(q.shape[-1], 100.0, torch.float64)
            turned = (apply_rotary(y, *tables) for y in (q, k))
            plan = exchange.plan(cut, None, q)
            out = attend(*turned, v, exchange=exchange, plan=plan, kernel=Plain())
            found.append(packed({"out": out}))
        return found

    right, wrong = zip(*run_ranks(of_rank, CP), strict=True)
    assert differences(joined(case, right), {"out": wanted})["out"] <= 1e-11
    assert differences(joined(case, wrong), {"out": wanted})["out"] > SEEN


def inputs_rotated(case: Case) -> dict[str, Values]:
    """As they are, and turned one row and head at a time by the place in the sequence."""
    draw = torch.Generator().manual_seed(3)
    (a, g), t, d = case.heads, case.tokens, 6
    shapes = {"q": (t, a, d), "k": (t, g, d), "v": (t, g, d)}
    plain = {n: torch.randn(s, generator=draw, dtype=torch.float64) for n, s in shapes.items()}
    places = [place for length in case.lengths for place in range(length)]
    turned = dict(plain)
    for name in ("q", "k"):
        turned[name] = torch.stack(
            [
                torch.stack([rotate(head, place, 100.0) for head in row])
                for place, row in zip(places, plain[name], strict=True)
            ]
        )
    return {"plain": plain, "turned": turned}
