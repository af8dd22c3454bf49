"""Experts' feed-forward layers in one operation: those of plain formulas, whatever is kept."""

from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penteract.nn.grouped_mlp import Way, grouped_mlp, weighted_bias
from penteract.parallel.expert.grouped import Groups
from penteract.parallel.recompute import Keeps

H, WIDTH = 5, 3
ROWS = {"uneven": (3, 0, 5), "few": (1, 0, 0), "none": (0, 0, 0), "even": (2, 2, 2)}
TOKENS = 4  # of which the last has no expert here


def way_of(rows: tuple[int, ...], *, gated: bool, keeps: Keeps) -> Way:
    counts, m = torch.tensor(rows), sum(rows)
    groups = Groups(list(rows), counts.cumsum(0).to(torch.int32))
    expert = torch.arange(len(rows)).repeat_interleave(counts)
    return Way(torch.arange(m) * 2 % (TOKENS - 1), expert, groups, gated, keeps, None)


def given(rows: tuple[int, ...], *, gated: bool, bias: bool, dtype: torch.dtype) -> list[Any]:
    """x, weights, inner, inner_bias, down, all with a gradient."""
    generator = torch.Generator().manual_seed(len(rows) + sum(rows))
    features, n = WIDTH * (1 + gated), len(rows)
    wide = torch.promote_types(dtype, torch.float32)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> nn.Parameter:
        return nn.Parameter(torch.randn(shape, generator=generator, dtype=wide).to(dtype))

    return [
        draw(TOKENS, H), draw(sum(rows), dtype=wide), draw(n, features, H),
        draw(n, features) if bias else None, draw(n, H, WIDTH),
    ]  # fmt: skip


def plain(x: Tensor, w: Tensor, inner: Tensor, bias: Tensor | None, down: Tensor, way: Way) -> Any:
    """A loop over rows."""
    out = [x[:0]]
    for i, (t, e) in enumerate(zip(way.token.tolist(), way.expert.tolist(), strict=True)):
        y = inner[e] @ x[t]
        y = y if bias is None else y + bias[e]
        if way.gated:
            gate, up = y.chunk(2)
            y = gate * torch.sigmoid(gate) * up
        else:
            y = F.gelu(y, approximate="tanh")
        out.append((down[e] @ (y * w[i]).to(x.dtype))[None])
    return torch.cat(out)


def outcome(fn: Any, inputs: list[Any], way: Way) -> list[Tensor]:
    y = fn(*inputs, way)
    there = [x for x in inputs if x is not None]
    return [y, *torch.autograd.grad((y * (1 + y.detach())).sum(), there, materialize_grads=True)]


@pytest.mark.parametrize("keeps", get_args(Keeps))
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_loop_over_rows(keeps: Keeps, rows: tuple[int, ...], gated: bool, bias: bool) -> None:
    inputs = given(rows, gated=gated, bias=bias, dtype=torch.float64)
    way = way_of(rows, gated=gated, keeps=keeps)
    for mine, theirs in zip(
        outcome(grouped_mlp, inputs, way), outcome(plain, inputs, way), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gated", [True, False])
def test_what_is_made_again_is_equal_to_the_bit(dtype: torch.dtype, gated: bool) -> None:
    rows = ROWS["uneven"]
    inputs = given(rows, gated=gated, bias=True, dtype=dtype)
    every, *others = (
        outcome(grouped_mlp, inputs, way_of(rows, gated=gated, keeps=keeps))
        for keeps in get_args(Keeps)
    )
    assert len(others) == 2
    for found in others:
        assert all(torch.equal(a, b) for a, b in zip(found, every, strict=True))


@pytest.mark.parametrize(
    ("keeps", "rows", "numbers"),
    [
        ("all", (3, 0, 5), 8 * (H + 3 * WIDTH)),
        ("expert_act", (3, 0, 5), TOKENS * H + 8 * 2 * WIDTH),
        ("experts", (3, 0, 5), TOKENS * H),
        ("expert_act", (1, 0, 0), H + 2 * WIDTH),  # one row is less than all tokens
        ("experts", (1, 0, 0), H),
        ("experts", (0, 0, 0), 0),
    ],
)
def test_what_is_kept(keeps: Keeps, rows: tuple[int, ...], numbers: int) -> None:
    """The documented table; parameters and weights apart, which are there anyway."""
    inputs = given(rows, gated=True, bias=True, dtype=torch.float64)
    apart = [x.untyped_storage()._cdata for x in inputs[1:]]
    found = dict[int, Tensor]()

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage()._cdata not in apart:
            found[x.untyped_storage()._cdata] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        grouped_mlp(*inputs, way_of(rows, gated=True, keeps=keeps))
    assert sum(x.numel() for x in found.values()) == numbers


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_biases_of_many_rows_are_summed_wide(dtype: torch.dtype) -> None:
    """4096 ones, which bfloat16 could not count."""
    rows = (4096, 0, 3)
    bias = nn.Parameter(torch.zeros(3, H, dtype=dtype))
    shares = torch.ones(sum(rows), requires_grad=True)
    way = way_of(rows, gated=True, keeps="all")
    weighted_bias(bias, shares, way).sum().backward()
    assert bias.grad[:, 0].tolist() == [4096.0, 0.0, 3.0]
    assert torch.equal(shares.grad, torch.zeros_like(shares))
    inputs = given(rows, gated=False, bias=True, dtype=dtype)
    inputs[4] = nn.Parameter(torch.zeros_like(inputs[4]))
    assert outcome(grouped_mlp, inputs, way_of(rows, gated=False, keeps="all"))[4].shape == (3, 3)


def test_a_weighted_bias_is_that_of_plain_formulas() -> None:
    rows = ROWS["uneven"]
    generator = torch.Generator().manual_seed(0)
    bias = nn.Parameter(torch.randn(3, H, generator=generator, dtype=torch.float64))
    shares = torch.randn(8, generator=generator, dtype=torch.float64, requires_grad=True)
    way = way_of(rows, gated=True, keeps="all")
    dy = torch.randn(8, H, generator=generator, dtype=torch.float64)
    wanted = bias[way.expert] * shares[:, None]
    found = weighted_bias(bias, shares, way)
    torch.testing.assert_close(found, wanted)
    pairs = [torch.autograd.grad(y, (bias, shares), dy) for y in (found, wanted)]
    for mine, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, theirs)
