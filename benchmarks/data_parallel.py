"""Data parallelism beside torch's own (DistributedDataParallel, ZeRO, FSDP2), on two CPU ranks.

    python benchmarks/data_parallel.py [--rounds 9] [--parts steps link memory]

A 56-million-parameter Llama in float32, the same weights and tokens, gloo, one thread a process.

*steps*: a training step (forward, backward, clipping, fused AdamW) by stage: 0 beside
DistributedDataParallel, 1 beside ZeroRedundancyOptimizer over it, 3 beside `fully_shard` of every
block, 2 alone. Where Megatron-Core is installed (`pip install megatron-core==0.16.1 einops`) its
data parallelism stands beside 0 and its distributed optimizer beside 1: for information, since its
fused kernels need a GPU. All take turns in the same processes; a time is that of the slower rank.
Printed are medians with quartiles; CPU time, of all threads of both ranks, which other load moves
less; the longer rank's share of our time in `Pending.wait`; and theirs / ours round by round (above
1: ours is faster). Exit code 1 where losses or norms of the first steps differ.

*link*: how much of stage 0's reduction hides behind backward over a link on which it takes half of
backward's time: no `wait` returns before that link, one message at a time, would have delivered.
gloo does the real work meanwhile, on the same cores.

*memory*: bytes a parameter that a rank holds, beside the formulas, and the growth of the peak of
its resident memory, in processes of their own.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from peers import megatron_cpu
from peers.llama import HEAD_SIZE, VOCAB, Model
from tensor_parallel import TOLERANCE, count_waiting, quartiles
from timing.slow_link import Link, slow_down
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from penteract.config import Config, resolve
from penteract.config_file import from_dict
from penteract.data.loader import micro_batches
from penteract.data.synthetic import SyntheticSource
from penteract.grid import Grid
from penteract.mesh import create_mesh
from penteract.parallel.buffers import Buffers
from penteract.testing import run_ranks, world_axis
from penteract.train.language_model import synthetic_task
from penteract.train.run import Run
from penteract.wire import all_reduce_, barrier

RANKS, LAYERS, HIDDEN, SEQ, BATCH = 2, 10, 640, 128, 2
WARM_UP = 3
LINK_SHARE = 0.5  # of backward's time that the reduction takes on the slowed link
LATENCY_S = 50e-6
PEERS = {0: "DistributedDataParallel", 1: "ZeroRedundancyOptimizer", 3: "fully_shard"}
MEGATRON = {0: "Megatron-Core's DDP", 1: "... and distributed optimizer"}
M_MMAP_THRESHOLD = -3  # in malloc.h
FORMULA = ((4, 3), (4, 2), (8, 1))  # parameters, gradients, moments; the stage that shares them out
PARTS = ("steps", "link", "memory")
Call = Callable[[], list[Tensor]]  # a step's loss and gradient norm


def configuration(stage: int, *, overlap: bool = True) -> Config:
    model = {"layers": LAYERS, "hidden": HIDDEN, "ffn": 27 * HIDDEN // 10, "vocab": VOCAB}
    model |= {"heads": HIDDEN // HEAD_SIZE, "kv_heads": HIDDEN // HEAD_SIZE // 2}
    train = {"steps": 1, "global_batch": BATCH * RANKS, "micro_batch": BATCH}
    parallel = {"zero": stage, "dp_overlap": overlap}
    sections = {"model": model, "parallel": parallel, "data": {"seq": SEQ}, "train": train}
    return resolve(from_dict({**sections, "optim": {"schedule": "constant"}}))


def new_run(config: Config, ranks: int = RANKS) -> Run:
    """Our run of a configuration as this rank of two, or as the only one."""
    mesh, device = create_mesh(Grid(ranks), world_axis().rank % ranks), torch.device("cpu")
    return Run(synthetic_task(config, mesh, device), config, mesh, device)


def stepping(run: Run) -> Call:
    """A step, with the gathering that would go on into the next one: another's turn comes first."""

    def call() -> list[Tensor]:
        line = run.update()
        run.buffers.wait()
        return [torch.tensor(line[name]) for name in ("loss", "grad_norm")]

    return call


# --- torch's side


def distributed(stage: int, model: Model) -> Callable[[Tensor], Tensor]:
    """The model as torch's users wrap it for two ranks."""
    if stage < 2:
        return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    mesh = init_device_mesh("cpu", (RANKS,))
    for unit in (model.embed, *model.layers):
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    # Backward begins with the head, which would be gathered again at once.
    fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    return model


def initial_weights() -> dict[str, Tensor]:
    """Ours, by logical names."""
    run = new_run(configuration(0), ranks=1)
    return {shard.tensor: values for shard, values in run.weights()}


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's tokens and labels of every step, [b, s] each: those of our runs."""
    source = SyntheticSource(seq=SEQ, vocab=VOCAB, seed=configuration(0).data.seed)
    (mine,) = micro_batches(BATCH * RANKS, BATCH, RANKS, world_axis().rank)
    for step in itertools.count():
        found = source.samples([step * BATCH * RANKS + i for i in mine])
        yield torch.from_numpy(found.tokens), torch.from_numpy(found.labels)


def mean_over_ranks(loss: float | Tensor) -> Tensor:
    mean = torch.as_tensor(loss).detach() / RANKS
    dist.all_reduce(mean)
    return mean


def torch_step(stage: int) -> Call:
    """A step of torch's model, with our initial weights and tokens."""
    config, data = configuration(stage), batches()
    model = Model(config)
    model.load_state_dict(initial_weights())
    wrapped, optim = distributed(stage, model), config.optim
    matrices, norms = ([p for p in model.parameters() if p.ndim == n] for n in (2, 1))
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": optim.weight_decay}]
    groups.append({"params": norms, "weight_decay": 0.0})
    how: dict[str, Any] = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "fused": True}
    adamw: torch.optim.Optimizer
    if stage == 1:
        views = {"parameters_as_bucket_view": True}
        adamw = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **views, **how)
    else:
        adamw = torch.optim.AdamW(groups, **how)

    def call() -> list[Tensor]:
        tokens, labels = next(data)
        loss = F.cross_entropy(wrapped(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), optim.clip)
        adamw.step()
        adamw.zero_grad()
        full = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return [mean_over_ranks(loss), full]

    return call


def megatron_step(stage: int) -> Call:
    """A step of Megatron-Core's model, with the same weights and tokens."""
    step, data = megatron_cpu.stepping(configuration(stage), initial_weights()), batches()

    def call() -> list[Tensor]:
        loss, norm = step([next(data)])
        return [mean_over_ranks(loss), torch.tensor(norm)]

    return call


# --- step times


def seconds(call: Call, spent: list[float]) -> list[float]:
    """Of one step: seconds, CPU seconds of all threads, and seconds in `Pending.wait`."""
    barrier(world_axis())
    before = spent[0]
    began, cpu = time.perf_counter(), time.process_time()
    call()
    ended, cpu_ended = time.perf_counter(), time.process_time()
    return [ended - began, cpu_ended - cpu, spent[0] - before]


def measure_steps(stage: int, rounds: int, megatron: bool) -> tuple[Tensor, Tensor]:
    """On one rank: the first steps' losses and norms, and [rounds, who, what `seconds` gives]."""
    calls = [stepping(new_run(configuration(stage)))]
    calls += [torch_step(stage)] if stage in PEERS else []
    calls += [megatron_step(stage)] if megatron and stage in MEGATRON else []
    spent = count_waiting()
    first = [[torch.stack([x.double() for x in call()]) for call in calls] for _ in range(WARM_UP)]
    times = torch.zeros(rounds, len(calls), 3, dtype=torch.float64)
    for i in range(rounds):
        for who in range(len(calls))[:: 1 if i % 2 else -1]:
            times[i, who] = torch.tensor(seconds(calls[who], spent))
    return torch.stack([torch.stack(values) for values in first]), times


def report_steps(rounds: int) -> bool:
    """Measure and print every stage; whether all of them compute the same."""
    reference, agree = None, True
    missing = run_ranks(megatron_cpu.missing_module, 1)[0]  # its import changes the process
    if missing is not None:
        print(f"without Megatron-Core, whose module {missing} is missing: {megatron_cpu.INSTALL}")
    measure = functools.partial(run_ranks, measure_steps, RANKS, timeout_s=7200, backend="gloo")
    for stage in range(4):
        ranks = measure(stage, rounds, missing is None)
        values, times = ranks[0][0], torch.maximum(ranks[0][1], ranks[1][1])
        times[:, :, 1] = ranks[0][1][:, :, 1] + ranks[1][1][:, :, 1]
        reference = values[:, :1] if reference is None else reference
        apart = (values / reference - 1).abs().max().nan_to_num(nan=torch.inf).item()
        agree = agree and apart <= TOLERANCE
        warning = "" if apart <= TOLERANCE else f", above {TOLERANCE:g}"
        print(f"\nzero = {stage}: first losses and norms within {apart:.1e} of stage 0's{warning}")
        names = ["penteract", *(peers[stage] for peers in (PEERS, MEGATRON) if stage in peers)]
        names = names[: times.shape[1]]
        for name, (wall, cpu, wait) in zip(names, times.permute(1, 2, 0), strict=True):
            share = f"   waiting {(wait / wall).median().item():.0%}" if name == names[0] else ""
            print(f"  {name:<29} {quartiles(wall)} s   CPU {quartiles(cpu)} s{share}")
        for who in range(1, len(names)):
            wall, cpu = (times[:, who, i] / times[:, 0, i] for i in (0, 1))
            name = "Megatron / ours" if who == 2 else "torch / ours"
            print(f"  {name:<29} {quartiles(wall)}     CPU {quartiles(cpu)}", flush=True)
    return agree


# --- a slowed link


def watched(buffers: Buffers) -> list[float]:
    """When the last backward began, when it ended, and when its sums were complete."""
    times = [0.0, 0.0, 0.0]

    def stamped(name: str, i: int, *, after: bool = False) -> None:
        call = getattr(buffers, name)

        def stamp(*stage: int, **arguments: Any) -> Any:
            times[i] = time.perf_counter()
            result = call(*stage, **arguments)
            times[i] = time.perf_counter() if after else times[i]
            return result

        setattr(buffers, name, stamp)

    stamped("begin_backward", 0)
    stamped("end_backward", 1)
    stamped("finish", 2, after=True)
    return times


def measure_link(rounds: int) -> tuple[Tensor, Tensor, float]:
    """On one rank: [rounds, case, (backward, backward and reduction)] in seconds; [rounds], the
    seconds that the slowed link needs; and the last message's share of them.

    Cases are overlap off and on over gloo as it is, then both over the slowed link.
    """
    link, axis = Link(), world_axis()
    slow_down(link)
    runs = [new_run(configuration(0, overlap=overlap)) for overlap in (False, True)]
    clocks = [watched(run.buffers) for run in runs]
    gradients = [bucket.own_gradient.nbytes for bucket in runs[0].buffers.buckets]
    sent = [2 * (RANKS - 1) * size / RANKS for size in gradients]

    def timed(overlap: int, s_per_byte: float) -> list[float]:
        link.s_per_byte, link.latency_s = s_per_byte, LATENCY_S if s_per_byte else 0.0
        barrier(axis)
        runs[overlap].update()
        began, ended, summed = clocks[overlap]
        return [ended - began, summed - began]

    times = torch.zeros(WARM_UP + rounds, 4, 2, dtype=torch.float64)
    carries = torch.zeros(WARM_UP + rounds, dtype=torch.float64)
    for i in range(WARM_UP + rounds):
        order = (0, 1)[:: 1 if i % 2 else -1]
        for case in order:
            times[i, case] = torch.tensor(timed(case, 0.0))
        # The load of the machine changes, so that each round has a link of its own.
        carries[i] = LINK_SHARE * all_reduce_(times[i, 0, 0].clone(), axis, "max")
        s_per_byte = (carries[i].item() - LATENCY_S * len(sent)) / sum(sent)
        for case in order:
            times[i, 2 + case] = torch.tensor(timed(case, s_per_byte))
    return times[WARM_UP:], carries[WARM_UP:], sent[-1] / sum(sent)


def report_link(rounds: int) -> None:
    ranks = run_ranks(measure_link, RANKS, rounds, timeout_s=7200, backend="gloo")
    times = torch.maximum(ranks[0][0], ranks[1][0])
    _, carry, last_share = ranks[0]
    backward = times[:, ::2, 0].mean(1)  # overlap off: nothing is beside it
    off_fast, on_fast, off, on = times[:, :, 1].unbind(1)
    limit = backward.clamp(min=carry)
    lines = {
        "backward alone": backward,
        "and gloo's reduction, dp_overlap off": off_fast,
        "and gloo's reduction, dp_overlap on": on_fast,
        "the slow link alone": carry,
        "and the slow link's, dp_overlap off": off,
        "and the slow link's, dp_overlap on": on,
        "sum of backward and the link's time": backward + carry,
        "limit: the longer of the two": limit,
        "dp_overlap on / limit, gloo as it is": on_fast / limit,
        "dp_overlap on / limit, slow link": on / limit,
        "share of the reduction that hides": (backward + carry - on) / carry,
    }
    print("\nzero = 0 over a slow link; seconds and ratios")
    for name, values in lines.items():
        print(f"  {name:<38} {quartiles(values)}")
    most = f"{1 - last_share:8.2f}  (the last message follows backward)"
    print(f"  {'the most of it that can':<38} {most}", flush=True)


# --- memory


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure_memory(stage: int, ours: bool) -> list[float]:
    """On one rank, bytes a parameter: growth of the peak; of ours also what it holds by kinds."""
    # What is freed goes back to the system: else glibc keeps the large pieces that it gives out.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    before, config = peak_bytes(), configuration(stage)
    run = new_run(config) if ours else None
    step = torch_step(stage) if run is None else stepping(run)
    for _ in range(WARM_UP):
        step()
    found = [peak_bytes() - before]
    if run is not None:
        parameters, gradients, masters = run.buffers.held_bytes()
        moments = sum(moment.nbytes for _, _, moment in run.optimizer.state())
        rings = run.buffers.gathering.memory.values() if run.buffers.gathering else ()
        ring = sum(slot.nbytes for slots in rings for slot in slots)
        found += [parameters + masters, gradients, moments, ring]
    count = sum(p.numel() for p in Model(config).parameters())
    return [size / count for size in found]


def report_memory() -> None:
    print(f"\nbytes a parameter on a rank of {RANKS}")
    measure = functools.partial(run_ranks, measure_memory, RANKS, timeout_s=3600, backend="gloo")
    for stage in range(4):
        parts = [size / RANKS if stage >= least else size for size, least in FORMULA]
        peak, *held, ring = torch.tensor(measure(stage, True)).amax(0).tolist()
        kinds = " + ".join(f"{x:.2f}" for x in held)
        theirs = f", {PEERS[stage]}'s {max(measure(stage, False))[0]:.1f}" if stage in PEERS else ""
        print(
            f"  zero = {stage}   formula {sum(parts):4.1f}   held {sum(held):5.2f} = {kinds}, "
            f"ring {ring:.2f}   peak growth {peak:.1f}{theirs}",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (9)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    print(
        f"torch {torch.__version__}, gloo, {RANKS} ranks, {BATCH} x {SEQ} tokens each, "
        f"{arguments.rounds} rounds in turn; load {load:.1f} on {os.cpu_count()} cores"
    )
    agree = "steps" not in arguments.parts or report_steps(arguments.rounds)
    if "link" in arguments.parts:
        report_link(arguments.rounds)
    if "memory" in arguments.parts:
        report_memory()
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
