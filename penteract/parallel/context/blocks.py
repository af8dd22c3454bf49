"""Attention over the blocks of a cut: block after block, merged by log-sum-exp.

A row's output over several blocks of keys is the mean of their outputs weighed by exp(lse of the
block), so blocks may come in any order and from anywhere:

    lse = log Σ_b exp lse_b          out = Σ_b exp(lse_b − lse) out_b

An attention sink is one more key with a learned score and a value of 0, added at the end. Gradients
are sums over the blocks (`kernels`). Blocks of one shape whose rows lie equally far apart, such as
those of samples of equal length, are one call of the kernel.

Source: Liu et al., arXiv:2310.01889 (ring attention), and for sinks OpenAI, arXiv:2508.10925.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from penteract.parallel.context.cut import Block
from penteract.parallel.context.kernels import Gradients, Kernel, Mask
from penteract.parallel.context.score_dropout import Places
from penteract.parallel.context.segments import Rows, Segments, packed


@dataclass(frozen=True)
class Runs:
    """n runs of `size` rows, the first at `start`, the next ones `step` rows further each."""

    n: int
    start: int
    size: int
    step: int

    def are_all(self, rows: int) -> bool:
        """Whether they are the rows 0, 1, … of so many."""
        return self.start == 0 and self.n * self.size == rows and self.step in (self.size, 0)

    def of(self, x: Tensor) -> Tensor:
        """Those rows of x [t, heads, d] or [t, heads]: a view [n, heads, size, d] or without d."""
        rows, *rest = x.stride()
        shape = (self.n, self.size, *x.shape[1:])
        at = x.storage_offset() + self.start * rows
        return x.as_strided(shape, (self.step * rows, rows, *rest), at).transpose(1, 2)

    def put(self, x: Tensor, values: Tensor) -> None:
        """Overwrite those rows of `x` with what is as `of` gives it."""
        self.of(x).copy_(values)

    def add(self, x: Tensor, values: Tensor) -> None:
        """Add to them."""
        self.of(x).add_(values)


@dataclass(frozen=True)
class Group:
    """Blocks that one call of a kernel computes; no two of them share a query or a key."""

    query: Runs
    key: Runs
    mask: Mask

    def forward(self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As the kernel's."""
        return kernel.forward(q, k, v, self.mask)

    def backward(
        self,
        kernel: Kernel,
        d_out: Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
    ) -> Gradients:
        """As the kernel's."""
        return kernel.backward(d_out, *qkv, out, lse, self.mask)


def _nowhere() -> Places:
    raise AssertionError("blocks without places cannot be dropped")


@dataclass(frozen=True)
class Blocks:
    """All that queries on one rank attend to of some keys, ready for the kernel."""

    groups: tuple[Group | Segments, ...]
    is_whole: bool  # one group whose queries are all rows, in order
    places: Callable[[], Places] = field(compare=False)  # of all local queries and these keys

    @classmethod
    def of(
        cls,
        blocks: Sequence[Block],
        rows: int,
        window: int | None = None,
        *,
        places: Callable[[], Places] = _nowhere,
        segments: torch.device | None = None,
    ) -> Blocks:
        """The blocks of a `Cut` for `rows` local queries.

        Those of several lengths are one call where `segments` says on which device.
        """
        alike = [block for block in blocks if block.mask != "window"]
        shapes = {(_size(block.query), _size(block.key)) for block in alike}
        if len(shapes) > 1 and segments is not None:
            banded = [block for block in blocks if block.mask == "window"]
            return cls((*packed(alike, segments), *_groups(banded, window)), False, places)
        groups = tuple(_groups(blocks, window))
        return cls(groups, len(groups) == 1 and groups[0].query.are_all(rows), places)

    def parts(self, kernel: Kernel) -> Iterator[Group | Segments]:
        """The groups, with the places that the kernel asks for."""
        if kernel.drop is None:
            yield from self.groups
            return
        places = self.places()
        for group in self.groups:
            own = group.query.of(places.queries), group.key.of(places.keys)
            mask = replace(group.mask, places=Places(*own, places.tokens))
            yield replace(group, mask=mask)


def _size(rows: slice) -> int:
    return int(rows.stop - rows.start)


def _groups(blocks: Iterable[Block], window: int | None) -> Iterator[Group]:
    like: dict[tuple[int, int, Mask], list[tuple[int, int]]] = {}
    for block in blocks:
        band = (block.shift, window or 0) if block.mask == "window" else ()
        key = (_size(block.query), _size(block.key), Mask(block.mask, *band))
        like.setdefault(key, []).append((block.query.start, block.key.start))
    for (q_size, k_size, mask), starts in like.items():
        for n, q, q_step, k, k_step in _progressions(starts, q_size, k_size):
            yield Group(Runs(n, q, q_size, q_step), Runs(n, k, k_size, k_step), mask)


def _progressions(
    starts: Sequence[tuple[int, int]], q_size: int, k_size: int
) -> Iterable[tuple[int, int, int, int, int]]:
    """(n, first query, query step, first key, key step) of runs that lie equally far apart."""
    i = 0
    while i < len(starts):
        (q, k), n, steps = starts[i], 1, (q_size, k_size)
        if i + 1 < len(starts):
            steps = starts[i + 1][0] - q, starts[i + 1][1] - k
            if steps[0] >= q_size and steps[1] >= k_size:
                while i + n < len(starts) and starts[i + n] == (q + n * steps[0], k + n * steps[1]):
                    n += 1
        yield n, q, steps[0], k, steps[1]
        i += n


class Merged:
    """Outputs over the blocks so far: `out` [t, a, d], `lse` [t, a], in at least float32.

    Rows that no block reaches, such as padding, have an output of 0 and a log-sum-exp of −∞.
    """

    def __init__(self, q: Tensor, kernel: Kernel) -> None:
        self.kernel, self.q = kernel, q
        wide = torch.promote_types(q.dtype, torch.float32)
        self.wide = wide
        self._found: tuple[Tensor, Tensor] | None = None

    def add(self, k: Tensor, v: Tensor, blocks: Blocks) -> None:
        """Attend to the blocks' rows of k and v [t', g, d]."""
        if self.q.shape[1] == 0:
            return
        fresh = self._found is None
        for group in blocks.parts(self.kernel):
            query, key = group.query, group.key
            # [n, a, s, d], [n, a, s]
            out, lse = group.forward(self.kernel, query.of(self.q), key.of(k), key.of(v))
            if fresh and blocks.is_whole:
                self._found = (_rows(out), _rows(lse).to(self.wide))
            else:
                self._merge(query, out, lse)

    def result(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output in q's type and log-sum-exp, with the sinks' scores [a] among the keys."""
        out, lse = self._whole()
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype))
            out, lse = out * torch.exp(lse - total)[..., None], total
        return out.to(self.q.dtype), lse

    def _whole(self) -> tuple[Tensor, Tensor]:
        if self._found is None:
            zeros = torch.zeros_like(self.q, dtype=self.wide, memory_format=torch.contiguous_format)
            self._found = zeros, zeros.new_full(zeros.shape[:2], float("-inf"))
        return self._found

    def _merge(self, query: Runs | Rows, out: Tensor, lse: Tensor) -> None:
        whole_out, whole_lse = self._whole()
        if whole_out.dtype != self.wide:
            whole_out = whole_out.to(self.wide)
            self._found = whole_out, whole_lse
        had_out, had = query.of(whole_out), query.of(whole_lse)
        total = torch.logaddexp(had, lse.to(self.wide))
        before, here = (torch.exp(x - total)[..., None] for x in (had, lse))
        query.put(whole_out, had_out * before + out * here)
        query.put(whole_lse, total)


def _rows(x: Tensor) -> Tensor:
    """[n, a, s, …] → [n·s, a, …]."""
    return x.transpose(1, 2).flatten(0, 1)


class Gradient:
    """Gradients of attention, block by block."""

    def __init__(self, d_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, kernel: Kernel) -> None:
        self.d_out, self.q, self.out, self.lse, self.kernel = d_out, q, out, lse, kernel
        self.wide = torch.promote_types(q.dtype, torch.float32)

    @cached_property
    def dq(self) -> Tensor:
        """That of q [t, a, d] over the blocks so far, in at least float32."""
        return torch.zeros_like(self.q, dtype=self.wide, memory_format=torch.contiguous_format)

    def add(self, k: Tensor, v: Tensor, blocks: Blocks, dkv: Tensor) -> Tensor:
        """Go back through the blocks' rows of k and v [t', g, d], adding to `dkv` [2, t', g, d]."""
        for group in blocks.parts(self.kernel) if self.q.shape[1] else ():
            dq, dk, dv = self._of(group, k, v)
            group.query.add(self.dq, dq)
            group.key.add(dkv[0], dk)
            group.key.add(dkv[1], dv)
        return dkv

    def whole(self, k: Tensor, v: Tensor, blocks: Blocks) -> Gradients:
        """Those of q, k and v where all there is is one group of all rows, in the kernel's type."""
        (group,) = blocks.parts(self.kernel)
        dq, dk, dv = map(_rows, self._of(group, k, v))
        return dq, dk, dv

    def _of(self, group: Group | Segments, k: Tensor, v: Tensor) -> Gradients:
        query, key = group.query, group.key
        d_out, q, out, lse = (query.of(x) for x in (self.d_out, self.q, self.out, self.lse))
        return group.backward(self.kernel, d_out, (q, key.of(k), key.of(v)), out, lse)

    def sinks(self, sinks: Tensor) -> Tensor:
        """The gradient of the sinks' scores [a]: −P_sink D, summed over the rows."""
        share = torch.exp(sinks.to(self.wide) - self.lse)  # [t, a]
        d = (self.d_out.to(self.wide) * self.out.to(self.wide)).sum(-1)
        return -(share * d).sum(0).to(sinks.dtype)


def newest(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, kernel: Kernel) -> Tensor:
    """The newest tokens q [n, a, d] over all their keys and values [n, s, g, d] → [n, a, d]."""
    n, s = k.shape[:2]
    group = Group(Runs(n, 0, 1, 1), Runs(n, 0, s, s), Mask("full"))
    merged = Merged(q, kernel)
    k, v = (x.flatten(0, 1) for x in (k, v))
    merged.add(k, v, Blocks((group,), is_whole=True, places=_nowhere))
    return merged.result(sinks)[0]
