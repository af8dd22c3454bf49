"""Products are rounded once, whether or not the machine has instructions for their type."""

import pytest
import torch
from torch import Tensor

from penteract import compat
from penteract.parallel.expert.grouped import Groups
from penteract.parallel.expert.grouped import product as grouped
from penteract.parallel.products import affine, fast, product, write_product

NARROW = [torch.bfloat16, torch.float16]


def data(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x [6, 5], W [4, 5], b [4]."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((6, 5), (4, 5), (4,))
    x, w, b = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x, w, b


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("there", [True, False])
def test_narrow_products(dtype: torch.dtype, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "multiplies", lambda x: there or x.dtype not in NARROW)
    x, w, b = data(dtype)
    wide = x.double(), w.double(), b.double()
    once = {"rtol": torch.finfo(dtype).eps, "atol": torch.finfo(dtype).eps}
    torch.testing.assert_close(affine(x, w, b).double(), wide[0] @ wide[1].t() + wide[2], **once)
    torch.testing.assert_close(product(x, w.t()).double(), wide[0] @ wide[1].t(), **once)
    groups = Groups([4, 2], torch.tensor([4, 6], dtype=torch.int32))
    each = torch.stack([w, -w]).mT
    wanted = wide[0] @ wide[1].t()
    wanted[4:] *= -1
    torch.testing.assert_close(grouped(x, each, groups).double(), wanted, **once)
    assert {affine(x, w).dtype, product(x, w.t()).dtype, grouped(x, each, groups).dtype} == {dtype}
    assert fast(x).dtype == (dtype if there else torch.float32)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_product_that_is_made_wide_is_added_unrounded(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "multiplies", lambda x: x.dtype not in NARROW)
    x, w, _ = data(dtype)
    out = torch.full((6, 4), torch.nan)
    write_product(x, w.t(), out, True)
    write_product(x, w.t(), out, False)
    torch.testing.assert_close(out.double(), 2 * x.double() @ w.double().t(), rtol=1e-6, atol=1e-6)


def test_wide_numbers_are_multiplied_as_they_are() -> None:
    for dtype in (torch.float32, torch.float64):
        x = torch.ones(2, dtype=dtype)
        assert compat.multiplies(x)
        assert fast(x) is x
