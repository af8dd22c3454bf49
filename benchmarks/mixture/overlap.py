"""Part "overlap": steps of a model whose tokens travel over a slow link, with and without turns.

Two ranks with half of the experts each. A link is so slow that what a rank sends of tokens in a
step takes a given share of the time that the step takes without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from mixture.layer import TOPK, Shape
from tensor_parallel import quartiles
from timing.slow_link import Link, slow_down
from timing.turns import Case, in_turn
from torch import Tensor

from penteract.config import Config, resolve
from penteract.config_file import from_dict
from penteract.grid import Grid
from penteract.mesh import create_mesh
from penteract.testing import run_ranks, world_axis
from penteract.train.language_model import synthetic_task
from penteract.train.run import Run

RANKS, BLOCKS, MICRO_BATCHES, SEQ = 2, 2, 8, 256
SHARES = (0.0, 0.25, 0.5, 1.0)
CASES: tuple[tuple[str, str, bool], ...] = (  # name, schedule, ep_overlap
    ("1f1b", "1f1b", False),
    ("1f1b-pairs, one after another", "1f1b-pairs", False),
    ("1f1b-pairs, in turns", "1f1b-pairs", True),
)


class Found(NamedTuple):
    apart: float  # the largest relative difference of losses and norms
    sent: float  # bytes of tokens in a step
    shares: list[tuple[float, float, Tensor]]  # share, seconds on the way, times [rounds, case]


def configuration(shape: Shape, schedule: str, *, overlap: bool) -> Config:
    heads = shape.hidden // 64
    sections: dict[str, Any] = {
        "model": {
            "layers": BLOCKS, "hidden": shape.hidden, "ffn": shape.ffn, "heads": heads,
            "kv_heads": max(1, heads // 4), "vocab": 512,
        },
        "moe": {"experts": shape.experts, "topk": TOPK, "balance": "none"},
        "parallel": {"ep": RANKS, "schedule": schedule, "ep_overlap": overlap},
        "data": {"seq": SEQ},
        "optim": {"schedule": "constant"},
        "train": {"steps": 1, "global_batch": RANKS * MICRO_BATCHES * 2, "micro_batch": 2},
    }  # fmt: skip
    return resolve(from_dict(sections))


def measure(shape: Shape, rounds: int) -> Found:
    link, axis, device = Link(), world_axis(), torch.device("cpu")
    slow_down(link)
    mesh = create_mesh(Grid(RANKS, ep=RANKS), axis.rank)
    runs = []
    for _, schedule, overlap in CASES:
        config = configuration(shape, schedule, overlap=overlap)
        runs.append(Run(synthetic_task(config, mesh, device), config, mesh, device))

    def stepping(run: Run) -> Any:
        def call() -> list[Tensor]:
            line = run.update()
            return [torch.tensor([line["loss"], line["grad_norm"]], dtype=torch.float64)]

        return call

    cases = [Case(name, stepping(run)) for (name, *_), run in zip(CASES, runs, strict=True)]
    traffic = mesh.axis("etp-ep").traffic
    before = sum(traffic.bytes.values())
    values = [case.call()[0] for case in cases]
    sent = (sum(traffic.bytes.values()) - before) / len(cases)
    apart = max(((x - values[0]).abs() / values[0].abs()).max().item() for x in values)
    found, base = [], 0.0
    for share in SHARES:
        link.s_per_byte = share * base / sent
        times = in_turn(cases, rounds, lambda: torch.empty(0))[:, :, 0]
        base = base or times[:, 0].median().item()
        found.append((share, link.s_per_byte * sent, times))
    return Found(apart, sent, found)


def report(shape: Shape, rounds: int) -> bool:
    """Print a case; whether the losses and norms agree."""
    ranks: Sequence[Found] = run_ranks(measure, RANKS, shape, rounds, timeout_s=3600)
    apart = max(x.apart for x in ranks)
    print(
        f"\noverlap, {BLOCKS} blocks of {shape}, {MICRO_BATCHES} micro-batches of {2 * SEQ} tokens "
        f"on {RANKS} ranks, {ranks[0].sent / 1e6:.0f} MB of tokens a step: largest difference "
        f"{apart:.1e}"
    )
    if apart > 1e-5:
        return False
    print(f"  {'on the way, ms a step':<24}" + "".join(f"{name:>34}" for name, *_ in CASES)
          + f"{'one after another / in turns':>34}{'hidden':>10}")  # fmt: skip
    for of_ranks in zip(*(x.shares for x in ranks), strict=True):
        times = torch.stack([x for *_, x in of_ranks]).amax(0)  # [rounds, case], the slower rank's
        _, way_s, _ = of_ranks[0]
        columns = [quartiles(1e3 * x) for x in times.unbind(1)]
        columns.append(quartiles(times[:, 1] / times[:, 2]))
        gain = (times[:, 1] - times[:, 2]).median().item()
        hidden = f"{gain / way_s:.0%}" if way_s else ""
        print(f"  {1e3 * way_s:<24.0f}" + "".join(f"{x:>34}" for x in columns) + f"{hidden:>10}",
              flush=True)  # fmt: skip
    return True
