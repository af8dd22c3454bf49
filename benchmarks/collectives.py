"""Our reduce-scatter and all-reduce beside gloo's own, on CPU ranks.

    python benchmarks/collectives.py [--rounds 15] [--ranks 2 4]

Every rank is one process with one thread. In each round ours and gloo's are called in turn, both a
few times, in alternating order; a round's time is that of its slowest rank. Printed are the median
of the rounds' times a call and of their ratios gloo / ours (above 1: ours is faster), with the
quartiles of the ratio as its spread. Large all-reduces are gloo's own in both columns, which shows
how far equal things differ.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from penteract import compat
from penteract.collectives import all_reduce_, barrier, start_reduce_scatter
from penteract.mesh import Axis
from penteract.testing import run_ranks, world_axis

SIZES_KIB = (16, 256, 4096, 16384)
CALLS = {16: 20, 256: 10, 4096: 3, 16384: 1}  # in a row, so that a round takes milliseconds
Call = Callable[[], object]


def pair(operation: str, x: torch.Tensor, axis: Axis) -> tuple[Call, Call]:
    """The same sum of `x` by us and by gloo."""
    if operation == "all-reduce":
        return lambda: all_reduce_(x, axis), lambda: dist.all_reduce(x)
    out = x.new_empty(x.numel() // axis.size)
    return (
        lambda: start_reduce_scatter(x, axis).wait(),
        lambda: compat.reduce_scatter_into(out, x, axis.group).wait(),
    )


def seconds(call: Call, calls: int, axis: Axis) -> float:
    """Mean seconds of a call, all ranks having started together."""
    barrier(axis)
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls


def measure(operation: str, size_kib: int, rounds: int) -> list[tuple[float, float]]:
    """(ours, gloo's) of every round on this rank, after a round to warm up."""
    axis = world_axis()
    both = pair(operation, torch.zeros(size_kib * 256), axis)  # float32; zeros stay finite
    found = []
    for i in range(rounds + 1):
        order = (0, 1) if i % 2 else (1, 0)
        times = {which: seconds(both[which], CALLS[size_kib], axis) for which in order}
        found.append((times[0], times[1]))
    return found[1:]


def report(operation: str, n: int, rounds: int) -> None:
    for size_kib in SIZES_KIB:
        ranks = run_ranks(measure, n, operation, size_kib, rounds)
        times = torch.tensor(ranks, dtype=torch.float64).amax(0)  # [rounds, 2]: ours, gloo's
        ours, theirs = times.median(0).values.tolist()
        low, ratio, high = statistics.quantiles((times[:, 1] / times[:, 0]).tolist(), n=4)
        print(
            f"{operation:<14} {n} ranks {size_kib:>6} KiB   ours {ours * 1e3:7.2f} ms   gloo "
            f"{theirs * 1e3:7.2f} ms   gloo / ours {ratio:5.2f}  ({low:.2f} .. {high:.2f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds (15)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, gloo, one thread a rank, {arguments.rounds} rounds in turn")
    for operation in ("reduce-scatter", "all-reduce"):
        for n in arguments.ranks:
            report(operation, n, arguments.rounds)


if __name__ == "__main__":
    main()
