"""Overlapping reductions and gathers with computing changes no bit."""

import dataclasses
from typing import Any

import pytest
import torch
import torch._dynamo  # optimizers import it at their first step: here once, not in every rank
from optim import logical
from parity.matrix import Cell
from parity.mixtures import mixture_of
from parity.outcome import unequal
from parity.training import train_here
from torch import Tensor, nn

from penteract.collectives import Pending, start_all_gather_into
from penteract.mesh import Axis, single
from penteract.optim.optimizer import build
from penteract.parallel import buffers as buffers_module
from penteract.parallel import zero as zero_module
from penteract.parallel.buckets import Bucket, Sharding
from penteract.parallel.buffers import Buffers
from penteract.parallel.parameters import adopt
from penteract.parallel.turns import Turns
from penteract.testing import run_ranks, world_axis

CELL = Cell(
    "gpt2", dp=2, micro_batch=1, global_batch=6, bucket_bytes=256, dropout=0.1, optimizer="muon"
)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_of_two_rules(zero: int, replicas: int) -> None:
    """Muon for matrices and AdamW for the rest share the buffers."""
    cell = dataclasses.replace(CELL, dp=2 * replicas, zero=zero, replicas=replicas)
    both = [cell, dataclasses.replace(cell, overlap=False)]
    for on, off in run_ranks(train_here, cell.world, both):
        assert not unequal([on, off])


PAIRED = Cell(
    "gpt2", dp=2, micro_batch=1, global_batch=10, bucket_bytes=256, dropout=0.1, moe="aux", ep=2,
    schedule="1f1b-pairs",
)  # fmt: skip
PAIRS: dict[str, dict[str, Any]] = {
    "zero-2": {"zero": 2},
    "tp": {"dp": 1, "tp": 2, "etp": 1},
    "cp": {"dp": 1, "cp": 2, "dispatcher": "all_gather"},
    "pp": {"pp": 2, "etp": 2, "ep": 1},
    "vee": {"pp": 2, "schedule": "dualpipe-v", "chunks": 2},
}


def swapped(cell: Cell) -> tuple[tuple[Any, Any], int, int]:
    """Results with turns and without; how often the two of a pair changed places, in each run."""
    swaps, swap = [0], Turns.swap

    def counted(turns: Turns) -> None:
        swaps[-1] += turns._go is not None
        swap(turns)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Turns, "swap", counted)
        on = train_here([cell])[0]
        swaps.append(0)
        off = train_here([dataclasses.replace(cell, overlap=False)])[0]
    return (on, off), *swaps


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.slow] * (i > 0)) for i, name in enumerate(PAIRS)],
)
def test_of_pairs_that_take_turns(layout: str) -> None:
    cell = dataclasses.replace(PAIRED, **PAIRS[layout])
    ranks = run_ranks(swapped, cell.world, cell)
    for both, _, off in ranks:
        assert not unequal(both)
        assert off == 0
    assert max(on for _, on, _ in ranks) > 0  # some may have no experts
    if cell.pp == 1:
        # Two steps; in every pair but the first and last forwards two waits a block each way.
        micro_batches = cell.global_batch // cell.dp
        pairs, blocks = micro_batches - 1, len(mixture_of(cell.moe).layers)
        assert {on for _, on, _ in ranks} == {2 * pairs * 2 * 2 * blocks}


def test_with_stage_3_pairs_are_computed_one_after_another() -> None:
    cell = dataclasses.replace(PAIRED, zero=3)
    for both, *swaps in run_ranks(swapped, cell.world, cell):
        assert not unequal(both)
        assert swaps == [0, 0]


class OutOfOrder(nn.Module):
    """Three layers that run in another order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for i in (2, 0, 1):
            x = self.layers[i](x).sin()
        return x.square().sum()


def late(out: Tensor, x: Tensor, axis: Axis) -> Pending:
    """A gather whose result is there only once somebody has waited for it."""
    gathered = start_all_gather_into(torch.empty_like(out), x, axis).wait()
    return Pending([], lambda: out.copy_(gathered))


def losses(stage: int, *, overlap: bool = True) -> list[float]:
    """Of five steps; each is that of the parameters after the step before."""
    axis, found = world_axis("dp-cp"), []
    torch.manual_seed(0)
    model = OutOfOrder()
    adopt(model)
    sharding = Sharding(axis, single("dp-cp"), stage, overlap)
    whole = Sharding.whole(axis, overlap=overlap)
    buffers = Buffers(model, sharding if stage else whole, seed=0, bucket_bytes=8)
    optimizer = build(buffers, logical.optim_of("adamw"), {})
    for step in range(5):
        generator = torch.Generator().manual_seed(axis.size * step + axis.rank)
        buffers.begin()
        loss = model(torch.randn(3, 6, generator=generator, dtype=torch.float64))
        found.append(loss.item())
        buffers.begin_backward(last=True)
        loss.backward()
        buffers.end_backward()
        buffers.finish()
        optimizer.step(0.1, torch.ones((), dtype=torch.float64), torch.zeros(()))
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_forward_order_other_than_that_of_registration(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buckets are gathered in the order of registration and waited for where they are used."""
    wanted = run_ranks(losses, 2, 0)
    assert len({loss for rank in wanted for loss in rank}) == 10
    for overlap in (True, False):
        assert run_ranks(lambda: losses(stage, overlap=overlap), 2) == wanted  # noqa: B023
    for module in (buffers_module, zero_module):
        monkeypatch.setattr(module, "start_all_gather_into", late)
    assert run_ranks(losses, 2, stage) == wanted
    # And a read that does not wait would be seen.
    monkeypatch.setattr(Bucket, "wait", lambda self: None)
    assert run_ranks(losses, 2, stage) != wanted
