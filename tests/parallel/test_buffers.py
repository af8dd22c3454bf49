"""Flat buffers: what they hold, when buckets are reduced, and what may be missing or stale."""

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penteract.mesh import Axis, single
from penteract.parallel import buffers as buffers_module
from penteract.parallel.buckets import ALIGNMENT, Sharding
from penteract.parallel.buffers import Buffers, Held
from penteract.parallel.parameters import Layer, Write
from penteract.parallel.tensor import ColumnLinear, Features, TensorParallel, replicated
from penteract.pending import Pending
from penteract.placement import Init
from penteract.testing import run_ranks, world_axis

F64 = torch.float64


class Scale(Layer):
    """x · weight, whose gradient autograd accumulates."""

    def __init__(self, name: str, n: int, dtype: torch.dtype = F64) -> None:
        super().__init__()
        self.declare("weight", replicated(name, (n,), Init("normal", 1.0)), dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Chain(nn.Module):
    """Scales applied in the order `forward_order`, where `skip` is not asked for."""

    def __init__(self, n: int, forward_order: Sequence[int], dtype: torch.dtype = F64) -> None:
        super().__init__()
        self.scales = nn.ModuleList(Scale(f"s{i}", n, dtype) for i in range(len(forward_order)))
        self.forward_order = forward_order

    def forward(self, x: Tensor, skip: Sequence[int] = ()) -> Tensor:
        for i in self.forward_order:
            x = x if i in skip else self.scales[i](x).sin()
        return x.sum()


ALONE = TensorParallel(single("tp"))
WHOLE = Sharding.whole(single("dp-cp"))


class Linears(nn.Module):
    """Two linear layers, whose weight gradients are closures and whose biases' autograd's."""

    def __init__(self) -> None:
        super().__init__()
        for name in "ab":
            layer = ColumnLinear(
                6, [Features(name, 6)], ALONE, bias=True, dtype=F64, init=Init("normal", 1.0)
            )
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).sin()).sin().sum()


def data(seed: int, shape: Sequence[int]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def backward(
    buffers: Buffers, model: Callable[..., Tensor], parts: list[Tensor], skips: Any = ()
) -> list[str]:
    """One step's gradients over micro-batches; the names without one."""
    buffers.begin()
    for i, x in enumerate(parts):
        loss = model(x, skips[i]) if skips else model(x)
        buffers.begin_backward(last=i == len(parts) - 1)
        loss.backward()
        buffers.end_backward()
    return buffers.finish()


def gradients(buffers: Buffers) -> dict[str, Tensor]:
    return {slot.entry.name: slot.gradient.clone() for slot in buffers.slots()}


def test_parameters_are_aligned_views_of_flat_storage_and_gaps_stay_zero() -> None:
    model = Linears()
    buffers = Buffers(model, WHOLE, seed=0)
    backward(buffers, model, [data(0, (4, 6))])
    for bucket in buffers.buckets:
        used = torch.zeros(bucket.parameters.shape, dtype=torch.bool)
        for slot in bucket.slots:
            start = slot.start - bucket.start
            stop = start + slot.numel
            assert start % ALIGNMENT == 0
            assert slot.entry.parameter.data_ptr() == bucket.parameters[start:].data_ptr()
            assert slot.gradient.data_ptr() == bucket.gradient[start:].data_ptr()
            assert not used[start:stop].any()
            used[start:stop] = True
        assert bucket.numel % ALIGNMENT == 0
        assert not bucket.parameters[~used].any()
        assert not bucket.gradient[~used].any()


@pytest.mark.parametrize("stage", [0, 3])
def test_buffers_go_with_their_model(stage: int) -> None:
    """The collector sees no cycle that passes through autograd's hooks."""
    model = Linears()
    buffers = Buffers(model, replace(WHOLE, stage=stage), seed=0)
    backward(buffers, model, [data(1, (2, 6))])
    gone = weakref.ref(buffers)
    del buffers, model
    gc.collect()
    assert gone() is None


def test_gradients_equal_plain_autograd_and_add_up_over_micro_batches() -> None:
    model, plain = Linears(), Linears()
    buffers = Buffers(model, WHOLE, seed=0)
    Buffers(plain, WHOLE, seed=0)
    for layer in (plain.a, plain.b):
        layer.gradients = None
    leaves = {name: p.detach().clone().requires_grad_() for name, p in plain.named_parameters()}
    parts = [data(i, (3, 6)) for i in range(3)]
    loss = sum(torch.func.functional_call(plain, leaves, (x,)) for x in parts)
    wanted = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    backward(buffers, model, parts)
    for name, found in gradients(buffers).items():
        torch.testing.assert_close(found, wanted[name], rtol=1e-12, atol=1e-12)


def test_nothing_reads_a_gradient_of_the_step_before() -> None:
    model = Linears()
    buffers = Buffers(model, WHOLE, seed=0)
    parts = [data(i, (3, 6)) for i in range(2)]
    backward(buffers, model, parts)
    first = gradients(buffers)
    for slot in buffers.slots():
        slot.gradient.fill_(float("nan"))
    backward(buffers, model, parts)
    assert all(torch.equal(x, first[name]) for name, x in gradients(buffers).items())


def test_a_bucket_is_reduced_while_backward_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets start in the order of backward, once each, and only in the last micro-batch."""
    model = Chain(4, [0, 1, 2, 3])
    buffers = Buffers(model, WHOLE, seed=0, bucket_bytes=8)
    unfinished: list[int] = []
    reached: list[int] = []
    start = buffers_module.start_all_reduce_

    def record(x: Tensor, axis: Axis) -> Any:
        reached.append([slot.gradient.data_ptr() for slot in order].index(x.data_ptr()))
        unfinished.append(sum(slot.pending for slot in buffers.slots()))
        return start(x, axis)

    order = list(buffers.slots())
    monkeypatch.setattr(buffers_module, "start_all_reduce_", record)
    backward(buffers, model, [data(i, (2, 4)) for i in range(3)])
    assert [slot.entry.name for slot in order] == ["s3", "s2", "s1", "s0"]
    assert reached == [0, 1, 2, 3]
    assert unfinished == [3, 2, 1, 0]


@pytest.mark.parametrize("accumulation", [1, 4])
def test_one_message_a_bucket_and_step(accumulation: int) -> None:
    def count() -> tuple[int, int]:
        axis = world_axis("dp-cp")
        model = Chain(40, [0, 1, 2])
        buffers = Buffers(model, Sharding.whole(axis), seed=0, bucket_bytes=600)
        before = axis.traffic.calls.get("all_reduce", 0)
        backward(buffers, model, [data(i, (2, 40)) for i in range(accumulation)])
        return axis.traffic.calls["all_reduce"] - before, len(buffers.buckets)

    assert run_ranks(count, 2) == [(2, 2), (2, 2)]


def test_a_rank_that_misses_a_parameter_does_not_change_the_order_of_messages() -> None:
    """Rank 1 never uses s2, rank 2 nothing in its last micro-batch; another order mixes values."""
    skips = {0: [(), ()], 1: [(2,), (2,)], 2: [(1,), (0, 1, 2, 3)]}
    sizes = 4

    def step() -> tuple[list[str], dict[str, Tensor]]:
        axis = world_axis("dp-cp")
        model = Chain(sizes, [0, 1, 2, 3])
        buffers = Buffers(model, Sharding.whole(axis), seed=0, bucket_bytes=8)
        parts = [data(10 * axis.rank + i, (2, sizes)).requires_grad_() for i in range(2)]
        names = backward(buffers, model, parts, skips[axis.rank])
        return names, gradients(buffers)

    results = run_ranks(step, 3)
    assert [names for names, _ in results] == [[], ["s2"], ["s1"]]
    model = Chain(sizes, [0, 1, 2, 3])
    alone = Buffers(model, WHOLE, seed=0)
    parts = [data(10 * rank + i, (2, sizes)) for rank in range(3) for i in range(2)]
    backward(
        alone, model, [x.requires_grad_() for x in parts], [s for r in range(3) for s in skips[r]]
    )
    for _, found in results:
        for name, wanted in gradients(alone).items():
            torch.testing.assert_close(found[name], wanted, rtol=1e-12, atol=1e-12)
            assert torch.equal(found[name], results[0][1][name])


def test_a_parameter_that_nobody_uses_is_named_and_counts_as_zero() -> None:
    model = Chain(4, [0, 1])
    buffers = Buffers(model, WHOLE, seed=0)
    for slot in buffers.slots():
        slot.gradient.fill_(7.0)
    assert backward(buffers, model, [data(0, (2, 4))], [(1,)]) == ["s1"]
    assert gradients(buffers)["s1"].count_nonzero() == 0


def test_a_forward_order_other_than_that_of_registration() -> None:
    """Backward completes buckets from the last to the first; sums are the same to the bit."""

    def five_steps(forward_order: list[int]) -> list[dict[str, Tensor]]:
        axis = world_axis("dp-cp")
        model = Chain(4, forward_order)
        buffers = Buffers(model, Sharding.whole(axis), seed=0, bucket_bytes=8)
        found = []
        for step in range(5):
            backward(buffers, model, [data(5 * step + axis.rank, (2, 4))])
            found.append(gradients(buffers))
            for slot in buffers.slots():
                slot.master.data.sub_(slot.gradient, alpha=0.1)
        return found

    by_rank = run_ranks(five_steps, 2, [3, 1, 0, 2])
    model = Chain(4, [3, 1, 0, 2])
    alone = Buffers(model, WHOLE, seed=0)
    for step in range(5):
        backward(alone, model, [data(5 * step + rank, (2, 4)) for rank in range(2)])
        for name, wanted in gradients(alone).items():
            assert torch.equal(by_rank[0][step][name], by_rank[1][step][name])
            torch.testing.assert_close(by_rank[0][step][name], wanted, rtol=1e-12, atol=1e-12)
        for slot in alone.slots():
            slot.master.data.sub_(slot.gradient, alpha=0.1)


def test_bfloat16_gradients_add_up_in_float32() -> None:
    model = Chain(1, [0], torch.bfloat16)
    buffers = Buffers(model, WHOLE, seed=0)
    slot = next(iter(buffers.slots()))
    assert (slot.gradient.dtype, slot.master.dtype) == (torch.float32, torch.float32)
    with torch.no_grad():
        slot.entry.parameter.zero_()  # d sin(w x) / dw = x there
    large, small = (torch.full((1, 1), x, dtype=torch.bfloat16) for x in (256.0, 0.5))
    backward(buffers, model, [large] + [small] * 100)
    assert slot.gradient.item() == 306.0  # in bfloat16 every 0.5 would be lost


def test_parameters_of_several_types_are_kept_apart() -> None:
    model = nn.Sequential(
        Scale("a", 3, torch.float32), Scale("b", 3, torch.bfloat16),
        Scale("c", 3, torch.float32), Scale("d", 3, torch.bfloat16),
    )  # fmt: skip
    buffers = Buffers(model, WHOLE, seed=0)
    names = {b.kind.dtype: [slot.entry.name for slot in b.slots] for b in buffers.buckets}
    assert names == {torch.bfloat16: ["d", "b"], torch.float32: ["c", "a"]}
    backward(buffers, lambda x: model(x).sum(), [torch.ones(2, 3)])
    assert all(x.dtype == torch.float32 and x.all() for x in gradients(buffers).values())


def test_a_gradient_partial_over_an_axis_that_nobody_gave_is_refused() -> None:
    layer = Layer()
    layer.declare("weight", replicated("w", (2,), Init("ones"), tp="partial"), F64)
    with pytest.raises(AssertionError, match="w: "):
        Buffers(layer, WHOLE, seed=0)


def order_of_a_split_backward() -> list[str]:
    """What happens where weight gradients come later than their backward, on one of two ranks."""
    model, events = Linears(), list[str]()
    buffers = Buffers(model, Sharding.whole(world_axis("dp-cp")), seed=0, bucket_bytes=8)
    begin = buffers_module.start_reduce_scatter_

    def reduce(x: Tensor, axis: Axis) -> Pending:
        events.append("reduce")
        return begin(x, axis)

    def noted(parameter: nn.Parameter, write: Write) -> tuple[nn.Parameter, Write]:
        def fill(out: Tensor, overwrite: bool) -> None:
            events.append("weight")
            write(out, overwrite)

        return parameter, fill

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers_module, "start_reduce_scatter_", reduce)
        buffers.begin()
        held: Held = []
        buffers.begin_backward(last=True, held=held)
        model(torch.ones(2, 6, dtype=F64)).sum().backward()
        buffers.end_backward()
        assert events == []
        with torch.no_grad():
            buffers.complete(0, [noted(*one) for one in held], last=True)
        buffers.finish()
    return events


def test_a_split_backward_reduces_each_bucket_as_it_fills() -> None:
    """Gradients of biases, which autograd makes, are there before and keep nothing waiting."""
    for events in run_ranks(order_of_a_split_backward, 2):
        assert events == ["reduce", "weight", "reduce", "reduce", "weight", "reduce"]
