"""Experts: feed-forward layers of which each token takes a few, all of a rank in grouped products.

Rows arrive in the order of tokens. They are put in the order of experts, one row for each expert of
a token, pass through gate|up and down (`grouped_mlp`), and are added up again by token. Over etp
each rank holds a part of every expert's width and makes a partial sum; the bias of `down` is added
by the first one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from penteract import compat
from penteract.nn.build import Build
from penteract.nn.grouped_mlp import Way, grouped_mlp, weighted_bias
from penteract.nn.mlp import MLPSpec
from penteract.parallel.expert.dispatch import Arrived
from penteract.parallel.expert.grouped import Groups
from penteract.parallel.expert.places import tally
from penteract.parallel.parameters import Layer
from penteract.placement import AxisUse, Box, Init, Piece, Placement, split_range


class Experts(Layer):
    """Rows that arrived [r, h] → what the experts of this rank make of them, weighted [r, h]."""

    inner: nn.Parameter
    down: nn.Parameter
    inner_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(self, name: str, hidden: int, spec: MLPSpec, count: int, build: Build) -> None:
        super().__init__()
        places = build.experts
        self.held, self.first = places.held(count), places.etp.rank == 0
        self.gated, self.keeps = spec.activation == "swiglu", build.recompute.of_experts
        start, stop = split_range(spec.width, places.etp.size, places.etp.rank)
        features = stop - start
        parts = ("gate", "up") if self.gated else ("up",)
        each = enumerate(self.held)
        inner, inner_bias, down, down_bias = [], [], [], []
        for place, number in each:
            for i, part in enumerate(parts):
                full, box = f"{name}.{number}.{part}", Box((start, 0), (features, hidden))
                at = (place, i * features, 0)
                inner.append(Piece(f"{full}.weight", (spec.width, hidden), box, at))
                inner_bias.append(
                    Piece(f"{full}.bias", (spec.width,), Box((start,), (features,)), at[:2])
                )
            full, box = f"{name}.{number}.down", Box((0, start), (hidden, features))
            down.append(Piece(f"{full}.weight", (hidden, spec.width), box, (place, 0, 0)))
            down_bias.append(Piece(f"{full}.bias", (hidden,), Box((0,), (hidden,)), (place, 0)))
        n, rows = len(self.held), len(parts) * features
        self._matrix("inner", (n, rows, hidden), inner, build.init, build.dtype)
        self._matrix("down", (n, hidden, features), down, build.output_init, build.dtype)
        self._bias("inner_bias", (n, rows), inner_bias, "split", build.dtype, spec.bias)
        self._bias("down_bias", (n, hidden), down_bias, "partial", build.dtype, spec.bias)

    def _matrix(
        self,
        attribute: str,
        shape: tuple[int, ...],
        pieces: Sequence[Piece],
        init: Init,
        dtype: torch.dtype,
    ) -> None:
        placement = Placement(
            shape, tuple(pieces), expert_axes("split"), init, decay=True, matrix=True
        )
        self.declare(attribute, placement, dtype)

    def _bias(
        self,
        attribute: str,
        shape: tuple[int, ...],
        pieces: Sequence[Piece],
        etp: AxisUse,
        dtype: torch.dtype,
        there: bool,
    ) -> None:
        if not there:
            self.register_parameter(attribute, None)
            return
        axes, zeros = expert_axes(etp), Init("zeros")
        self.declare(attribute, Placement(shape, tuple(pieces), axes, zeros, decay=False), dtype)

    def forward(self, arrived: Arrived, padded: int = 0) -> Tensor:
        """Every expert gets `padded` rows at least; those that it lacks are copies that weigh 0."""
        row, expert, groups, real = self._sorted(arrived, padded)
        weights = arrived.weights.flatten()[row]  # [m]
        if real is not None:
            weights = torch.where(real, weights, 0.0)
        token = row.div(arrived.experts.shape[1], rounding_mode="floor")
        way = Way(token, expert, groups, self.gated, self.keeps, self.gradients)
        # [m, h], partial over etp
        y = grouped_mlp(arrived.x, weights, self.inner, self.inner_bias, self.down, way)
        if self.down_bias is not None:
            # On the other ranks times 0: all reach the same parameters, in one order.
            y = y + weighted_bias(self.down_bias, weights * float(self.first), way)
        return torch.zeros_like(arrived.x).index_add(0, token, y)

    def _sorted(
        self, arrived: Arrived, padded: int
    ) -> tuple[Tensor, Tensor, Groups, Tensor | None]:
        """Which of the [r·k] pairs of token and expert are here, by expert; their experts; which
        are no padding, where there is some.
        """
        n, flat = len(self.held), arrived.experts.flatten()
        every, counts = torch.where(flat < 0, n, flat), tally(flat, n)
        rows = counts.tolist() if compat.has_values(counts) else _evenly(len(flat), n)
        row = every.argsort(stable=True)[: sum(rows)]
        if not padded or not len(flat):
            return row, every[row], Groups(rows, counts.cumsum(0).to(torch.int32)), None
        most = max(padded, *rows)
        place = torch.arange(most, device=flat.device)
        real = (place < counts[:, None]).flatten()  # [n·most]
        at = ((counts.cumsum(0) - counts)[:, None] + place).flatten()
        row = torch.cat([row, row.new_zeros(1)])[torch.where(real, at, len(row))]
        expert = torch.arange(n, device=flat.device).repeat_interleave(most)
        ends = (torch.arange(n, device=flat.device, dtype=torch.int32) + 1) * most
        return row, expert, Groups([most] * n, ends), real


def _evenly(rows: int, experts: int) -> list[int]:
    """What a dry run takes for the rows of every expert."""
    return [rows // experts] * experts


def expert_axes(etp: AxisUse) -> dict[str, AxisUse]:
    """Axes of an expert parameter: others hold other experts, or all of these for other tokens."""
    return {"ep": "split", "etp": etp, "edp": "partial"}
