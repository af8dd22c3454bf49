"""Norms and zeros count every logical element once, in every layout; the clip coefficient."""

import math

import pytest
import torch
from optim import logical
from optim.logical import Layout
from parity.matrix import MODELS
from reference import bridge

from penteract.grid import Grid
from penteract.mesh import create_mesh, single
from penteract.optim.norm import clip_coefficient, count_zeros, gradient_norm
from penteract.parallel.buckets import Sharding
from penteract.parallel.buffers import Buffers
from penteract.parallel.parameters import Layer, replicated
from penteract.placement import Init
from penteract.testing import run_ranks, world_axis

ADAMW = logical.optim_of("adamw")
TP2 = [Layout(tp=2), Layout(tp=2, zero=1)]
LAYOUTS = {
    1: [Layout()],
    2: [*(Layout(dp=2, zero=zero) for zero in range(4)), *TP2],
    3: [Layout(dp=3, zero=2)],
    4: [Layout(dp=2, tp=2, zero=1), Layout(dp=4, zero=3, replicas=2), Layout(tp=4)],
}


@pytest.mark.parametrize(
    ("norm", "limit", "wanted"),
    [
        (2.0, 1.0, 0.49999975000012500),  # 1 / (2 + 1e-6)
        (0.5, 1.0, 1.0),
        (1.0, 1.0, 0.99999900000099999),  # 1 / (1 + 1e-6)
        (0.0, 1.0, 1.0),
        (100.0, 0.0, 1.0),
        (4.0, 0.5, 0.12499996875000781),
    ],
)
def test_clip_coefficient(norm: float, limit: float, wanted: float) -> None:
    found = clip_coefficient(torch.tensor(norm, dtype=torch.float64), limit)
    assert found.item() == pytest.approx(wanted, rel=1e-15)


def measured(chosen: list[tuple[str, Layout]], bad: float | None) -> list[tuple[float, ...]]:
    """2-norm, largest magnitude and zeros; `bad` is planted on the last rank alone."""
    axis = world_axis()
    found = []
    for model, layout in chosen:
        mesh = create_mesh(Grid(axis.size, tp=layout.tp), axis.rank)
        buffers, _, weights = logical.setting(model, ADAMW, mesh=mesh, layout=layout)
        logical.fill(buffers, "own_gradient", logical.gradients(weights, 1))
        if bad is not None and axis.rank == axis.size - 1:
            # What every tensor rank holds has the same gradient on each, good or bad.
            split = (b for b in buffers.buckets if layout.tp == 1 or b.kind.split_axes)
            bucket = next(b for b in split if [*b.owned(b.own_gradient)])
            next(bucket.owned(bucket.own_gradient))[2].fill_(bad)
        norms = [gradient_norm(buffers, mesh.axes, order=order) for order in (2.0, math.inf)]
        assert all(norm.dtype == torch.float64 for norm in norms)
        zeros = count_zeros(buffers, mesh.axes)
        found.append((*(norm.item() for norm in norms), zeros.item()))
    return found


@pytest.mark.parametrize("world", LAYOUTS)
def test_every_logical_element_counts_once(world: int) -> None:
    """A tied weight is one parameter; replicas, and key/value heads held whole, count once."""
    chosen = [(model, layout) for layout in LAYOUTS[world] for model in MODELS]
    by_rank = run_ranks(measured, world, chosen, None) if world > 1 else [measured(chosen, None)]
    for (model, _), *found in zip(chosen, *by_rank, strict=True):
        gradients = logical.gradients(logical.setting(model, ADAMW)[2], 1).values()
        values = [value for x in gradients for value in x.flatten().tolist()]
        assert len(set(found)) == 1
        norm, largest, zeros = found[0]
        assert norm == pytest.approx(math.sqrt(sum(v * v for v in values)), rel=1e-12)
        assert largest == max(map(abs, values))
        assert zeros == sum(v == 0 for v in values) > 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_every_rank_sees_what_is_not_finite_on_one(bad: float) -> None:
    chosen = [("llama", layout) for layout in LAYOUTS[2] if layout.zero or layout.tp > 1]
    for found in run_ranks(measured, 2, chosen, bad):
        assert not any(math.isfinite(x) for norms in found for x in norms[:2])


def test_of_nothing_trained_both_are_zero() -> None:
    optim = logical.optim_of("adamw", rules=[{"match": "*", "freeze": True}])
    buffers, _, _ = logical.setting("llama", optim)
    axes = logical.alone().axes
    assert gradient_norm(buffers, axes) == gradient_norm(buffers, axes, order=math.inf) == 0
    assert count_zeros(buffers, axes) == 0


def test_the_norm_of_random_weights_as_gradients() -> None:
    buffers, _, weights = logical.setting("gpt2", ADAMW)
    bridge.set_owned(buffers, "own_gradient", weights)
    total = sum(value**2 for x in weights.values() for value in x.flatten().tolist())
    found = gradient_norm(buffers, logical.alone().axes)
    assert found.item() == pytest.approx(total**0.5, rel=1e-12)


def test_a_float32_norm_of_many_elements_keeps_its_digits() -> None:
    """One long float32 sum on a CPU is 7e-4 off at this length."""
    layer = Layer()
    layer.declare("weight", replicated("w", (1 << 24,), Init("zeros")), torch.float32)
    buffers = Buffers(layer, Sharding.whole(single("dp-cp")), seed=0)
    for flat in (bucket.own_gradient for bucket in buffers.buckets):
        flat.normal_(generator=torch.Generator().manual_seed(0))
        wanted = torch.linalg.vector_norm(flat.double()).item()
    assert gradient_norm(buffers, {}).item() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("order", [2.0, float("inf")])
def test_a_rank_that_holds_nothing_of_a_kind_has_a_norm(order: float) -> None:
    """As with more tensor ranks than heads."""
    layer = Layer()
    layer.declare("weight", replicated("w", (0,), Init("zeros")), torch.float32)
    buffers = Buffers(layer, Sharding.whole(single("dp-cp")), seed=0)
    assert gradient_norm(buffers, {}, order=order).item() == 0.0
