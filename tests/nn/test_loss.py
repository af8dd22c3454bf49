"""The head's cross-entropy: extreme logits, its derivative, and sums rather than means."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from penteract.mesh import single
from penteract.nn.build import Build
from penteract.nn.loss import Head
from penteract.nn.sequences import MicroBatch, Sequences
from penteract.parallel.parameters import materialise
from penteract.parallel.tensor import TensorParallel
from penteract.placement import Init

F64 = torch.float64


def head(std: float = 1.0, dtype: torch.dtype = F64) -> Head:
    init = Init("normal", std)
    result = Head(
        "head", 7, 5, Build(TensorParallel(single("tp")), dtype, init, init), tied_to=None
    )
    materialise(result, seed=0)
    return result


def batch(weights: list[float]) -> MicroBatch:
    t = len(weights)
    labels = torch.arange(t) % 7
    sequences = Sequences.of((t,), weights=torch.tensor(weights, dtype=F64))
    return MicroBatch(torch.zeros_like(labels), labels, sequences)


def stream(t: int) -> Tensor:
    return torch.randn(t, 5, generator=torch.Generator().manual_seed(1), dtype=F64)


@pytest.mark.parametrize("std", [1.0, 1e3])
def test_loss_and_gradients_equal_torchs(std: float) -> None:
    layer, x = head(std), stream(6).requires_grad_()
    weights = [1.0, 0.0, 2.0, 1.0, 0.5, 0.0]
    loss = layer.loss(x, batch(weights), torch.tensor(0.125))["loss"]
    each = F.cross_entropy(x @ layer.weight.t(), batch(weights).labels, reduction="none")
    wanted = 0.125 * (each * torch.tensor(weights)).sum()
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
    leaves = [x, layer.weight]
    found, plain = (torch.autograd.grad(y, leaves) for y in (3 * loss, 3 * wanted))
    for a, b in zip(found, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_a_sum_over_parts_is_the_sum_over_the_whole() -> None:
    """Unequal masks: dividing each part by its own count would give 2 different results."""
    layer, x = head(), stream(6)
    weights = [1.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    scale = torch.tensor(1.0 / 4)
    whole = layer.loss(x, batch(weights), scale)["loss"]
    rows = batch(weights)
    parts = []
    for part in (slice(0, 4), slice(4, 6)):
        labels = rows.labels[part]
        sequences = Sequences.of((len(labels),), weights=rows.sequences.weights[part])
        parts.append(layer.loss(x[part], MicroBatch(labels, labels, sequences), scale)["loss"])
    torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=1e-12)


def test_masked_rows_get_exactly_no_gradient() -> None:
    x = stream(3).requires_grad_()
    head().loss(x, batch([0.0, 1.0, 0.0]), torch.tensor(1.0))["loss"].backward()
    assert not x.grad[[0, 2]].any()
    assert x.grad[1].any()


def test_bfloat16_logits_are_summed_in_float32() -> None:
    layer = head(dtype=torch.bfloat16)
    x = stream(4).bfloat16()
    loss = layer.loss(x, batch([1.0] * 4), torch.tensor(0.25))["loss"]
    logits = (x @ layer.weight.t()).float()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(logits, batch([1.0] * 4).labels))
