"""Faults that tensor and sequence parallelism invite: `test_tensor_parallel` would see each."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity.matrix import Cell
from parity.training import first_difference, reference
from torch import Tensor

from penteract.collectives import done
from penteract.mesh import Axis
from penteract.nn.loss import Head
from penteract.nn.sequences import Rows, Sequences
from penteract.parallel import buffers as buffers_module
from penteract.parallel import tensor as tensor_module
from penteract.parallel.tensor import RowLinear, linear
from penteract.placement import AxisUse

TP = Cell(
    "six-heads", dp=1, tp=2, micro_batch=2, global_batch=3, bucket_bytes=256, dropout=0.1, seq=7,
    label_smoothing=0.1, z_loss=1e-2,
)  # fmt: skip
SP = dataclasses.replace(TP, sp=True)
MQA = dataclasses.replace(TP, model="llama-tied-bias")  # one key/value head, on both ranks

Fault = Callable[[pytest.MonkeyPatch], None]


def no_sum_of_input_gradients(patch: pytest.MonkeyPatch) -> None:
    """A column layer's input gradient stays this rank's part."""
    patch.setattr(tensor_module, "start_all_reduce_", lambda x, axis: done(x))


def partial_gradients_not_summed(patch: pytest.MonkeyPatch) -> None:
    """Norms, biases and positions on rows of the stream; norms over local heads."""
    patch.setattr(buffers_module, "_sum_together", lambda flats, axis: None)


def bias_on_every_rank(patch: pytest.MonkeyPatch) -> None:
    def forward(self: RowLinear, x: Tensor) -> Tensor:
        return self.tp.sum(linear(x, self.weight, self.bias, self.gradients))

    patch.setattr(RowLinear, "forward", forward)


def smoothing_over_the_local_vocabulary(patch: pytest.MonkeyPatch) -> None:
    init = Head.__init__

    def local(self: Head, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        self.vocab = self.columns

    patch.setattr(Head, "__init__", local)


def padding_in_the_softmax(patch: pytest.MonkeyPatch) -> None:
    """Padded rows are zero, so their logits are 0 and not minus infinity."""
    init = Head.__init__

    def padded(self: Head, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        self.columns = self.placements["weight"].shape[0]

    patch.setattr(Head, "__init__", padded)


def loss_times_tp(patch: pytest.MonkeyPatch) -> None:
    loss = Head.forward

    def more(self: Head, *arguments: Any) -> dict[str, Tensor]:
        return {k: v * self.tp.axis.size for k, v in loss(self, *arguments).items()}

    patch.setattr(Head, "forward", more)


def gradients_of_the_loss_times_tp(patch: pytest.MonkeyPatch) -> None:
    """Where the loss is a sum over ranks rather than the same on each: the value is right."""
    loss = Head.forward

    def more(self: Head, *arguments: Any) -> dict[str, Tensor]:
        n, terms = self.tp.axis.size, loss(self, *arguments)
        return {k: n * v - (n - 1) * v.detach() for k, v in terms.items()}

    patch.setattr(Head, "forward", more)


def masks_by_local_row(patch: pytest.MonkeyPatch) -> None:
    part = Sequences.part

    def local(self: Sequences, axis: Axis) -> Rows:
        whole = part(self, axis)
        return dataclasses.replace(whole, rows=torch.arange(len(whole.rows)))

    patch.setattr(Sequences, "part", local)


def shared_heads_not_summed(patch: pytest.MonkeyPatch) -> None:
    """A key/value head that several ranks hold has the gradient of one rank's query heads."""
    declared = tensor_module.data_partial

    def replicated(tp: AxisUse) -> dict[str, AxisUse]:
        return declared("replicated" if tp == "partial" else tp)

    patch.setattr(tensor_module, "data_partial", replicated)


def input_not_gathered_again(patch: pytest.MonkeyPatch) -> None:
    """A weight's gradient is made of this rank's rows, padded by rows of another tensor."""
    again = tensor_module.input_gradient

    def local(dy: Tensor, weight: Tensor, x: Tensor, tp: Any, sizes: Any) -> Any:
        dx, rows = again(dy, weight, x, tp, sizes)
        return dx, torch.cat([x, rows])[: len(rows)]

    patch.setattr(tensor_module, "input_gradient", local)


FAULTS: tuple[tuple[Fault, Cell, str], ...] = (  # and the first quantity in which each shows
    (no_sum_of_input_gradients, TP, "gradients"),
    (partial_gradients_not_summed, SP, "gradients"),
    (partial_gradients_not_summed, TP, "gradients"),
    (bias_on_every_rank, TP, "loss"),
    (bias_on_every_rank, SP, "loss"),
    (smoothing_over_the_local_vocabulary, TP, "loss"),
    (padding_in_the_softmax, dataclasses.replace(TP, vocab_multiple=4), "loss"),
    (loss_times_tp, TP, "loss"),
    (gradients_of_the_loss_times_tp, TP, "gradients"),
    (masks_by_local_row, SP, "loss"),
    (shared_heads_not_summed, MQA, "gradients"),
    (input_not_gathered_again, SP, "gradients"),
)


@pytest.mark.parametrize(
    ("fault", "cell", "shows"), FAULTS, ids=[f"{f.__name__}-sp={c.sp}" for f, c, _ in FAULTS]
)
def test_a_planted_fault_is_seen(
    fault: Fault, cell: Cell, shows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference(cell)  # before anything is broken
    fault(monkeypatch)
    assert first_difference(cell) == shows


@pytest.mark.parametrize("cell", [TP, SP, MQA], ids=["tp", "sp", "mqa"])
def test_without_a_fault_there_is_none(cell: Cell) -> None:
    assert first_difference(cell) is None
