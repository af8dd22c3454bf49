"""Experts in flat buffers: summed, owned, measured and updated over the ranks of their own grid."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch._dynamo  # optimizers import it at their first step: here once, not in every rank
import torch.distributed as dist
from optim import logical
from optim.logical import Outcome
from parallel.expert_model import BLOCKS, F64, MICRO_BATCHES, Model, stored_gradient, total
from parity.matrix import MODELS
from reference import bridge
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from penteract.collectives import start_all_gather_into
from penteract.config import Config, resolve
from penteract.config_file import from_dict
from penteract.grid import Grid
from penteract.mesh import Axis, Mesh, create_mesh, single
from penteract.optim.norm import count_zeros, gradient_norm
from penteract.optim.optimizer import build
from penteract.parallel import buffers as buffers_module
from penteract.parallel import zero as zero_module
from penteract.parallel.buckets import Sharding, Slot
from penteract.parallel.buffers import Buffers
from penteract.parallel.parameters import materialise
from penteract.pending import Pending
from penteract.testing import run_ranks, world_axis
from penteract.train.assembly import sharding_of

SEED = 3
NAMES = ("adamw", "sgd", "muon")

GRIDS = {  # world: tp, cp, pp, ep, etp
    1: [(1, 1, 1, 1, 1)],
    4: [
        (1, 1, 1, 2, 1),
        (1, 1, 1, 4, 1),
        (2, 1, 1, 2, 1),
        (1, 1, 1, 2, 2),
        (2, 1, 1, 4, 1),
        (1, 2, 1, 4, 1),
    ],
    8: [
        (1, 1, 1, 2, 1),
        (1, 1, 1, 4, 1),
        (2, 1, 1, 2, 1),
        (1, 1, 1, 2, 2),
        (2, 1, 1, 4, 1),
        (1, 2, 1, 4, 1),
        (2, 1, 2, 2, 1),
        (1, 1, 2, 2, 2),
    ],
}
QUICK = ((2, 1, 1, 4, 1), (2, 1, 2, 2, 1))  # of those of 8 ranks
CELLS = [
    pytest.param(n, sizes, marks=[pytest.mark.slow] if n == 8 and sizes not in QUICK else [])
    for n, found in GRIDS.items()
    for sizes in found
]


@dataclass(frozen=True)
class How:
    """How the buffers are kept, whatever the grid."""

    stage: int
    replicas: int = 1
    bucket_bytes: int | None = None  # 8: a bucket for every parameter
    overlap: bool = True


KEPT = [  # and the optimizer
    *((How(stage), "adamw") for stage in range(4)),
    *((How(stage, bucket_bytes=8), name) for stage in range(4) for name in ("sgd", "muon")),
    *((How(stage, bucket_bytes=8, overlap=False), "sgd") for stage in (0, 2)),
    *((How(stage, 2, 8), name) for stage, name in zip((1, 2, 3), NAMES, strict=True)),
]


def grid_of(world: int, sizes: tuple[int, ...]) -> Grid:
    return Grid(world, **dict(zip(("tp", "cp", "pp", "ep", "etp"), sizes, strict=True)))


def kept(grid: Grid) -> list[tuple[How, str]]:
    data = grid.size("dp-cp")
    return [x for x in KEPT if grid.edp % x[0].replicas == data % x[0].replicas == 0]


# --- what a rank does and finds


def made(mesh: Mesh, how: How) -> tuple[Model, Buffers]:
    model = Model(mesh)
    dense, experts = (
        Sharding.over(mesh.axis(name), how.stage, how.replicas, how.overlap, False)
        for name in ("dp-cp", "edp")
    )
    buffers = Buffers(
        model,
        dense,
        experts=experts,
        seed=SEED,
        bucket_bytes=how.bucket_bytes,
        more_axes=[mesh.axis("tp"), mesh.axis("etp")],
    )
    return model, buffers


def accumulate(buffers: Buffers, slot: Slot, gradient: Tensor) -> None:
    def write(out: Tensor, overwrite: bool) -> None:
        out.copy_(gradient) if overwrite else out.add_(gradient)

    buffers.accumulate(slot.entry.parameter, write)


def reduce(model: Model, buffers: Buffers, mesh: Mesh) -> None:
    """A step's backwards, on each rank in an order of its own."""
    generator = np.random.default_rng(mesh.rank)
    slots = list(buffers.slots())
    buffers.begin()
    for micro_batch in range(MICRO_BATCHES):
        buffers.begin_backward(model.unit_stages[0], last=micro_batch == MICRO_BATCHES - 1)
        for i in generator.permutation(len(slots)):
            gradient = stored_gradient(slots[i].entry.placement, mesh, micro_batch)
            accumulate(buffers, slots[i], gradient)
        buffers.end_backward()
    assert buffers.finish() == []


@dataclass
class Found:
    """Of one rank: its parts of logical tensors, and what it measured."""

    parts: Outcome
    norm: float
    largest: float
    zeros: int


def step(mesh: Mesh, how: How, name: str) -> Found:
    """One step of an optimizer."""
    model, buffers = made(mesh, how)
    optimizer = build(buffers, logical.optim_of(name), mesh.axes)
    parts = Outcome()
    parts.add("start", bridge.fragments(model.stored()))
    reduce(model, buffers, mesh)
    parts.add("gradients", bridge.owned(buffers, "own_gradient"))
    norm, largest = (gradient_norm(buffers, mesh.axes, order=x).item() for x in (2.0, math.inf))
    zeros = count_zeros(buffers, mesh.axes)
    assert zeros.dtype == torch.int64
    coefficient = torch.tensor(logical.COEFFICIENT, dtype=F64)
    optimizer.step(logical.LR, coefficient, torch.zeros(()))
    parts.add("masters", bridge.owned(buffers, "master"))
    parts.add("parameters", bridge.fragments(model.stored()))
    return Found(parts, norm, largest, int(zeros))


def steps(sizes: tuple[int, ...]) -> dict[tuple[How, str], Found]:
    axis = world_axis()
    mesh = create_mesh(grid_of(axis.size, sizes), axis.rank)
    return {(how, name): step(mesh, how, name) for how, name in kept(mesh.grid)}


# --- what must come out


def wanted(name: str) -> dict[str, dict[str, Tensor]]:
    """By the definitions, one logical tensor at a time."""
    optim = logical.optim_of(name)
    model = Model(logical.alone())
    materialise(model, seed=SEED)
    start = bridge.logical(bridge.fragments(bridge.parameters(model)))
    gradients = {tensor: torch.from_numpy(total(tensor)) for tensor in start}
    after = {}
    for tensor, g in gradients.items():
        bias = tensor.endswith("bias")
        rule = logical.RULES["adamw" if bias and name == "muon" else name]
        decay = 0.0 if bias else optim.weight_decay
        clipped = logical.COEFFICIENT * g
        after[tensor], _ = rule(optim, start[tensor], {}, clipped, logical.LR, decay, 1)
    return {"start": start, "gradients": gradients, "masters": after, "parameters": after}


@pytest.mark.parametrize(("world", "sizes"), CELLS)
def test_every_grid_and_stage_gives_the_same(world: int, sizes: tuple[int, ...]) -> None:
    by_rank = run_ranks(steps, world, sizes) if world > 1 else [steps(sizes)]
    right = {name: wanted(name) for name in NAMES}
    values = np.concatenate([total(name).ravel() for name in right["sgd"]["start"]])
    for how, name in by_rank[0]:
        ranks = [found[how, name] for found in by_rank]
        joined = logical.joined([rank.parts for rank in ranks])
        for kind, tensors in right[name].items():
            difference, where = bridge.worst_difference(joined[kind], tensors)
            exact = kind in ("start", "gradients")
            assert difference <= (0 if exact else 1e-12), f"{how}, {name}: {kind} of {where}"
        for rank in ranks:
            assert rank.norm == ranks[0].norm == pytest.approx(math.hypot(*values), rel=1e-14)
            assert rank.largest == np.abs(values).max()
            assert rank.zeros == (values == 0).sum() > 0


def test_no_sharding_of_experts_is_an_error_that_names_one() -> None:
    mesh = logical.alone()
    with pytest.raises(AssertionError, match=r"layers\.1\.experts\.0\.bias.*no sharding"):
        Buffers(Model(mesh), Sharding.whole(single("dp-cp")), seed=0)


def late(out: Tensor, x: Tensor, axis: Axis) -> Pending:
    """A gather whose result is there only once somebody has waited for it."""
    gathered = start_all_gather_into(torch.empty_like(out), x, axis).wait()
    return Pending([], lambda: out.copy_(gathered))


def after_a_step(sizes: tuple[int, ...], stage: int) -> Outcome:
    axis = world_axis()
    mesh = create_mesh(grid_of(axis.size, sizes), axis.rank)
    parts = step(mesh, How(stage, bucket_bytes=8), "sgd").parts
    return Outcome({"parameters": parts.parts["parameters"]})


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_expert_is_read_while_it_is_on_its_way(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where dense parameters have one owner each, which waits for nobody."""
    for module in (buffers_module, zero_module):
        monkeypatch.setattr(module, "start_all_gather_into", late)
    found = logical.joined(run_ranks(after_a_step, 2, (2, 1, 1, 1, 1), stage))["parameters"]
    assert bridge.worst_difference(found, wanted("sgd")["parameters"])[0] <= 1e-12


def on_their_way() -> list[str]:
    mesh = create_mesh(Grid(2, ep=2), world_axis().rank)
    _, buffers = made(mesh, How(1, bucket_bytes=8))
    buffers.begin()
    buffers.begin_backward(last=True)
    slots = list(buffers.slots())[:-1]  # the dense one of the first block is the last in backward
    for slot in slots:
        accumulate(buffers, slot, stored_gradient(slot.entry.placement, mesh, 0))
    names = [bucket.slots[0].entry.name for bucket, *_ in buffers._in_flight]
    buffers.end_backward()
    buffers.finish()
    return names


def test_an_expert_of_one_owner_waits_for_no_dense_sum() -> None:
    """Else every layer of experts would end the overlap of those before it."""
    assert run_ranks(on_their_way, 2) == [["layers.2.weight", "layers.1.weight"]] * 2


def sent() -> dict[str, dict[str, int]]:
    mesh = create_mesh(Grid(4, etp=2), world_axis().rank)
    model, buffers = made(mesh, How(1))
    for name in ("dp-cp", "edp", "etp"):
        mesh.axis(name).traffic.bytes.clear()
    reduce(model, buffers, mesh)
    return {name: mesh.axis(name).traffic.bytes for name in ("dp-cp", "edp", "etp")}


def test_bytes_of_a_step_are_those_of_the_table() -> None:
    """Each kind is one bucket, whose slices are multiples of 64 elements, 8 bytes each."""
    layers = BLOCKS - 1
    weights = 8 * layers * 256  # EXPERTS * OUT * IN / 2, and 40 behind them
    biases = 8 * layers * 64  # EXPERTS * OUT, and 16
    dense = 8 * 1024  # BLOCKS of 320, and 64
    for found in run_ranks(sent, 4):
        assert found["edp"] == {"reduce_scatter": (weights + biases) // 2}
        assert found["etp"] == {"all_reduce": biases // 2}
        assert found["dp-cp"] == {"reduce_scatter": dense * 3 // 4}


class Shards(NamedTuple):
    """The ranks of an axis cut into runs: inside one, and across them; how it is used."""

    inside: tuple[int, ...]
    across: tuple[int, ...]
    how: tuple[int, bool, bool]


def shards(found: Sharding) -> Shards:
    how = found.stage, found.overlap, found.offload
    return Shards(found.shard.ranks, found.replicate.ranks, how)


def shardings(config: Config) -> tuple[Shards, Shards | None]:
    mesh = create_mesh(Grid(8, ep=config.parallel.ep), world_axis().rank)
    dense, experts = sharding_of(config, mesh)
    return shards(dense), experts and shards(experts)


@pytest.mark.parametrize("moe", [None, {"experts": 4}])
def test_a_run_cuts_edp_as_it_cuts_dp_cp_where_there_are_experts(
    moe: dict[str, int] | None,
) -> None:
    values: dict[str, Any] = {
        "model": MODELS["llama"],
        "parallel": {"zero": 2, "replicas": 2, "dp_overlap": False, "ep": 2 if moe else 1},
        "optim": {"offload": True},
        "train": {"steps": 1},
        **({"moe": moe} if moe else {}),
    }
    how = (2, False, True)
    for rank, (dense, experts) in enumerate(run_ranks(shardings, 8, resolve(from_dict(values)))):
        run, place = divmod(rank, 4)
        assert dense == Shards(tuple(range(4 * run, 4 * run + 4)), (place, place + 4), how)
        same = rank % 2, rank % 2 + 2, rank % 2 + 4, rank % 2 + 6  # the ranks with these experts
        inside, across = same[:2] if rank < 4 else same[2:], same[rank // 2 % 2 :: 2]
        assert experts == (Shards(inside, across, how) if moe else None)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_step_of_muon_on_shapes_alone(zero: int) -> None:
    """Nobody tells of the other ranks' experts."""
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    try:
        mesh = create_mesh(Grid(8, tp=2, ep=4, etp=1), 5)
        with FakeTensorMode(allow_non_fake_inputs=True):
            _, buffers = made(mesh, How(zero))
            optimizer = build(buffers, logical.optim_of("muon"), mesh.axes)
            optimizer.step(1e-3, torch.ones(()), torch.zeros(()))
        assert mesh.axis("tp-dp-cp").traffic.calls["all_to_all"] == 2
    finally:
        dist.destroy_process_group()
