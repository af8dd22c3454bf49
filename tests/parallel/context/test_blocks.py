"""Blocks in groups are the blocks of the cut, and merge to attention in any order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from parallel.context.attention_case import (
    Case,
    differences,
    expected,
    inputs_of,
    local,
    work,
)
from torch import Tensor

from penteract.parallel.context.blocks import Blocks, Gradient, Group, Merged, Runs
from penteract.parallel.context.cut import Block, Cut
from penteract.parallel.context.kernels import Gradients, Mask, Plain
from penteract.parallel.context.segments import Segments

PACKED = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 60)), max_size=9).map(tuple)
WINDOWS = st.one_of(st.none(), st.integers(1, 30))
CPU = torch.device("cpu")
bounded = settings(deadline=None, derandomize=True, max_examples=80)


def seen(mask: Mask, rows: int, columns: int) -> NDArray[np.bool_]:
    allowed = mask.allowed(rows, columns, CPU)
    return np.ones((rows, columns), bool) if allowed is None else allowed.numpy()


def places(runs: Runs) -> NDArray[np.int64]:
    """[n, size] rows."""
    start = runs.start + runs.step * np.arange(runs.n)
    return start[:, None] + np.arange(runs.size)


def pairs_of(group: Group | Segments) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """The query rows and the key rows of each block of a group."""
    if isinstance(group, Group):
        return list(zip(places(group.query), places(group.key), strict=True))
    both = (
        np.split(rows.index.numpy(), np.cumsum(rows.sizes)[:-1])
        for rows in (group.query, group.key)
    )
    return list(zip(*both, strict=True))


def drawn(groups: Sequence[Group | Segments], rows: int, columns: int) -> NDArray[np.int64]:
    """How often groups hold each (query, key)."""
    times = np.zeros((rows, columns), np.int64)
    for group in groups:
        queries, keys = zip(*pairs_of(group), strict=True)
        assert len(np.unique(np.concatenate(queries))) == sum(map(len, queries)), "a query twice"
        if isinstance(group, Group):  # segments add to their keys one by one
            assert len(np.unique(np.concatenate(keys))) == sum(map(len, keys)), "a key twice"
        for query, key in zip(queries, keys, strict=True):
            times[np.ix_(query, key)] += seen(group.mask, len(query), len(key))
    return times


def one_by_one(blocks: list[Block], rows: int, columns: int, window: int) -> NDArray[np.int64]:
    times = np.zeros((rows, columns), np.int64)
    for block in blocks:
        i, j = np.ogrid[block.query, block.key]
        distance = block.shift + (i - block.query.start) - (j - block.key.start)
        upper = {"full": True, "causal": i - block.query.start >= j - block.key.start}
        band = (distance >= 0) & (distance < window)
        times[block.query, block.key] += upper.get(block.mask, band)
    return times


@bounded
@given(PACKED, st.integers(1, 5), WINDOWS)
def test_groups_hold_what_their_blocks_hold(
    lengths: tuple[int, ...], cp: int, window: int | None
) -> None:
    cut = Cut.of(lengths, cp)
    for rank, other in product(range(cp), range(-1, cp)):
        if other < 0:
            blocks, columns = cut.outside(rank, window=window), cut.tokens
        else:
            blocks, columns = cut.blocks(rank, other, window=window), cut.t_local
        wanted = one_by_one(blocks, cut.t_local, columns, window or 0)
        for segments in (None, CPU):
            grouped = Blocks.of(blocks, cut.t_local, window, segments=segments)
            assert (drawn(grouped.groups, cut.t_local, columns) == wanted).all()
            assert len(grouped.groups) <= len(blocks)
            if grouped.is_whole:
                rows = np.concatenate([query for query, _ in pairs_of(grouped.groups[0])])
                assert rows.tolist() == list(range(cut.t_local))


@pytest.mark.parametrize("samples", [1, 2, 5])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_equal_samples_are_one_call(samples: int, cp: int) -> None:
    cut = Cut.of((24,) * samples, cp)
    for rank, other in product(range(cp), repeat=2):
        grouped = Blocks.of(cut.blocks(rank, other), cut.t_local)
        assert [len(pairs_of(group)) for group in grouped.groups] == [samples]
        assert isinstance(grouped.groups[0], Group), "as views, not copies"
        assert grouped.is_whole == (other <= rank)
    for rank in range(cp):  # keys of a sample before its two chunks, and between them
        groups = Blocks.of(cut.outside(rank), cut.t_local).groups
        assert len(groups) == (rank > 0) + (rank < cp - 1)


def test_runs_are_views_of_rows_that_lie_anyhow() -> None:
    for x in (torch.arange(240.0).view(20, 3, 4), torch.arange(720.0).view(20, 9, 4)[:, 2:8:2]):
        runs = Runs(3, 2, 4, 5)
        wanted = torch.stack([x[start : start + 4] for start in (2, 7, 12)]).transpose(1, 2)
        assert torch.equal(runs.of(x), wanted)
        assert torch.equal(runs.of(x[..., 0]), wanted[..., 0])
        assert runs.of(x).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert Runs(2, 0, 5, 5).are_all(10)
    assert not Runs(2, 0, 5, 5).are_all(11)
    assert not Runs(2, 0, 4, 5).are_all(8)
    assert Runs(1, 0, 7, 99).of(torch.ones(7, 1, 1)).shape == (1, 1, 7, 1)


class Counting(Plain):
    """The plain kernel, which notes what it was called for."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards: list[int] = []
        self.backwards: list[int] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        self.forwards.append(self._pairs(q, k, mask))
        return super().forward(q, k, v, mask)

    def backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask
    ) -> Gradients:
        self.backwards.append(self._pairs(q, k, mask))
        return super().backward(d_out, q, k, v, out, lse, mask)

    def _pairs(self, q: Tensor, k: Tensor, mask: Mask) -> int:
        """Queries times keys, masked or not."""
        assert min(q.numel(), k.numel()) > 0, "a call for nothing"
        one = seen(mask, q.shape[2], k.shape[2])
        assert one.any(1).all(), "a query sees nothing in a block"
        assert one.any(0).all(), "nothing sees a key of a block"
        return len(q) * one.size


def parts_of(
    case: Case, comm: str, cp: int, rank: int, *, segments: torch.device | None = None
) -> Iterator[tuple[int | None, Blocks]]:
    """Whose keys, or all, and the blocks of them, as a ring or a gather comes upon them."""
    cut, window = Cut.of(case.lengths, cp), case.window
    for owner in range(cp) if comm == "ring" else [rank]:
        found = cut.blocks(rank, owner, window=window)
        yield owner, Blocks.of(found, cut.t_local, window, segments=segments)
    if comm == "all_gather":
        found = cut.outside(rank, window=window)
        yield None, Blocks.of(found, cut.t_local, window, segments=segments)


def computed(
    case: Case, comm: str, cp: int, draw: Random, *, segments: torch.device | None = None
) -> list[Counting]:
    """Attention of all ranks in one process, block after block in any order, held against the
    reference. Returns each rank's kernel.
    """
    cut, x = Cut.of(case.lengths, cp), inputs_of(case)
    sinks, kernels = x.get("sinks"), []
    total = {f"d{n}": torch.zeros_like(x[n]) for n in ("q", "k", "v")}
    total["out"] = torch.zeros_like(x["q"])
    if sinks is not None:
        total["dsinks"] = torch.zeros_like(sinks)
    rows = [torch.from_numpy(cut.rows(rank)) for rank in range(cp)]
    for rank in range(cp):
        kernel, mine, real = Counting(), rows[rank], rows[rank] >= 0
        q, d_out = (local(x[n], cut, rank, 0.0) for n in ("q", "d_out"))
        kv = {r: [local(x[n], cut, r, float("nan")) for n in ("k", "v")] for r in range(cp)}
        parts = list(parts_of(case, comm, cp, rank, segments=segments))
        draw.shuffle(parts)
        merged = Merged(q, kernel)
        for owner, blocks in parts:
            merged.add(*((x["k"], x["v"]) if owner is None else kv[owner]), blocks)
        out, lse = merged.result(sinks)
        assert (out[~real] == 0).all()
        total["out"][mine[real]] = out[real]
        gradient = Gradient(d_out, q, out, lse, kernel)
        draw.shuffle(parts)
        for owner, blocks in parts:
            keys, values = (x["k"], x["v"]) if owner is None else kv[owner]
            found = gradient.add(keys, values, blocks, torch.zeros((2, *keys.shape)).double())
            to = torch.arange(cut.tokens) if owner is None else rows[owner]
            total["dk"].index_add_(0, to[to >= 0], found[0][to >= 0])
            total["dv"].index_add_(0, to[to >= 0], found[1][to >= 0])
        total["dq"][mine[real]] = gradient.dq[real]
        if sinks is not None:
            total["dsinks"] += gradient.sinks(sinks)
        kernels.append(kernel)
    worst = differences(total, expected(case))
    assert max(worst.values(), default=0.0) < 1e-11, worst
    return kernels


@pytest.mark.parametrize("comm", ["ring", "all_gather"])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_blocks_in_any_order_are_attention(cp: int, comm: str) -> None:
    draw = Random(cp)
    for window, sinks, lengths in product((None, 1, 4), (False, True), ((5, 1, 0, 11), (9,), ())):
        case = Case(lengths, (4, 2), window, sinks)
        for segments in (None, CPU):
            kernels = computed(case, comm, cp, draw, segments=segments)
            assert all(sorted(x.forwards) == sorted(x.backwards) for x in kernels)


@pytest.mark.parametrize("comm", ["ring", "all_gather"])
@pytest.mark.parametrize("cp", [2, 4])
def test_what_is_computed_is_half_of_all_pairs_and_even(cp: int, comm: str) -> None:
    """Of the causal blocks of a rank's own rows half is masked, 1/2n of all pairs."""
    case = Case((48,), (1, 1), sinks=False)
    pairs = [sum(kernel.forwards) for kernel in computed(case, comm, cp, Random(0))]
    assert set(pairs) == {48**2 * (cp + 1) // (2 * cp**2)}


def sizes(parts: Iterable[tuple[int | None, Blocks]]) -> list[int]:
    """Queries times keys of each call."""
    groups = (group for _, blocks in parts for group in blocks.groups)
    return [sum(len(q) * len(k) for q, k in pairs_of(group)) for group in groups]


@pytest.mark.parametrize("comm", ["ring", "all_gather"])
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_work_of_a_long_sequence_is_even_in_what_is_computed(cp: int, comm: str) -> None:
    """By the sizes of the calls, for a length that does not divide; and no more than is needed."""
    cut, sums = Cut.of((4001,), cp), []
    for rank in range(cp):
        sums.append(sum(sizes(parts_of(Case((4001,)), comm, cp, rank))))
        assert sums[-1] - work(cut, rank) <= cut.t_local**2 / 2, "more than its own is masked"
    assert max(sums) / (sum(sums) / cp) < 1.03
    assert sum(sums) < 4001**2 * (0.5 + 0.5 / cp) * 1.01


@pytest.mark.parametrize("window", [16, 100])
def test_blocks_that_a_window_masks_are_not_called_for(window: int) -> None:
    """Each of a rank's two chunks sees itself and the end of what is before it."""
    case = Case((1600,), window=window)
    for cp, comm in product((1, 4), ("ring", "all_gather")):
        chunk = Cut.of(case.lengths, cp).t_local // 2
        for rank in range(cp):
            calls = sizes(parts_of(case, comm, cp, rank))
            assert len(calls) <= 4
            own = (2 * chunk) ** 2 if cp == 1 else 2 * chunk**2
            assert sum(calls) <= own + 2 * window**2, (cp, rank)


def test_scores_that_are_far_apart_do_not_overflow() -> None:
    """Blocks whose log-sum-exps differ by thousands, with sinks between them."""
    q = torch.ones(1, 1, 4, dtype=torch.float64)
    k = torch.tensor([-3000.0, 0.0, 3000.0], dtype=torch.float64)[:, None, None].expand(3, 1, 4)
    v = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)[:, None, None].expand(3, 1, 4)
    blocks = [Blocks.of([Block(slice(0, 1), slice(i, i + 1), "full")], 1) for i in range(3)]
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        for sink, share in ((None, 1.0), (6000.0, 0.5), (9000.0, 0.0), (-9000.0, 1.0)):
            merged = Merged(q, Plain())
            for i in order:
                merged.add(k, v, blocks[i])
            sinks = None if sink is None else torch.tensor([sink], dtype=torch.float64)
            out, lse = merged.result(sinks)
            torch.testing.assert_close(out, torch.full_like(q, 3 * share))
            assert torch.isfinite(lse).all()


def test_rows_that_nothing_reaches_are_zero() -> None:
    q = torch.full((5, 2, 4), float("nan"), dtype=torch.float64)
    for sinks in (None, torch.tensor([5.0, -5.0], dtype=torch.float64)):
        out, lse = Merged(q, Plain()).result(sinks)
        assert torch.equal(out, torch.zeros_like(q))
        wanted = torch.full((5, 2), float("-inf")) if sinks is None else sinks.expand(5, 2)
        assert torch.equal(lse, wanted.double())
        gradient = Gradient(torch.ones_like(q), q, out, lse, Plain())
        if sinks is not None:
            assert torch.equal(gradient.sinks(sinks), torch.zeros(2, dtype=torch.float64))
