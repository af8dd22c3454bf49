"""Which rows of a micro-batch each context rank holds, and who attends to what (pure).

Causal attention costs a token as many pairs as there are tokens before it. So every sequence (when
packed, every document) is cut into 2·cp chunks, and rank r takes chunks r and 2·cp−1−r: a cheap
one from the front and a dear one from the back. Source: Zhu, `ring-flash-attention` ("zigzag").

A rank's rows are those of the first sequence (front chunk, back chunk), then of the second, and so
on. Both chunks being in order, one rule says all of causal attention between ranks:

| keys come from | queries | keys | mask |
|---|---|---|---|
| the rank itself | both chunks | both chunks | causal |
| a lower rank | both chunks | the front chunk | none |
| a higher rank | the back chunk | both chunks | none |

The chunks of a sequence differ by at most one row, and no sequence is padded. Which of them get the
row more follows from where the sequence lies: chunk c is as long as there are rows of the sequence
whose number in the micro-batch is ≡ c mod 2·cp. So rank r holds as many rows of the micro-batch as
there are numbers ≡ r or 2·cp−1−r: at most ⌈t/cp⌉, with fewer than cp padding rows over all ranks,
whatever the lengths. Documents of one token go to rank 0, 1, …, cp−1, cp−1, …, 0, 0, and so on.

A padding row has number −1 and is the last of its rank, behind every sequence; no block contains
it. Its token, label and position are fill values and its weight is 0. Attention must write 0 as
its output: what is not written may be NaN, and NaN times weight 0 is NaN.

Measured, busiest rank over the mean, in attention pairs: one sequence of 8191 tokens on 2, 4, 8
ranks 0.02 % here, 50, 75, 87 % where each rank takes one run of rows; documents of median length
545 packed to 8192 rows on 8 ranks 0.2 % against 116 %. Padding each document to a multiple of 2·cp
instead costs 1 % of the rows there and 1.2 % of balance, and 54 % of the rows where documents have
1 to 29 tokens. Keeping documents of less than 512 tokens whole on one rank makes half as many
blocks of the former and 45 times fewer of the latter, but ranks of unlike size: 15 % more rows for
the former. Least even are regular mixtures of tiny documents (1, 3, 1, 3, …: 14 %). With a sliding
window the work is as even as in runs: only the start of a sequence is cheaper.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penteract.layout_rules import check_inner

Ints = NDArray[np.int64]
Mask = Literal["full", "causal", "window"]


@dataclass(frozen=True)
class Block:
    """Local query rows that attend to local key rows of one sequence, each to at least one.

    "full": every query to every key. "causal": query i to keys 0..i, equally many of both.
    "window": query i to key j where 0 <= shift + i − j < window.
    """

    query: slice
    key: slice
    mask: Mask
    shift: int = 0  # position of the first query less that of the first key, in "window" blocks


@dataclass(frozen=True, eq=False)
class Cut:
    """Sequences of `lengths` rows, one behind the other, cut over `cp` ranks of `t_local` rows.

    Nothing is kept: each method computes its result anew, so ask once a micro-batch, not a layer.
    """

    lengths: tuple[int, ...]
    cp: int
    t_local: int
    chunks: Ints  # [n, 2·cp]: rows of each chunk, in the order of the sequence

    @classmethod
    def of(cls, lengths: tuple[int, ...], cp: int) -> Cut:
        """Cut n sequences; lengths of 0 and n = 0 are fine. ValueError for what is no length."""
        if cp < 1 or min(lengths, default=0) < 0:
            raise ValueError(f"cannot cut lengths {lengths} over {cp} ranks: need >= 0 and >= 1")
        chunk = np.arange(2 * cp)
        bounds = np.cumsum([0, *lengths], dtype=np.int64)
        # Numbers below each bound that are ≡ chunk mod 2·cp, [n + 1, 2·cp].
        below = (bounds[:, None] - chunk + 2 * cp - 1) // (2 * cp)
        return cls(lengths, cp, -(-int(bounds[-1]) // cp), np.diff(below, axis=0))

    @property
    def tokens(self) -> int:
        """Rows of all sequences, t."""
        return sum(self.lengths)

    def merged(self, inner: int) -> Cut:
        """The cut over cp/inner groups of `inner` neighbouring ranks, each as one rank.

        Neighbours hold neighbouring chunks, so it is a cut of the same kind. `order` brings the
        rows of a group into its order. UserError where `inner` does not divide cp.
        """
        check_inner(inner, cp=self.cp)
        chunks = self.chunks.reshape(-1, 2 * self.cp // inner, inner).sum(-1)
        return Cut(self.lengths, self.cp // inner, self.t_local * inner, chunks)

    def rank_lengths(self, rank: int) -> Ints:
        """Local rows of each sequence, [n]; those of padding come after."""
        return self._pair(rank, self.chunks).sum(1)

    def rows(self, rank: int) -> Ints:
        """Numbers of this rank's rows in the micro-batch, [t_local]; −1 for padding."""
        starts = np.cumsum([0, *self.lengths], dtype=np.int64)[:-1]
        return self._spread(starts[:, None] + self._starts(rank), rank, fill=-1)

    def positions(self, rank: int) -> Ints:
        """Places of this rank's rows in their sequences, [t_local]; 0 for padding."""
        return self._spread(self._starts(rank), rank, fill=0)

    def take(self, array: NDArray[Any], rank: int, *, fill: float) -> NDArray[Any]:
        """This rank's rows [t_local, ...] of an array [t, ...], `fill` in those of padding.

        The one way to cut tokens, labels and weights, so that they are cut alike.
        """
        if len(array) != self.tokens:
            raise ValueError(f"an array of {len(array)} rows is not of the {self.tokens} tokens")
        rows = self.rows(rank)
        taken = np.full((self.t_local, *array.shape[1:]), fill, array.dtype)
        taken[rows >= 0] = array[rows[rows >= 0]]
        return taken

    def order(self, ranks: range) -> Ints:
        """Index that sorts the rows of `ranks`, one rank behind the other, padding last.

        `y = x[order]` brings them into the micro-batch's order, `x[order] = y` back.
        """
        rows = np.concatenate([self.rows(rank) for rank in ranks])
        return np.argsort(np.where(rows < 0, self.tokens, rows), kind="stable")

    def restore(self) -> Ints:
        """Index [t] of the micro-batch's rows in those of all ranks, one behind the other."""
        return self.order(range(self.cp))[: self.tokens]

    def blocks(self, query_rank: int, key_rank: int, *, window: int | None = None) -> list[Block]:
        """What queries of one rank attend to on another, in the order of the sequences.

        With a `window` a token attends to itself and the window − 1 tokens before it, and a
        sequence longer than that has a block for each pair of chunks. What is wholly masked or
        empty is left out.
        """
        if window is not None and window < 1:
            raise ValueError(f"a window of {window} tokens lets no token attend: need at least 1")
        found: list[Block] = []
        pairs = zip(self.lengths, self._chunks(query_rank), self._chunks(key_rank), strict=True)
        for length, queries, keys in pairs:
            if window is not None and window < length:
                for q, k in product(queries, keys):
                    found += _windowed(q, k, window)
            elif query_rank == key_rank:
                found += _block(_join(*queries), _join(*keys), "causal")
            elif key_rank < query_rank:
                found += _block(_join(*queries), keys[0], "full")
            else:
                found += _block(queries[1], _join(*keys), "full")
        return found

    def outside(self, rank: int, *, window: int | None = None) -> list[Block]:
        """What this rank's queries attend to besides `blocks(rank, rank)`; keys are rows of the
        micro-batch.
        """
        found: list[Block] = []
        starts = np.cumsum([0, *self.lengths]).tolist()
        for start, length, (front, back) in zip(
            starts, self.lengths, self._chunks(rank), strict=False
        ):
            middle = front.position + front.size
            before = _Chunk(start, front.position, 0)
            between = _Chunk(start + middle, back.position - middle, middle)
            if window is not None and window < length:
                for q, k in ((front, before), (back, before), (back, between)):
                    found += _windowed(q, k, window)
            else:
                found += _block(_join(front, back), before, "full")
                found += _block(back, between, "full")
        return found

    def _pair(self, rank: int, table: Ints) -> Ints:
        """The columns of this rank's two chunks, [n, 2], of a table [n, 2·cp]."""
        assert 0 <= rank < self.cp, (rank, self.cp)
        return table[:, [rank, 2 * self.cp - 1 - rank]]

    def _starts(self, rank: int) -> Ints:
        """Places in their sequences of the first rows of this rank's chunks, [n, 2]."""
        return self._pair(rank, np.cumsum(self.chunks, axis=1) - self.chunks)

    def _spread(self, firsts: Ints, rank: int, *, fill: int) -> Ints:
        """The numbers upwards from each of `firsts` [n, 2], one for each row, [t_local]."""
        sizes = self._pair(rank, self.chunks).reshape(-1)
        filled = np.full(self.t_local, fill, np.int64)
        held = int(sizes.sum())
        filled[:held] = np.arange(held) + np.repeat(
            firsts.reshape(-1) - np.cumsum(sizes) + sizes, sizes
        )
        return filled

    def _chunks(self, rank: int) -> Iterator[tuple[_Chunk, _Chunk]]:
        """This rank's front and back chunk of each sequence."""
        sizes = self._pair(rank, self.chunks)
        starts = (np.cumsum(sizes) - sizes.reshape(-1)).reshape(-1, 2)
        table = np.stack([starts, sizes, self._starts(rank)], axis=-1)  # [n, 2, 3]
        for front, back in table.tolist():
            yield _Chunk(*front), _Chunk(*back)


class _Chunk(NamedTuple):
    start: int  # first local row
    size: int
    position: int  # of the first row, in its sequence


def _join(front: _Chunk, back: _Chunk) -> _Chunk:
    return _Chunk(front.start, front.size + back.size, front.position)


def _block(q: _Chunk, k: _Chunk, mask: Mask, shift: int = 0) -> Iterator[Block]:
    """One block, or none where a side is empty."""
    if q.size > 0 and k.size > 0:
        query, key = (slice(x.start, x.start + x.size) for x in (q, k))
        yield Block(query, key, mask, shift)


def _windowed(q: _Chunk, k: _Chunk, window: int) -> Iterator[Block]:
    """The block of two chunks, without the queries and keys at its ends that see nothing."""
    if q.position < k.position:
        return iter(())
    if q.position == k.position:
        return _block(q, k, "causal" if q.size <= window else "window")
    skipped = max(0, q.position - k.position - window + 1)
    k = _Chunk(k.start + skipped, k.size - skipped, k.position + skipped)
    shift = q.position - k.position
    q = q._replace(size=min(q.size, window + k.size - 1 - shift))
    return _block(q, k, "full" if shift + q.size <= window else "window", shift)
