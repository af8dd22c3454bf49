"""The head's losses: extreme logits, derivatives, split vocabularies; sums rather than means."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from penteract.collectives import all_gather
from penteract.mesh import Axis, single
from penteract.nn.build import Build
from penteract.nn.loss import Head, Objective
from penteract.nn.sequences import MicroBatch, Sequences
from penteract.parallel.parameters import materialise
from penteract.parallel.tensor import TensorParallel
from penteract.placement import Init
from penteract.testing import run_ranks, world_axis

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
    loss = layer(x, batch(weights), torch.tensor(0.125))["loss"]
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
    whole = layer(x, batch(weights), scale)["loss"]
    rows = batch(weights)
    parts = []
    for part in (slice(0, 4), slice(4, 6)):
        labels = rows.labels[part]
        sequences = Sequences.of((len(labels),), weights=rows.sequences.weights[part])
        parts.append(layer(x[part], MicroBatch(labels, labels, sequences), scale)["loss"])
    torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=1e-12)


def test_masked_rows_get_exactly_no_gradient() -> None:
    x = stream(3).requires_grad_()
    head()(x, batch([0.0, 1.0, 0.0]), torch.tensor(1.0))["loss"].backward()
    assert not x.grad[[0, 2]].any()
    assert x.grad[1].any()


def test_bfloat16_logits_are_summed_in_float32() -> None:
    layer = head(dtype=torch.bfloat16)
    x = stream(4).bfloat16()
    loss = layer(x, batch([1.0] * 4), torch.tensor(0.25))["loss"]
    logits = (x @ layer.weight.t()).float()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(logits, batch([1.0] * 4).labels))


# --- label smoothing, z-loss, split and padded vocabularies

T, V = 6, 8  # tokens, and a vocabulary of as many as the stream is wide
WEIGHTS = [1.0, 0.0, 2.0, 1.0, 0.5, 0.0]
SCALE = torch.tensor(0.125)
OBJECTIVES = [Objective(*pair) for pair in product((0.0, 0.1), (0.0, 1e-2))]


def logits_of(gain: float, vocab: int = V) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return gain * torch.randn(T, vocab, generator=generator, dtype=F64)


def plainly(z: Tensor, objective: Objective) -> dict[str, Tensor]:
    """Both losses of whole logits [t, v], by torch's own cross-entropy."""
    labels, weights = torch.arange(T) % z.shape[1], torch.tensor(WEIGHTS, dtype=F64)
    smoothing = objective.label_smoothing
    each = F.cross_entropy(z, labels, reduction="none", label_smoothing=smoothing)
    squares = objective.z_loss * z.logsumexp(-1).square()
    terms = {"loss": SCALE * (weights * each).sum(), "z_loss": SCALE * (weights * squares).sum()}
    return terms if objective.z_loss else {"loss": terms["loss"]}


def identity_head(vocab: int, axis: Axis, multiple: int = 1) -> Head:
    """A head whose logits are the stream itself, so that the stream's gradient is the logits'."""
    init = Init("zeros")
    build = Build(TensorParallel(axis), F64, init, init, vocab_multiple=multiple)
    layer = Head("head", vocab, vocab, build, tied_to=None)
    materialise(layer, seed=0)
    with torch.no_grad():
        rows = torch.eye(vocab, dtype=F64)[layer.start : layer.start + layer.columns]
        layer.weight[: layer.columns] = rows
        layer.weight[layer.columns :] = 5.0  # what pads the vocabulary must have no share
    return layer


def losses_of(z: Tensor, layer: Head, objective: Objective) -> dict[str, Tensor]:
    labels = torch.arange(T) % z.shape[1]
    sequences = Sequences.of((T,), weights=torch.tensor(WEIGHTS, dtype=F64))
    return layer(z, MicroBatch(labels, labels, sequences), SCALE, objective)


def compare_with_torch(axis: Axis, gain: float) -> None:
    for objective, multiple, vocab in product(OBJECTIVES, (1, 4), (V, 2)):
        layer = identity_head(vocab, axis, multiple)
        z, whole = (logits_of(gain, vocab).requires_grad_() for _ in range(2))
        found, wanted = losses_of(z, layer, objective), plainly(whole, objective)
        assert found.keys() == wanted.keys()
        for name, loss in found.items():
            torch.testing.assert_close(loss, wanted[name], rtol=1e-12, atol=1e-12)
        # Unequal factors: each loss has a gradient of its own.
        grads = [
            torch.autograd.grad(sum(i * x for i, x in enumerate(terms.values(), 2)), leaf)[0]
            for terms, leaf in ((found, z), (wanted, whole))
        ]
        torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-11)
        assert torch.isfinite(grads[0]).all()


@pytest.mark.parametrize("gain", [1.0, 1000.0])
def test_smoothing_and_z_loss_equal_torchs(gain: float) -> None:
    compare_with_torch(single("tp"), gain)


@pytest.mark.parametrize("n", [2, 3])
def test_a_split_vocabulary_is_the_whole_one(n: int) -> None:
    """Losses and the gradient of whole logits; 3 ranks do not divide 8, and 2 tokens leave one."""

    def both() -> None:
        for gain in (1.0, 1000.0):
            compare_with_torch(world_axis("tp"), gain)

    run_ranks(both, n)


def weight_gradients(axis: Axis, objective: Objective) -> tuple[Tensor, Tensor]:
    """The gradient of a rank's real rows, and of those that pad them."""
    layer = identity_head(V, axis, 4)
    losses_of(logits_of(1.0), layer, objective)["loss"].backward()
    return layer.weight.grad[: layer.columns], layer.weight.grad[layer.columns :]


def test_padding_has_no_gradient() -> None:
    objective = Objective(0.1, 1e-2)
    parts = run_ranks(lambda: weight_gradients(world_axis("tp"), objective), 3)
    whole, none = weight_gradients(single("tp"), objective)
    assert not len(none)
    torch.testing.assert_close(torch.cat([real for real, _ in parts]), whole)
    padding = torch.cat([padded for _, padded in parts])
    assert len(padding) == 4
    assert not padding.any()


def test_log_probabilities_reach_every_part_of_the_vocabulary() -> None:
    """Of chosen tokens, from the split logits and from whole ones: the gradient of whole logits."""
    labels, advantages = torch.arange(T) % V, SCALE * torch.tensor(WEIGHTS, dtype=F64)

    def on_this_rank(axis: Axis) -> list[Tensor]:
        layer, z = identity_head(V, axis, 4), logits_of(1.0).requires_grad_()
        gathered = F.log_softmax(layer.logits(z), -1)[range(T), labels]
        both = layer.log_probabilities(z, labels), gathered
        gradients = [torch.autograd.grad((advantages * x).sum(), z)[0] for x in both]
        return [*(x.detach() for x in both), *gradients]

    whole = logits_of(1.0).requires_grad_()
    chosen = F.log_softmax(whole, -1)[range(T), labels]
    (gradient,) = torch.autograd.grad((advantages * chosen).sum(), whole)
    for found in run_ranks(lambda: on_this_rank(world_axis("tp")), 2):
        for x, wanted in zip(found, (chosen, chosen, gradient, gradient), strict=True):
            torch.testing.assert_close(x, wanted.detach(), rtol=1e-11, atol=1e-12)


def test_smoothing_is_over_the_real_vocabulary_in_narrow_types() -> None:
    """Sums over ranks are taken in float32 of bfloat16 logits."""

    def loss(axis: Axis) -> Tensor:
        layer = identity_head(V, axis, 4).bfloat16()
        return losses_of(logits_of(3.0).bfloat16(), layer, Objective(0.1, 1e-2))["loss"].detach()

    (first, second), alone = run_ranks(lambda: loss(world_axis("tp")), 2), loss(single("tp"))
    assert first.dtype == torch.float32
    assert torch.equal(first, second)
    wanted = plainly(logits_of(3.0).bfloat16().double(), Objective(0.1, 1e-2))["loss"]
    for found in (first, alone):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0)


def test_a_loss_over_rows_of_all_ranks_is_refused() -> None:
    """Logits of the whole vocabulary on every rank would be summed over the ranks once more."""

    def whole_on_every_rank() -> None:
        layer = identity_head(V, world_axis("tp"))
        layer.weight = torch.nn.Parameter(all_gather(layer.weight, layer.tp.axis).detach())
        with pytest.raises(ValueError, match="4 rows of the head's 8, not 8"):
            losses_of(logits_of(1.0), layer, Objective())

    run_ranks(whole_on_every_rank, 2)
