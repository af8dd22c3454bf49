"""Weights cut over tensor ranks give the loss, the outputs and the gradients of the whole."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity.matrix import MODELS
from reference import bridge
from reference.plain import Document, Weights
from torch import Tensor, nn

from penteract.collectives import all_reduce_, done
from penteract.config import resolve
from penteract.config_file import from_dict
from penteract.families import model_spec
from penteract.mesh import Axis, single
from penteract.nn import loss as loss_module
from penteract.nn.build import Build
from penteract.nn.embedding import Embedding
from penteract.nn.loss import Head
from penteract.nn.mlp import MLP, MLPSpec
from penteract.nn.model import Stage
from penteract.optim.norm import gradient_norm
from penteract.parallel import buffers as buffers_module
from penteract.parallel import tensor as tensor_module
from penteract.parallel.buckets import Sharding
from penteract.parallel.buffers import Buffers
from penteract.parallel.parameters import declared_parameters
from penteract.parallel.tensor import TensorParallel
from penteract.placement import Init
from penteract.testing import run_ranks, world_axis

F64 = torch.float64
NORMAL = Init("normal", 0.4)
DOCUMENTS = [
    Document([0, 12, 5, 7], [12, 5, 7, 6], [1.0, 0.0, 1.0, 2.0]),
    Document([6, 1], [1, 0], [1.0, 1.0]),
]
Part = tuple[float, Tensor, bridge.Fragments]  # loss, output, gradients


def logical_gradients(parts: list[Part]) -> Weights:
    return bridge.logical([fragment for _, _, found in parts for fragment in found])


def finish(model: nn.Module, axis: Axis, loss: Tensor, out: Tensor) -> Part:
    """Backward; gradients that are partial over tp are summed, as their placement says."""
    loss.backward()
    for entry in declared_parameters(model):
        if "tp" in entry.placement.partial_axes:
            all_reduce_(entry.parameter.grad, axis)
    return loss.item(), out.detach(), bridge.fragments(bridge.plain_gradients(model))


def prepare(model: nn.Module) -> None:
    """Give every rank its part of the same random logical weights."""
    for entry in declared_parameters(model):
        entry.replace(torch.empty(entry.placement.shape, dtype=F64))
    bridge.write(bridge.parameters(model), bridge.random_weights(bridge.parameters(model)))


def mlp(axis: Axis, activation: Any) -> Part:
    model = MLP(
        "mlp", 6, MLPSpec(7, activation, True), Build(TensorParallel(axis), F64, NORMAL, NORMAL)
    )
    prepare(model)
    generator = torch.Generator().manual_seed(1)
    x, c = torch.randn(2, 5, 6, generator=generator, dtype=F64).unbind()
    x.requires_grad_()
    y = model(x)
    part = finish(model, axis, (y * c).sum(), y)
    return part[0], torch.cat([part[1], x.grad]), part[2]


def ends(axis: Axis, tied: bool, gain: float = 1.0) -> Part:
    """Embedding, learned positions, head and loss, over a vocabulary that no axis divides."""
    build = Build(TensorParallel(axis), F64, NORMAL, NORMAL)
    embedding = Embedding("embed", 13, 6, build, positions=5, dropout=0.0)
    tied_to = embedding if tied else None
    head = Head("head", 13, 6, build, tied_to=tied_to)
    model = nn.ModuleList([embedding, head])
    prepare(model)
    batch = bridge.micro_batch(DOCUMENTS)
    x = embedding(batch.tokens, batch.sequences, None)
    x = x * gain  # logits of hundreds: without their maximum taken off, exp overflows
    loss = head(x, batch, torch.tensor(0.25))["loss"]
    return finish(model, axis, loss, head.logits(x))


def whole_model(axis: Axis, name: str) -> Part:
    config = from_dict({"model": MODELS[name], "data": {"seq": 8}, "train": {"steps": 1}})
    model = Stage(model_spec(resolve(config)), TensorParallel(axis), dtype=F64)
    prepare(model)
    batch = bridge.micro_batch(DOCUMENTS)
    logits = model.logits(batch.tokens, batch.sequences)
    return finish(model, axis, model(batch, scale=torch.tensor(0.25)).terms["loss"], logits)


CASES: dict[str, tuple[Callable[..., Part], Any]] = {
    "mlp swiglu": (mlp, "swiglu"),
    "mlp gelu": (mlp, "gelu"),
    "ends": (ends, False),
    "ends tied": (ends, True),
    "ends of large logits": (functools.partial(ends, gain=3000.0), False),
    "llama": (whole_model, "llama"),
}


def compare(case: str, n: int) -> tuple[float, str]:
    """The largest difference from one rank; replicas that differ at all are infinitely far."""
    build, argument = CASES[case]
    parts = run_ranks(lambda: build(world_axis("tp"), argument), n)
    loss, out, _ = one = build(single("tp"), argument)
    if any(part[0] != parts[0][0] or not torch.equal(part[1], parts[0][1]) for part in parts):
        return float("inf"), "ranks differ"
    copies: dict[Any, Tensor] = {}
    for _, _, found in parts:
        for fragment, values in found:
            first = copies.setdefault((fragment.tensor, fragment.box), values)
            if not torch.equal(values, first):
                return float("inf"), f"copies of {fragment.tensor} differ"
    worst = bridge.worst_difference(logical_gradients(parts), logical_gradients([one]))
    found, wanted = {"out": parts[0][1]}, {"out": out}
    return max(worst, bridge.worst_difference(found, wanted), (abs(loss - parts[0][0]), "loss"))


@pytest.mark.parametrize(
    ("case", "n"), [(case, n) for case in CASES for n in (2, 3) if (case, n) != ("llama", 3)]
)
def test_split_weights_equal_the_whole(case: str, n: int) -> None:
    worst, where = compare(case, n)
    assert worst <= 1e-12, f"{where}: {worst:.3g}"


@pytest.mark.parametrize(
    ("module", "name", "case"),
    [
        (tensor_module, "start_all_reduce_", "mlp swiglu"),
        (tensor_module, "all_reduce", "mlp gelu"),
        (tensor_module, "start_all_reduce_", "ends"),
        (loss_module, "all_reduce_", "ends tied"),
    ],
)
def test_a_collective_that_is_missing_is_seen(
    module: Any, name: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = done if name.startswith("start") else lambda x: x
    monkeypatch.setattr(module, name, lambda x, *_: nothing(x))
    assert compare(case, 2)[0] > 1e-3


def test_buffers_and_the_norm_follow_the_placement() -> None:
    """Norms over local heads are summed over tp; the norm counts split parts all, replicas once."""

    def norm_of(axis: Axis) -> tuple[float, bridge.Fragments]:
        config = from_dict({"model": MODELS["llama"], "data": {"seq": 8}, "train": {"steps": 1}})
        model = Stage(model_spec(resolve(config)), TensorParallel(axis), dtype=F64)
        buffers = Buffers(model, Sharding.whole(single("dp-cp")), seed=0, more_axes=[axis])
        bridge.set_owned(buffers, "master", bridge.random_weights(bridge.placements(buffers)))
        buffers.begin()
        loss = model(bridge.micro_batch(DOCUMENTS), scale=torch.tensor(0.25)).terms["loss"]
        buffers.begin_backward(last=True)
        loss.backward()
        buffers.end_backward()
        assert buffers.finish() == []
        found = bridge.owned(buffers, "own_gradient")
        return gradient_norm(buffers, {"tp": axis}).item(), found

    parts = run_ranks(lambda: norm_of(world_axis("tp")), 2)
    norm, wanted = norm_of(single("tp"))
    assert [part[0] for part in parts] == pytest.approx([norm, norm], rel=1e-12)
    found = bridge.logical([fragment for _, fragments in parts for fragment in fragments])
    bridge.assert_close(found, bridge.logical(wanted), 1e-12)
    squares = sum(x.square().sum() for x in bridge.logical(wanted).values())
    assert norm == pytest.approx(squares.sqrt().item(), rel=1e-12)


@pytest.mark.parametrize("sequence", [False, True])
def test_gradients_of_norms_in_bfloat16_are_summed_in_float32(
    sequence: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With sequence parallelism of every norm, without it of those over local heads."""
    together = buffers_module._sum_together

    def on_this_rank() -> tuple[list[Tensor], list[Tensor]]:
        parts: list[Tensor] = []

        def keep(flats: list[Tensor], axis: Axis) -> None:
            parts.extend(x.clone() for x in flats)
            together(flats, axis)

        monkeypatch.setattr(buffers_module, "_sum_together", keep)
        axis = world_axis("tp")
        config = from_dict({"model": MODELS["llama"], "data": {"seq": 8}, "train": {"steps": 1}})
        tp, dtype = TensorParallel(axis, sequence), torch.bfloat16
        model = Stage(model_spec(resolve(config)), tp, dtype=dtype)
        buffers = Buffers(model, Sharding.whole(single("dp-cp")), seed=0, more_axes=[axis])
        buffers.begin()
        buffers.begin_backward(last=True)
        model(bridge.micro_batch(DOCUMENTS), scale=torch.tensor(0.25)).terms["loss"].backward()
        buffers.finish()
        return parts, [b.gradient for b in buffers.buckets if "tp" in b.kind.more_axes]

    (first, found), (second, _) = run_ranks(on_this_rank, 2)
    assert found
    for a, b, total in zip(first, second, found, strict=True):
        assert total.dtype == torch.float32
        assert torch.equal(total, a + b)
        assert not torch.equal(total, (a.bfloat16() + b.bfloat16()).float()), "bfloat16 would do"
