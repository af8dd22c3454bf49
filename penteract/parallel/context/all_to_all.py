"""Context parallelism by heads: each rank attends to all rows with some of the heads.

An all-to-all turns all heads of some rows into some heads of all rows, and another turns the output
back. Key/value heads go to every rank that has a query head of theirs; what these send back of
their gradients is summed. The heads are exchanged in two halves, so that one travels while
attention on the other runs; with a single key/value head on a rank there is one half, and nothing
runs beside it. What backward needs is kept as it was exchanged, as many elements as before.

Over groups of ranks this is hierarchical: heads are exchanged inside a group, and the rows of a
group, which are a cut of the same kind (`Cut.merged`), go around a ring of groups. What is sent and
held stands in `exchange`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penteract.collectives import Pending, start_all_to_all
from penteract.mesh import Axis
from penteract.parallel.context.cut import Cut
from penteract.parallel.context.exchange import Found, begun
from penteract.parallel.context.kernels import Kernel, of_heads
from penteract.parallel.context.ring import Ring, Turns
from penteract.placement import split_range

HALVES = 2  # of the heads
KEPT = 5  # tensors that a half keeps for backward


class Plan(NamedTuple):
    turns: Turns  # of the ring of groups
    order: Tensor  # [n·t/cp] the group's rows, in the order of the sequences, in those of its ranks


class Half(NamedTuple):
    """Heads that travel together: of each rank, by their numbers before the exchange."""

    queries: tuple[tuple[int, ...], ...]
    keys: tuple[tuple[int, ...], ...]  # and values; once for each query head where uneven


def halves(a: int, g: int, n: int) -> list[Half]:
    """Which of `a` query and `g` key/value heads each of n ranks takes, in halves that have some.

    Every rank takes an even share of the query heads, and the key/value heads that these need.
    """
    found = []
    for half in range(HALVES):
        taken = [_half_of(a, g, split_range(a, n, rank), half) for rank in range(n)]
        if any(queries for queries, _ in taken):
            queries, keys = zip(*taken, strict=True)
            found.append(Half(queries, keys))
    return found


def _half_of(
    a: int, g: int, share: tuple[int, int], half: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The query heads and the key/value heads of one half of a rank's share."""
    if share[0] == share[1]:
        return (), ()
    group = a // g
    first, last = share[0] // group, (share[1] - 1) // group + 1
    start, stop = (first + x for x in split_range(last - first, HALVES, half))
    queries = tuple(h for h in range(*share) if start <= h // group < stop)
    served = [sum(h // group == key for h in queries) for key in range(start, stop)]
    if len(set(served)) <= 1:
        return queries, tuple(range(start, stop))
    return queries, tuple(h // group for h in queries)


@dataclass(frozen=True)
class AllToAll:
    """Over the ranks `inside` a group, then by `ring` over the groups of `axis`."""

    axis: Axis
    inside: Axis
    ring: Ring
    overlap: bool = True

    def plan(self, cut: Cut, window: int | None, like: Tensor) -> Plan:
        n = self.inside.size
        first = self.ring.axis.rank * n
        order = torch.from_numpy(cut.order(range(first, first + n))).to(like.device)
        return Plan(self.ring.plan(cut.merged(n), window, like), order)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: Plan, kernel: Kernel
    ) -> tuple[Tensor, Sequence[Tensor]]:
        me, a, g = self.inside.rank, q.shape[1], k.shape[1]
        both = halves(a, g, self.inside.size)
        every = torch.cat([q, k, v], 1)  # [t/cp, a + 2g, d]
        coming = [self._start(every, _all_heads(half, a, g)) for half in both]
        del every
        kept = [k.new_empty((0, g))]  # backward must know g
        leaving = []
        for half in both:
            came = self._arrived(coming.pop(0), plan)  # [n·t/cp, a' + 2g', d]
            heads = list(half.queries[me])
            own_q, own_k, own_v = came.split([len(heads), *[len(half.keys[me])] * 2], 1)
            few = None if sinks is None else sinks[heads]
            few_heads = of_heads(kernel, heads)
            out, saved = self.ring.forward(own_q, own_k, own_v, few, plan.turns, few_heads)
            leaving.append(self._start_back(out, plan, half.queries))
            kept += saved
        result = torch.empty_like(q, memory_format=torch.contiguous_format)
        for half, pending in zip(both, leaving, strict=True):
            sent = _numbers(sum(half.queries, ()), q)
            result.index_copy_(1, sent, pending.wait().transpose(0, 1))
        return result, kept

    def backward(
        self,
        d_out: Tensor,
        saved: Sequence[Tensor],
        sinks: Tensor | None,
        plan: Plan,
        kernel: Kernel,
    ) -> Found:
        a, g = d_out.shape[1], saved[0].shape[1]
        both = halves(a, g, self.inside.size)
        coming = [self._start(d_out, half.queries) for half in both]
        wide = torch.promote_types(d_out.dtype, torch.float32)
        d_sinks = None if sinks is None else torch.zeros_like(sinks)
        leaving = []
        for i, half in enumerate(both):
            mine, saved_here = list(half.queries[self.inside.rank]), saved[i * KEPT + 1 :][:KEPT]
            few = None if sinks is None else sinks[mine]
            d_half = self._arrived(coming.pop(0), plan)
            few_heads = of_heads(kernel, mine)
            dq, dk, dv, d_few = self.ring.backward(d_half, saved_here, few, plan.turns, few_heads)
            if d_sinks is not None and d_few is not None:
                d_sinks[mine] = d_few
            d_every = torch.cat([dq, dk, dv], 1)
            leaving.append(self._start_back(d_every, plan, _all_heads(half, a, g)))
        total = d_out.new_zeros((len(d_out), a + 2 * g, d_out.shape[2]), dtype=wide)
        for half, pending in zip(both, leaving, strict=True):
            heads = _numbers(sum(_all_heads(half, a, g), ()), d_out)
            total.index_add_(1, heads, pending.wait().transpose(0, 1).to(wide))
        dq, dk, dv = total.to(d_out.dtype).split([a, g, g], 1)
        return dq, dk, dv, d_sinks

    def _start(self, x: Tensor, heads: Sequence[tuple[int, ...]]) -> Pending:
        """Begin to send heads of x [t/cp, heads, d] to each rank, and to receive this one's."""
        sent = x.index_select(1, _numbers(sum(heads, ()), x)).transpose(0, 1)
        mine = len(heads[self.inside.rank])
        return self._begin(sent, [len(h) for h in heads], [mine] * self.inside.size)

    def _arrived(self, pending: Pending, plan: Plan) -> Tensor:
        """[n·heads, t/cp, d] from all ranks → [n·t/cp, heads, d] in the order of the sequences."""
        n, came = self.inside.size, pending.wait()
        by_rank = came.unflatten(0, (n, len(came) // n)).transpose(1, 2)  # [n, t/cp, heads, d]
        return by_rank.flatten(0, 1).index_select(0, plan.order)

    def _start_back(self, y: Tensor, plan: Plan, heads: Sequence[tuple[int, ...]]) -> Pending:
        """The transpose of `_start` and `_arrived`: [n·t/cp, heads, d] to the ranks of its rows."""
        n = self.inside.size
        by_rank = torch.empty_like(y).index_copy_(0, plan.order, y)
        sent = by_rank.unflatten(0, (n, len(y) // n)).transpose(1, 2).flatten(0, 1)
        return self._begin(sent, [y.shape[1]] * n, [len(h) for h in heads])

    def _begin(self, sent: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        return begun(start_all_to_all(sent, self.inside, send, receive), overlap=self.overlap)


def _all_heads(half: Half, a: int, g: int) -> list[tuple[int, ...]]:
    """What a rank is sent of q, k and v side by side."""
    zipped = zip(half.queries, half.keys, strict=True)
    return [(*q, *(a + h for h in k), *(a + g + h for h in k)) for q, k in zipped]


def _numbers(heads: Iterable[int], like: Tensor) -> Tensor:
    return torch.tensor(list(heads), dtype=torch.int64, device=like.device)
