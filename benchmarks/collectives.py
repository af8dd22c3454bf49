"""Reduce-scatter and all-reduce on CPU ranks: ours over gloo and over shared memory, and gloo's.

    python benchmarks/collectives.py [--rounds 15] [--ranks 2 4]

Every rank is one process with one thread. In each round the three are called in turn, each a few
times, in an order that rotates; a round's time is that of its slowest rank. Printed are the median
of the rounds' times a call, and the medians of their ratios to gloo's own operation (above 1: ours
is faster) with the quartiles as their spread. Large all-reduces over gloo are gloo's own in both
columns, which shows how far equal things differ.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from penteract import compat, shared_memory
from penteract.collectives import all_reduce_, barrier, start_reduce_scatter
from penteract.mesh import Axis
from penteract.testing import run_ranks, world_axis

KIB, MIB = 1 << 10, 1 << 20
# Bytes, and calls in a row, so that a round takes milliseconds.
SIZES = {4: 50, 16 * KIB: 20, 256 * KIB: 10, MIB: 5, 4 * MIB: 3, 16 * MIB: 1}
Call = Callable[[], object]


def over_shared_memory() -> Axis:
    axis = world_axis()
    shared_memory.register()
    group = dist.new_group(backend=shared_memory.NAME)
    return Axis(axis.name, axis.size, axis.rank, axis.ranks, group)


def three(operation: str, x: torch.Tensor, gloo: Axis, shared: Axis) -> tuple[Call, Call, Call]:
    """The same sum of `x`: ours over gloo, ours over shared memory, gloo's own."""
    if operation == "all-reduce":
        return (
            lambda: all_reduce_(x, gloo),
            lambda: all_reduce_(x, shared),
            lambda: dist.all_reduce(x, group=gloo.group),
        )
    out = x.new_empty(x.numel() // gloo.size)
    return (
        lambda: start_reduce_scatter(x, gloo).wait(),
        lambda: start_reduce_scatter(x, shared).wait(),
        lambda: compat.reduce_scatter_into(out, x, gloo.group).wait(),
    )


def seconds(call: Call, calls: int, axis: Axis) -> float:
    """Mean seconds of a call, all ranks having started together."""
    barrier(axis)
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls


def measure(operation: str, size: int, rounds: int) -> list[list[float]]:
    """Seconds of the three in every round on this rank, after a round to warm up."""
    gloo, shared = world_axis(), over_shared_memory()
    calls = three(operation, torch.zeros(size // 4), gloo, shared)  # float32; zeros stay finite
    found = []
    for i in range(rounds + 1):
        times = [0.0, 0.0, 0.0]
        for which in (i % 3, (i + 1) % 3, (i + 2) % 3):
            times[which] = seconds(calls[which], SIZES[size], gloo)
        found.append(times)
    return found[1:]


def report(operation: str, n: int, rounds: int) -> None:
    for size in SIZES:
        if operation == "reduce-scatter" and size < KIB:
            continue  # less than an element a rank
        ranks = run_ranks(measure, n, operation, size, rounds, backend="gloo")
        times = torch.tensor(ranks, dtype=torch.float64).amax(0)  # [rounds, 3]
        ours, shared, theirs = (1e3 * times.median(0).values).tolist()
        ratios = [
            statistics.quantiles((times[:, 2] / times[:, which]).tolist(), n=4) for which in (0, 1)
        ]
        spread = [f"{median:5.2f} ({low:.2f} .. {high:.2f})" for low, median, high in ratios]
        name = f"{size // KIB} KiB" if size >= KIB else f"{size} B"
        print(
            f"{operation:<14} {n} ranks {name:>9}   ms: ours {ours:7.3f}   shared {shared:7.3f}   "
            f"gloo {theirs:7.3f}   gloo / ours {spread[0]}   gloo / shared {spread[1]}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds (15)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread a rank, {arguments.rounds} rounds in turn")
    for operation in ("reduce-scatter", "all-reduce"):
        for n in arguments.ranks:
            report(operation, n, arguments.rounds)


if __name__ == "__main__":
    main()
