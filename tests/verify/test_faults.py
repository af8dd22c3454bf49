"""Faults that layouts invite, planted in the package: `verify` says where each begins.

A fault acts on ranks of a layout only, so the reference, which is the same code, is right.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penteract.config import Config, resolve
from penteract.config_file import from_dict
from penteract.mesh import Axis
from penteract.nn import loss as loss_module
from penteract.nn.loss import Head
from penteract.optim.optimizer import Optimizer
from penteract.parallel import buffers as buffers_module
from penteract.parallel import tensor as tensor_module
from penteract.parallel.tensor import RowLinear, linear
from penteract.pending import Pending
from penteract.train import run as run_module
from penteract.train.run import Run
from penteract.verify.layouts import parse_layout
from penteract.verify.verify import Trained, prepare, train_reference, verify_layout

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]

MODEL = {
    "family": "llama", "layers": 2, "hidden": 12, "ffn": 10, "heads": 4, "kv_heads": 1,
    "head_size": 6, "vocab": 13, "norm_eps": 1e-2, "bias": True, "qk_norm": True, "dropout": 0.1,
}  # fmt: skip


def config() -> Config:
    values = {
        "model": MODEL,
        "data": {"seq": 5},
        "optim": {"lr": 1e-2, "schedule": "constant"},
        "train": {"steps": 2, "global_batch": 4, "micro_batch": 1, "label_smoothing": 0.1},
    }
    return prepare(resolve(from_dict(values)), dtype="float64", steps=1)[0]


def done(x: Tensor) -> Pending:
    return Pending((), lambda: x)


# --- data parallelism


def missing_bucket(patch: Patch) -> None:
    """The first bucket of a step is not reduced."""
    start = buffers_module.start_all_reduce_
    seen: list[Tensor] = []

    def skip_first(x: Tensor, axis: Axis) -> Pending:
        seen.append(x)
        return done(x) if axis.size > 1 and len(seen) == 1 else start(x, axis)

    patch.setattr(buffers_module, "start_all_reduce_", skip_first)


def local_count(patch: Patch) -> None:
    """Each rank divides by the number of its own tokens."""

    def totals(self: Run, *several: list[Tensor]) -> Tensor:
        local = [[torch.as_tensor(part).double() for part in parts] for parts in several]
        return torch.stack([torch.stack(parts).sum() for parts in local])

    patch.setattr(Run, "_totals", totals)


def local_dropout(patch: Patch) -> None:
    """Masks follow a rank's own number of the micro-batch."""
    training = run_module.Training

    class Local(training):  # type: ignore[misc, valid-type]
        def stream(self, name: str) -> str:
            return f"dropout/{self.step}/{self.micro_batch // 2 * 2}/{name}"

    def of(*what: Any) -> Any:
        alone = not torch.distributed.is_initialized()
        return training(*what) if alone else Local(*what)

    patch.setattr(run_module, "Training", of)


def unequal_replica(patch: Patch) -> None:
    """One rank's copy of the weights differs in the last bit after a step."""
    step = Optimizer.step

    def shifted(self: Optimizer, *arguments: Any) -> None:
        step(self, *arguments)
        owners = self.buffers.sharding.replicate
        if owners.size > 1 and owners.rank == 1:
            data = self.buffers.kinds[0].buckets[0].master
            data[0] = np.nextafter(data[0].item(), 10.0)

    patch.setattr(Optimizer, "step", shifted)


def lost_tensor(patch: Patch) -> None:
    """No rank says that it holds the second half of a layer's weight."""
    held = Run.gradients

    def gradients(self: Run) -> Any:
        for shard, view in held(self):
            if self.axis.size == 1 or shard.tensor != "layers.1.mlp.up.weight":
                yield shard, view

    patch.setattr(Run, "gradients", gradients)


# --- tensor and sequence parallelism


def input_not_summed(patch: Patch, module: Any) -> None:
    """The input gradient of `module`'s layers stays a part of a sum."""
    whole = module.input_gradient

    def partial(dy: Tensor, weight: Tensor, x: Tensor, tp: Any, sizes: Any) -> Any:
        return whole(dy, weight, x, None, sizes)

    patch.setattr(module, "input_gradient", partial)


def no_replicate(patch: Patch) -> None:
    """The input gradient of a column layer is not summed over the ranks."""
    input_not_summed(patch, tensor_module)


def norm_not_summed(patch: Patch) -> None:
    """Gradients of what is used on rows of the stream stay parts of a sum."""
    reduce = buffers_module.all_reduce_

    def skip(x: Tensor, axis: Axis, *more: Any) -> Tensor:
        return x if axis.name == "tp" else reduce(x, axis, *more)

    patch.setattr(buffers_module, "all_reduce_", skip)


def bias_before_the_sum(patch: Patch) -> None:
    """The bias of a row layer is added on every rank."""

    def forward(self: RowLinear, x: Tensor) -> Tensor:
        return self.tp.sum(linear(x, self.weight, self.bias, self.gradients))

    patch.setattr(RowLinear, "forward", forward)


def local_smoothing(patch: Patch) -> None:
    """Smoothing divides by the local vocabulary."""
    start = Head.__init__

    def init(self: Head, *arguments: Any, **options: Any) -> None:
        start(self, *arguments, **options)
        self.vocab = self.columns

    patch.setattr(Head, "__init__", init)


def loss_times_tp(patch: Patch) -> None:
    """A factor of the number of tensor ranks in the loss."""
    loss = Head.forward

    def more(self: Head, *arguments: Any, **options: Any) -> Any:
        return {k: v * self.tp.axis.size for k, v in loss(self, *arguments, **options).items()}

    patch.setattr(Head, "forward", more)


def head_not_summed(patch: Patch) -> None:
    """The input gradient of the head is not summed over the ranks."""
    input_not_summed(patch, loss_module)


def embedding_twice(patch: Patch) -> None:
    """The gradient of the embedding, the last of backward, is doubled on tensor ranks."""
    accumulate = buffers_module.Buffers.accumulate

    def more(self: Any, parameter: torch.nn.Parameter, write: Callable[..., None]) -> None:
        accumulate(self, parameter, write)
        slot = self._slots[id(parameter)]
        if slot.entry.name == "embed.weight" and self.more_axes["tp"].size > 1:
            write(slot.gradient, False)

    patch.setattr(buffers_module.Buffers, "accumulate", more)


# Fault, layout, and how the first difference begins and ends.
FAULTS: tuple[tuple[Fault, str, str, str], ...] = (
    (missing_bucket, "dp=2", "gradient of layers.1.attention.k_norm.weight at [", ""),
    (local_count, "dp=2", "loss, rank 0, step 1: ", "(twice; dp is 2)"),
    (local_dropout, "dp=2", "activation of embed, rank 1, token ", ""),
    (unequal_replica, "dp=2", "weights after the step of ", "bits of these copies differ"),
    (
        lost_tensor,
        "dp=2",
        "gradient of layers.1.mlp.up.weight at [0:10, 0:12], step 1: ",
        "no rank holds it",
    ),
    (no_replicate, "tp=2", "gradient of the output of layers.1.mlp_norm, rank 0, ", ""),
    (head_not_summed, "tp=2", "gradient of the output of norm, rank 0, ", ""),
    (norm_not_summed, "tp=2,sp=true", "gradient of norm.weight at [", ""),
    (norm_not_summed, "tp=2", "gradient of layers.1.attention.k_norm.weight at [", ""),
    (embedding_twice, "tp=2", "gradient of embed.weight at [", "(twice; tp is 2)"),
    (embedding_twice, "tp=2,sp=true,recompute=layer", "gradient of embed.weight at [", ""),
    (
        bias_before_the_sum,
        "tp=2",
        "activation of layers.0.attention.o, rank 0, token 0, ",
        "(about twice; tp is 2)",
    ),
    (local_smoothing, "tp=2", "loss, rank 0, step 1: ", ""),
    (loss_times_tp, "tp=2", "loss, rank 0, step 1: ", "(twice; tp is 2)"),
)


@pytest.fixture(scope="module")
def trained() -> Trained:
    return train_reference(config())


@pytest.mark.parametrize(
    ("fault", "layout", "begins", "ends"), FAULTS, ids=lambda x: getattr(x, "__name__", None)
)
def test_a_fault_is_found_where_it_begins(
    fault: Fault, layout: str, begins: str, ends: str, trained: Trained, monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    result = verify_layout(parse_layout(layout, config()), trained)
    assert not result.verdict.ok
    said = result.first_difference or ""
    assert said.startswith(begins), said
    assert said.endswith(ends), said


@pytest.mark.parametrize("layout", ["dp=2", "tp=2", "tp=2,sp=true"])
def test_without_a_fault_there_is_none(layout: str, trained: Trained) -> None:
    result = verify_layout(parse_layout(layout, config()), trained)
    assert result.verdict.ok
    assert result.first_difference is None


def test_a_crash_is_a_difference_that_names_the_rank(trained: Trained, monkeypatch: Patch) -> None:
    update = Run.update

    def fail(self: Run) -> Any:
        if self.axis.size > 1 and self.axis.rank == 1:
            raise ZeroDivisionError("planted")
        return update(self)

    monkeypatch.setattr(Run, "update", fail)
    result = verify_layout(parse_layout("dp=2", config()), trained)
    assert result.first_difference == "rank 1 of 2 failed: ZeroDivisionError: planted"
    assert result.verdict.loss == float("inf")
    assert not result.verdict.ok


@pytest.mark.slow
def test_a_hang_is_a_difference(trained: Trained, monkeypatch: Patch) -> None:
    update = Run.update

    def sleep(self: Run) -> Any:
        if self.axis.size > 1 and self.axis.rank == 1:
            time.sleep(600)
        return update(self)

    monkeypatch.setattr(Run, "update", sleep)
    monkeypatch.setattr("penteract.verify.verify.patience_s", lambda *_: 5.0)
    result = verify_layout(parse_layout("dp=2", config()), trained)
    assert not result.verdict.ok
    assert (result.first_difference or "").startswith(("no answer within 5 s", "rank 0 of 2"))
