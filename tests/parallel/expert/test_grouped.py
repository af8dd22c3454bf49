"""Products of groups of rows are those of a loop over experts, in every form, and gradients too."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from penteract import compat
from penteract.parallel.expert.grouped import Groups, product, weight_gradient
from penteract.parallel.parameters import Write

INPUTS, OUTPUTS = 8, 4
ROWS = [(3, 0, 5, 1), (0, 0, 0, 0), (2, 2, 2, 2), (0, 9, 0, 0), (1,)]


def groups_of(rows: Sequence[int]) -> Groups:
    return Groups(list(rows), torch.tensor(rows).cumsum(0).to(torch.int32))


def data(rows: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(rows), INPUTS, generator=generator, dtype=torch.float64)
    weight = torch.randn(len(rows), OUTPUTS, INPUTS, generator=generator, dtype=torch.float64)
    return x.to(dtype), weight.to(dtype)


def looped(x: Tensor, weight: Tensor, rows: Sequence[int]) -> Tensor:
    parts, at = [], 0
    for n, w in zip(rows, weight.unbind(0), strict=True):
        parts.append(x[at : at + n] @ w.T)
        at += n
    return torch.cat(parts)


class Taken:
    """Takes weight gradients as the buffers of training do."""

    def __init__(self, out: Tensor) -> None:
        self.out, self.fresh = out, True

    def accumulate(self, parameter: nn.Parameter, write: Write) -> None:
        write(self.out, self.fresh)
        self.fresh = False


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("one_kernel", [False, True])
def test_product_and_gradients(
    rows: Sequence[int], one_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, so that the second use adds to what the first has written."""
    dtype = torch.float32 if one_kernel else torch.float64
    monkeypatch.setattr(compat, "has_grouped_product", lambda x, weights: one_kernel)
    x, weight = data(rows, dtype)
    groups, parameter = groups_of(rows), nn.Parameter(weight)
    taken = Taken(torch.full_like(weight, torch.nan))
    inputs = [v.clone().requires_grad_() for v in (x, weight)]
    near = {"rtol": 1e-5, "atol": 1e-5} if one_kernel else {"rtol": 1e-12, "atol": 1e-12}
    for _ in range(2):
        wanted = looped(*inputs, rows)
        y = product(x, weight.mT, groups)
        torch.testing.assert_close(y, wanted, **near)
        wanted.sin().sum().backward()
        dy = y.cos()
        assert weight_gradient(dy, x, parameter, groups, taken) is None
        inputs_grad, inputs[0].grad = inputs[0].grad, None
        torch.testing.assert_close(product(dy, weight, groups), inputs_grad, **near)
    torch.testing.assert_close(taken.out, inputs[1].grad, **near)


def test_without_buffers_the_gradient_is_returned_and_a_frozen_matrix_has_none() -> None:
    rows = (2, 0, 3)
    x, weight = data(rows, torch.float64)
    theirs, parameter = weight.clone().requires_grad_(), nn.Parameter(weight)
    y = looped(x, theirs, rows)
    y.sum().backward()
    dy = torch.ones_like(y)
    found = weight_gradient(dy, x, parameter, groups_of(rows), None)
    torch.testing.assert_close(found, theirs.grad)
    assert weight_gradient(dy, x, parameter.requires_grad_(False), groups_of(rows), None) is None


def test_an_empty_product_has_its_shape() -> None:
    x, weight = data((0, 0), torch.float64)
    assert product(x, weight.mT, groups_of((0, 0))).shape == (0, OUTPUTS)
