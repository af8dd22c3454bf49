"""Overlapping reductions and gathers with computing changes no bit."""

import dataclasses

import pytest
import torch
import torch._dynamo  # optimizers import it at their first step: here once, not in every rank
from optim import logical
from parity.matrix import Cell
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
