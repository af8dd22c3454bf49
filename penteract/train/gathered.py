"""What all ranks tell each other of the last step, for people: times of actions, unused weights."""

from __future__ import annotations

import dataclasses
import json

import torch

from penteract.checkpoint.agreement import together
from penteract.collectives import all_reduce_, exchange
from penteract.parallel.pipeline.trace import Row
from penteract.train.run import Run


def traced(run: Run) -> list[Row]:
    """When every action of a traced step ran, of all ranks, which call it together; else []."""
    if run.times is None:
        return []
    rank = run.mesh.rank
    rows = [(rank, *dataclasses.astuple(t.action), t.start, t.end) for t in run.times]
    answers = exchange(json.dumps(rows).encode(), run.mesh.axis("world"))
    every = [row for answer in answers for row in json.loads(answer)]
    first = min(start for *_, start, _ in every)
    return [(*what, start - first, end - first) for *what, start, end in every]


def unreached(run: Run) -> list[str]:
    """Names of parameters that no data rank's last step reached; all ranks call it together."""
    world = run.mesh.axis("world")
    some = torch.tensor(float(bool(run.unused)), device=run.device)
    if not any(run.read([all_reduce_(some, world, "max")])):
        return []
    answers = together(world, lambda: run.unused)
    # Ranks of one such group hold the same parameters, whole or in part.
    groups = run.mesh.grid.groups("tp-dp-cp").tolist()
    found = [set.intersection(*(set(answers[rank]) for rank in group)) for group in groups]
    return sorted(set[str]().union(*found))
