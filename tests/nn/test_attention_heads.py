"""Which heads a tensor rank computes: all of them once, with the key/value heads that they need."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penteract.mesh import Axis, single
from penteract.nn.attention import Attention, AttentionSpec, Heads
from penteract.nn.build import Build
from penteract.parallel.context.cut import Cut
from penteract.parallel.context.exchange import attend
from penteract.parallel.context.kernels import kernel_of
from penteract.parallel.context.ring import Ring
from penteract.parallel.parameters import declared_parameters
from penteract.parallel.tensor import TensorParallel
from penteract.placement import Init

Sizes = tuple[int, int, int]  # query heads a, key/value heads g, tensor ranks
EXAMPLES = settings(derandomize=True, deadline=None, max_examples=150)
sizes = st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 9)).map(
    lambda x: (x[0] * x[1], x[1], x[2])
)


def spec_of(a: int, g: int) -> AttentionSpec:
    return AttentionSpec(a, g, 4, rope_theta=None, bias=True, qk_norm=None)


def axis(n: int, rank: int) -> Axis:
    return Axis("tp", n, rank, tuple(range(n)))


def every(case: Sizes) -> list[Heads]:
    a, g, n = case
    return [Heads.of(spec_of(a, g), axis(n, rank)) for rank in range(n)]


@given(sizes)
@EXAMPLES
def test_every_query_head_is_computed_once_beside_its_keys(case: Sizes) -> None:
    a, g, n = case
    ranks = every(case)
    assert [i for rank in ranks for i in range(*rank.q)] == list(range(a))
    counts = [stop - start for start, stop in (rank.q for rank in ranks)]
    assert max(counts) - min(counts) <= 1
    for rank in ranks:
        heads = range(*rank.kv)
        needed = [i // (a // g) for i in range(*rank.q)]
        assert sorted(set(needed)) == list(heads), "no head is missing and none is in vain"
        assert rank.served == tuple(needed.count(head) for head in heads)
        assert sum(rank.served) == rank.q[1] - rank.q[0]
        assert rank.whole == (g % n != 0)
    if g % n == 0:
        assert [i for rank in ranks for i in range(*rank.kv)] == list(range(g))


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two sequences, of 3 and of 2 tokens."""
    alone, cut = Ring(single("cp")), Cut.of((3, 2), 1)
    plan = alone.plan(cut, None, q)
    return attend(q, k, v, exchange=alone, plan=plan, kernel=kernel_of("plain"))


@given(sizes)
@EXAMPLES
def test_what_ranks_compute_is_the_whole(case: Sizes) -> None:
    """Outputs of uneven parts, one behind the other, are those of all heads together."""
    a, g, _ = case
    generator = torch.Generator().manual_seed(0)

    def heads(n: int) -> Tensor:
        return torch.randn(5, n, 4, generator=generator, dtype=torch.float64)

    q, k, v = heads(a), heads(g), heads(g)
    whole = attended(q, k, v)
    parts = []
    for rank in every(case):
        keys, values = (rank.spread(x[:, slice(*rank.kv)]) for x in (k, v))
        mine = q[:, slice(*rank.q)]
        if mine.shape[1]:
            parts.append(attended(mine, keys, values))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-12, atol=1e-12)


@given(sizes)
@EXAMPLES
def test_declared_rows_are_those_that_are_computed(case: Sizes) -> None:
    """Query rows tile their matrix; key rows tile it where ranks share them out, else all hold it.

    A matrix that several ranks hold has a gradient that is a part of a sum.
    """
    a, g, n = case
    rows: dict[str, int] = {}
    for rank in range(n):
        init = Init("zeros")
        build = Build(TensorParallel(axis(n, rank)), torch.float64, init, init)
        model = Attention("x", 3, spec_of(a, g), build)
        uses = {}
        for entry in declared_parameters(model):
            for piece in entry.placement.pieces:
                rows[piece.tensor] = rows.get(piece.tensor, 0) + piece.box.size[0]
                uses[piece.tensor] = entry.placement.axes["tp"]
        assert uses["x.q.weight"] == uses["x.q.bias"] == "split"
        assert uses["x.k.weight"] == uses["x.v.bias"] == ("partial" if g % n else "split")
    copies = n if g % n else 1
    assert rows["x.q.weight"] == rows["x.q.bias"] == 4 * a
    assert rows["x.k.weight"] == rows["x.v.bias"] == 4 * g * copies


@pytest.mark.parametrize(
    ("case", "rank", "q", "kv", "served"),
    [
        ((6, 2, 4), 1, (2, 4), (0, 2), (1, 1)),  # a rank in the middle of two groups
        ((6, 2, 4), 3, (5, 6), (1, 2), (1,)),
        ((9, 3, 2), 0, (0, 5), (0, 2), (3, 2)),  # unequal groups
        ((4, 2, 8), 5, (4, 4), (0, 0), ()),  # no head
        ((8, 2, 2), 1, (4, 8), (1, 2), (4,)),
    ],
)
def test_examples(
    case: Sizes, rank: int, q: tuple[int, int], kv: tuple[int, int], served: tuple[int, ...]
) -> None:
    found = every(case)[rank]
    assert (found.q, found.kv, found.served) == (q, kv, served)
