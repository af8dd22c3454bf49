"""Placements stay with their parameters; one without a placement is an error."""

import pytest
import torch
from torch import nn

from penteract.mesh import single
from penteract.parallel.buckets import Sharding
from penteract.parallel.buffers import Buffers
from penteract.parallel.parameters import Layer, declared_parameters, materialise
from penteract.parallel.tensor import replicated
from penteract.placement import Init


def layer(name: str = "w") -> Layer:
    result = Layer()
    result.declare(
        "weight", replicated(name, (3, 2), Init("normal", 0.5), decay=True), torch.float32
    )
    return result


def test_a_parameter_without_a_placement_is_named() -> None:
    model = nn.Sequential(layer(), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"1\.weight has no placement"):
        declared_parameters(model)


def test_a_placement_survives_conversion_and_a_swap_of_the_parameter() -> None:
    model = layer()
    materialise(model, seed=0)
    placement = declared_parameters(model)[0].placement
    model.to(torch.float64)
    model.weight = nn.Parameter(torch.zeros(3, 2))
    model.register_parameter("weight", nn.Parameter(torch.ones(3, 2)))
    entry = declared_parameters(model)[0]
    assert entry.placement is placement
    assert entry.parameter is model.weight


def test_a_tied_parameter_is_declared_once_and_stays_one_object() -> None:
    model = nn.ModuleList([layer("shared"), Layer()])
    model[1].share("weight", model[0], "weight")
    entries = declared_parameters(model)
    assert [(entry.name, len(entry.holders)) for entry in entries] == [("shared", 2)]
    buffers = Buffers(model, Sharding.whole(single("dp-cp")), seed=0)
    assert model[0].weight is model[1].weight
    assert next(iter(buffers.slots())).uses == 2


def test_initial_values_are_a_function_of_seed_and_name() -> None:
    models = [layer(), layer(), layer("v")]
    for model, seed in zip(models, (1, 1, 1), strict=True):
        materialise(model, seed=seed)
    again = layer()
    Buffers(again, Sharding.whole(single("dp-cp")), seed=1)
    assert torch.equal(models[0].weight, models[1].weight)
    assert torch.equal(models[0].weight, again.weight)
    assert not torch.equal(models[0].weight, models[2].weight)
