"""What a step with experts sends is what the formula says, to the byte, on every rank and axis."""

from collections.abc import Mapping
from dataclasses import dataclass
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
from penteract.mesh import Axis, create_mesh
from penteract.nn.build import Build
from penteract.nn.moe import MoE, MoESpec
from penteract.nn.router import Routing
from penteract.nn.sequences import Training
from penteract.parallel.expert.dispatchers import Name, dispatcher_of
from penteract.parallel.expert.places import ExpertParallel
from penteract.parallel.expert.traffic import Routed, Sent, Sizes, dispatched_bytes, routed
from penteract.parallel.parameters import materialise
from penteract.parallel.tensor import TensorParallel
from penteract.placement import Init
from penteract.testing import run_ranks, world_axis
from penteract.train.language_model import synthetic_task
from penteract.train.run import Run
from penteract.train.traffic import step_bytes

Calls = dict[str, dict[str, int]]  # by axis and operation
Values = dict[str, Any]
NORMAL = Init("normal", 0.4)

# Of [moe].
EVERYWHERE: Values = {"dispatcher": "all_gather"}
AUX: Values = {"balance": "aux", "z_weight": 0.1}
SEQ_AUX: Values = {"balance": "seq_aux", "shared_ffn": 6}
SINKHORN: Values = {"balance": "sinkhorn", "topk": 1}
NONE: Values = {"balance": "none"}
Z: Values = {"balance": "none", "z_weight": 0.1, "topk": 1}
BIAS: Values = {"balance": "bias", "capacity": 0.5, "shared_ffn": 6, "shared_gate": True}
GLOBAL: Values = {"balance": "global_aux", "capacity": 1.0, "experts": 6, "topk": 3}
# Of [parallel]: dp is what is left of the ranks.
TP: Values = {"tp": 2}
SP: Values = {"tp": 2, "sp": True}
ZB_V: Values = {"pp": 2, "chunks": 2, "schedule": "zb-v"}
PACKED: dict[str, Values] = {"data": {"packing": True, "balance": True}}
FROZEN: dict[str, Values] = {
    "optim": {"rules": [{"match": "*.moe.experts.*.down.*", "freeze": True}]}
}

# Ranks, model, experts, layout, and other sections. Five sequences of five tokens in micro-batches
# of two leave parts that no axis divides, and empty micro-batches from dp = 2 on.
TABLE: list[tuple[int, str, Values, Values, dict[str, Values]]] = [
    (2, "llama", AUX, {"zero": 1}, {}),
    (2, "llama", NONE, {"ep": 2, "zero": 3, "recompute": ["layer"]}, {}),
    (2, "llama", NONE | EVERYWHERE, {"ep": 2, "zero": 2, "recompute": ["mlp"]}, {}),
    (2, "gpt2", AUX | EVERYWHERE, {"etp": 2, "recompute": ["layer"]}, {}),
    (2, "gpt2", BIAS, {"etp": 2}, {"optim": {"name": "muon"}}),
    (2, "gpt2", SEQ_AUX, TP, {}),
    (2, "gpt2", SEQ_AUX | EVERYWHERE, SP | {"recompute": ["mlp"]}, {}),
    (2, "llama", SINKHORN | EVERYWHERE, TP | {"recompute": ["layer"]}, {"model": {"dropout": 0.1}}),
    (2, "llama", SINKHORN, SP | {"etp": 1, "ep": 2}, {"train": {"dtype": "bfloat16"}}),
    (2, "llama", GLOBAL | EVERYWHERE, TP | {"etp": 1, "zero": 3, "recompute": ["mlp"]}, {}),
    (2, "llama", BIAS | EVERYWHERE, SP | {"recompute": ["layer", "core"]}, {}),
    (2, "llama", BIAS, TP | {"recompute": ["attention", "mlp"]}, {"model": {"dropout": 0.1}}),
    (2, "llama", SEQ_AUX, {"cp": 2, "ep": 2}, {}),
    (2, "llama", GLOBAL, {"cp": 2, "etp": 2}, {"train": {"dtype": "bfloat16"}}),
    (2, "llama", Z | EVERYWHERE, {"ep": 2, "recompute": ["layer/2"]}, {}),
    (2, "llama", {"layers": [1], **AUX}, {"pp": 2, "zero": 1}, {}),
    (4, "llama", AUX, {"ep": 2, "zero": 3, "recompute": ["experts"]}, {"optim": {"name": "muon"}}),
    (4, "gpt2", AUX | EVERYWHERE, {"ep": 2, "etp": 2, "zero": 2}, {}),
    (4, "llama", NONE | EVERYWHERE, {"ep": 2, "zero": 3, "replicas": 2}, FROZEN),
    (4, "gpt2", GLOBAL, {"etp": 2, "zero": 1, "replicas": 2}, {"optim": {"name": "muon"}}),
    (4, "llama", BIAS | EVERYWHERE, TP | {"ep": 2, "recompute": ["layer"]}, {}),
    (4, "llama", SEQ_AUX, SP | {"ep": 4, "etp": 1, "recompute": ["mlp"]}, {}),
    (4, "gpt2", SINKHORN, {"tp": 4, "ep": 2, "etp": 2}, {"train": {"dtype": "bfloat16"}}),
    (4, "llama", AUX | EVERYWHERE, {"tp": 2, "cp": 2, "ep": 2, "recompute": ["layer"]}, {}),
    (4, "llama", SEQ_AUX | EVERYWHERE, SP | {"cp": 2, "etp": 1, "ep": 2}, {"data": {"seq": 3}}),
    (4, "llama", SEQ_AUX | {"capacity": 0.5}, {"cp": 2, "ep": 4}, PACKED),
    (4, "gpt2", SEQ_AUX, {"pp": 2, "ep": 2, "zero": 3, "recompute": ["layer"]}, {}),
    (4, "llama", GLOBAL, SP | {"pp": 2, "etp": 1, "ep": 2}, {"optim": {"name": "muon"}}),
    (4, "llama", BIAS | EVERYWHERE, ZB_V | {"etp": 2, "zero": 2}, {}),
]  # fmt: skip


def config_of(name: str, moe: Values, parallel: Values, special: dict[str, Values]) -> Config:
    values: dict[str, Values] = {
        "model": MODELS[name],
        "moe": {"experts": 4, "ffn": 7, **moe},
        "parallel": parallel,
        "data": {"seq": 5},
        "train": {"steps": 2, "global_batch": 5, "micro_batch": 2},
    }
    for section, keys in special.items():
        values[section] = {**values.get(section, {}), **keys}
    return resolve(from_dict(values))


def grid_of(config: Config, world: int) -> Grid:
    p = config.parallel
    return Grid(world, tp=p.tp, cp=p.cp, pp=p.pp, ep=p.ep, etp=p.etp, order=p.order)


@dataclass
class Counted:
    """What a rank sent in its second update, and which experts its tokens took."""

    sent: dict[str, int]  # by axis
    chosen: dict[tuple[int, int], Tensor]  # by block and place among its micro-batches: [t, k]


def counted(config: Config) -> Counted:
    world = world_axis()
    grid = grid_of(config, world.size)
    mesh = create_mesh(grid, world.rank)
    task = synthetic_task(config, mesh, torch.device("cpu"))
    run = Run(task, config, mesh, torch.device("cpu"))
    run.update()
    for axis in mesh.axes.values():
        axis.traffic.bytes.clear()
    chosen = {}
    with pytest.MonkeyPatch.context() as patch:
        with_losses = MoE._with_losses

        def seen(moe: MoE, y: Tensor, logits: Tensor, routing: Routing, *rest: Any) -> Tensor:
            training: Training = rest[-1]
            block = int(moe.name.split(".")[1])
            chosen[block, training.micro_batch // grid.dp] = routing.experts
            return with_losses(moe, y, logits, routing, *rest)

        patch.setattr(MoE, "_with_losses", seen)
        run.update()
    task.close()
    sent = {name: sum(axis.traffic.bytes.values()) for name, axis in mesh.axes.items()}
    return Counted({name: size for name, size in sent.items() if size}, chosen)


def routes(config: Config, grid: Grid, rank: int, ranks: list[Counted]) -> dict[Any, Routed]:
    """u and v of every block and micro-batch of a rank, by what all chose."""
    (group,) = (row.tolist() for row in grid.groups("etp-ep") if rank in row)
    homes, place = [grid.coordinates(r)["ep"] for r in group], group.index(rank)
    assert config.moe is not None
    each = config.moe.experts // grid.ep
    return {
        key: routed([ranks[r].chosen[key] for r in group], homes, each, place)
        for key in ranks[rank].chosen
    }


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_step_sends_what_the_formula_says(world: int) -> None:
    rows = [row for n, *row in TABLE if n == world]
    configs = [config_of(*row) for row in rows]
    everything = run_ranks(lambda: [counted(config) for config in configs], world)
    for i, (config, row) in enumerate(zip(configs, rows, strict=True)):
        grid, ranks = grid_of(config, world), [found[i] for found in everything]
        for rank in range(world):
            where = routes(config, grid, rank, ranks)
            formula = step_bytes(config, grid, rank, step=2, routed=where)
            said = {axis: sum(what.values()) for axis, what in formula.items()}
            assert ranks[rank].sent == said, (row, rank, formula)


def test_what_the_table_has() -> None:
    """Every way to send over every axis, where something else could be sent."""
    axes = {"tp", "cp", "pp", "dp-cp", "ep", "etp", "edp", "etp-ep", "tp-cp", "tp-dp-cp", "world"}
    found = set()
    for n, *row in TABLE:
        config = config_of(*row)
        for axis, what in step_bytes(config, grid_of(config, n), 0).items():
            found |= {(axis, name) for name in what}
    assert {axis for axis, _ in found} == axes | {"tied"}
    assert {name for axis, name in found if axis == "tp-cp"} == {"loads", "logits", "choices"}
    assert {("etp", "gradients"), ("edp", "parameters"), ("tp-dp-cp", "matrices")} <= found


# --- what follows from the routing


def test_bytes_that_follow_from_the_routing_are_said_to() -> None:
    for special, known in (({}, False), (EVERYWHERE, True)):
        config = config_of("llama", AUX | special, {"pp": 2, "ep": 2}, {})
        for step, says in ((1, False), (config.log.every, True)):
            sent = step_bytes(config, Grid(4, pp=2, ep=2), 0, step=step)
            assert (sent["etp-ep"]["tokens"] is not None) == known
            assert ("experts" in sent["pp"]) == says
            unknown = [what for what in sent.values() for size in what.values() if size is None]
            assert len(unknown) == (not known) + says


def test_experts_that_are_not_split_send_nothing_over_their_axes() -> None:
    config = config_of("llama", SEQ_AUX, {}, {})
    assert step_bytes(config, Grid(1), 0) == {}
    sent = step_bytes(config, Grid(3), 0)
    assert sent.keys() == {"dp-cp", "edp", "tp-dp-cp", "world"}
    assert sent["edp"].keys() == {"gradients", "parameters", "norm"}


K, H, EXPERTS = 2, 3, 8
# Experts of the tokens of each of four ranks. With ep = 4, two experts a rank:
CHOSEN = [
    [[0, 1], [2, 3], [0, 7], [6, 7]],  # stays; goes to 1; to 3 and stays; to 3, once
    [],
    [[4, 0], [-1, 5], [-1, -1], [1, 0]],  # to 0 and stays; one dropped; padding; to 0, once
    [[2, 4]],  # to 1 and 2
]
# By ep and etp, of every rank: pairs of a token and another rank, and the rows that come.
BY_HAND = {
    (4, 1): [Routed(3, 2), Routed(0, 2), Routed(2, 1), Routed(2, 2)],
    # Experts 0 to 3 are on ranks 0 and 1, the others on 2 and 3.
    (2, 2): [Routed(7, 3), Routed(0, 6), Routed(6, 3), Routed(3, 4)],
    (1, 4): [Routed(12, 4), Routed(0, 8), Routed(9, 5), Routed(3, 7)],
}


# Messages of tokens, weights and numbers on their way; of results; of gradients.
MESSAGES: dict[Name, list[dict[str, int]]] = {
    "all_gather": [
        {"all_gather": 4},
        {"reduce_scatter": 1},
        {"all_gather": 1, "reduce_scatter": 2},
    ],
    "all_to_all": [{"all_to_all": 4}, {"all_to_all": 1}, {"all_to_all": 3}],
}


def passed(kind: Name, ep: int, etp: int) -> tuple[Sent, list[dict[str, int]], tuple[int, ...]]:
    """Bytes and messages of one dispatcher, and where the experts' parts are."""
    axis = world_axis()
    places = ExpertParallel.of(create_mesh(Grid(4, ep=ep, etp=etp), axis.rank))
    chosen = torch.tensor(CHOSEN[axis.rank], dtype=torch.int64).view(-1, K)
    x, weights = (torch.ones(len(chosen), n, requires_grad=True) for n in (H, K))
    sizes, calls = [], []

    def taken() -> None:
        found = taken_from({"etp-ep": places.group})
        sizes.append(sum(found[1].get("etp-ep", {}).values()))
        calls.append(found[0].get("etp-ep", {}))

    visit = dispatcher_of(kind, EXPERTS, places).send(x, weights, chosen)
    arrived = visit.arrive()
    taken()
    y = visit.leave(arrived.x * arrived.weights.sum(1, keepdim=True))
    taken()
    y.sum().backward()
    taken()
    return Sent(*sizes), calls, places.homes


def taken_from(axes: Mapping[str, Axis]) -> tuple[Calls, Calls]:
    """Calls and bytes of the axes that have some, which are forgotten."""
    used = {name: axis.traffic for name, axis in axes.items() if axis.traffic.calls}
    found = (
        {n: dict(t.calls) for n, t in used.items()},
        {n: dict(t.bytes) for n, t in used.items()},
    )
    for traffic in used.values():
        traffic.calls.clear()
        traffic.bytes.clear()
    return found


@pytest.mark.parametrize("kind", MESSAGES)
def test_tokens_of_a_known_routing(kind: Name) -> None:
    chosen = [torch.tensor(c, dtype=torch.int64).view(-1, K) for c in CHOSEN]
    for (ep, etp), by_hand in BY_HAND.items():
        for rank, (sent, calls, homes) in enumerate(run_ranks(passed, 4, kind, ep, etp)):
            where = routed(chosen, homes, EXPERTS // ep, rank)
            assert where == by_hand[rank]
            t, t_all = len(chosen[rank]), sum(map(len, chosen))
            sizes = Sizes(4, t, t_all, H, K, torch.float32)
            assert sent == dispatched_bytes(kind, sizes, where)
            # The table of `dispatch`.
            u, v = where if kind == "all_to_all" else (3 * t, t_all - t)
            there, back = 8 * 3 + u * (H * 4 + K * (4 + 8)), v * H * 4
            assert sent == (there, back, u * H * 4 + v * (H * 4 + K * 4))
            assert calls == MESSAGES[kind]


def test_what_one_rank_or_a_library_sends_is_not_counted() -> None:
    for kind in ("all_gather", "all_to_all", "fused"):
        assert dispatched_bytes(kind, Sizes(1, 5, 5, H, K, torch.float32)) == (0, 0, 0)
    sizes = Sizes(2, 5, 9, H, K, torch.float32)
    assert dispatched_bytes("fused", sizes) == (0, 0, 0)
    assert dispatched_bytes("all_to_all", sizes) is None


# Of a mixture on two tensor ranks, ep = 2: [moe], whether with sp, and messages forward and
# backward by axis.
FORTH: dict[Name, dict[str, int]] = {
    "all_gather": {"all_gather": 4, "reduce_scatter": 1},
    "all_to_all": {"all_to_all": 5},
}
BLOCKS: list[tuple[Values, bool, Calls, Calls]] = [
    (NONE, False, {"tp": {"all_gather": 1}}, {"tp": {"all_gather": 1}}),
    (NONE, True, {}, {}),
    (AUX, True, {"tp-cp": {"all_reduce": 1}}, {}),
    ({"balance": "seq_aux"}, True, {"tp-cp": {"all_reduce": 1}}, {}),
    (GLOBAL | {"capacity": None}, True, {}, {}),
    (SINKHORN, True, {"tp-cp": {"all_gather": 3}}, {}),
    (NONE | {"capacity": 1.0}, True, {"tp-cp": {"all_gather": 3}}, {}),
    (
        NONE | {"shared_ffn": 6},
        False,
        {"tp": {"all_gather": 1, "all_reduce": 1}},
        {"tp": {"all_gather": 1, "all_reduce": 1}},
    ),
    (
        NONE | {"shared_ffn": 6, "shared_gate": True},
        True,
        {"tp": {"all_gather": 1, "reduce_scatter": 1}},
        {"tp": {"all_gather": 2, "reduce_scatter": 1}},
    ),
]


def both_ways(kind: Name) -> list[tuple[Calls, Calls]]:
    """Messages forward and backward of every one of `BLOCKS`."""
    mesh = create_mesh(Grid(2, tp=2, ep=2, etp=1), world_axis().rank)
    batch = bridge.micro_batch([Document([1] * 8, [2] * 8, [1.0] * 8)])
    found = []
    for moe, sequence, *_ in BLOCKS:
        spec = model_spec(config_of("llama", moe, {}, {})).blocks[0].mlp
        assert isinstance(spec, MoESpec)
        tp, experts = TensorParallel(mesh.axis("tp"), sequence), ExpertParallel.of(mesh)
        build = Build(tp, torch.float32, NORMAL, NORMAL, dispatcher=kind, experts=experts)
        module = MoE("layers.0.moe", 12, spec, build)
        materialise(module, seed=0)
        x = torch.randn(8 // 2 if sequence else 8, 12, requires_grad=True)
        y = module(x, batch.sequences, Training(0, 1, 0, 1.0))
        forward = taken_from(mesh.axes)[0]
        y.sum().backward()
        found.append((forward, taken_from(mesh.axes)[0]))
    return found


@pytest.mark.parametrize("kind", FORTH)
def test_messages_of_a_block(kind: Name) -> None:
    there = {"etp-ep": FORTH[kind]}, {"etp-ep": MESSAGES[kind][2]}
    for ways in run_ranks(both_ways, 2, kind):
        for (moe, sequence, *more), found in zip(BLOCKS, ways, strict=True):
            assert found == tuple(a | b for a, b in zip(there, more, strict=True)), (moe, sequence)
