"""Matrix products of layers, each in a type in which the device is fast, rounded once.

A CPU without instructions for products of 16-bit numbers takes 10 to 50 times as long for them as
for those of 32-bit ones, so there they are made in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from penteract import compat


def fast(x: Tensor) -> Tensor:
    """`x` in the type in which it is multiplied."""
    return x if compat.multiplies(x) else x.float()


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b, in the type of a."""
    return (fast(a) @ fast(b)).to(a.dtype)


def affine(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, in the type of x."""
    return F.linear(fast(x), fast(weight), None if bias is None else fast(bias)).to(x.dtype)


def write_product(a: Tensor, b: Tensor, out: Tensor, overwrite: bool) -> None:
    """out = a b, or out += a b; a product of a narrower type is added in the type of `out`."""
    a, b = fast(a), fast(b)
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=0.0 if overwrite else 1.0, out=out)
        return
    if not len(b):  # of an expert without a token
        if overwrite:
            out.zero_()
        return
    # A device's kernels accumulate 16-bit products in float32 and can leave them so.
    wide = a.is_cuda and out.dtype == torch.float32
    found = torch.mm(a, b, out_dtype=torch.float32) if wide else a @ b
    out.copy_(found) if overwrite else out.add_(found)
