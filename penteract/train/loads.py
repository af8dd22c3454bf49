"""What the routers of a model did in a step, over all ranks: for the log, and for the next step.

| what                         | axis     | bytes a rank                    | when               |
|------------------------------|----------|---------------------------------|--------------------|
| loads and sums of all layers | tp-dp-cp | one all-reduce, (E+5)·8 a layer | each step          |
| those of all pipeline stages | pp       | JSON, to pp-1 ranks             | steps of log.every |
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

from penteract.collectives import all_reduce_, exchange
from penteract.mesh import Mesh
from penteract.nn.balance import moved_bias
from penteract.nn.moe import SUMS, MoE, Router
from penteract.parallel.parameters import place_kept


class Loads:
    """The routers of what one rank holds. A step is `begin`, forwards, `sum_up`, `commit`."""

    def __init__(self, model: nn.Module, mesh: Mesh, device: torch.device) -> None:
        found = [module for module in model.modules() if isinstance(module, MoE)]
        self.routers: dict[str, Router] = {moe.name: moe.router for moe in found}
        self.mesh, self.device = mesh, device
        self.totals: dict[str, Tensor] = {}  # of the last step: loads [E], then `SUMS`
        place_kept(model, device)

    def begin(self) -> None:
        for router in self.routers.values():
            router.seen.clear()

    def losses(self, terms: list[str]) -> dict[str, Tensor]:
        """This rank's parts of the auxiliary losses, over all its layers and micro-batches."""
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        seen = [x.sums for router in self.routers.values() for x in router.seen.values()]
        total = torch.stack(seen).sum(0) if seen else zero.expand(len(SUMS))
        return {name: total[SUMS.index(name)] for name in terms}

    @torch.no_grad()
    def sum_up(self) -> None:
        """Add up the step over micro-batches and ranks; all ranks together."""
        rows = []
        for router in self.routers.values():
            zeros = torch.zeros(router.spec.experts + len(SUMS), dtype=torch.float64)
            parts = [torch.cat([x.load.double(), x.sums]) for x in router.seen.values()]
            rows.append(torch.stack(parts).sum(0) if parts else zeros.to(self.device))
        if rows:
            whole = all_reduce_(torch.cat(rows), self.mesh.axis("tp-dp-cp"))
            sizes = [len(row) for row in rows]
            self.totals = dict(zip(self.routers, whole.split(sizes), strict=True))

    @torch.no_grad()
    def commit(self) -> None:
        """The step counts: biases move, and loads are those of the last step."""
        for name, router in self.routers.items():
            load = self.totals[name][: router.spec.experts].long()
            if router.bias is not None:
                router.bias.copy_(moved_bias(router.bias, load, router.spec.bias_rate))
            if router.load is not None:
                router.load.copy_(load)

    def line(self) -> dict[str, dict[str, Any]]:
        """By layer, over all pipeline stages: tokens of every expert, in all and those dropped, the
        share of choices dropped, the largest load over the mean, and the mean entropy in nats.
        """
        mine = {name: _described(row.tolist()) for name, row in self.totals.items()}
        answers = exchange(json.dumps(mine).encode(), self.mesh.axis("pp"))
        every = {name: row for answer in answers for name, row in json.loads(answer).items()}
        return dict(sorted(every.items(), key=lambda item: int(item[0].split(".")[1])))


def _described(row: list[float]) -> dict[str, Any]:
    load, sums = row[: -len(SUMS)], dict(zip(SUMS, row[-len(SUMS) :], strict=True))
    chosen = sum(load)
    return {
        "tokens": [int(n) for n in load],
        "dropped": sums["dropped"] / chosen if chosen else 0.0,
        "balance": max(load) * len(load) / chosen if chosen else 0.0,
        "entropy": sums["entropy"] / sums["tokens"] if sums["tokens"] else 0.0,
    }
