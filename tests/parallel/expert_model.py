"""A model of one matrix, and experts with biases, a block; gradients whose sum is the same however
the ranks are used.
"""

from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from penteract.grid import Grid
from penteract.mesh import Mesh
from penteract.parallel.parameters import Layer, data_partial
from penteract.placement import AxisUse, Box, Init, Piece, Placement, whole

F64 = torch.float64
EXPERTS, OUT, IN = 4, 12, 9
DENSE_SHAPE = (16, 20)
BLOCKS = 3  # the last one has no experts
MICRO_BATCHES = 2


class Dense(Layer):
    """A matrix whose rows are split over tp."""

    def __init__(self, block: int, mesh: Mesh) -> None:
        super().__init__()
        tp = mesh.axis("tp")
        n, columns = DENSE_SHAPE[0] // tp.size, DENSE_SHAPE[1]
        box = Box((n * tp.rank, 0), (n, columns))
        piece = Piece(f"layers.{block}.weight", DENSE_SHAPE, box, (0, 0))
        axes, init = data_partial("split"), Init("normal", 1.0)
        place = Placement((n, columns), (piece,), axes, init, decay=True, matrix=True)
        self.declare("weight", place, F64)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Experts(Layer):
    """Matrices whose rows etp splits; and biases: each etp rank has a part of their gradients."""

    def __init__(self, block: int, mesh: Mesh) -> None:
        super().__init__()
        ep, etp, name = mesh.axis("ep"), mesh.axis("etp"), f"layers.{block}.experts"
        e, n = EXPERTS // ep.size, OUT // etp.size
        numbers = range(e * ep.rank, e * (ep.rank + 1))
        rows = Box((n * etp.rank, 0), (n, IN))
        weights = tuple(
            Piece(f"{name}.{i}.weight", (OUT, IN), rows, (j, 0, 0)) for j, i in enumerate(numbers)
        )
        biases = tuple(
            Piece(f"{name}.{i}.bias", (OUT,), whole((OUT,)), (j, 0)) for j, i in enumerate(numbers)
        )
        axes: dict[str, AxisUse] = {"ep": "split", "etp": "split", "edp": "partial"}
        init = Init("normal", 1.0)
        place = Placement((e, n, IN), weights, axes, init, decay=True, matrix=True)
        self.declare("weight", place, F64)
        axes = {"ep": "split", "etp": "partial", "edp": "partial"}
        self.declare("bias", Placement((e, OUT), biases, axes, Init("ones"), decay=False), F64)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Block(nn.Module):
    def __init__(self, block: int, mesh: Mesh) -> None:
        super().__init__()
        self.dense = Dense(block, mesh)
        if block < BLOCKS - 1:
            self.experts = Experts(block, mesh)

    def forward(self, x: Tensor) -> list[tuple[Placement, Tensor]]:
        """Every parameter as it is while the block runs."""
        found = []
        for layer in self.children():
            layer(x)
            placed = layer.placements.items()
            found += [(place, getattr(layer, name).detach().clone()) for name, place in placed]
        return found


class Model(nn.Module):
    """The blocks that a pipeline rank has; the last one is alone on the last rank."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        pp = mesh.axis("pp")
        held = {1: [range(BLOCKS)], 2: [range(BLOCKS - 1), [BLOCKS - 1]]}[pp.size][pp.rank]
        self.units = nn.ModuleList(Block(i, mesh) for i in held)
        self.unit_stages = [pp.rank] * len(held)

    def stored(self) -> list[tuple[Placement, Tensor]]:
        """Every parameter, each while its block runs."""
        return [pair for block in self.units for pair in block(torch.zeros(()))]


# --- the gradients, in numpy from the groups of the grid


def random(name: str, *more: object) -> np.ndarray:
    """A logical tensor of small whole numbers, whose sums are exact; some are 0."""
    shape = (OUT,) if name.endswith("bias") else (OUT, IN) if "experts" in name else DENSE_SHAPE
    generator = np.random.default_rng(crc32(repr((name, *more)).encode()))
    return generator.integers(-2, 3, shape).astype(np.float64)


def total(name: str) -> np.ndarray:
    """The gradient, whatever the grid."""
    return random(name) / 64


def partial(grid: Grid, rank: int, name: str, micro_batch: int) -> np.ndarray:
    """Of a rank's gradient what one micro-batch adds: the first of the ranks whose gradients are to
    be summed has in its last one what all the others lack of the total.
    """
    axes = "dp-cp" if "experts" not in name else "etp-edp" if name.endswith("bias") else "edp"
    rows = grid.groups(axes)
    row = [int(r) for r in rows[(rows == rank).any(1)][0]]
    if (rank, micro_batch) != (row[0], MICRO_BATCHES - 1):
        return random(name, rank, micro_batch)
    others = [(r, j) for r in row for j in range(MICRO_BATCHES) if (r, j) != (rank, micro_batch)]
    return total(name) - sum(random(name, *other) for other in others)


def stored_gradient(place: Placement, mesh: Mesh, micro_batch: int) -> Tensor:
    out = torch.zeros(place.shape, dtype=F64)
    for piece in place.pieces:
        x = partial(mesh.grid, mesh.rank, piece.tensor, micro_batch)[piece.box.slices()]
        out[piece.local.slices()] = torch.from_numpy(x).view(piece.local.size)
    return out
