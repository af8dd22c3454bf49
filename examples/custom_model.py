"""A model of your own in the trainer: plain torch layers, your batches, your loss.

    python examples/custom_model.py
    torchrun --nproc-per-node 2 examples/custom_model.py

Both give the same numbers. Keys of the configuration (custom_model.toml) are options: with
`--train.steps 400` a second call continues from the last checkpoint of the first.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penteract.config import Config
from penteract.config_file import load
from penteract.data.loader import micro_batches
from penteract.grid import Grid
from penteract.launch import connect, environment
from penteract.mesh import Axis, create_mesh
from penteract.parallel.parameters import adopt
from penteract.train.loop import train
from penteract.train.task import Task, whole

DIGITS = 10


class Sorter(nn.Module):
    """Reads digits and writes them sorted: tokens [n, s] → logits [n, s, v]."""

    def __init__(self, *, hidden: int, ffn: int, heads: int, layers: int, seq: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(DIGITS, hidden)
        self.places = nn.Parameter(0.02 * torch.randn(seq, hidden))
        block = nn.TransformerEncoderLayer(hidden, heads, ffn, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, layers)
        self.head = nn.Linear(hidden, DIGITS)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.embed(tokens) + self.places))
        return logits


def sorting_task(config: Config, dp: Axis, device: torch.device) -> Task:
    """The task as one data rank sees it."""
    m, batch, seq = config.model, config.train.global_batch, config.data.seq
    model = Sorter(hidden=m.hidden, ffn=m.ffn, heads=m.heads, layers=m.layers, seq=seq).to(device)
    adopt(model)  # every parameter is whole on every rank; gradients are summed over the ranks

    def samples(indices: range) -> Tensor:
        # Each sample is a function of its number, so that any number of ranks sees the same ones.
        tokens = torch.empty(len(indices), seq, dtype=torch.int64)
        for row, index in zip(tokens, indices, strict=True):
            row.random_(DIGITS, generator=torch.Generator().manual_seed(index))
        return tokens.to(device)

    def batches(step: int) -> list[Tensor]:
        first = (step - 1) * batch
        mine = micro_batches(batch, config.train.micro_batch, dp.size, dp.rank)
        return [samples(range(first + part.start, first + part.stop)) for part in mine]

    def loss(tokens: Tensor, scale: Tensor, training: object) -> dict[str, Tensor]:
        # A sum over the batch, times the scale that the trainer passes: 1 / all ranks' counts.
        wanted = tokens.sort(-1).values
        return {"loss": scale * F.cross_entropy(model(tokens).mT, wanted, reduction="sum")}

    return Task(
        model=model,
        batches=batches,
        forward=whole(loss),
        count=lambda tokens: tokens.numel(),
        tokens=lambda step: batch * seq,
        validation={"held-out": lambda: [samples(range(dp.rank - 64, 0, dp.size))]},
        cursor=lambda step: step * batch,
    )


def main() -> None:
    config = load(Path(__file__).with_suffix(".toml"), sys.argv[1:])
    launch = environment()
    device = connect(launch, device=config.train.device)
    mesh = create_mesh(Grid(launch.world), launch.rank)
    torch.manual_seed(config.train.seed)
    train(sorting_task(config, mesh.axis("dp"), device), config, mesh, device)


if __name__ == "__main__":
    main()
