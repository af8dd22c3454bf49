"""Where conversations lie in rows, and which rows of a step run together (pure).

Both are functions of lengths alone, never of how many ranks there are.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from penteract.data.indexed import Ints


def best_fit(sizes: Ints, room: int) -> Ints:
    """The row [n] of each item when rows hold `room`, by best-fit decreasing.

    Items go by falling size, those of one size in their order, each into the row with the least
    room that is enough for it. Rows are numbered by the item each began with, so that a row's
    number says nothing of what is in it. Needs 1 <= sizes <= room. O(n log n), and Johnson et al.,
    SIAM J. Comput. 3 (1974): at most 11/9 of the fewest rows, and 4.
    """
    assert len(sizes) == 0 or 1 <= sizes.min() <= sizes.max() <= room, (sizes, room)
    rows: Ints = np.empty(len(sizes), np.int64)
    began: list[int] = []  # the item with which each row began
    with_room: dict[int, list[int]] = {}
    rooms = 0  # bit r is set where a row has room r: the least that is enough is one bit operation
    for item, size in zip(
        np.argsort(-sizes, kind="stable").tolist(), -np.sort(-sizes), strict=True
    ):
        size = int(size)
        enough = rooms >> size
        if enough:
            left = (enough & -enough).bit_length() - 1
            row = with_room[size + left].pop()
            if not with_room[size + left]:
                rooms ^= 1 << (size + left)
        else:
            left, row = room - size, len(began)
            began.append(item)
        if left:
            with_room.setdefault(left, []).append(row)
            rooms |= 1 << left
        rows[item] = row
    number = np.empty(len(began), np.int64)
    number[np.argsort(began)] = np.arange(len(began))
    return number[rows]


def costs(lengths: Sequence[int], seq: int) -> Ints:
    """Σ length² of each row [n]: what its attention costs. `lengths` are those of rows of `seq`."""
    sizes = np.asarray(lengths, np.int64)
    out: Ints = np.zeros(int(sizes.sum()) // seq, np.int64)
    np.add.at(out, (np.cumsum(sizes) - 1) // seq, sizes * sizes)
    return out


def balanced(costs: Ints, micro_batch: int) -> Ints:
    """The order [n] of a step's samples in which micro-batches of `micro_batch` cost alike.

    Samples go by falling cost, each to the micro-batch with room that costs least (LPT, Graham,
    SIAM J. Appl. Math. 17 (1969)); where the largest is not below that of the plain order, that is
    kept. Micro-batches then go by falling cost, so that those at the same time on data ranks are
    alike; one that is not full stays last.
    """
    n, whole = len(costs), len(costs) // micro_batch * micro_batch
    plain: Ints = np.arange(n)
    best = min((plain, _spread(costs, micro_batch)), key=lambda x: _largest(costs[x], micro_batch))
    groups = best[:whole].reshape(-1, micro_batch)
    by_cost = np.argsort(-costs[groups].sum(1), kind="stable")
    return np.concatenate([groups[by_cost].ravel(), best[whole:]])


def _spread(costs: Ints, micro_batch: int) -> Ints:
    n = len(costs)
    groups: list[list[int]] = [[] for _ in range(0, n, micro_batch)]
    rooms = [min(micro_batch, n - start) for start in range(0, n, micro_batch)]
    open_groups = [(0, i) for i in range(len(groups))]  # (cost, group)
    for sample in np.argsort(-costs, kind="stable").tolist():
        cost, i = heapq.heappop(open_groups)
        groups[i].append(sample)
        if len(groups[i]) < rooms[i]:
            heapq.heappush(open_groups, (cost + int(costs[sample]), i))
    return np.array([sample for group in groups for sample in sorted(group)], np.int64)


def _largest(costs: Ints, micro_batch: int) -> int:
    """The cost of the dearest micro-batch."""
    return max(
        (int(costs[i : i + micro_batch].sum()) for i in range(0, len(costs), micro_batch)),
        default=0,
    )
