"""Every backend computes a block alike, and shares of the gradient add up to the whole."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import attention as reference
from torch import Tensor

from penteract.parallel.context.blocks import newest
from penteract.parallel.context.kernels import TILE, Backend, Kernel, Mask, Plain, kernel_of

F64 = torch.float64
BACKENDS: tuple[Backend, ...] = ("flash", "plain", "flex")
SIZES = st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 3]), st.sampled_from([1, 4, 5, 8]))
bounded = settings(derandomize=True, deadline=None, max_examples=40)
Kept = list[Tensor]  # out, lse, dq, dk, dv


@st.composite
def masks(draw: st.DrawFn) -> tuple[int, int, Mask]:
    """(queries, keys, mask), where every query attends to some key."""
    s, s2 = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    kind = draw(st.sampled_from(["full", "causal", "window"]))
    if kind == "full":
        return s, s2, Mask("full")
    if kind == "causal":
        return s, s, Mask("causal")
    window = draw(st.integers(1, 12))
    # Query 0 reaches key 0 or a later one, and the last query has a key left.
    shift = draw(st.integers(max(0, window - s2), max(0, window - 1)))
    s = min(s, s2 + window - 1 - shift)
    return s, s2, Mask("window", shift, window)


def inputs(n: int, s: int, s2: int, sizes: tuple[int, int, int]) -> list[Tensor]:
    g, group, d = sizes
    draw = torch.Generator().manual_seed(s + 10 * s2)
    shapes = ((n, g * group, s, d), (n, g, s2, d), (n, g, s2, d))
    return [torch.randn(shape, generator=draw, dtype=F64) for shape in shapes]


def both_ways(kernel: Kernel, x: Sequence[Tensor], mask: Mask) -> Kept:
    """Output, log-sum-exp and the gradients of Σ out cos out, as if there were no other block."""
    out, lse = kernel.forward(*x, mask)  # type: ignore[call-arg]
    return [out, lse, *kernel.backward(out.cos(), *x, out, lse, mask)]  # type: ignore[call-arg]


def by_autograd(x: Sequence[Tensor], mask: Mask, softcap: float | None = None) -> Kept:
    """The same from the definition of softmax, without any of the kernels' formulas."""
    leaves = [y.detach().double().requires_grad_() for y in x]
    q, k, v = leaves
    k, v = (y.repeat_interleave(q.shape[1] // k.shape[1], 1) for y in (k, v))
    scores = torch.einsum("nhid,nhjd->nhij", q, k) / q.shape[-1] ** 0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = torch.ones(scores.shape[2:], dtype=torch.bool)
    for i in range(seen.shape[0]):
        for j in range(seen.shape[1]):
            if mask.kind == "causal":
                seen[i, j] = j <= i
            if mask.kind == "window":
                seen[i, j] = 0 <= mask.shift + i - j < mask.window
    scores = scores.masked_fill(~seen, -1e30)
    out = torch.softmax(scores, -1) @ v
    gradients = torch.autograd.grad(out, leaves, out.detach().cos())
    return [out.detach(), scores.detach().logsumexp(-1), *gradients]


def check(found: Kept, wanted: Kept, tolerance: float = 1e-11) -> None:
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
        assert x.shape == y.shape, name
        worst = (x.double() - y).abs().max() / max(y.abs().max().item(), 0.1)
        assert worst <= tolerance, f"{name} differs by {worst:.3g}"


@bounded
@given(masks(), SIZES, st.integers(1, 3))
def test_flash_and_plain_are_softmax(
    mask: tuple[int, int, Mask], sizes: tuple[int, int, int], n: int
) -> None:
    x = inputs(n, *mask[:2], sizes)
    wanted = by_autograd(x, mask[2])
    check(both_ways(kernel_of("flash"), x, mask[2]), wanted)
    check(both_ways(kernel_of("plain"), x, mask[2]), wanted)


@bounded
@given(masks(), SIZES, st.sampled_from([0.3, 2.0, 50.0]))
def test_a_soft_cap_and_its_slope(
    mask: tuple[int, int, Mask], sizes: tuple[int, int, int], softcap: float
) -> None:
    x = inputs(2, *mask[:2], sizes)
    check(both_ways(kernel_of("plain", softcap), x, mask[2]), by_autograd(x, mask[2], softcap))


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("mask", [Mask("full"), Mask("causal"), Mask("window", 3, 5)], ids=str)
def test_flex_is_softmax(mask: Mask, softcap: float | None) -> None:
    x = inputs(2, 7, 7, (2, 2, 8))
    with warnings.catch_warnings():  # uncompiled, as it is on a CPU, it says that it is slow
        warnings.simplefilter("ignore")
        found = both_ways(kernel_of("flex", softcap), x, mask)
    check(found, by_autograd(x, mask, softcap))


@pytest.mark.parametrize("backend", BACKENDS)
def test_shares_of_blocks_add_up(backend: Backend) -> None:
    """Given the whole row's output and log-sum-exp: what context parallelism stands on."""
    q, k, v = inputs(1, 6, 10, (2, 2, 8))
    whole = by_autograd([q, k, v], Mask("window", 4, 40))  # causal, with 4 keys before the first
    kernel, out, lse = kernel_of(backend), whole[0], whole[1]
    blocks = [
        (slice(0, 1), Mask("full")),
        (slice(1, 4), Mask("full")),
        (slice(4, 10), Mask("causal")),
    ]
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    lses, outs = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for keys, mask in blocks:
            part = q, k[:, :, keys], v[:, :, keys]
            one, own = kernel.forward(*part, mask)
            share = kernel.backward(out.cos(), *part, out, lse, mask)
            outs.append(one)
            lses.append(own)
            dq += share[0]
            dk[:, :, keys], dv[:, :, keys] = share[1:]
    total = torch.stack(lses).logsumexp(0)
    shares = (torch.exp(own - total)[..., None] * one for own, one in zip(lses, outs, strict=True))
    merged = torch.stack(list(shares)).sum(0)
    check([merged, total, dq, dk, dv], whole)


@pytest.mark.parametrize(
    ("rows", "columns", "shift", "window"),
    [
        (2 * TILE + 9, 2 * TILE + 9, 0, 5),
        (TILE + 1, TILE + 40, 39, 40),
        (3 * TILE, 3 * TILE, 0, TILE + 30),
        (TILE + 50, 20, 0, TILE + 40),
    ],
)
def test_a_band_of_several_tiles(rows: int, columns: int, shift: int, window: int) -> None:
    mask, x = Mask("window", shift, window), inputs(1, rows, columns, (1, 2, 4))
    check(both_ways(kernel_of("flash"), x, mask), both_ways(Plain(), x, mask))
    allowed = mask.allowed(rows, columns, torch.device("cpu"))
    assert allowed is not None
    drawn, computed = torch.zeros_like(allowed, dtype=torch.int64), 0
    for queries, keys, tile in mask.tiles(rows, columns):
        seen = tile.allowed(queries.stop - queries.start, keys.stop - keys.start, allowed.device)
        assert seen is not None
        assert seen.any(1).all(), "a query of a tile sees nothing"
        drawn[queries, keys] += seen
        computed += seen.numel()
    assert torch.equal(drawn, allowed.long())
    # A tile as long as the window is twice as wide, and so half of it is in the band.
    assert computed <= rows * (window + max(TILE, window))


@pytest.mark.parametrize("backend", ["flash", "plain"])
@pytest.mark.parametrize("sinks", [False, True])
def test_the_newest_tokens_are_the_last_rows(backend: Backend, sinks: bool) -> None:
    """As generation uses it: three sequences of five tokens, the last of which are new."""
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(15, heads, 6, generator=draw, dtype=F64) for heads in (4, 2, 2))
    x = {"q": q, "k": k, "v": v} | ({"sinks": torch.linspace(3, -1, 4, dtype=F64)} if sinks else {})
    whole = reference.attention(x, (5, 5, 5))
    rows = slice(4, 15, 5)
    keys, values = (y.unflatten(0, (3, 5)) for y in (k, v))
    found = newest(q[rows], keys, values, x.get("sinks"), kernel_of(backend))
    torch.testing.assert_close(found, whole[rows], rtol=1e-11, atol=1e-11)
    # With a window, of the keys that are cached the last few.
    few = newest(q[rows], keys[:, -2:], values[:, -2:], x.get("sinks"), kernel_of(backend))
    windowed = reference.attention(x, (5, 5, 5), window=2)
    torch.testing.assert_close(few, windowed[rows], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("mask", [Mask("full"), Mask("causal"), Mask("window", 2, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["flash", "plain"])
def test_narrow_types(backend: Backend, dtype: torch.dtype, mask: Mask) -> None:
    """The log-sum-exp stays in float32."""
    x = [y.to(dtype) for y in inputs(2, 7, 7, (2, 2, 8))]
    found = both_ways(kernel_of(backend), x, mask)
    assert found[0].dtype in (dtype, torch.float32)
    assert found[1].dtype == torch.float32
    check(found, by_autograd(x, mask), 2e-6 if dtype == torch.float32 else 2e-2)


def test_the_fused_kernels_refuse_a_soft_cap() -> None:
    with pytest.raises(ValueError, match=r"no soft cap, which is 30\.0: use plain or flex"):
        kernel_of("flash", 30.0)
