"""Every optimizer gives the same weights and moments in every layout, and those of its formulas."""

import dataclasses

import pytest
import torch
from optim import logical
from optim.logical import NAMES, Layout, Outcome
from reference import bridge

from penteract.grid import Grid
from penteract.mesh import create_mesh
from penteract.testing import run_ranks, world_axis

TOLERANCE = 1e-12
# Three query heads over two ranks, one key/value head held whole; and even heads with qk-norm.
UNEVEN, EVEN = "llama-tied-bias", "llama"
SMALL, LARGE = 256, None  # bytes of a bucket: one or two parameters, or a whole kind

Cell = tuple[str, str, Layout, int | None]


def cells(world: int) -> list[Cell]:
    layouts = [Layout(dp=world, zero=zero) for zero in range(4)]
    if world % 2 == 0:
        layouts += [Layout(dp=world // 2, tp=2, zero=zero) for zero in range(4)]
    if world == 4:
        layouts += [Layout(tp=4, zero=1), *(Layout(dp=4, zero=z, replicas=2) for z in (1, 3))]
    found: list[Cell] = []
    for i, layout in enumerate(layouts):
        for name in NAMES:
            model = UNEVEN if name == "muon" or i % 2 else EVEN
            found.append((model, name, layout, SMALL if i % 3 else LARGE))
    muon = [Layout(dp=world // 2, tp=2, zero=zero) for zero in (0, 2)] if world == 4 else []
    return found + [(EVEN, "muon", layout, LARGE) for layout in muon]


def train(chosen: list[Cell]) -> list[Outcome]:
    axis = world_axis()
    meshes = {
        tp: create_mesh(Grid(axis.size, tp=tp), axis.rank) for tp in {c[2].tp for c in chosen}
    }
    return [
        logical.updated(
            model,
            logical.optim_of(name),
            mesh=meshes[layout.tp],
            layout=layout,
            bucket_bytes=bucket_bytes,
        )
        for model, name, layout, bucket_bytes in chosen
    ]


@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_every_layout_gives_what_the_formulas_give(world: int) -> None:
    chosen = cells(world)
    by_rank = run_ranks(train, world, chosen) if world > 1 else [train(chosen)]
    for cell, *outcomes in zip(chosen, *by_rank, strict=True):
        model, name = cell[:2]
        found = logical.joined(outcomes)
        weights = logical.setting(model, logical.optim_of(name))[2]
        wanted = logical.reference(logical.optim_of(name), weights)
        assert found.keys() == wanted.keys(), cell
        for kind, tensors in wanted.items():
            difference, where = bridge.worst_difference(found[kind], tensors)
            assert difference <= TOLERANCE, f"{cell}: {kind} of {where} differs by {difference:.3g}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_skipped_step_changes_nothing_to_the_bit(name: str, dtype: torch.dtype) -> None:
    """After an update that gave moments values, with NaN in gradients and coefficient."""
    buffers, optimizer, weights = logical.setting("llama", logical.optim_of(name), dtype=dtype)
    logical.fill(buffers, "own_gradient", logical.gradients(weights, 1))
    optimizer.step(1e-3, torch.tensor(0.5), torch.tensor(False))
    kept = [x for b in buffers.buckets for x in (b.master, b.own_parameters, b.parameters)]
    kept += [moment for _, _, moment in optimizer.state()]
    before = [x.clone() for x in kept]
    for bucket in buffers.buckets:
        bucket.own_gradient.fill_(float("nan"))
    optimizer.step(1e-3, torch.tensor(float("nan")), torch.tensor(True))
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    for a, b in zip(before, kept, strict=True):
        assert torch.equal(a.view(integer[a.itemsize]), b.view(integer[b.itemsize]))
    assert optimizer.updates == 1


@pytest.mark.parametrize("name", NAMES)
def test_the_number_of_updates_goes_on_where_it_is_set(name: str) -> None:
    """Adam's bias correction is that of the hundredth step."""
    outcomes = []
    for start in (0, 99):
        buffers, optimizer, weights = logical.setting("gpt2", logical.optim_of(name))
        optimizer.updates = start
        logical.fill(buffers, "own_gradient", logical.gradients(weights, 1))
        optimizer.step(1e-3, torch.tensor(1.0), torch.tensor(False))
        assert optimizer.updates == start + 1
        outcomes.append(bridge.logical(bridge.owned(buffers, "master")))
    differs = bridge.worst_difference(*outcomes)[0] > 1e-6
    assert differs == (name in ("adamw", "muon"))


@pytest.mark.parametrize("name", NAMES)
def test_gaps_between_parameters_stay_zero(name: str) -> None:
    buffers, optimizer, weights = logical.setting("gpt2-plain", logical.optim_of(name))
    for step in (1, 2):
        logical.fill(buffers, "own_gradient", logical.gradients(weights, step))
        optimizer.step(1e-2, torch.tensor(1.0), torch.tensor(False))
    flats = [(b, b.master) for b in buffers.buckets]
    flats += [(bucket, moment) for _, bucket, moment in optimizer.state()]
    for bucket, flat in flats:
        gap = flat.clone()
        for _, _, view in bucket.owned(gap):
            view.zero_()
        assert not gap.any()


def test_momentum_of_zero_keeps_nothing() -> None:
    optim = dataclasses.replace(logical.optim_of("sgd"), momentum=0.0)
    _, optimizer, _ = logical.setting("llama", optim)
    assert list(optimizer.state()) == []
    assert list(logical.updated("llama", optim).parts) == ["weights"]
