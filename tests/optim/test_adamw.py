"""AdamW against the reference: rounding of each type, masters, what decays."""

import dataclasses
from typing import Any

import pytest
import torch
from optim import logical
from optim.logical import setting
from parity.matrix import MODELS
from reference import bridge, plain
from torch import Tensor

from penteract.config import resolve
from penteract.config_file import from_dict
from penteract.families import model_spec
from penteract.mesh import single
from penteract.nn.model import Stage
from penteract.optim.optimizer import build
from penteract.parallel.buckets import Sharding
from penteract.parallel.buffers import Buffers
from penteract.parallel.tensor import TensorParallel

GO = torch.zeros(())
OPTIM = logical.optim_of("adamw", lr=1e-2, eps=1e-4, weight_decay=0.1, betas=[0.9, 0.95])


def decayed(buffers: Buffers) -> frozenset[str]:
    return frozenset(
        piece.tensor
        for slot in buffers.slots()
        for piece in slot.entry.placement.pieces
        if slot.entry.placement.decay
    )


def one() -> Tensor:
    return torch.ones((), dtype=torch.float64)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)]
)
@pytest.mark.parametrize("coefficient", [1.0, 0.3])
def test_three_updates_equal_the_formulas(
    dtype: torch.dtype, tolerance: float, coefficient: float
) -> None:
    """Masters and moments; a clip coefficient must not lose float64's digits."""
    buffers, optimizer, weights = setting("gpt2", OPTIM, dtype=dtype)
    state = plain.State.start(weights)
    rates = plain.Rates(lambda n: n * 1e-3, OPTIM.betas, OPTIM.eps, 0.1, 0.0, decayed(buffers))
    for step in range(1, 4):
        grads = bridge.random_weights(bridge.placements(buffers), seed=step)
        bridge.set_owned(buffers, "own_gradient", grads)
        optimizer.step(step * 1e-3, coefficient * one(), GO)
        plain.update(state, 0.0, {name: coefficient * g for name, g in grads.items()}, rates)
    assert optimizer.updates == 3
    found = bridge.logical(bridge.owned(buffers, "master"))
    bridge.assert_close(found, state.weights, tolerance)
    for kind, wanted in (("exp_avg", state.first), ("exp_avg_sq", state.second)):
        parts = [
            (fragment, view)
            for name, bucket, moment in optimizer.state()
            if name == kind
            for _, fragment, view in bucket.owned(moment)
        ]
        bridge.assert_close(bridge.logical(parts), wanted, tolerance)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_only_matrices_and_embeddings_decay(family: str, tied: bool) -> None:
    """The golden list, {name: whether it decays}, of a model with every kind of parameter."""
    model: dict[str, Any] = {**MODELS["llama"], "family": family, "layers": 1, "tied": tied}
    model |= {"bias": True, "qk_norm": True}
    config = resolve(from_dict({"model": model, "data": {"seq": 8}, "train": {"steps": 1}}))
    stage = Stage(model_spec(config), TensorParallel(single("tp")), dtype=torch.float32)
    buffers = Buffers(stage, Sharding.whole(single("dp-cp")), seed=0, more_axes=[single("tp")])
    matrices = ["attention.q", "attention.k", "attention.v", "attention.o", "mlp.up", "mlp.down"]
    matrices += ["mlp.gate"] if family == "llama" else []
    norms = ["attention_norm", "mlp_norm", "attention.q_norm", "attention.k_norm"]
    golden = {"embed.weight": True, "norm.weight": False}
    golden |= {} if tied else {"head.weight": True}
    golden |= {f"layers.0.{name}.weight": True for name in matrices}
    golden |= {f"layers.0.{name}.bias": False for name in matrices}
    golden |= {f"layers.0.{name}.weight": False for name in norms}
    if family == "gpt2":
        biases = ("norm.bias", "layers.0.attention_norm.bias", "layers.0.mlp_norm.bias")
        golden |= {"embed.positions": True, **dict.fromkeys(biases, False)}
    found = {
        piece.tensor: slot.entry.placement.decay
        for slot in buffers.slots()
        for piece in slot.entry.placement.pieces
    }
    assert found == golden
    # With gradients of zero, decay alone changes a weight.
    optimizer = build(buffers, OPTIM, {})
    bridge.set_owned(buffers, "master", bridge.random_weights(bridge.placements(buffers)))
    before = {f.tensor: x.clone() for _, f, x in buffers.owned("master")}
    optimizer.step(1e-2, one(), GO)
    moved = {f.tensor: not torch.equal(x, before[f.tensor]) for _, f, x in buffers.owned("master")}
    assert moved == golden


def test_masters_move_by_less_than_bfloat16_can_say() -> None:
    """Steps of 1e-4 on weights near 1 vanish in bfloat16 one by one, and add up in the master."""
    optim = dataclasses.replace(OPTIM, weight_decay=0.0)
    buffers, optimizer, weights = setting("llama", optim, dtype=torch.bfloat16)
    bridge.set_owned(buffers, "master", {name: torch.ones_like(x) for name, x in weights.items()})
    buffers.publish()
    for step in range(1, 41):
        for slot in buffers.slots():
            slot.gradient.fill_(1.0)
        optimizer.step(1e-4, one(), GO)
        for slot in buffers.slots():
            parameter = slot.entry.parameter
            torch.testing.assert_close(
                slot.master, torch.full_like(slot.master, 1 - step * 1e-4), rtol=0, atol=1e-6
            )
            assert torch.equal(parameter, slot.master.bfloat16())
            # bfloat16 next to 1 has steps of 1/256 below.
            assert bool((parameter == 1.0).all()) == (step * 1e-4 < 1 / 512)
