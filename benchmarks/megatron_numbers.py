"""Megatron-Core beside ours on CPU ranks: the same weights and data, the same losses.

    pip install megatron-core==0.16.1 einops triton
    python benchmarks/megatron_numbers.py

A small Llama, untied and tied, is trained for four steps in float32 by one process of ours and then
by both in every layout below. Initial weights are ours, copied by name into Megatron's. Printed are
the losses, the largest relative differences of loss and gradient norm to our one process, and the
median time of a step: for information, since Megatron's fused kernels need a GPU. Exit code 1 where
a difference is above the tolerance, 2 where Megatron-Core is not installed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import torch
from peers import megatron_cpu
from torch import Tensor

from penteract.config import Config, resolve
from penteract.config_file import from_dict
from penteract.grid import Grid
from penteract.mesh import create_mesh
from penteract.testing import run_ranks, world_axis
from penteract.train.language_model import synthetic_task
from penteract.train.run import Run

STEPS, BATCH, MICRO_BATCH, SEQ, VOCAB = 4, 4, 2, 48, 96
TOLERANCE = 1e-5
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp=1": {},
    "tp=2": {"tp": 2},
    "tp=2,sp=true": {"tp": 2, "sp": True},
}
Lines = list[dict[str, float]]  # loss, grad_norm, step_ms of each step


def configuration(parallel: dict[str, Any], *, tied: bool) -> Config:
    """Head size, eps, theta and start values are such that a slip in one of them shows."""
    model = {
        "layers": 2,
        "hidden": 64,
        "ffn": 112,
        "heads": 8,
        "kv_heads": 4,
        "head_size": 24,
        "vocab": VOCAB,
        "norm_eps": 1e-2,
        "rope_theta": 500.0,
        "init_std": 0.1,
        "tied": tied,
    }
    values = {
        "model": model,
        "parallel": parallel,
        "data": {"seq": SEQ, "seed": 3},
        "optim": {"lr": 1e-3, "schedule": "constant", "weight_decay": 0.1, "clip": 1.0},
        "train": {"steps": STEPS, "global_batch": BATCH, "micro_batch": MICRO_BATCH, "seed": 5},
    }
    return resolve(from_dict(values))


def new_run(config: Config) -> Run:
    """Our run of a configuration as this rank of all ranks."""
    world, device = world_axis(), torch.device("cpu")
    mesh = create_mesh(Grid(world.size, tp=config.parallel.tp), world.rank)
    return Run(synthetic_task(config, mesh, device), config, mesh, device)


def ours(config: Config) -> Lines:
    run = new_run(config)
    lines = [run.update() for _ in range(STEPS)]
    run.task.close()
    split = "reduce_scatter" in run.mesh.axis("tp").traffic.calls
    assert split == config.parallel.sp, "sequence parallelism is not what was asked for"
    return [{key: line[key] for key in ("loss", "grad_norm", "step_ms")} for line in lines]


def start(config: Config) -> tuple[dict[str, Tensor], list[megatron_cpu.MicroBatches]]:
    """Our model's logical tensors at their start, by name, and every step's micro-batches."""
    run = new_run(config)
    views = list(run.weights())
    assert all(shard.box.size == shard.shape for shard, _ in views), "one process holds all"
    steps: list[megatron_cpu.MicroBatches] = [
        [(b.tokens.view(-1, SEQ), b.labels.view(-1, SEQ)) for b in run.task.batches(step)]
        for step in range(1, STEPS + 1)
    ]
    run.task.close()
    return {shard.tensor: values for shard, values in views}, steps


def largest_difference(ranks: list[Lines], reference: Lines, key: str) -> float:
    """Over all steps and ranks, relative to the reference; NaN where a value is."""
    found, wanted = (
        torch.tensor([[line[key] for line in r] for r in x], dtype=torch.float64)
        for x in (ranks, [reference])
    )
    return ((found - wanted) / wanted).abs().max().item()


def report(name: str, layout: str, ranks: list[Lines], reference: Lines) -> bool:
    """Print one row; whether it agrees with the reference."""
    differences = [largest_difference(ranks, reference, key) for key in ("loss", "grad_norm")]
    agrees = all(difference <= TOLERANCE for difference in differences)  # NaN does not
    ms = statistics.median(line["step_ms"] for line in ranks[0][1:])
    columns = [f"{line['loss']:8.6f}" for line in ranks[0]] + [f"{d:9.1e}" for d in differences]
    verdict = "" if agrees else f"  above {TOLERANCE:g}"
    print(f"{name:<9}  {layout:<12}  {'  '.join(columns)}  {ms:9.1f}{verdict}", flush=True)
    return agrees


def compare(tied: bool) -> bool:
    """All layouts of one model; whether all agree."""
    single = configuration({}, tied=tied)
    weights, steps = run_ranks(start, 1, single)[0]
    reference = run_ranks(ours, 1, single)[0]
    columns = [f"step {i}  " for i in range(1, STEPS + 1)] + ["loss diff", "norm diff"]
    print(f"\n{'tied' if tied else 'untied':<9}  {'layout':<12}  {'  '.join(columns)}  ms a step")
    agree = True
    for layout, parallel in LAYOUTS.items():
        config = configuration(parallel, tied=tied)
        n = config.parallel.tp
        agree &= report("penteract", layout, run_ranks(ours, n, config, backend="gloo"), reference)
        theirs = run_ranks(megatron_cpu.train, n, config, weights, steps, backend="gloo")
        agree &= report("megatron", layout, theirs, reference)
    return agree


def main() -> int:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    missing = run_ranks(megatron_cpu.missing_module, 1)[0]  # its import changes the process
    if missing is not None:
        print(f"Python module {missing} is missing: {megatron_cpu.INSTALL}", file=sys.stderr)
        return 2
    print(f"torch {torch.__version__}, gloo, one thread a rank, float32, {BATCH} x {SEQ} tokens")
    agree = [compare(tied) for tied in (False, True)]
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())
