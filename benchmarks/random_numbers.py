"""Speed of counter-based numbers against torch.randn on one thread.

`python benchmarks/random_numbers.py` prints nanoseconds of processor time a number and the ratio to
torch's float32 generator: the best of several runs, so that other work counts little.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from penteract.placement import Box, whole
from penteract.random import bits, bits_range, fill_box, keep_mask, keep_runs


def best_ns(fill: Callable[[], object], numbers: int, runs: int = 7) -> float:
    """Nanoseconds a number of the fastest run, after one to warm up."""
    fill()
    times = []
    for _ in range(runs):
        start = time.process_time_ns()
        fill()
        times.append(time.process_time_ns() - start)
    return min(times) / numbers


def main() -> None:
    torch.set_num_threads(1)
    n = 2**22
    rows, columns = 2**12, 2**10
    out = torch.empty(n)
    index = torch.arange(n).view(rows, columns)
    matrix = out.view(rows, columns)
    right, ragged = Box((0, columns), (rows, columns)), Box((0, 3), (rows, columns))
    cases: dict[str, Callable[[], object]] = {
        "torch.randn float32": out.normal_,
        "torch.randn float64": lambda: torch.randn(n, dtype=torch.float64),
        "normal, whole matrix": lambda: fill_box(out, 1, "w", shape=(n,), box=whole((n,))),
        "normal, half the columns": lambda: fill_box(
            matrix, 1, "w", shape=(rows, 2 * columns), box=right
        ),
        "normal, columns of an odd width": lambda: fill_box(
            matrix, 1, "w", shape=(rows, 2 * columns + 1), box=ragged
        ),
        "bits, range": lambda: bits_range(1, "w", 0, n),
        "bits, any index": lambda: bits(1, "w", index),
        "dropout mask, any index": lambda: keep_mask(1, "w", index, 0.9),
        "dropout mask, rows": lambda: keep_runs(1, "w", index[:, 0], columns, 0.9),
    }
    figures = {name: best_ns(fill, n) for name, fill in cases.items()}
    base = figures["torch.randn float32"]
    print(f"torch {torch.__version__}, 1 thread, {n} numbers")
    for name, ns in figures.items():
        print(f"{name:34} {ns:6.1f} ns  {1e3 / ns:7.1f} million/s  {ns / base:5.1f} x randn")


if __name__ == "__main__":
    main()
