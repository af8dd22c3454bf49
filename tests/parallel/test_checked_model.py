"""Whole models under the checking mode: right over every axis, and planted mistakes are refused."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from parity.matrix import MODELS
from reference import bridge
from reference.plain import Document
from torch import Tensor

import penteract
from penteract import collectives as c
from penteract.checking import KindError, checking, typed
from penteract.collectives import I, P, R, S, declare
from penteract.config import resolve
from penteract.config_file import from_dict
from penteract.families import model_spec
from penteract.mesh import Axis, single
from penteract.nn import loss
from penteract.nn.attention import Attention
from penteract.nn.model import Stage
from penteract.nn.norm import Norm
from penteract.nn.sequences import MicroBatch, Training
from penteract.parallel import tensor
from penteract.parallel.context.exchanges import Comm, exchange_of
from penteract.parallel.context.kernels import Backend, kernel_of
from penteract.parallel.parameters import declared_parameters, materialise, parameter_kinds
from penteract.parallel.tensor import ColumnLinear, RowLinear, TensorParallel, linear
from penteract.testing import run_ranks, world_axis

DUAL = {"S": S(), "R": P, "I": I}
DATA = single("dp-cp")
DOCUMENTS = [
    Document([0, 2, 5, 6], [2, 5, 6, 6], [1.0, 0.0, 1.0, 2.0]),
    Document([6, 1], [1, 0], [1.0, 1.0]),
]


def build(
    name: str,
    axis: Axis,
    backend: Backend = "flash",
    *,
    sequence: bool = False,
    **options: Any,
) -> Stage:
    model = {**MODELS[name], "dropout": 0.1}
    config = from_dict({"model": model, "data": {"seq": 8}, "train": {"steps": 1}})
    spec, tp = model_spec(resolve(config)), TensorParallel(axis, sequence)
    stage = Stage(spec, tp, dtype=torch.float64, **options)
    materialise(stage, seed=0)
    for module in stage.modules():
        if isinstance(module, Attention):
            module.kernel = kernel_of(backend)
    return stage


def forward(model: Stage, batch: MicroBatch) -> Tensor:
    return model(batch, scale=torch.tensor(0.25), training=Training(0, 1, 0)).terms["loss"]


def step(model: Stage) -> tuple[float, dict[str, Tensor]]:
    loss = forward(model, bridge.micro_batch(DOCUMENTS))
    loss.backward()
    return loss.item(), {e.name: e.parameter.grad for e in declared_parameters(model)}


def checked_step(name: str, axis: Axis, backend: Backend = "flash", **options: Any) -> None:
    """No call is refused, the types come out as declared, and no number changes."""
    model = build(name, axis, backend, **options)
    seeds = parameter_kinds(model, ["tp"])
    batch = bridge.micro_batch(DOCUMENTS)
    with checking(seeds):
        loss = forward(model, batch)
        assert typed(loss) == {"tp": I}
        loss.backward()
        for label, (parameter, kinds) in seeds.items():
            assert typed(parameter.grad) == {"tp": DUAL[kinds["tp"].letter]}, label
        assert typed(model.logits(batch.tokens, batch.sequences)) == {"tp": I}
    plain_loss, plain = step(build(name, axis, backend, **options))
    assert loss.item() == plain_loss
    assert all(torch.equal(parameter.grad, plain[label]) for label, (parameter, _) in seeds.items())


@pytest.mark.parametrize("backend", ["flash", "plain"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_typed_rightly_at_size_1(name: str, backend: Backend) -> None:
    checked_step(name, single("tp"), backend)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("n", [2, 3])
def test_a_step_is_typed_rightly_on_ranks(n: int, sequence: bool) -> None:
    """3 ranks divide neither heads nor key/value heads, so these are held whole."""

    def steps() -> None:
        for name in MODELS if n == 2 else ("llama", "llama-tied-bias"):
            checked_step(name, world_axis("tp"), sequence=sequence)
        options = {"recompute": ("layer",), "vocab_multiple": 4}
        checked_step("llama", world_axis("tp"), sequence=sequence, **options)

    run_ranks(steps, n)


def test_over_the_data_the_loss_is_a_part_of_the_sum() -> None:
    """Parameters are R over the data and the batch is split, so every gradient is P there."""
    model = build("llama", single("tp"))
    seeds = parameter_kinds(model, ["tp", "dp", "cp"])
    batch = bridge.micro_batch(DOCUMENTS)
    with checking(seeds):
        with pytest.raises(KindError, match="backward over 'cp' from R"):
            forward(model, batch).backward()
        declare(batch.tokens, DATA, S(0))
        loss = forward(model, batch)
        assert typed(loss) == {"tp": I, "dp": S(), "cp": S()}
        loss = declare(loss, DATA, P)
        loss.backward()
        for parameter, kinds in seeds.values():
            gradient = {axis: DUAL[kind.letter] for axis, kind in kinds.items()}
            assert typed(parameter.grad) == gradient
            assert gradient["dp"] == P


def test_context_ranks_hold_parts_of_the_sum() -> None:
    """Every exchange takes rows that are split over the axis, and gives such."""

    def steps() -> None:
        axis = world_axis("cp")
        batch = bridge.micro_batch(DOCUMENTS, axis)
        for comm in get_args(Comm):
            model = build("llama", single("tp"), exchange=exchange_of(comm, axis))
            with checking(parameter_kinds(model, ["tp", "cp"])):
                declare(batch.tokens, axis, S(0))
                loss = forward(model, batch)
                assert typed(loss) == {"tp": I, "cp": S()}
                declare(loss, axis, P).backward()
            with (
                checking(parameter_kinds(model, ["tp", "cp"])),
                pytest.raises(KindError, match=r"Attention over 'cp' takes S\(0\).*found R"),
            ):
                forward(model, bridge.micro_batch(DOCUMENTS, axis))

    run_ranks(steps, 2)


def test_seeds_follow_the_placements() -> None:
    seeds = parameter_kinds(build("llama", single("tp")), ["tp", "dp"])
    kinds = {label: kinds for label, (_, kinds) in seeds.items()}
    fused = "|".join(f"layers.0.attention.{x}.weight" for x in "qkv")
    assert kinds[fused] == {"tp": S(), "dp": R}
    assert kinds["layers.0.attention.q_norm.weight"] == {"tp": R, "dp": R}
    assert kinds["norm.weight"] == {"tp": I, "dp": R}


def test_tied_weights_are_one_seed() -> None:
    model = build("gpt2", single("tp"))
    assert len(parameter_kinds(model, ["tp"])) == len(list(model.parameters()))


def test_no_function_hides_from_the_mode() -> None:
    package = Path(penteract.__file__).parent
    found = [p.name for p in package.rglob("*.py") if "autograd.Function)" in p.read_text()]
    assert found == ["collectives.py"]  # Operation itself, and what the collectives are made of


Change = Callable[[pytest.MonkeyPatch], None]


def instead(owner: Any, name: str, value: Any) -> Change:
    return lambda patch: patch.setattr(owner, name, value)


def row_bias_inside(self: RowLinear, x: Tensor) -> Tensor:
    return self.tp.sum(linear(x, self.weight, self.bias, self.gradients))


def row_bias_before(self: RowLinear, x: Tensor) -> Tensor:
    y = declare(linear(x, self.weight, None, self.gradients), self.tp.axis, P)
    return c.all_reduce(y if self.bias is None else y + self.bias, self.tp.axis)


def row_not_reduced(self: RowLinear, x: Tensor) -> Tensor:
    return declare(linear(x, self.weight, None, self.gradients), self.tp.axis, P)


def twice(x: Tensor, axis: Axis) -> Tensor:
    return c.all_reduce(c.all_reduce(x, axis), axis)


def product_without_tp(self: ColumnLinear, x: Tensor, sizes: Any = None) -> Tensor:
    return linear(x, self.weight, self.bias, self.gradients)


def loss_of_gathered(self: loss.Head, x: Tensor, *rest: Any) -> dict[str, Tensor]:
    """Every rank makes the logits of the whole vocabulary, which the loss would sum up again."""
    whole = c.all_gather(self.weight, self.tp.axis, sizes=self.sizes)
    return {"loss": loss._HeadLoss.apply(x, whole, self, *rest)[0]}


def loss_of_replicated(self: loss.Head, x: Tensor, *rest: Any) -> dict[str, Tensor]:
    x = c.replicate(x, self.tp.axis)
    return {"loss": loss._HeadLoss.apply(x, self.weight, self, *rest)[0]}


def never(*_: Any) -> Tensor:
    raise AssertionError("computed")


def norms_over_heads_replicated(patch: pytest.MonkeyPatch) -> None:
    original = Norm.__init__

    def without_heads(self: Norm, *args: Any, heads: Any = None) -> None:
        original(self, *args)

    patch.setattr(Norm, "__init__", without_heads)


def row_weight_replicated(patch: pytest.MonkeyPatch) -> None:
    original = RowLinear.declare

    def declare_wrongly(self: Any, attribute: str, placement: Any, dtype: torch.dtype) -> None:
        axes = {**placement.axes, "tp": "replicated"}
        original(self, attribute, dataclasses.replace(placement, axes=axes), dtype)

    patch.setattr(RowLinear, "declare", declare_wrongly)


def gathered_logits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loss.Head, "forward", loss_of_gathered)
    patch.setattr(loss._HeadLoss, "forward", never)


def same(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


MISTAKES: dict[str, tuple[str, Change, str]] = {
    "no replicate before a column layer": (
        "llama", instead(ColumnLinear, "forward", product_without_tp),
        r"Linear over 'tp' mixes I \[6, 12\] with S 'layers\.0\.attention\.q\.weight.*replicate",
    ),
    "bias of a row layer inside its product": (
        "gpt2", instead(RowLinear, "forward", row_bias_inside),
        r"Linear over 'tp' mixes I 'layers\.0\.attention\.o\.bias' \[12\] with S",
    ),
    "bias of a row layer before the reduction": (
        "gpt2", instead(RowLinear, "forward", row_bias_before),
        r"add over 'tp' adds I 'layers\.0\.attention\.o\.bias' \[12\] to the partial sum P",
    ),
    "a row layer reduced twice": (
        "llama", instead(tensor, "all_reduce", twice),
        r"all_reduce over 'tp' takes P and gives I, but found I \[6, 12\].*leave the call out",
    ),
    "a row layer not reduced": (
        "llama", instead(RowLinear, "forward", row_not_reduced),
        r"add over 'tp' adds I \[6, 12\] to the partial sum P",
    ),
    "an embedding not reduced": (
        "gpt2", instead(tensor, "all_reduce", same),
        r"add over 'tp' adds I \[6, 12\] to the partial sum P",
    ),
    "gathered logits in the loss": (
        "llama", gathered_logits,
        r"HeadLoss over 'tp' takes I and S\(0\) and gives I, but found R \[13, 12\] for the S\(0\)",
    ),
    "a stream that is replicated before the loss": (
        "llama", instead(loss.Head, "forward", loss_of_replicated),
        r"HeadLoss over 'tp' takes I and S\(0\) and gives I, but found R \[6, 12\] for the I",
    ),
    "norms over heads declared replicated": (
        "llama", norms_over_heads_replicated,
        r"RMSNorm over 'tp' mixes I 'layers\.0\.attention\.q_norm\.weight' \[6\] with S",
    ),
    "a row layer's weight declared replicated": (
        "llama", row_weight_replicated,
        r"Linear over 'tp' mixes I 'layers\.0\.attention\.o\.weight' \[12, \d+\] with S",
    ),
}  # fmt: skip


def refused(case: str, axis: Axis) -> None:
    name, change, message = MISTAKES[case]
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        model = build(name, axis)
        batch = bridge.micro_batch(DOCUMENTS)
        with (
            checking(parameter_kinds(model, ["tp"])),
            pytest.raises(KindError, match=message),
        ):
            forward(model, batch)


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_refused_at_size_1(case: str) -> None:
    refused(case, single("tp"))


def test_mistakes_are_refused_on_two_ranks() -> None:
    def all_of_them() -> None:
        for case in MISTAKES:
            refused(case, world_axis("tp"))

    run_ranks(all_of_them, 2)
