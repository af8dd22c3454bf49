"""Every backend gives the same output and log-sum-exp, forwards and backwards."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penteract.nn.attention_kernels import Backend, attend, attend_cached

F64 = torch.float64
SIZES = st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 3]), st.sampled_from([1, 4, 5, 8]))


def inputs(t: int, a: int, g: int, d: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(t)
    shapes = ((t, a, d), (t, g, d), (t, g, d))
    return [torch.randn(s, generator=generator, dtype=F64).requires_grad_() for s in shapes]


def run(backend: Backend, x: list[Tensor], lengths: tuple[int, ...]) -> list[Tensor]:
    out, lse = attend(*x, lengths, backend=backend)
    return [out, lse, *torch.autograd.grad(out.cos().sum(), x)]


@settings(derandomize=True, deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple), sizes=SIZES)
def test_flash_equals_plain(lengths: tuple[int, ...], sizes: tuple[int, int, int]) -> None:
    g, group, d = sizes
    x = inputs(sum(lengths), g * group, g, d)
    for found, wanted in zip(run("flash", x, lengths), run("plain", x, lengths), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backend", ["flash", "plain"])
def test_plain_formula(backend: Backend) -> None:
    """Row by row: softmax of scaled scores up to the row, heads sharing keys as neighbours."""
    q, k, v = inputs(5, 4, 2, 6)
    out, lse = attend(q, k, v, (2, 3), backend=backend)
    for start, stop in ((0, 2), (2, 5)):
        for i in range(start, stop):
            for head in range(4):
                scores = k[start : i + 1, head // 2] @ q[i, head] / math.sqrt(6)
                weights = scores.exp() / scores.exp().sum()
                torch.testing.assert_close(out[i, head], weights @ v[start : i + 1, head // 2])
                torch.testing.assert_close(lse[i, head], scores.exp().sum().log())


@pytest.mark.parametrize("backend", ["flash", "plain"])
def test_log_sum_exp_merges_blocks_exactly(backend: Backend) -> None:
    """The newest row over all keys from two halves of the keys."""
    q, k, v = (x.detach().unsqueeze(0) for x in inputs(6, 2, 1, 4))
    whole = attend_cached(q[:, -1:], k, v, backend=backend)
    parts = []
    for block in (slice(0, 2), slice(2, 6)):
        scores = torch.einsum("ad,sd->as", q[0, -1], k[0, block, 0]) / 2
        parts.append((attend_cached(q[:, -1:], k[:, block], v[:, block], backend=backend), scores))
    lses = torch.stack([scores.logsumexp(-1) for _, scores in parts])  # [2, a]
    shares = (lses - lses.logsumexp(0)).exp()
    merged = sum(w[None, :, None] * out for w, (out, _) in zip(shares, parts, strict=True))
    torch.testing.assert_close(merged, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types(dtype: torch.dtype) -> None:
    """The log-sum-exp stays in float32, the output in the type of the input."""
    x = [y.detach().to(dtype).requires_grad_() for y in inputs(7, 4, 2, 8)]
    flash, plain = (run(backend, x, (3, 4)) for backend in ("flash", "plain"))
    assert (flash[0].dtype, flash[1].dtype) == (dtype, torch.float32)
    assert (plain[0].dtype, plain[1].dtype) == (dtype, torch.float32)
    for found, wanted in zip(flash, plain, strict=True):
        torch.testing.assert_close(found, wanted, rtol=3e-2, atol=3e-2)
