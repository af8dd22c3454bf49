"""User rules: which tensors they reach, what a group changes, what is frozen."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from optim import logical
from optim.logical import NAMES
from reference import bridge
from reference.plain import Weights

from penteract.config import ConfigError, OptimConfig, RuleConfig, resolve
from penteract.config_file import from_dict, load, to_dict
from penteract.optim.groups import group_of, unmatched
from penteract.parallel.buckets import Group
from penteract.parallel.parameters import Declared
from penteract.placement import Init, Piece, Placement, whole

SIZES = {"layers": 1, "hidden": 4, "ffn": 4, "heads": 1}


def test_rules_are_tables_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        "[model]\nlayers = 1\nhidden = 4\nffn = 4\nheads = 1\n[train]\nsteps = 1\n"
        '[[optim.rules]]\nmatch = "embed*"\nlr = 0.1\n[[optim.rules]]\nmatch = "*"\nfreeze = true\n'
    )
    config = load(path)
    assert config.optim.rules == (
        RuleConfig(match="embed*", lr=0.1),
        RuleConfig(match="*", freeze=True),
    )
    assert from_dict(to_dict(config)) == config
    path.write_text(path.read_text().replace("freeze", "frozen"))
    with pytest.raises(ConfigError, match=r"optim\.rules.*frozen"):
        load(path)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"name": "sgd"}, 0.9), ({"name": "muon"}, 0.95), ({"name": "lion"}, None), ({}, None),
        ({"name": "sgd", "momentum": 0.0}, 0.0), ({"name": "muon", "momentum": 0.8}, 0.8),
    ],
)  # fmt: skip
def test_momentum_is_that_of_the_optimizer(given: dict[str, Any], wanted: float | None) -> None:
    values = {"model": SIZES, "optim": given, "train": {"steps": 1}}
    assert resolve(from_dict(values)).optim.momentum == wanted


def test_momentum_is_not_for_all() -> None:
    values = {"model": SIZES, "optim": {"momentum": 0.9}, "train": {"steps": 1}}
    with pytest.raises(ConfigError, match=r"optim\.momentum = 0\.9 is for sgd and muon; adamw has"):
        resolve(from_dict(values))


def stored(*names: str) -> Declared:
    """A parameter that holds these vectors one behind the other."""
    pieces = tuple(Piece(name, (2,), whole((2,)), (2 * i,)) for i, name in enumerate(names))
    placement = Placement((2 * len(names),), pieces, {}, Init("zeros"), decay=True)
    return Declared(placement, torch.nn.Parameter(torch.empty(0)))


RULES = (
    RuleConfig(match="layers.0.*", lr=0.5),
    RuleConfig(match="layers.*.attention.*", weight_decay=0.0),
    RuleConfig(match="*norm*", freeze=True, lr=3.0),
)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("layers.0.attention.q.weight", Group(lr=0.5)),  # the first rule that matches
        ("layers.1.attention.q.weight", Group(weight_decay=0.0)),
        ("layers.1.mlp_norm.weight", Group(frozen=True)),
        ("layers.1.mlp.up.weight", Group()),
        ("Layers.0.mlp.up.weight", Group()),  # case counts
    ],
)
def test_the_first_rule_that_matches_holds(name: str, group: Group) -> None:
    assert group_of(RULES)(stored(name)) == group


def test_what_is_stored_together_has_one_group() -> None:
    names = [f"layers.0.attention.{x}.weight" for x in "qkv"]
    assert group_of(RULES)(stored(*names)) == Group(lr=0.5)
    with pytest.raises(ConfigError) as caught:
        group_of([RuleConfig(match="*.q.weight", lr=0.5)])(stored(*names))
    assert str(caught.value) == (
        "optim.rules: layers.0.attention.q.weight, layers.0.attention.k.weight, "
        "layers.0.attention.v.weight are stored together, so one rule must hold for them all; "
        "layers.0.attention.q.weight has match = '*.q.weight', layers.0.attention.k.weight has none"
    )
    # Two rules that say the same are one.
    same = [RuleConfig(match="*.q.weight", lr=2.0), RuleConfig(match="*", lr=2.0)]
    assert group_of(same)(stored(*names)) == Group(lr=2.0)


def test_a_rule_without_a_tensor_is_named() -> None:
    names = ["embed.weight", "layers.0.attention.q.weight", "norm.weight"]
    assert unmatched(RULES, names) == []
    (message,) = unmatched([*RULES, RuleConfig(match="layers.*.attentions.q.weight")], names)
    assert "'layers.*.attentions.q.weight' matches no tensor of the model" in message
    assert "layers.0.attention.q.weight" in message
    assert unmatched([RuleConfig(match="zzz")], names)[0].endswith(", ".join(names))


@pytest.mark.parametrize("decay", [0.3, 0.0])
@pytest.mark.parametrize("name", NAMES)
def test_groups_change_rate_and_decay_as_in_the_formulas(name: str, decay: float) -> None:
    rules = [{"match": "layers.0.*", "lr": 0.5, "weight_decay": decay}]
    optim = logical.optim_of(name, rules=rules)
    found = logical.joined([logical.updated("llama", optim)])["weights"]
    weights = logical.setting("llama", optim)[2]
    plain = logical.reference(optim, weights)["weights"]
    inside = {n: x for n, x in found.items() if n.startswith("layers.0.")}
    wanted = {n: x for n, x in grouped(optim, weights, decay).items() if n in inside}
    assert bridge.worst_difference(inside, wanted)[0] < 1e-12
    outside = {n: x for n, x in found.items() if n not in inside}
    assert bridge.worst_difference(outside, {n: plain[n] for n in outside})[0] < 1e-12


def grouped(optim: OptimConfig, weights: Weights, decay: float) -> Weights:
    """The reference at half of the rate, everything decaying alike."""
    rate, decays = logical.LR, logical.decays
    logical.LR, logical.decays = rate / 2, lambda name: True
    try:
        return logical.reference(dataclasses.replace(optim, weight_decay=decay), weights)["weights"]
    finally:
        logical.LR, logical.decays = rate, decays


@pytest.mark.parametrize("name", NAMES)
def test_what_is_frozen_neither_moves_nor_has_state(name: str) -> None:
    rules = [{"match": "layers.0.attention.*", "freeze": True}, {"match": "embed*", "freeze": True}]
    optim = logical.optim_of(name, rules=rules)
    buffers, optimizer, weights = logical.setting("llama", optim)
    logical.fill(buffers, "own_gradient", logical.gradients(weights, 1))
    optimizer.step(1e-2, torch.ones(()), torch.zeros(()))
    state = {
        fragment.tensor
        for _, bucket, moment in optimizer.state()
        for _, fragment, _ in bucket.owned(moment)
    }
    for bucket in buffers.all_buckets:
        for _, fragment, view in bucket.owned(bucket.own_parameters):
            tensor = fragment.tensor
            frozen = tensor.startswith(("layers.0.attention.", "embed"))
            assert torch.equal(view, weights[tensor][fragment.box.slices()]) == frozen, tensor
            assert (tensor in state) != frozen
