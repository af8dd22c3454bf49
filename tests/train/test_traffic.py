"""What a step sends is what the formula says, to the byte, on every rank and over every axis."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # the optimizer imports it at its first step: once here, not in every rank
from parity.matrix import MODELS
from reference import bridge
from reference.plain import Document
from torch import Tensor

from penteract.config import Config, resolve
from penteract.config_file import from_dict
from penteract.families import model_spec
from penteract.grid import Grid
from penteract.mesh import Axis, create_mesh, single
from penteract.nn.block import Block
from penteract.nn.build import Build
from penteract.nn.mlp import MLP
from penteract.nn.model import Stage
from penteract.parallel import buckets as buckets_module
from penteract.parallel.buckets import Sharding
from penteract.parallel.buffers import Buffers
from penteract.parallel.parameters import materialise
from penteract.parallel.tensor import Features, RowLinear, TensorParallel
from penteract.placement import Init
from penteract.testing import run_ranks, world_axis
from penteract.train.language_model import synthetic_task
from penteract.train.run import Run
from penteract.train.traffic import all_reduced, step_bytes

Calls = dict[str, int]
NORMAL = Init("normal", 0.4)

FROZEN = {"rules": [{"match": p, "freeze": True} for p in ("layers.0.*", "embed.*", "norm.*")]}
# World, model, and what is special: {section: {key: value}}. Five sequences of five tokens in
# micro-batches of two leave parts that no axis divides, and empty micro-batches from dp = 2 on.
TABLE: list[tuple[int, str, dict[str, dict[str, Any]]]] = [
    *((2, "llama", {"parallel": {"zero": stage}}) for stage in (1, 2, 3)),
    (3, "gpt2", {"parallel": {"zero": 3}, "train": {"dtype": "bfloat16"}}),
    (4, "llama", {"parallel": {"zero": 3, "tp": 2, "sp": True}}),
    (4, "llama", {"parallel": {"zero": 2, "replicas": 2}, "train": {"z_loss": 1e-3}}),
    (4, "llama", {"parallel": {"zero": 1, "tp": 2}, "optim": {"name": "muon"}}),
    *((2, "llama", {"parallel": {"zero": stage}, "optim": FROZEN}) for stage in (1, 3)),
    (2, "llama", {"parallel": {"tp": 2}}),
    (2, "llama", {"parallel": {"tp": 2, "sp": True}}),
    (2, "llama", {"parallel": {"tp": 2, "sp": True, "recompute": ["layer"]}}),
    (2, "gpt2", {"parallel": {"tp": 2, "sp": True}, "model": {"dropout": 0.1}}),
    (2, "gpt2", {"parallel": {"tp": 2, "recompute": ["layer"]}, "model": {"dropout": 0.1}}),
    (2, "gpt2", {"parallel": {"tp": 2, "recompute": ["attention"]}}),
    (2, "gpt2-plain", {"parallel": {"tp": 2, "sp": True, "recompute": ["mlp", "core"]}}),
    (2, "llama", {"parallel": {"tp": 2, "sp": True, "recompute": ["layer", "attention"]}}),
    (
        2,
        "llama",
        {
            "parallel": {"tp": 2, "sp": True, "recompute": ["layer", "attention", "mlp"]},
            "model": {"dropout": 0.1},
        },
    ),
    (2, "llama-tied-bias", {"parallel": {"tp": 2, "sp": True}, "train": {"dtype": "bfloat16"}}),
    (2, "llama", {"parallel": {"tp": 2}, "train": {"z_loss": 1e-3, "label_smoothing": 0.1}}),
    (2, "llama", {"train": {"z_loss": 1e-3}}),
    (2, "gpt2", {"train": {"dtype": "bfloat16"}}),
    (3, "llama", {"parallel": {"tp": 3, "sp": True}}),  # heads 2, 1, 1; k and v held whole
    (3, "gpt2", {"parallel": {"tp": 3, "vocab_multiple": 4}}),  # a rank without heads
    (3, "llama-tied-bias", {"parallel": {"tp": 3, "sp": True}, "train": {"dtype": "float64"}}),
    (3, "llama", {"train": {"global_batch": 2, "z_loss": 1e-3}}),
    (4, "llama", {"parallel": {"tp": 2, "sp": True, "recompute": ["layer/2"]}}),
    (4, "gpt2", {"parallel": {"tp": 2, "sp": True}, "train": {"global_batch": 1}}),
    (4, "gpt2-plain", {"parallel": {"tp": 4}, "train": {"dtype": "bfloat16"}}),
    (4, "llama", {"parallel": {"tp": 4, "sp": True, "vocab_multiple": 4}, "data": {"seq": 1}}),
    (4, "llama", {"parallel": {"tp": 2, "order": "dp-tp"}}),
    (2, "gpt2", {"parallel": {"pp": 2}}),
    (2, "llama", {"parallel": {"pp": 2, "chunks": 3}}),
    (3, "llama", {"parallel": {"pp": 3, "stages": "embed | | 2*layer,norm,head"}}),
    (4, "gpt2", {"parallel": {"pp": 2, "chunks": 2, "schedule": "zb-v", "zero": 3}}),
    (4, "gpt2", {"parallel": {"pp": 2, "schedule": "zb-h1", "zero": 3}, "optim": FROZEN}),
    (4, "llama", {"parallel": {"pp": 2, "tp": 2, "sp": True}, "optim": {"name": "muon"}}),
]


def config_of(name: str, special: dict[str, dict[str, Any]]) -> Config:
    values: dict[str, dict[str, Any]] = {
        "model": dict(MODELS[name]),
        "data": {"seq": 5},
        "train": {"steps": 2, "global_batch": 5, "micro_batch": 2},
    }
    for section, keys in special.items():
        values[section] = {**values.get(section, {}), **keys}
    return resolve(from_dict(values))


def grid_of(config: Config, world: int) -> Grid:
    parallel = config.parallel
    return Grid(world, tp=parallel.tp, pp=parallel.pp, order=parallel.order)


def counted(config: Config) -> tuple[dict[str, Calls], dict[str, Calls]]:
    """Calls and bytes of the second update, by axis and operation, as this rank of the world."""
    world = world_axis()
    mesh = create_mesh(grid_of(config, world.size), world.rank)
    task = synthetic_task(config, mesh, torch.device("cpu"))
    run = Run(task, config, mesh, torch.device("cpu"))
    run.update()
    for axis in mesh.axes.values():
        axis.traffic.calls.clear()
        axis.traffic.bytes.clear()
    run.update()
    task.close()
    axes = [(name, axis.traffic) for name, axis in mesh.axes.items() if axis.traffic.calls]
    return {name: t.calls for name, t in axes}, {name: t.bytes for name, t in axes}


@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_step_sends_what_the_formula_says(world: int) -> None:
    rows = [(name, special) for n, name, special in TABLE if n == world]
    configs = [config_of(*row) for row in rows]
    ranks = run_ranks(lambda: [counted(config)[1] for config in configs], world)
    for i, (config, row) in enumerate(zip(configs, rows, strict=True)):
        for rank in range(world):
            formula = step_bytes(config, grid_of(config, world), rank)
            said = {axis: sum(what.values()) for axis, what in formula.items()}
            sent = {axis: sum(calls.values()) for axis, calls in ranks[rank][i].items()}
            assert sent == said, (row, rank, formula, ranks[rank][i])


def test_the_formula_follows_the_ramp_of_the_batch() -> None:
    special = {"parallel": {"tp": 2}, "train": {"ramp": [[1, 2]]}}
    config, flat = config_of("llama", special), config_of("llama", {"parallel": {"tp": 2}})
    assert step_bytes(config, Grid(2, tp=2), 0)["tp"] != step_bytes(flat, Grid(2, tp=2), 0)["tp"]
    assert step_bytes(config, Grid(2, tp=2), 0, step=2) == step_bytes(flat, Grid(2, tp=2), 0)


def test_one_process_sends_nothing() -> None:
    assert step_bytes(config_of("gpt2", {}), Grid(1), 0) == {}


@pytest.mark.parametrize("name", MODELS)
def test_gradient_buckets_are_those_of_the_buffers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With buckets so small that several parameters fill one and a large one fills its own."""
    monkeypatch.setattr(buckets_module, "BUCKET_BYTES", 1000)
    monkeypatch.setattr(buckets_module, "SLICE_BYTES", 0)
    config = config_of(name, {"parallel": {"tp": 4, "sp": True}})
    grid, spec = Grid(12, tp=4), model_spec(config)
    for rank in range(4):
        axis = Axis("tp", 4, rank, (0, 1, 2, 3))
        model = Stage(spec, TensorParallel(axis, sequence=True), dtype=torch.float32)
        data = single("dp-cp")
        buffers = Buffers(model, Sharding.whole(data), seed=0, more_axes=[axis])
        buckets = [bucket.gradient.nbytes for bucket in buffers.buckets]
        assert len(buckets) > len(buffers.kinds)
        said = step_bytes(config, grid, rank)
        assert said["dp-cp"]["gradients"] == sum(all_reduced(size, 3) for size in buckets)
        kinds = [bucket for bucket in buffers.buckets if "tp" in bucket.kind.more_axes]
        partial = sum(bucket.gradient.nbytes for bucket in kinds)
        assert said["tp"]["gradients"] == all_reduced(partial, 4)


# --- how many messages there are


def both_ways(make: Callable[[TensorParallel], Any], sequence: bool) -> list[tuple[Calls, Calls]]:
    """(calls, bytes) of the forward and of the backward of one module over all ranks."""
    axis = world_axis("tp")
    module = make(TensorParallel(axis, sequence))
    materialise(module, seed=0)
    batch = bridge.micro_batch([Document([1] * 8, [2] * 8, [1.0] * 8)])
    rows = 8 // axis.size if sequence else 8
    x = torch.randn(rows, 12, requires_grad=True)

    def taken() -> tuple[Calls, Calls]:
        found = dict(axis.traffic.calls), dict(axis.traffic.bytes)
        axis.traffic.calls.clear()
        axis.traffic.bytes.clear()
        return found

    if isinstance(module, Block):
        y: Tensor = module(x, batch.sequences, None)
    elif isinstance(module, RowLinear):
        y = module(torch.randn(8, 12 // axis.size, requires_grad=True))
    else:
        y = module(x)
    forward = taken()
    y.sum().backward()
    return [forward, taken()]


def block(tp: TensorParallel) -> Block:
    spec = model_spec(config_of("llama", {})).blocks[0]
    return Block("block", 12, spec, Build(tp, torch.float32, NORMAL, NORMAL))


def mlp(tp: TensorParallel) -> MLP:
    spec = model_spec(config_of("gpt2", {})).blocks[0].mlp
    return MLP("mlp", 12, spec, Build(tp, torch.float32, NORMAL, NORMAL))


def row(tp: TensorParallel) -> RowLinear:
    inputs = Features("row", 12)
    return RowLinear(inputs, 12, tp, bias=True, dtype=torch.float32, init=NORMAL)


def test_two_collectives_a_layer_forward_and_two_backward() -> None:
    message = all_reduced(8 * 12 * 4, 2)
    for make, halves in ((block, 2), (mlp, 1)):
        for ways in run_ranks(lambda make=make: both_ways(make, False), 2):
            assert ways == [({"all_reduce": halves}, {"all_reduce": halves * message})] * 2


def test_with_sequence_parallelism_the_same_bytes_and_the_gather_again() -> None:
    """A gather and a scatter where there was one sum, of half its bytes each."""
    part = all_reduced(8 * 12 * 4, 2) // 2
    for make, halves in ((block, 2), (mlp, 1)):
        for forward, backward in run_ranks(lambda make=make: both_ways(make, True), 2):
            assert forward[0] == {"all_gather": halves, "reduce_scatter": halves}
            assert forward[1] == dict.fromkeys(forward[0], halves * part)
            # The output gradient of the row layer, and the input of the column layer again.
            assert backward[0] == {"all_gather": 2 * halves, "reduce_scatter": halves}
            assert backward[1] == {name: n * part for name, n in backward[0].items()}
    for forward, backward in run_ranks(lambda: both_ways(row, True), 2):
        assert (forward[0], backward[0]) == ({"reduce_scatter": 1}, {"all_gather": 1})


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sequence_parallelism_sends_what_plain_does_beside_the_gather_again(name: str) -> None:
    """Where tp divides the tokens; the gradients of the stream's own parameters come on top."""
    special = {"data": {"seq": 4}, "parallel": {"tp": 2}}
    plain = config_of(name, special)
    split = config_of(name, {**special, "parallel": {"tp": 2, "sp": True}})
    sent = run_ranks(lambda: [sum(counted(c)[1]["tp"].values()) for c in (plain, split)], 2)
    for rank, (without, with_sp) in enumerate(sent):
        a, b = (step_bytes(config, Grid(2, tp=2), rank)["tp"] for config in (plain, split))
        again = b["stream gathered again"]
        assert again == a["stream forward"] // 2 > 0 == a["stream gathered again"]
        assert with_sp - without == again + b["gradients"] - a["gradients"]


@pytest.mark.parametrize(("name", "kinds"), [("llama", 1), ("gpt2", 2)])
def test_gradients_that_are_partial_over_tp_are_one_message_of_the_step(
    name: str, kinds: int
) -> None:
    """Decayed positions beside norms and biases too, which lie in another buffer."""
    config = config_of(name, {"parallel": {"tp": 2, "sp": True}})
    axis = Axis("tp", 2, 0, (0, 1))
    model = Stage(model_spec(config), TensorParallel(axis, True), dtype=torch.float32)
    found = Buffers(model, Sharding.whole(single("dp-cp")), seed=0, more_axes=[axis]).kinds
    assert sum("tp" in kind.more_axes for kind in found) == kinds
    micro = 3  # of five sequences
    pairs = 2 * config.model.layers + 1
    for calls, _ in run_ranks(lambda: counted(config), 2):
        # Two of the vocabulary a micro-batch; the gradients; the norm.
        assert calls["tp"]["all_reduce"] == 2 * micro + 1 + 1
        assert calls["tp"]["reduce_scatter"] == 2 * pairs * micro
        assert calls["tp"]["all_gather"] == 3 * pairs * micro
