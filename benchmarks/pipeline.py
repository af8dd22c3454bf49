"""Pipelines beside torch's own (`torch.distributed.pipelining`) and Megatron-Core's, on two ranks.

    python benchmarks/pipeline.py [--rounds 9] [--hidden 256 640] [--schedules 1f1b zb-v ...]
    pip install megatron-core==0.16.1 einops triton    (left out where it is not installed)

A Llama of 8 layers in float32, cut in stages of about equal cost, 8 micro-batches of one sequence,
the same weights, tokens, stages and schedule, gloo, one thread a process. A training step is
forward, backward, clipping and fused AdamW. Ours and torch's take turns in the same processes; a
time is that of the slower rank. Printed are medians with quartiles of the step and of its forward
and backward alone; CPU time, of all threads of both ranks, which other load moves less; the longer
rank's share of our time in `Pending.wait`, the bubble included; and torch / ours round by round
(above 1: ours is faster). Exit code 1 where losses or norms of the first steps differ.

*timeline*: how long forward and backward of our later steps took, from the first action to the end
of the last, and what the simulator gives for the same actions with the lengths that they had. The
quotient is the cost of messages and of what the executor does between actions.

*megatron*: its 1F1B, with the layers cut evenly, in processes of its own that take turns with ours.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from peers import megatron_cpu
from peers.llama import HEAD_SIZE, VOCAB, Block, Model
from tensor_parallel import TOLERANCE, count_waiting, quartiles
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn import functional as F

from penteract.config import Config, resolve
from penteract.config_file import from_dict
from penteract.data.synthetic import SyntheticSource
from penteract.grid import Grid
from penteract.mesh import create_mesh
from penteract.parallel.pipeline.executor import Timed
from penteract.parallel.pipeline.timeline import timeline
from penteract.testing import run_ranks, world_axis
from penteract.train.language_model import synthetic_task
from penteract.train.pipeline import plan
from penteract.train.run import Run
from penteract.wire import barrier

RANKS, LAYERS, SEQ, MICRO_BATCHES = 2, 8, 128, 8
WARM_UP, TRACED = 3, 5
BLOCKS = 2  # of processes of ours and of Megatron's in turn
PEERS: dict[str, tuple[int, Any]] = {  # chunks, and the peer's schedule
    "gpipe": (1, pipelining.ScheduleGPipe),
    "1f1b": (1, pipelining.Schedule1F1B),
    "interleaved": (2, pipelining.ScheduleInterleaved1F1B),
    "zb-v": (2, pipelining.ScheduleZBVZeroBubble),
    "dualpipe-v": (2, pipelining.ScheduleDualPipeV),
}
Call = Callable[[], list[Tensor]]  # a step's loss and gradient norm
Marks = list[
    tuple[float, float]
]  # clock and CPU seconds when the gradients of a step were complete


def configuration(
    hidden: int, kind: str | None, *, trace: Sequence[int] = (), stages: str = "cost"
) -> Config:
    """On two ranks with that schedule; on one where it is None."""
    model = {"layers": LAYERS, "hidden": hidden, "ffn": 27 * hidden // 10, "vocab": VOCAB}
    model |= {"heads": hidden // HEAD_SIZE, "kv_heads": hidden // HEAD_SIZE // 2}
    parallel: dict[str, Any] = {}
    if kind is not None:
        parallel = {"pp": RANKS, "schedule": kind, "chunks": PEERS[kind][0], "stages": stages}
    train = {"steps": 1, "global_batch": MICRO_BATCHES, "micro_batch": 1}
    sections = {"model": model, "parallel": parallel, "data": {"seq": SEQ}, "train": train}
    more = {"optim": {"schedule": "constant"}, "log": {"trace": list(trace)}}
    return resolve(from_dict({**sections, **more}))


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def new_run(config: Config, marks: Marks | None = None) -> Run:
    """Our run as this rank of two, or as the only one."""
    pp, device = config.parallel.pp, torch.device("cpu")
    mesh = create_mesh(Grid(pp, pp=pp), world_axis().rank % pp)
    task, marks = synthetic_task(config, mesh, device), [] if marks is None else marks
    return Run(task, config, mesh, device, on_gradients=lambda run: marks.append(now()))


def stepping(run: Run) -> Call:
    def call() -> list[Tensor]:
        line = run.update()
        return [torch.tensor(line[name]) for name in ("loss", "grad_norm")]

    return call


# --- torch's side


class Stage(nn.Module):
    """Some of the model's layers."""

    def __init__(self, model: Model, names: Sequence[str]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(model.get_submodule(name) for name in names)
        self.angles = model.angles

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x, self.angles) if isinstance(part, Block) else part(x)
        return x


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def torch_step(config: Config, marks: Marks) -> Call:
    """A step of torch's model in our stages, with our initial weights and tokens."""
    model, start = Model(config), new_run(configuration(config.model.hidden, None))
    model.load_state_dict({shard.tensor: values for shard, values in start.weights()})
    ours, rank, optim = plan(config), world_axis().rank, config.optim
    last, device = len(ours.stages) - 1, torch.device("cpu")
    mine = nn.ModuleDict({str(i): Stage(model, names) for i, names in ours.held(rank).items()})
    stages = [pipelining.PipelineStage(part, int(i), last + 1, device) for i, part in mine.items()]
    chunks, kind = PEERS[config.parallel.schedule or "1f1b"]
    schedule = kind(stages if chunks > 1 else stages[0], MICRO_BATCHES, loss_fn=mean_loss)
    parameters = list(mine.parameters())
    groups: list[dict[str, Any]] = [{"params": [p for p in parameters if p.ndim == 2]}]
    groups.append({"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0})
    how: dict[str, Any] = {"betas": optim.betas, "eps": optim.eps, "fused": True}
    adamw = torch.optim.AdamW(groups, lr=optim.lr, weight_decay=optim.weight_decay, **how)
    source, steps = SyntheticSource(seq=SEQ, vocab=VOCAB, seed=config.data.seed), itertools.count()

    def call() -> list[Tensor]:
        first, losses = next(steps) * MICRO_BATCHES, list[Tensor]()
        found = source.samples(range(first, first + MICRO_BATCHES))
        tokens, labels = map(torch.from_numpy, (found.tokens, found.labels))
        given = [tokens] if "0" in mine else []
        target = {"target": labels, "losses": losses} if str(last) in mine else {}
        schedule.step(*given, **target, return_outputs=False)
        marks.append(now())
        gradients = [p.grad for p in parameters if p.grad is not None]
        own = nn.utils.get_total_norm(gradients)
        mean = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        sums = torch.stack([mean, own * own])
        dist.all_reduce(sums)
        loss, norm = sums[0], sums[1].sqrt()
        nn.utils.clip_grads_with_norm_(parameters, optim.clip, norm)
        adamw.step()
        adamw.zero_grad()
        return [loss, norm]

    return call


# --- times


def seconds(call: Call, marks: Marks, spent: list[float]) -> list[float]:
    """Of one step: seconds and CPU seconds of all threads, the same until the gradients are
    complete, and seconds in `Pending.wait`.
    """
    barrier(world_axis())
    before, began = spent[0], now()
    call()
    ended = now()
    parts = [end - start for t in (ended, marks[-1]) for start, end in zip(began, t, strict=True)]
    return [*parts, spent[0] - before]


def measure(hidden: int, kind: str, rounds: int) -> tuple[Tensor, Tensor, list[list[Timed]]]:
    """On one rank: the first steps' losses and norms, [rounds, who, what `seconds` gives], and
    the actions of some later steps of ours.
    """
    first_traced = WARM_UP + rounds + 1
    config = configuration(hidden, kind, trace=range(first_traced, first_traced + TRACED))
    marks: tuple[Marks, Marks] = [], []
    run = new_run(config, marks[0])
    calls, spent = [stepping(run), torch_step(config, marks[1])], count_waiting()
    first = [[torch.stack([x.double() for x in call()]) for call in calls] for _ in range(WARM_UP)]
    times = torch.zeros(rounds, len(calls), 5, dtype=torch.float64)
    for i in range(rounds):
        for who in (0, 1)[:: 1 if i % 2 else -1]:
            times[i, who] = torch.tensor(seconds(calls[who], marks[who], spent))
    traces = []
    for _ in range(TRACED):
        calls[0]()
        traces.append(run.times or [])
    run.task.close()
    return torch.stack([torch.stack(values) for values in first]), times, traces


def report(hidden: int, kind: str, rounds: int) -> bool:
    """Measure and print one case; whether ours and torch's compute the same."""
    ranks = run_ranks(measure, RANKS, hidden, kind, rounds, timeout_s=7200, backend="gloo")
    values = torch.stack([values for values, *_ in ranks])  # [rank, step, who, loss and norm]
    apart = (values / values[:1, :, :1] - 1).abs().max().nan_to_num(nan=torch.inf).item()
    warning = "" if apart <= TOLERANCE else f", above {TOLERANCE:g}"
    what = f"{kind}, chunks = {PEERS[kind][0]}, hidden {hidden}"
    print(f"\n{what}: first losses and norms within {apart:.1e}{warning}")
    times = torch.maximum(ranks[0][1], ranks[1][1])
    cpu = [1, 3]
    times[:, :, cpu] = ranks[0][1][:, :, cpu] + ranks[1][1][:, :, cpu]
    for name, (step, step_cpu, fb, fb_cpu, wait) in zip(
        ("penteract", "torch"), times.permute(1, 2, 0), strict=True
    ):
        share = f"   waiting {(wait / step).median():.0%}" if name == "penteract" else ""
        print(f"  {name:<12} step {quartiles(step)} s   CPU {quartiles(step_cpu)} s{share}")
        print(f"  {'':<12} F, B {quartiles(fb)} s   CPU {quartiles(fb_cpu)} s")
    step, step_cpu, fb, fb_cpu = (times[:, 1] / times[:, 0])[:, :4].unbind(1)
    print(f"  {'torch / ours':<12} step {quartiles(step)}     CPU {quartiles(step_cpu)}")
    print(f"  {'':<12} F, B {quartiles(fb)}     CPU {quartiles(fb_cpu)}")
    report_timeline(configuration(hidden, kind), [traces for *_, traces in ranks])
    return not warning


def report_timeline(config: Config, ranks: Sequence[Sequence[list[Timed]]]) -> None:
    schedule = plan(config).schedule(MICRO_BATCHES)
    found, simulated, bubbles = [], [], []
    for step in zip(*ranks, strict=True):
        actions = list(itertools.chain(*step))
        lengths = {t.action: t.end - t.start for t in actions}
        found.append(max(t.end for t in actions) - min(t.start for t in actions))
        simulated.append(timeline(schedule, lengths.__getitem__).makespan)
        bubbles.append(1 - sum(lengths.values()) / (RANKS * found[-1]))
    ours, theirs = torch.tensor(found), torch.tensor(simulated)
    print(f"  {'timeline':<12} F, B {quartiles(ours)} s   of its actions {quartiles(theirs)} s")
    bubble = f"idle {torch.tensor(bubbles).median().item():.1%} of both ranks' time"
    print(f"  {'':<12} quotient {quartiles(ours / theirs)}   {bubble}", flush=True)


# --- Megatron-Core


def start(hidden: int, steps: int) -> tuple[dict[str, Tensor], list[megatron_cpu.MicroBatches]]:
    """Our initial weights by name, and the micro-batches of all steps."""
    run = new_run(configuration(hidden, None))
    batches: list[megatron_cpu.MicroBatches] = [
        [(b.tokens.view(-1, SEQ), b.labels.view(-1, SEQ)) for b in run.task.batches(step)]
        for step in range(1, steps + 1)
    ]
    run.task.close()
    return {shard.tensor: values for shard, values in run.weights()}, batches


def our_lines(config: Config, steps: int) -> list[dict[str, float]]:
    run = new_run(config)
    lines = [run.update() for _ in range(steps)]
    run.task.close()
    return lines


def report_megatron(hidden: int, rounds: int) -> bool:
    """Measure and print; whether losses and norms are the same."""
    config, steps = configuration(hidden, "1f1b", stages="even"), WARM_UP + rounds
    weights, batches = run_ranks(start, 1, hidden, steps)[0]
    values, times = [], []
    for _ in range(BLOCKS):
        ours = run_ranks(our_lines, RANKS, config, steps, backend="gloo")
        theirs = run_ranks(megatron_cpu.train, RANKS, config, weights, batches, backend="gloo")
        numbers = [
            [[[line[k] for k in ("loss", "grad_norm", "step_ms")] for line in r] for r in who]
            for who in (ours, theirs)
        ]
        found = torch.tensor(numbers, dtype=torch.float64)  # [who, rank, step, which]
        values.append(found[..., :2])
        times.append(found[:, :, WARM_UP:, 2].amax(1) / 1e3)
    both = torch.stack(values)
    apart = (both / both[:1, :1, :1] - 1).abs().max().nan_to_num(nan=torch.inf).item()
    warning = "" if apart <= TOLERANCE else f", above {TOLERANCE:g}"
    what = f"1f1b beside Megatron-Core, hidden {hidden}"
    print(f"\n{what}: losses and norms within {apart:.1e}{warning}")
    seconds_of = torch.cat(times, 1)
    for name, step in zip(("penteract", "megatron"), seconds_of, strict=True):
        print(f"  {name:<12} step {quartiles(step)} s")
    first, second = seconds_of.median(1).values.tolist()
    print(f"  megatron / ours   {second / first:8.2f}  (of the medians)", flush=True)
    return not warning


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (9)")
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 640])
    parser.add_argument("--schedules", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--megatron", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, gloo, {RANKS} ranks, {MICRO_BATCHES} micro-batches of {SEQ} "
        f"tokens, {arguments.rounds} rounds in turn; load {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} cores",
        flush=True,
    )
    cases = itertools.product(arguments.hidden, arguments.schedules)
    agree = [report(*case, arguments.rounds) for case in cases]
    if arguments.megatron:
        missing = run_ranks(megatron_cpu.missing_module, 1)[0]  # its import changes the process
        if missing is None:
            agree += [report_megatron(h, arguments.rounds) for h in arguments.hidden]
        else:
            print(f"\nPython module {missing} is missing: {megatron_cpu.INSTALL}", file=sys.stderr)
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())
