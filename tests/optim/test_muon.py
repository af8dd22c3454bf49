"""Muon's own: the orthogonal factor, the unit that is orthogonalised, what is sent, a dry run."""

import dataclasses
import math

import pytest
import torch
import torch.distributed as dist
from optim import logical
from optim.logical import Layout
from reference import bridge
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from penteract.grid import Grid
from penteract.mesh import create_mesh, single
from penteract.optim.muon import orthogonalise
from penteract.optim.optimizer import build
from penteract.testing import run_ranks, world_axis

MUON = logical.optim_of("muon")


@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (3, 8), (8, 3), (1, 6)])
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = orthogonalise(x, 1e-8)
    torch.testing.assert_close(y, logical.newton_schulz(x, 1e-8), rtol=0, atol=1e-12)
    values = torch.linalg.svdvals(y)
    assert 0.6 < values.min() <= values.max() < 1.25


def test_the_update_is_that_of_torch() -> None:
    """torch's own works in bfloat16, hence the tolerance."""
    weight = torch.nn.Parameter(torch.randn(12, 20, generator=torch.Generator().manual_seed(1)))
    start = weight.detach().clone()
    ours = torch.zeros_like(start)
    theirs = torch.optim.Muon(
        [weight], lr=1.0, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    weight.grad = torch.randn(12, 20, generator=torch.Generator().manual_seed(2))
    ahead = ours.lerp(weight.grad, 0.05).mul_(0.95).add_(weight.grad, alpha=0.05)
    ours = 0.2 * math.sqrt(20) * orthogonalise(ahead, 1e-7)
    theirs.step()
    assert float((start - weight.detach() - ours).norm() / ours.norm()) < 0.02


def test_zero_and_noise_stay_small() -> None:
    """A gradient that is mathematically zero must not become an update of full size."""
    assert not orthogonalise(torch.zeros(3, 4), 1e-8).any()
    noise = 1e-17 * torch.randn(3, 4, dtype=torch.float64)
    assert float(orthogonalise(noise, 1e-4).abs().max()) < 1e-9


def fused_qkv(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The planted fault: q, k and v orthogonalised as the one matrix that is stored."""
    g = logical.COEFFICIENT * torch.cat(
        [logical.gradients(weights, 1)[f"layers.0.attention.{x}.weight"] for x in "qkv"]
    )
    change = 0.2 * math.sqrt(max(g.shape)) * logical.newton_schulz(g * 0.0975, MUON.eps)
    sizes = [weights[f"layers.0.attention.{x}.weight"].shape[0] for x in "qkv"]
    parts = dict(zip("qkv", change.split(sizes), strict=True))
    found = {}
    for x, part in parts.items():
        name = f"layers.0.attention.{x}.weight"
        found[name] = weights[name] * (1 - logical.LR * MUON.weight_decay) - logical.LR * part
    return found


def test_the_unit_is_the_logical_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logical, "STEPS", 1)
    found = logical.joined([logical.updated("llama", MUON)])["weights"]
    weights = logical.setting("llama", MUON)[2]
    wrong = fused_qkv(weights)
    mine = {name: found[name] for name in wrong}
    right = {name: logical.reference(MUON, weights)["weights"][name] for name in wrong}
    assert bridge.worst_difference(mine, right)[0] < 1e-12
    assert bridge.worst_difference(mine, wrong)[0] > 1e-3


def on_half() -> str:
    """A tensor rank that takes its part for the whole."""
    axis = world_axis()
    mesh = create_mesh(Grid(2, tp=2), axis.rank)
    buffers, _, _ = logical.setting("llama", MUON, mesh=mesh, layout=Layout(tp=2))
    with pytest.raises(ValueError, match="elements") as caught:
        build(buffers, MUON, {"tp-dp-cp": single("tp-dp-cp")})
    return str(caught.value)


def test_a_tensor_ranks_part_cannot_pass_for_the_matrix() -> None:
    assert all("layers.0.attention" in message for message in run_ranks(on_half, 2))


def sent(layout: Layout) -> tuple[list[int], int, int]:
    """Bytes and messages of one step, and the bytes that this rank holds of matrices."""
    axis = world_axis()
    mesh = create_mesh(Grid(axis.size, tp=layout.tp), axis.rank)
    buffers, optimizer, weights = logical.setting("llama", MUON, mesh=mesh, layout=layout)
    traffic = mesh.axis("tp-dp-cp").traffic
    traffic.bytes.clear(), traffic.calls.clear()
    logical.fill(buffers, "own_gradient", logical.gradients(weights, 1))
    optimizer.step(1e-3, torch.ones(()), torch.zeros(()))
    held = sum(
        view.nbytes
        for bucket in buffers.buckets
        if bucket.kind.matrix
        for _, _, view in bucket.owned(bucket.master)
    )
    assert traffic.calls == {"all_to_all": 2}
    return traffic.bytes["all_to_all"], held, sum(b.numel for b in buffers.buckets)


@pytest.mark.parametrize("layout", [Layout(dp=2, zero=1), Layout(tp=2), Layout(dp=2)])
def test_bytes_of_a_step(layout: Layout) -> None:
    """Two messages; split, each element goes to its owner and back at most once. With equal copies
    everywhere only results travel, and each matrix once to the other rank.
    """
    found = run_ranks(sent, 2, layout)
    total, held = sum(x[0] for x in found), sum(x[1] for x in found)
    if layout == Layout(dp=2):
        assert total == held / 2
    else:
        assert 0.8 * held <= total <= 1.2 * held  # half of it lies on its owner already


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_step_on_shapes_alone(zero: int) -> None:
    """A rank of a larger world runs a step, though no other answers."""
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    try:
        mesh = create_mesh(Grid(8, tp=4), 5)
        with FakeTensorMode(allow_non_fake_inputs=True):
            layout = Layout(dp=2, tp=4, zero=zero)
            _, optimizer, _ = logical.setting("llama", MUON, mesh=mesh, layout=layout)
            optimizer.step(1e-3, torch.ones(()), torch.zeros(()))
        assert mesh.axis("tp-dp-cp").traffic.calls["all_to_all"] == 2
    finally:
        dist.destroy_process_group()


def test_without_matrices_or_anything_to_train() -> None:
    rules = [{"match": "layers.*.weight", "freeze": True}]
    optim = dataclasses.replace(MUON, rules=logical.optim_of("muon", rules=rules).rules)
    outcome = logical.updated("llama", optim)
    assert set(outcome.parts) == {"weights", "exp_avg", "exp_avg_sq"}
    for name in logical.NAMES:
        frozen = logical.optim_of(name, rules=[{"match": "*", "freeze": True}])
        _, optimizer, _ = logical.setting("llama", frozen)
        optimizer.step(1e-3, torch.ones(()), torch.zeros(()))
        assert list(optimizer.state()) == []
