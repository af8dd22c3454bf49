"""What optimizer state costs in host memory (`optim.offload`) and in bfloat16 (`optim.moments`).

    python benchmarks/optimizer_state.py [--parts update quality] [--rounds 9] [--steps 400]

*update*: `Optimizer.step` and `Buffers.publish` of a 13-million-parameter Llama on the CPU, by
optimizer (`--optimizers`): on the device, offloaded, and with bfloat16 moments, in turn on the same
gradients. Printed are medians with quartiles in nanoseconds of one thread's processor time a
parameter. Here the host is the device, so what offload adds is a copy in the place of a transfer;
the time that its bytes take over a link of `--link` GB/s, and that of an update on a device of
`--memory` GB/s, are arithmetic. Exit code 1 where parameters, masters or moments differ with
offload, by one bit.

*quality*: with the first of the optimizers a 0.13-million-parameter Llama learns the sources of
Python's library, with moments in float32, in bfloat16 rounded to the nearest (which only this
benchmark can), and in bfloat16 as ours are: validation loss after `--steps` steps by beta2, mean
and standard deviation over `--seeds` seeds; of the differences to float32 seed by seed; and the
size of moments (the mean root of second ones) beside float32's. *decay*, which goes with it: what
is left of second moments alone after gradients fell to a tenth.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tensor_parallel import quartiles
from torch import Tensor

from penteract.config import resolve
from penteract.config_file import from_dict
from penteract.data.build import Build, build
from penteract.grid import Grid
from penteract.mesh import create_mesh
from penteract.optim import moments
from penteract.train.language_model import language_model, synthetic_task
from penteract.train.run import Run

OPTIMIZERS = ("adamw", "sgd", "lion", "muon")
WAYS: dict[str, dict[str, Any]] = {
    "on the device": {},
    "offload": {"offload": True},
    "moments bfloat16": {"moments": "bfloat16"},
}
BETAS = (0.95, 0.999)
WARM_UP, TEXT_BYTES = 2, 4_000_000
PARTS = ("update", "quality")


def new_run(values: dict[str, dict[str, Any]], *, text: bool = False) -> Run:
    """One process's run, on text or on tokens from a seed."""
    config, mesh, device = resolve(from_dict(values)), create_mesh(Grid(1), 0), torch.device("cpu")
    if text:
        task, config = language_model(config, mesh, device)
    else:
        task = synthetic_task(config, mesh, device)
    return Run(task, config, mesh, device)


# --- the update alone


def large(dtype: str, **optim: Any) -> Run:
    model = {"layers": 4, "hidden": 512, "ffn": 1408, "heads": 8, "vocab": 1024, "tied": True}
    train = {"steps": 1, "global_batch": 1, "dtype": dtype}
    return new_run({"model": model, "data": {"seq": 8}, "optim": optim, "train": train})


def update_ns(run: Run, gradients: Sequence[Tensor]) -> float:
    """Processor nanoseconds a parameter of an update with these gradients."""
    for bucket, gradient in zip(run.buffers.buckets, gradients, strict=True):
        bucket.own_gradient.copy_(gradient)
    one, go = torch.ones((), dtype=torch.float64), torch.zeros(())
    began = time.process_time()
    run.optimizer.step(1e-3, one, go)
    run.buffers.publish()
    took = time.process_time() - began
    return 1e9 * took / sum(bucket.numel for bucket in run.buffers.buckets)


def held(run: Run) -> list[Tensor]:
    flats = [x for b in run.buffers.buckets for x in (b.own_parameters, b.master)]
    return flats + [moment for _, _, moment in run.optimizer.state()]


def touched_bytes(run: Run) -> float:
    """Bytes a parameter that an update reads or writes where state lies, each once."""
    bucket = max(run.buffers.buckets, key=lambda bucket: bucket.numel)
    state = [x for _, b, x in run.optimizer.state() if b is bucket] + [bucket.master]
    narrow = bucket.own_parameters if bucket.kind.narrow else bucket.own_parameters[:0]
    read_and_written = 2 * sum(x.nbytes for x in state)
    return (bucket.own_gradient.nbytes + read_and_written + narrow.nbytes) / bucket.numel


def report_update(arguments: argparse.Namespace, dtype: str) -> bool:
    """Measure and print one type of weights; whether offload gave the same bits."""
    agree, rounds, memory = True, arguments.rounds, arguments.memory
    print(f"\nupdate, weights in {dtype}: ns a parameter")
    for name in arguments.optimizers:
        runs = {way: large(dtype, name=name, **optim) for way, optim in WAYS.items()}
        times = torch.zeros(len(runs), WARM_UP + rounds, dtype=torch.float64)
        for i in range(WARM_UP + rounds):
            generator = torch.Generator().manual_seed(i)
            buckets = runs["on the device"].buffers.buckets
            gradients = [torch.randn(b.numel, generator=generator).mul_(1e-3) for b in buckets]
            for j in range(len(runs))[:: 1 if i % 2 else -1]:
                times[j, i] = update_ns([*runs.values()][j], gradients)
        plain, offloaded = (held(runs[way]) for way in ("on the device", "offload"))
        same = all(torch.equal(x, y) for x, y in zip(plain, offloaded, strict=True))
        agree = agree and same
        for way, row in zip(runs, times[:, WARM_UP:], strict=True):
            print(f"  {name:<6} {way:<18} {quartiles(row)}")
        bucket = buckets[0]
        moved = bucket.own_gradient.itemsize + bucket.own_parameters.itemsize
        # Every matrix of a block goes to its device and back; they are most of a model.
        moved += 2 * bucket.master.itemsize if name == "muon" else 0
        carried = ", ".join(f"{moved / link:.2f} at {link:g} GB/s" for link in arguments.link)
        touched = touched_bytes(runs["on the device"])
        print(
            f"         {'same bits' if same else 'OTHER BITS'}; the link carries {moved:g} bytes: "
            f"{carried}; a device of {memory:g} GB/s touches {touched:.0f}: {touched / memory:.3f}",
            flush=True,
        )
        del runs, plain, offloaded
        gc.collect()  # a run's hooks refer to it
    return agree


# --- what rounding changes


def nearest(x: Tensor, training: Tensor) -> Tensor:
    return x.bfloat16()


NARROW = {"bfloat16, nearest": nearest, "bfloat16": moments.rounded}


def trained(
    config: dict[str, dict[str, Any]], how: str, beta2: float, seed: int
) -> tuple[float, float]:
    """Validation loss, and the mean magnitude of the last moment (of adamw's second its root)."""
    dtype = "float32" if how == "float32" else "bfloat16"
    optim = {**config["optim"], "betas": [0.9, beta2], "moments": dtype}
    values = {**config, "optim": optim, "train": {**config["train"], "seed": seed}}
    with mock.patch.object(moments, "rounded", NARROW.get(how, moments.rounded)):
        run = new_run(values, text=True)
        for _ in range(run.config.train.steps):
            run.update()
    run.task.close()
    (loss,) = run.evaluate().values()
    kept = list(run.optimizer.state())
    size = torch.cat([x.double().abs() for name, _, x in kept if name == kept[-1][0]])
    return loss, float((size.sqrt() if kept[-1][0] == "exp_avg_sq" else size).mean())


def small(folder: Path, name: str, steps: int) -> dict[str, dict[str, Any]]:
    prefix = str(folder / "text")
    rate = {"adamw": 3e-3, "sgd": 0.1, "lion": 5e-4, "muon": 3e-3}[name]
    return {
        "model": {"layers": 2, "hidden": 64, "ffn": 176, "heads": 4},
        "data": {"train": [prefix], "valid_fraction": 0.1, "seq": 64},
        "optim": {"name": name, "lr": rate, "warmup": 20},
        "train": {"steps": steps, "global_batch": 8, "micro_batch": 8, "eval_steps": 16},
    }


def report_quality(name: str, steps: int, seeds: int) -> None:
    ways = ("float32", *NARROW)
    print(f"\nquality, {name}, {steps} steps: validation loss in nats a byte over {seeds} seeds")
    with tempfile.TemporaryDirectory() as folder:
        built = build(Build(str(Path(folder) / "text"), source="stdlib", limit_bytes=TEXT_BYTES))
        print(f"  text of {built.text_bytes:,} bytes, unigram {built.unigram_entropy:.2f} nats")
        config = small(Path(folder), name, steps)
        for beta2 in BETAS:
            found = {
                way: torch.tensor([trained(config, way, beta2, seed) for seed in range(seeds)])
                for way in ways
            }
            for way, x in found.items():
                apart, ratio = x[:, 0] - found["float32"][:, 0], x[:, 1] / found["float32"][:, 1]
                print(
                    f"  beta2 {beta2:<6} {way:<18} {mean_and_spread(x[:, 0])}   less float32's "
                    f"{mean_and_spread(apart)}   size of moments {mean_and_spread(ratio)}",
                    flush=True,
                )


def report_decay() -> None:
    """Second moments beside float32's, on the same random gradients, before and after they fall."""
    print("\ndecay: mean second moment / float32's, gradients N(0, 1), then N(0, 0.1)")
    generator, n = torch.Generator().manual_seed(0), 1 << 12
    for beta2 in BETAS:
        kept = {"float32": torch.zeros(n), **{way: torch.zeros(n).bfloat16() for way in NARROW}}
        ratios = []
        for step in range(1, 4001):
            square = torch.randn(n, generator=generator).square_().mul_(1 if step <= 2000 else 0.01)
            training = torch.randint(1 << 16, (n,), generator=generator, dtype=torch.int32)
            for way, old in kept.items():
                new = old.float().lerp_(square, 1 - beta2)
                kept[way] = new if way == "float32" else NARROW[way](new, training)
            if step in (2000, 4000):
                means = {way: x.float().mean() for way, x in kept.items()}
                ratios.append({way: float(means[way] / means["float32"]) for way in NARROW})
        for way in NARROW:
            before, after = (ratio[way] for ratio in ratios)
            print(f"  beta2 {beta2:<6} {way:<18} {before:8.3f} {after:8.3f}", flush=True)


def mean_and_spread(x: Tensor) -> str:
    return f"{x.mean():7.4f} +- {x.std() if len(x) > 1 else 0.0:.4f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds of updates (9)")
    parser.add_argument("--link", type=float, nargs="+", default=[25.0, 55.0], help="GB/s (25 55)")
    parser.add_argument("--memory", type=float, default=2000.0, help="a device's GB/s (2000)")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=["adamw", "lion"])
    parser.add_argument("--steps", type=int, default=400, help="of a training run (400)")
    parser.add_argument("--seeds", type=int, default=4, help="runs of each kind (4)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    print(f"torch {torch.__version__}, 1 thread, {os.cpu_count()} cores, load {load:.1f}")
    agree = True
    for dtype in ("float32", "bfloat16") if "update" in arguments.parts else ():
        agree = report_update(arguments, dtype) and agree
    if "quality" in arguments.parts:
        report_decay()
        report_quality(arguments.optimizers[0], arguments.steps, arguments.seeds)
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
