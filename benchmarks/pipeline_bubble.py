"""Pipelines of sleeping stages: does the executor run a schedule in its simulated time?

    python benchmarks/pipeline_bubble.py [--rounds 3] [--unit-ms 40] [--ranks 4 8]

A stage's forward sleeps for a unit of time, its input gradient for one, its weight gradient for
one, so two cores play eight ranks. All else is real: processes, the executor, autograd, gradient
buffers, and messages (of one number) over shared memory. What a sleep is too long, on a machine
that does something else too, shortens the rank's next one.

A row is a schedule with 2p or p+1 micro-batches on p ranks: its simulated makespan, the measured
one (from a common start to the end of the last rank, median of the rounds with least and most),
measured / simulated, and the same beside the makespan that `timeline` gives for the actions with
the lengths they had: this quotient leaves out how exactly the machine sleeps. Last come both
bubbles, as shares of the ranks' time. Exit code 1 where measured / simulated is not within 5 % of
1.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penteract.mesh import create_channels, single
from penteract.parallel.buckets import Sharding
from penteract.parallel.buffers import Buffers
from penteract.parallel.parameters import adopt
from penteract.parallel.pipeline.actions import Schedule
from penteract.parallel.pipeline.executor import Executor, Output, Timed
from penteract.parallel.pipeline.lowering import lower
from penteract.parallel.pipeline.schedules import schedule
from penteract.parallel.pipeline.timeline import timeline
from penteract.shared_memory import NAME as SHARED_MEMORY
from penteract.testing import run_ranks, world_axis
from penteract.wire import all_reduce_

KINDS = {"gpipe": (1,), "1f1b": (1,), "interleaved": (2, 3)}
KINDS |= {"zb-h1": (1,), "zb-v": (2,), "dualpipe-v": (2,)}
TOLERANCE = 0.05
HEAD_START_S = 0.02  # from agreeing on a start to the start
SPIN_S = 0.5e-3  # at the end of a sleep, whose own end is not so exact
SHAPE = (1,), torch.float32
Case = tuple[str, int, int]  # kind, chunks, micro-batches
Result = tuple[float, list[Timed]]  # seconds from the common start to this rank's end; its actions


def cases(ranks: int) -> list[Case]:
    pairs = [(kind, chunks) for kind, all_chunks in KINDS.items() for chunks in all_chunks]
    return [(*pair, m) for m in (2 * ranks, ranks + 1) for pair in pairs]


def planned(case: Case, ranks: int) -> Schedule:
    kind, chunks, m = case
    return schedule(kind, ranks=ranks, chunks=chunks, micro_batches=m)


class Sleep:
    """Sleeps of a unit each. What one is too long, as on a busy machine, shortens the next."""

    def __init__(self, unit_s: float) -> None:
        self.unit_s, self.owed_s = unit_s, 0.0

    def __call__(self) -> None:
        end = time.perf_counter() + self.unit_s - self.owed_s
        time.sleep(max(0.0, end - SPIN_S - time.perf_counter()))
        while (late_s := time.perf_counter() - end) < 0.0:
            pass  # so short that eight ranks do not disturb each other
        self.owed_s = late_s


class Sleepers(nn.Module):
    """The stages of one rank. Each has one weight, whose gradient can be put off."""

    def __init__(self, plan: Schedule, rank: int, unit_s: float) -> None:
        super().__init__()
        self.last, self.sleep = len(plan.placement) - 1, Sleep(unit_s)
        self.unit_stages = [s for s, r in enumerate(plan.placement) if r == rank]
        self.units = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in self.unit_stages)
        adopt(self)
        self.gradients = Buffers(self, Sharding.whole(single("dp-cp")), seed=0)

    def forward(self, stage: int, micro_batch: int, stream: Tensor | None) -> Output:
        weight = self.units[self.unit_stages.index(stage)].weight
        x = torch.zeros(1, requires_grad=True) if stream is None else stream
        y = _Asleep.apply(x, weight, self.gradients, self.sleep)
        return Output(None, {"loss": y.sum()}) if stage == self.last else Output(y)


class _Asleep(torch.autograd.Function):
    """The identity, which takes its time, and so do both halves of its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, buffers: Buffers, sleep: Sleep) -> Tensor:
        ctx.of = weight, buffers, sleep
        sleep()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        weight, buffers, sleep = ctx.of
        sleep()
        buffers.accumulate(weight, lambda gradient, fresh: sleep())
        return dy, None, None, None


def boundary(stage: int, micro_batch: int) -> tuple[tuple[int, ...], torch.dtype]:
    return SHAPE


def measure(all_cases: list[Case], unit_s: float, rounds: int) -> list[list[Result]]:
    """On one rank: for each case a result a round."""
    world = world_axis()
    ring = [(r, (r + 1) % world.size) for r in range(world.size)]
    channels = create_channels(world, [*ring, *((b, a) for a, b in ring)])
    executor = Executor(world.rank, channels, torch.device("cpu"))
    plans = [planned(case, world.size) for case in all_cases]
    run_once(executor, plans[0], unit_s)  # the first messages open connections
    results: list[list[Result]] = [[] for _ in plans]
    for _, (plan, found) in itertools.product(
        range(rounds), list(zip(plans, results, strict=True))
    ):
        found.append(run_once(executor, plan, unit_s))
    return results


def run_once(executor: Executor, plan: Schedule, unit_s: float) -> Result:
    model, times = Sleepers(plan, executor.rank, unit_s), list[Timed]()
    program = lower(plan)[executor.rank]
    model.gradients.begin()
    # All ranks read one clock, that of the machine.
    now = torch.tensor(time.perf_counter(), dtype=torch.float64)
    start = all_reduce_(now, world_axis(), "max").item() + HEAD_START_S
    time.sleep(max(0.0, start - time.perf_counter()))
    executor.run(program, model, boundary, model.gradients, times)
    end = time.perf_counter()
    model.gradients.finish()
    return end - start, times


def summary(plan: Schedule, ranks: Sequence[Result]) -> list[float]:
    """Of one round: seconds, those that its actions need by themselves, and the bubble."""
    lengths = {t.action: t.end - t.start for _, times in ranks for t in times}
    seconds = max(end for end, _ in ranks)
    needed = timeline(plan, lengths.__getitem__).makespan
    return [seconds, needed, 1 - sum(lengths.values()) / (plan.ranks * seconds)]


def report(case: Case, plan: Schedule, rounds: Sequence[Sequence[Result]], unit_s: float) -> bool:
    """Print one row; whether the measured time is the simulated one."""
    expected = timeline(plan)
    expected_s = unit_s * expected.makespan
    seconds, needed, bubble = torch.tensor([summary(plan, ranks) for ranks in rounds]).unbind(1)
    middle = seconds.median().item()
    fits = abs(middle / expected_s - 1) <= TOLERANCE
    print(
        f"{case[0]:<12}{plan.ranks:5d}{case[1]:8d}{case[2]:7d}{expected.makespan:8.0f}"
        f"{expected_s:9.3f}  {middle:8.3f} ({seconds.min():.3f} .. {seconds.max():.3f})"
        f"{middle / expected_s:8.3f}{(seconds / needed).median():10.3f}"
        f"{expected.bubble_fraction:9.1%}{bubble.median():8.1%}{'' if fits else '  outside'}",
        flush=True,
    )
    return fits


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="of all schedules (3)")
    parser.add_argument("--unit-ms", type=float, default=40.0, help="of a stage's forward (40)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--backend", default=SHARED_MEMORY, help=f"or gloo ({SHARED_MEMORY})")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    unit_s = arguments.unit_ms / 1e3
    print(
        f"torch {torch.__version__}, {arguments.backend}, a unit is {arguments.unit_ms:g} ms, "
        f"{arguments.rounds} rounds; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n\n"
        "schedule    ranks  chunks  micro-  simulated makespan  measured, s              "
        "measured / simulated  bubble\n"
    )
    fits = []
    for ranks in arguments.ranks:
        listed = cases(ranks)
        measured = run_ranks(
            measure,
            ranks,
            listed,
            unit_s,
            arguments.rounds,
            timeout_s=7200,
            backend=arguments.backend,
        )
        for case, *rounds in zip(listed, *measured, strict=True):
            fits.append(report(case, planned(case, ranks), list(zip(*rounds, strict=True)), unit_s))
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")
    return 0 if all(fits) else 1


if __name__ == "__main__":
    sys.exit(main())
