"""How far right layouts are from one process in float32 and bfloat16, by depth and width.

    python benchmarks/rounding.py [--seeds 2] [--dtypes float32 bfloat16]

Measured as `penteract verify` measures. A layout computes the same sums in another order, so every
number printed here is rounding (in float64 the same layouts agree to 1e-9, as the parity tests
show). Depth and width are varied one at a time with tp = 2 and two models: `plain` has no biases,
and `hard` has what rounding is worst for: biases and normalised queries and keys, whose gradients
are small sums of large terms. All six layouts, and more steps, are run at one size.

Printed are the worst of the seeds, as relative differences; then the exponents p of a fit of
difference = constant * size^p; and the largest share of `tolerance` that any measurement took.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import torch

from penteract.config import Config, resolve
from penteract.config_file import from_dict
from penteract.testing import run_ranks
from penteract.verify.compare import faults, relative_scalar
from penteract.verify.layouts import parse_layout
from penteract.verify.measure import Measured, Reference, measure
from penteract.verify.tolerances import Limits
from penteract.verify.verify import Dtype, limits_of, prepare, train_reference

DEPTHS, WIDTHS = (1, 2, 4, 8, 16), (16, 32, 64, 128, 256)
DEPTH, WIDTH = 2, 32  # where the other one is varied
LAYOUTS = ("tp=2", "tp=2,sp=true", "tp=4", "dp=2", "tp=2,dp=2", "tp=2,recompute=layer")
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hard": {"bias": True, "qk_norm": True, "dropout": 0.1},
}
LONG = 16  # steps, where it is seen how rounding grows with them
LR = 1e-2  # large, so that later steps show what an update does to rounding
KINDS = ("loss", "gradients", "norm", "weights")


@dataclass(frozen=True)
class Case:
    """A model of one size in one type."""

    model: str
    dtype: Dtype
    layers: int
    hidden: int
    steps: int = 2

    def config(self, seed: int) -> Config:
        sizes = {"layers": self.layers, "hidden": self.hidden, "ffn": 2 * self.hidden}
        heads = {"heads": 4, "kv_heads": 2, "vocab": 67}
        values = {
            "model": {"family": "llama", **sizes, **heads, **MODELS[self.model]},
            "data": {"seq": 16, "seed": seed},
            "optim": {"lr": LR, "schedule": "constant"},
            "train": {"steps": self.steps, "global_batch": 4, "micro_batch": 1, "seed": seed},
        }
        return prepare(resolve(from_dict(values)), dtype=self.dtype, steps=self.steps)[0]

    def limits(self) -> Limits:
        return limits_of(self.config(seed=1))


# Of each kind, the relative difference of every step.
Found = dict[str, list[float]]


def differences(case: Case, texts: Sequence[str], seed: int) -> Iterator[Found]:
    """How far each layout is from one process, which is trained once."""
    config = case.config(seed)
    trained = train_reference(config)
    assert trained.outcome is not None, trained.failure
    for text in texts:
        layout = parse_layout(text, config)
        arguments = (layout.config, layout.grid, case.steps, trained.outcome)
        yield found(trained.outcome, run_ranks(measure, layout.world, *arguments))


def found(wanted: Reference, ranks: Sequence[Measured]) -> Found:
    def scalar(name: str, step: int) -> float:
        of_one = getattr(wanted, name)[step]
        return max(relative_scalar(getattr(rank, name)[step], of_one) for rank in ranks)

    def tensors(name: str, index: int) -> float:
        return max(fault.relative for fault in faults(wanted, ranks, name, index))

    steps = range(len(wanted.losses))
    return {
        "loss": [scalar("losses", i) for i in steps],
        "gradients": [tensors("gradients", i) for i in steps],
        "norm": [scalar("norms", i) for i in steps],
        "weights": [tensors("weights", i + 1) for i in steps],
    }


def worst(several: Sequence[Found]) -> Found:
    """The largest of each kind and step."""
    return {
        kind: [max(steps) for steps in zip(*(f[kind] for f in several), strict=True)]
        for kind in KINDS
    }


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """p of the line through (log size, log value); nan where a value is 0."""
    if min(values) <= 0:
        return float("nan")
    x, y = [log(size) for size in sizes], [log(value) for value in values]
    return statistics.linear_regression(x, y).slope


class Study:
    """Measurements, printed as they come."""

    def __init__(self, seeds: int) -> None:
        self.seeds = range(1, seeds + 1)
        self.share = {"float32": 0.0, "bfloat16": 0.0}

    def row(self, name: str, case: Case, found: Found) -> Found:
        """Print one line: the first step, the worst step. Keep its share of the tolerance."""
        limits = case.limits()
        share = max(max(steps) / getattr(limits, kind) for kind, steps in found.items())
        self.share[case.dtype] = max(self.share[case.dtype], share)
        cells = "".join(f"{found[kind][0]:>9.1e}{max(found[kind]):>9.1e}" for kind in KINDS)
        print(f"{name:<22}{case.layers:>7}{case.hidden:>7}{cells}{share:>7.2f}", flush=True)
        return found

    def heading(self, what: str) -> None:
        kinds = "".join(f"{kind:>18}" for kind in KINDS)
        print(f"\n{what}: relative differences, first step and worst step")
        print(f"{'':<22}{'layers':>7}{'hidden':>7}{kinds}{'share':>7}")

    def sizes(self, model: str, dtype: Dtype) -> None:
        """Depth and width, with the exponents of both."""
        self.heading(f"{dtype}, {model}, tp=2")
        cases = [Case(model, dtype, layers, WIDTH) for layers in DEPTHS]
        cases += [Case(model, dtype, DEPTH, hidden) for hidden in WIDTHS if hidden != WIDTH]
        rows = {}
        for case in cases:
            several = [f for seed in self.seeds for f in differences(case, ["tp=2"], seed)]
            rows[case.layers, case.hidden] = self.row("tp=2", case, worst(several))
        for name, sizes in (("depth", DEPTHS), ("width", WIDTHS)):
            places = [(n, WIDTH) if name == "depth" else (DEPTH, n) for n in sizes]
            found = [rows[place] for place in places]
            cells = "".join(
                f"{exponent(sizes, [f[kind][0] for f in found]):>9.1f}"
                f"{exponent(sizes, [max(f[kind]) for f in found]):>9.1f}"
                for kind in KINDS
            )
            print(f"{'exponent of ' + name:<36}{cells}", flush=True)

    def layouts(self, case: Case) -> None:
        self.heading(f"{case.dtype}, {case.model}, all layouts")
        for text, found in zip(LAYOUTS, differences(case, LAYOUTS, seed=1), strict=True):
            self.row(text, case, found)

    def steps(self, dtype: Dtype) -> None:
        """More and more steps of one run."""
        for model in MODELS:
            self.heading(f"{dtype}, {model}, tp=2, more steps")
            case = Case(model, dtype, DEPTH, WIDTH, LONG)
            several = [f for seed in self.seeds for f in differences(case, ["tp=2"], seed)]
            n = 2
            while n <= LONG:
                upto = {kind: steps[:n] for kind, steps in worst(several).items()}
                self.row(f"{n} steps", case, upto)
                n *= 2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    options = parser.parse_args()
    torch.set_num_threads(1)  # ranks are forked
    began, study = time.perf_counter(), Study(options.seeds)
    for dtype in options.dtypes:
        for model in MODELS:
            study.sizes(model, dtype)
        study.layouts(Case("hard", dtype, DEPTH, WIDTH))
        study.steps(dtype)
    print("\nlargest share of the tolerance:")
    for dtype in options.dtypes:
        print(f"  {dtype} {study.share[dtype]:.2f}")
    print(f"torch {torch.__version__}, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
