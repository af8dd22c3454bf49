"""Every row on one rank, every pair of causal attention in one block, even work, little padding."""

from __future__ import annotations

from itertools import product
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from parallel.context.attention_case import work

from penteract.errors import UserError
from penteract.nn.sequences import Sequences
from penteract.parallel.context.cut import Block, Cut

SMALL = [lengths for n in range(4) for lengths in product((0, 1, 2, 3, 5, 8, 13), repeat=n)]
PACKED = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 200)), max_size=12).map(tuple)
RANKS = st.integers(1, 8)
bounded = settings(deadline=None, derandomize=True, max_examples=80)


def places(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    """(sequence, place in it) of every row of the micro-batch."""
    return [(i, place) for i, length in enumerate(lengths) for place in range(length)]


def padding(cut: Cut) -> int:
    """Rows of all ranks that hold no token."""
    return cut.cp * cut.t_local - cut.tokens


def causal(lengths: tuple[int, ...], window: int | None = None) -> NDArray[np.int64]:
    """1 where the row's token attends to the column's, from the definition."""
    where = np.array(places(lengths)).reshape(-1, 2)
    same = where[:, None, 0] == where[None, :, 0]
    back = where[:, None, 1] - where[None, :, 1]
    seen: NDArray[np.bool_] = same & (back >= 0) & (back < (window or 10**9))
    return seen.astype(np.int64)


def block_mask(block: Block, window: int | None) -> NDArray[np.bool_]:
    i, j = np.ogrid[: block.query.stop - block.query.start, : block.key.stop - block.key.start]
    if block.mask == "full":
        return (i >= 0) & (j >= 0)
    if block.mask == "causal":
        assert i.shape[0] == j.shape[1]
        return i >= j
    return (block.shift + i - j >= 0) & (block.shift + i - j < window)


def drawn(cut: Cut, window: int | None = None) -> NDArray[np.int64]:
    """How often the blocks of all pairs of ranks hold each (query, key), [t, t]."""
    times = np.zeros((cut.tokens, cut.tokens), np.int64)
    for query_rank, key_rank in product(range(cut.cp), repeat=2):
        query_rows, key_rows = cut.rows(query_rank), cut.rows(key_rank)
        for block in cut.blocks(query_rank, key_rank, window=window):
            mask = block_mask(block, window)
            rows, columns = query_rows[block.query], key_rows[block.key]
            assert mask.shape == (len(rows), len(columns))
            assert min(rows.min(), columns.min()) >= 0, "a padding row is in a block"
            assert mask.any(1).all(), "a query attends to nothing"
            assert mask.any(0).all(), "nothing attends to a key"
            times[np.ix_(rows, columns)] += mask
    return times


def check_rows(cut: Cut) -> None:
    where = places(cut.lengths)
    rows = [cut.rows(rank) for rank in range(cut.cp)]
    assert {x.shape for x in rows} == {(cut.t_local,)}
    assert {x.dtype for x in rows} == {np.dtype(np.int64)}
    held = np.concatenate(rows)
    assert sorted(held[held >= 0].tolist()) == list(range(cut.tokens))
    assert (held < 0).sum() == padding(cut) < cut.cp
    for rank, mine in enumerate(rows):
        real = int((mine >= 0).sum())
        assert (mine[:real] >= 0).all(), "padding is last"
        assert (np.diff(mine[:real]) > 0).all(), "rows are in the order of the micro-batch"
        counts = np.bincount([where[x][0] for x in mine[:real]], minlength=len(cut.lengths))
        assert cut.rank_lengths(rank).tolist() == counts.tolist()
        expected = [where[x][1] for x in mine[:real]] + [0] * (cut.t_local - real)
        assert cut.positions(rank).tolist() == expected
    assert held[cut.restore()].tolist() == list(range(cut.tokens))
    assert cut.chunks.sum(1).tolist() == list(cut.lengths)
    if cut.lengths:
        assert int((cut.chunks.max(1) - cut.chunks.min(1)).max()) <= 1


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_every_row_is_on_one_rank_at_its_position(cp: int) -> None:
    for lengths in SMALL:
        check_rows(Cut.of(lengths, cp))


@bounded
@given(PACKED, RANKS)
def test_every_row_of_any_lengths_is_on_one_rank(lengths: tuple[int, ...], cp: int) -> None:
    check_rows(Cut.of(lengths, cp))


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_the_blocks_are_the_causal_mask(cp: int) -> None:
    for lengths in SMALL[::3]:
        assert (drawn(Cut.of(lengths, cp)) == causal(lengths)).all(), lengths


@pytest.mark.parametrize("cp", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 3, 7, 40])
def test_the_blocks_of_a_window_are_its_mask(cp: int, window: int) -> None:
    for lengths in [*SMALL[::11], (29,), (31, 1, 17)]:
        found = drawn(Cut.of(lengths, cp), window)
        assert (found == causal(lengths, window)).all(), lengths


@bounded
@given(PACKED, RANKS, st.one_of(st.none(), st.integers(1, 60)))
def test_the_blocks_and_the_work_of_any_lengths(
    lengths: tuple[int, ...], cp: int, window: int | None
) -> None:
    cut, expected = Cut.of(lengths, cp), causal(lengths, window)
    assert (drawn(cut, window) == expected).all()
    for rank in range(cp):
        mine = cut.rows(rank)
        assert work(cut, rank, window=window) == expected[mine[mine >= 0]].sum()


@pytest.mark.parametrize("lengths", [(16,), (48, 48), (16, 32, 64)])
def test_lengths_that_divide_are_cut_into_equal_chunks_from_both_ends(
    lengths: tuple[int, ...],
) -> None:
    cut = Cut.of(lengths, 4)
    assert padding(cut) == 0
    for rank in range(4):
        expected: list[int] = []
        for start, length in zip(np.cumsum((0, *lengths)).tolist(), lengths, strict=False):
            s = length // 8
            front, back = start + rank * s, start + (7 - rank) * s
            expected += [*range(front, front + s), *range(back, back + s)]
        assert cut.rows(rank).tolist() == expected
        assert len(cut.blocks(rank, rank)) == len(lengths), "one block a sequence"


@pytest.mark.parametrize("lengths", [(), (0,), (1,), (7,), (5, 0, 1, 6)])
def test_one_rank_is_the_identity(lengths: tuple[int, ...]) -> None:
    cut = Cut.of(lengths, 1)
    assert padding(cut) == 0
    assert cut.rows(0).tolist() == cut.restore().tolist() == list(range(sum(lengths)))
    assert cut.rank_lengths(0).tolist() == list(lengths)
    found = cut.blocks(0, 0)
    assert [b.query.stop - b.query.start for b in found] == [x for x in lengths if x]
    assert all(b.mask == "causal" and b.query == b.key for b in found)


def test_documents_of_one_token_go_up_and_down_the_ranks() -> None:
    cut = Cut.of((1,) * 10, 4)
    assert [cut.rows(rank).tolist() for rank in range(4)] == [
        [0, 7, 8], [1, 6, 9], [2, 5, -1], [3, 4, -1],
    ]  # fmt: skip
    assert not cut.blocks(0, 1)
    assert len(cut.blocks(0, 0)) == 3


def over(work: list[int]) -> float:
    """How far the busiest rank is above the mean."""
    return max(work) / (sum(work) / len(work)) - 1


@pytest.mark.parametrize("cp", [2, 3, 4, 8])
@pytest.mark.parametrize("length", [2999, 8192, 8191])
def test_work_is_even_and_would_not_be_in_one_run_a_rank(length: int, cp: int) -> None:
    cut = Cut.of((length,), cp)
    seen = np.arange(1, length + 1)
    assert over([work(cut, rank) for rank in range(cp)]) < 0.003
    assert over([int(x.sum()) for x in np.array_split(seen, cp)]) > 0.49
    # A window's work is even but for the start, which is on one rank in any cut of few chunks.
    runs = [int(x.clip(max=512).sum()) for x in np.array_split(seen, cp)]
    assert over([work(cut, rank, window=512) for rank in range(cp)]) < over(runs) + 0.001


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("median", [10, 150, 500])
def test_work_of_packed_documents_is_even_and_padding_is_less_than_a_row_a_rank(
    median: int, cp: int
) -> None:
    draw = np.random.default_rng(7).lognormal(np.log(median), 1.0, 400)
    lengths = tuple(draw.astype(int).clip(1).tolist())
    cut = Cut.of(lengths, cp)
    assert padding(cut) < cp
    assert over([work(cut, rank) for rank in range(cp)]) < 0.03


@bounded
@given(st.integers(0, 500), RANKS, st.randoms())
def test_the_size_of_a_rank_depends_on_the_tokens_alone(
    total: int, cp: int, random: Random
) -> None:
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(random.randint(1, total - sum(lengths)))
    # One rule for padding, here: the size of messages is that of the packed row, document or not.
    assert Cut.of(tuple(lengths), cp).t_local == -(-total // cp) == Cut.of((total,), cp).t_local


def test_tokens_labels_and_weights_are_cut_alike() -> None:
    lengths = (11, 1, 6)
    tokens = np.arange(100, 118)
    weights = np.ones(18)
    weights[[10, 11, 17]] = 0  # the token that ends a document does not predict the next one's
    cut = Cut.of(lengths, 4)
    total = 0.0
    for rank in range(4):
        mine = cut.rows(rank) >= 0
        x, y = (cut.take(a, rank, fill=-100) for a in (tokens, tokens + 1))
        w = cut.take(weights, rank, fill=0)
        assert x.dtype == np.int64
        assert (y - x)[mine].tolist() == [1] * int(mine.sum())
        assert (x[~mine] == -100).all()
        assert not w[~mine].any()
        assert (w[mine] == 0).tolist() == np.isin(x[mine], [110, 111, 117]).tolist()
        total += float(w.sum())
    assert total == weights.sum()
    with pytest.raises(ValueError, match="17 rows is not of the 18 tokens"):
        cut.take(tokens[1:], 0, fill=0)


@pytest.mark.parametrize("token", [0, 1234, 2998])
def test_one_token_that_counts_is_counted_on_one_rank(token: int) -> None:
    cut = Cut.of((2999,), 4)
    assert (cut.t_local, padding(cut)) == (750, 1)
    weights = np.zeros(2999)
    weights[token] = 1
    found = [cut.take(weights, rank, fill=0).sum() for rank in range(4)]
    assert sorted(found) == [0, 0, 0, 1]


def test_rotary_tables_of_a_rank_are_rows_of_the_whole_table() -> None:
    lengths = (4001, 1, 37)
    cut = Cut.of(lengths, 3)
    whole = Sequences.of(lengths).rotary(8, 1e4, torch.float64)
    for rank in range(3):
        rows = torch.from_numpy(cut.rows(rank))
        positions = torch.from_numpy(cut.positions(rank))
        own = Sequences(cut, positions, rows, torch.ones(len(rows)), rows >= 0)
        for table, part in zip(whole, own.rotary(8, 1e4, torch.float64), strict=True):
            assert torch.equal(table[rows[rows >= 0]], part[rows >= 0])


@pytest.mark.parametrize(("cp", "inner"), [(4, 2), (6, 2), (6, 3), (4, 4), (3, 1), (8, 2)])
@pytest.mark.parametrize("lengths", [(64,), (29, 1, 1, 0, 17, 40), (3, 2), ()])
def test_groups_of_neighbours_are_ranks_of_a_smaller_cut(
    lengths: tuple[int, ...], cp: int, inner: int
) -> None:
    cut = Cut.of(lengths, cp)
    merged = cut.merged(inner)
    assert (merged.cp, merged.t_local) == (cp // inner, inner * cut.t_local)
    for group in range(merged.cp):
        ranks = range(group * inner, (group + 1) * inner)
        rows = np.concatenate([cut.rows(rank) for rank in ranks])
        order = cut.order(ranks)
        assert rows[order].tolist() == merged.rows(group).tolist()
        back = np.empty_like(rows)
        back[order] = merged.rows(group)
        assert back.tolist() == rows.tolist()
    assert (drawn(merged) == causal(lengths)).all()


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_blocks_merged_by_log_sum_exp_are_attention(cp: int, window: int | None) -> None:
    lengths = (23, 1, 2, 9)
    cut, draw = Cut.of(lengths, cp), np.random.default_rng(1)
    q, k, v = draw.normal(size=(3, 35, 4))
    scores = np.where(causal(lengths, window) > 0, np.exp(q @ k.T), 0)
    expected = scores @ v / scores.sum(1, keepdims=True)
    outputs = []
    for rank in range(cp):
        top, sums = np.zeros((cut.t_local, 4)), np.zeros((cut.t_local, 1))
        own_q = cut.take(q, rank, fill=np.nan)
        for other in range(cp):
            own_k, own_v = (cut.take(x, other, fill=np.nan) for x in (k, v))
            for block in cut.blocks(rank, other, window=window):
                mask = block_mask(block, window)
                part = np.where(mask, np.exp(own_q[block.query] @ own_k[block.key].T), 0)
                top[block.query] += part @ own_v[block.key]
                sums[block.query] += part.sum(1, keepdims=True)
        outputs.append(top / np.where(sums > 0, sums, 1))
    found = np.concatenate(outputs)
    np.testing.assert_allclose(found[cut.restore()], expected, rtol=1e-12)
    assert np.isfinite(found).all(), "padding reached a row, or was left unwritten"


def test_what_cannot_be_cut_is_refused_with_its_numbers() -> None:
    with pytest.raises(ValueError, match="over 0 ranks"):
        Cut.of((4,), 0)
    with pytest.raises(ValueError, match=r"\(4, -1\)"):
        Cut.of((4, -1), 2)
    with pytest.raises(
        UserError, match=r"cp_inner = 4 does not divide cp = 6; .* 1 or 2 or 3 or 6"
    ):
        Cut.of((4,), 6).merged(4)
    with pytest.raises(ValueError, match="window of 0"):
        Cut.of((4,), 2).blocks(0, 0, window=0)
