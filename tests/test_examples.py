"""The examples run, and a model of plain torch layers is trained as one of ours is."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import assert_same_state, curve, evaluations, newest, tensors
from torch import nn

from penteract.config import Config, ModelConfig, OptimConfig, TrainConfig, resolve
from penteract.grid import Grid
from penteract.mesh import create_mesh
from penteract.parallel.buckets import Sharding
from penteract.parallel.buffers import Buffers
from penteract.parallel.parameters import adopt, declared_parameters
from penteract.testing import run_ranks, world_axis
from penteract.train.run import Run
from penteract.train.task import Task, whole

EXAMPLE = Path(__file__).parents[1] / "examples" / "custom_model.py"


def example(*words: str, ranks: int = 1) -> str:
    """Standard error of a run of the example in real processes."""
    command = [sys.executable, str(EXAMPLE), *words]
    if ranks > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_the_example_gives_the_same_on_two_ranks(tmp_path: Path) -> None:
    """Three micro-batches on two ranks: one is empty. Then it goes on from its checkpoint."""
    words = ("--train.global_batch=12", "--train.micro_batch=4", "--train.steps=4")
    alone, two = (f"--log.dir={tmp_path}/{name}" for name in ("alone", "two"))
    example(*words, alone)
    example(*words, two, ranks=2)
    np.testing.assert_allclose(curve(tmp_path / "two"), curve(tmp_path / "alone"), rtol=1e-5)
    losses = [evaluations(tmp_path / name)[4]["held-out"] for name in ("alone", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    said = example(*words, "--train.steps=6", two)
    assert "continuing" in said
    assert [line[0] for line in curve(tmp_path / "two")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_the_example_learns_to_sort(tmp_path: Path) -> None:
    example(f"--log.dir={tmp_path}/run")
    first, last = curve(tmp_path / "run")[0], curve(tmp_path / "run")[-1]
    assert first[1] > 2.2
    assert last[1] < 0.5


class Tied(nn.Module):
    """A model with a tied weight, a 0-d parameter and layers of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6, dtype=torch.float64)
        self.mix = nn.Sequential(
            nn.Linear(6, 6, dtype=torch.float64), nn.Tanh(), nn.LayerNorm(6, dtype=torch.float64)
        )
        self.gain = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.head = nn.Linear(6, 7, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.gain * self.mix(self.embed(tokens)))
        return result


def config() -> Config:
    return resolve(
        Config(
            model=ModelConfig(layers=1, hidden=6, ffn=6, heads=1),
            train=TrainConfig(steps=3, dtype="float64"),
            optim=OptimConfig(lr=0.1, weight_decay=0.3, eps=1e-4, schedule="constant", clip=0.7),
        )
    )


def samples(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(7, (9, 5), generator=generator)  # [n, s]; 9 rows over 2 ranks: uneven


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="sum")


def trained(model: nn.Module, ranks: int, folder: Path | None = None) -> list[torch.Tensor]:
    """The parameters after three updates on each of `ranks` forked ranks; the first one's."""

    def work() -> list[torch.Tensor]:
        world = world_axis()
        mesh = create_mesh(Grid(world.size), world.rank)
        if world.rank:  # other makers' modules draw their values as they like
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_()
        adopt(model)
        task = Task(
            model=model,
            batches=lambda step: [samples(step)[world.rank :: world.size]],
            forward=whole(lambda tokens, scale, training: {"loss": scale * loss_of(model, tokens)}),
            count=lambda tokens: tokens[:, 1:].numel(),
            tokens=lambda step: 36,
        )
        run = Run(task, config(), mesh, torch.device("cpu"))
        for _ in range(3):
            run.update()
        if folder is not None:
            run.save(folder)
        return [p.detach().clone() for p in model.parameters()]

    results = run_ranks(work, ranks)
    for other in results[1:]:
        for mine, first in zip(other, results[0], strict=True):
            assert torch.equal(mine, first), "replicas are equal to the bit"
    return results[0]


def by_hand(model: nn.Module) -> list[torch.Tensor]:
    """The same updates with torch's own pieces."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-4)
    for step in (1, 2, 3):
        optimizer.zero_grad()
        (loss_of(model, samples(step)) / 36).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_adopted_model_is_trained_as_by_hand(ranks: int) -> None:
    torch.manual_seed(3)
    model = Tied()
    expected = by_hand(copy.deepcopy(model))
    for mine, wanted in zip(trained(model, ranks), expected, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-12)


def test_an_adopted_model_is_saved_under_its_own_names(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Tied()
    trained(copy.deepcopy(model), 1, tmp_path / "alone/checkpoints")
    trained(copy.deepcopy(model), 2, tmp_path / "two/checkpoints")
    alone = newest(tmp_path / "alone")
    names = {name for name in tensors(alone) if "/" not in name}
    assert names == {"embed.weight", "mix.0.weight", "mix.0.bias", "mix.2.weight", "mix.2.bias",
                     "gain"}  # fmt: skip
    assert_same_state(newest(tmp_path / "two"), alone, tolerance=1e-12)


def test_what_has_a_placement_and_values_keeps_them() -> None:
    model = Tied()
    values = [p.detach().clone() for p in model.parameters()]
    adopt(model)
    before = [entry.placement for entry in declared_parameters(model)]
    adopt(model)
    assert [entry.placement for entry in declared_parameters(model)] == before
    assert [entry.placement.decay for entry in declared_parameters(model)] == [
        v.dim() >= 2 for v in sorted_like(model, values)
    ]
    Buffers(model, Sharding.whole(world_axis("dp-cp")), seed=0)
    for parameter, value in zip(model.parameters(), values, strict=True):
        assert torch.equal(parameter, value)


def sorted_like(model: nn.Module, values: list[torch.Tensor]) -> list[torch.Tensor]:
    """The values in the order of `declared_parameters`."""
    by_id = {id(p): v for p, v in zip(model.parameters(), values, strict=True)}
    return [by_id[id(entry.parameter)] for entry in declared_parameters(model)]


def test_what_cannot_be_trained_is_named() -> None:
    with pytest.raises(ValueError, match=r"module 1 has the saved buffer running_mean"):
        adopt(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with pytest.raises(ValueError, match=r"weight has no placement"):
        Buffers(nn.Linear(2, 2), Sharding.whole(world_axis("dp-cp")), seed=0)
