"""Context parallelism beside torch's own ring attention and beside one process, on two CPU ranks.

    python benchmarks/context_parallel.py [--rounds 9] [--tokens 8192] [--parts attention step]

One thread a process, gloo; all cases take turns in the same two processes, and a time is that of
the slower rank. Printed are medians, with quartiles in brackets. Speed-up is one process's time
over a case's, round by round; of the line "both alone at once", where each rank computes all of it
for itself, twice that: the most that two ranks of this machine can gain. The columns after it add
up the time of both ranks in units of one process's, to 1 / efficiency: kernels, merging their
results, awaiting messages inside attention, what else attention does (copies, starting messages),
awaiting outside of it (gradients, and the slower rank at the end), and everything else. "Uneven" is
kernel time of the busier rank over the mean; the last column, calls of a kernel on a rank.

*attention*: forward and backward of 8 heads of 64, over a causal sequence, with as many key/value
heads or 2: all exchanges with overlap on and off, a ring over contiguous runs of rows instead of
the balanced cut, and torch's ring with its balanced cut and both its ways to pass keys on. The
public manager of torch.distributed.tensor.experimental refuses CPU tensors, so that its templates
are called with the CPU's kernels, as its functions for CUDA do. Ours get [t, heads, d] as in our
model; torch gets what its kernels like best, contiguous [1, heads, t, d]. Below stand torch / ours,
round by round (above 1: ours is faster), and what overlap gains, with the share of the longer
rank's time in `Pending.wait`. Exit code 1, and no times, where outputs or gradients differ from
those of torch's attention in float32 on one process: by more than float32's rounding, or in
bfloat16 by more than twice what one process's do.

*step*: a training step of a small Llama, with clipping and AdamW; its losses and norms must agree.

*packed*: ours, documents of a median length packed to --tokens, beside one sequence of the same
attention pairs. It has fewer rows: packed / one also holds what more rows cost in messages.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from peers import torch_ring
from peers.llama import HEAD_SIZE, VOCAB
from tensor_parallel import quartiles
from timing.turns import Call, Case, Measured, Watch, differences
from torch import Tensor
from torch.nn import functional as F

from penteract.config import resolve
from penteract.config_file import from_dict
from penteract.grid import Grid
from penteract.mesh import create_mesh, single
from penteract.parallel.context.all_gather import AllGather
from penteract.parallel.context.all_to_all import AllToAll
from penteract.parallel.context.blocks import Blocks, Gradient, Merged
from penteract.parallel.context.cut import Block, Cut
from penteract.parallel.context.exchange import Exchange, attend
from penteract.parallel.context.exchanges import Comm, exchange_of
from penteract.parallel.context.kernels import Flash, kernel_of
from penteract.parallel.context.ring import Ring
from penteract.pending import Pending
from penteract.testing import run_ranks, world_axis
from penteract.train.language_model import synthetic_task
from penteract.train.run import Run

RANKS, HEADS, WARM_UP = 2, 8, 2
COMMS: tuple[Comm, ...] = ("ring", "all_gather", "all_to_all")
ONE, BOTH, OFF = "one process", "both alone at once", ", overlap off"
TOLERANCE = 2e-5  # of the largest value
STEP_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
WAYS = ("forward", "backward")
PARTS = ("attention", "step", "packed")
COLUMNS = ("kernel", "merging", "waiting", "rest", "outside: waiting", "rest")


# --- where the time goes


class Watches:
    """All that is watched of one process, from here on."""

    def __init__(self) -> None:
        exchanges = (Ring, AllGather, AllToAll, torch_ring.TorchRing)
        self.attention = Watch(*itertools.product(exchanges, WAYS))
        adding = [(x, name) for x in (Merged, Gradient) for name in public_methods(x)]
        self.adding = Watch(*adding)
        self.added = Watch(*itertools.product((Flash,), WAYS), inside=self.adding)
        messages = [(Pending, "wait"), *torch_ring.WAITING]
        self.waiting = Watch(*messages, inside=self.attention)
        self.all_waiting = Watch(*messages)
        self.torch_kernel = Watch()

    def read(self) -> Tensor:
        """Seconds of attention, kernels, merging, waiting in attention and in all; kernel calls."""
        kernels, waiting = (self.added, self.torch_kernel), self.waiting.seconds
        parts = [self.attention.seconds, sum(x.seconds for x in kernels)]
        parts += [self.adding.seconds - self.added.seconds, waiting, self.all_waiting.seconds]
        return torch.tensor([*parts, sum(x.calls for x in kernels)], dtype=torch.float64)


def public_methods(owner: type) -> list[str]:
    return [name for name, x in vars(owner).items() if inspect.isfunction(x) and name[0] != "_"]


# --- what takes turns


def sequences(lengths: tuple[int, ...], kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the output's gradient [t, heads, d], the same on all ranks."""
    generator, t = torch.Generator().manual_seed(1), sum(lengths)
    heads = (HEADS, kv_heads, kv_heads, HEADS)
    return [torch.randn(t, n, HEAD_SIZE, generator=generator).to(dtype) for n in heads]


def attending(whole: Sequence[Tensor], rows: Any, exchange: Exchange, plan: Any) -> Call:
    """Forward and backward of these rows: output, and gradients of q, k and v."""
    *given, d_out = (x[rows].clone() for x in whole)
    q, k, v = (x.requires_grad_() for x in given)
    kernel = kernel_of("flash")

    def call() -> list[Tensor]:
        out = attend(q, k, v, exchange=exchange, plan=plan, kernel=kernel)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)]

    return call


def ours(
    name: str, whole: Sequence[Tensor], lengths: tuple[int, ...], exchange: Exchange, **how: Any
) -> Case:
    axis = exchange.axis
    cut = Cut.of(lengths, axis.size)
    rows = torch.from_numpy(cut.rows(axis.rank))
    assert cut.cp * cut.t_local == cut.tokens, (
        f"{lengths} cannot be compared row by row on {axis.size} ranks"
    )
    call = attending(whole, rows, exchange, exchange.plan(cut, None, rows))
    return Case(name, call, rows, **how)


def contiguous(whole: Sequence[Tensor]) -> Case:
    """A ring in which each rank has one run of rows: the first has nothing to do in the second
    turn.
    """
    axis, size = world_axis(), len(whole[0]) // RANKS
    rows, all_rows = slice(axis.rank * size, (axis.rank + 1) * size), slice(0, size)
    before = [Block(all_rows, all_rows, "full")] if axis.rank else []
    plan = tuple(
        Blocks.of(blocks, size) for blocks in ([Block(all_rows, all_rows, "causal")], before)
    )
    return Case("ring, contiguous", attending(whole, rows, Ring(axis), plan), rows)


def of_torch(whole: Sequence[Tensor], rotation: str, kernel: Watch) -> Case:
    rank, t = world_axis().rank, len(whole[0])
    chunks = torch.arange(t).chunk(2 * RANKS)
    rows = torch.cat([chunks[rank], chunks[2 * RANKS - 1 - rank]])
    *given, d_out = (x[rows].transpose(0, 1)[None].contiguous() for x in whole)
    q, k, v = (x.requires_grad_() for x in given)

    def call() -> list[Tensor]:
        out = torch_ring.attend(q, k, v, rotation, kernel.timed)
        found = [out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)]
        return [x[0].transpose(0, 1) for x in found]

    return Case(f"torch, {rotation}", call, rows)


def one_process(whole: Sequence[Tensor], lengths: tuple[int, ...]) -> list[Tensor]:
    """What `attending` computes, by torch's own attention, in float32."""
    found = []
    for parts in zip(*(x.float().split(lengths) for x in whole), strict=True):
        *given, d_out = (x.transpose(0, 1)[None] for x in parts)
        q, k, v = (x.detach().requires_grad_() for x in given)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        values = [out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)]
        found.append([x[0].transpose(0, 1) for x in values])
    return [torch.cat(x) for x in zip(*found, strict=True)]


def compared(
    cases: Sequence[Case], whole: Sequence[Tensor], lengths: tuple[int, ...]
) -> tuple[float, float]:
    """The largest difference from one process in float32, and what is allowed; the first case is
    one process.
    """
    one, *others = differences(cases, one_process(whole, lengths))
    return max(one, *others), TOLERANCE if whole[0].dtype == torch.float32 else 2 * one


def measure_attention(tokens: int, kv_heads: int, dtype: torch.dtype, rounds: int) -> Measured:
    watches, axis, lengths = Watches(), world_axis(), (tokens,)
    whole, alone = sequences(lengths, kv_heads, dtype), exchange_of("ring", single("one"))
    cases = [ours(ONE, whole, lengths, alone, solo=True), ours(BOTH, whole, lengths, alone, work=2)]
    for comm, overlap in itertools.product(COMMS, (True, False)):
        name, how = comm if overlap else comm + OFF, exchange_of(comm, axis, overlap=overlap)
        cases.append(ours(name, whole, lengths, how))
    cases.append(contiguous(whole))
    cases += [of_torch(whole, rotation, watches.torch_kernel) for rotation in torch_ring.ROTATIONS]
    return Measured.of(cases, compared(cases, whole, lengths), rounds, watches.read)


def new_run(tokens: int, dtype: torch.dtype, cp: int, comm: Comm, overlap: bool) -> Run:
    """Our run as this rank of two, or as the only one."""
    hidden, layers = 256, 2
    model = {"layers": layers, "hidden": hidden, "ffn": 11 * hidden // 4, "vocab": VOCAB}
    model |= {"heads": hidden // HEAD_SIZE}
    parallel = {"cp": cp, "cp_comm": comm, "cp_overlap": overlap}
    train = {"steps": 1, "global_batch": 1, "dtype": str(dtype).removeprefix("torch.")}
    sections = {"model": model, "parallel": parallel, "data": {"seq": tokens}, "train": train}
    config = resolve(from_dict({**sections, "optim": {"schedule": "constant"}}))
    mesh, device = create_mesh(Grid(cp, cp=cp), world_axis().rank % cp), torch.device("cpu")
    return Run(synthetic_task(config, mesh, device), config, mesh, device)


def stepping(run: Run) -> Call:
    def call() -> list[Tensor]:
        line = run.update()
        return [torch.tensor(line[name]) for name in ("loss", "grad_norm")]

    return call


def measure_step(tokens: int, dtype: torch.dtype, rounds: int) -> Measured:
    watches = Watches()
    runs = [new_run(tokens, dtype, 1, "ring", True) for _ in range(2)]
    names = [ONE, BOTH]
    ways: list[tuple[Comm, bool]] = [("ring", True), ("ring", False)]
    for comm, overlap in [*ways, *((comm, True) for comm in COMMS[1:])]:
        runs.append(new_run(tokens, dtype, RANKS, comm, overlap))
        names.append(comm if overlap else comm + OFF)
    cases = [Case(name, stepping(run)) for name, run in zip(names, runs, strict=True)]
    apart = max(max(differences(cases)) for _ in range(WARM_UP))
    cases[0] = dataclasses.replace(cases[0], solo=True)
    cases[1] = dataclasses.replace(cases[1], work=2)
    found = Measured.of(cases, (apart, STEP_TOLERANCE[dtype]), rounds, watches.read)
    for run in runs:
        run.task.close()
    return found


def documents(tokens: int, median: float) -> tuple[int, ...]:
    """Log-normal lengths, ln's deviation 1, until they fill the row; the last one is cut."""
    drawn = median * np.random.default_rng(0).lognormal(sigma=1.0, size=tokens)
    ends = np.minimum(drawn.clip(1).astype(np.int64).cumsum(), tokens)
    return tuple(np.diff(np.unique([0, *ends])).tolist())


def same_pairs(lengths: Sequence[int]) -> int:
    """The length of one sequence with as many pairs, to the next multiple of 2·ranks."""
    parts = 2 * RANKS
    return max(parts, parts * round(sum(n * (n + 1) for n in lengths) ** 0.5 / parts))


def measure_packed(tokens: int, median: int, dtype: torch.dtype, rounds: int) -> Measured:
    """Of documents, then of one sequence."""
    watches, cases, agreements = Watches(), list[Case](), list[tuple[float, float]]()
    packed, alone = documents(tokens, median), exchange_of("ring", single("one"))
    for lengths in (packed, (same_pairs(packed),)):
        whole = sequences(lengths, HEADS, dtype)
        kind = "packed" if lengths == packed else "one"
        mine = [ours(f"{kind}, {ONE}", whole, lengths, alone, solo=True)]
        for comm in COMMS:
            how = exchange_of(comm, world_axis())
            mine.append(ours(f"{kind}, {comm}", whole, lengths, how))
        agreements.append(compared(mine, whole, lengths))
        cases += mine
    worse = max(agreements, key=lambda x: x[0] / x[1])
    return Measured.of(cases, worse, rounds, watches.read)


# --- what is printed


def shares(times: Tensor, work: Tensor, one: Tensor) -> list[Tensor]:
    """COLUMNS of times [rank, round, case, 7], as parts of one process's time [round, 1]."""
    spent, attention, kernel, merging, waiting, all_waiting, _ = times.sum(0).unbind(-1)
    longest, ranks = times[..., 0].amax(0), (times[..., 0] > 0).sum(0)
    outside = all_waiting - waiting
    rest, other = attention - kernel - merging - waiting, spent - attention - outside
    outside = outside + ranks * longest - spent  # and for the slower rank's end
    parts = (kernel, merging, waiting, rest, outside, other)
    return [(part / one / work).median(0).values for part in parts]


def table(names: Sequence[str], work: Sequence[int], times: Tensor) -> None:
    """Of cases of which the first is one process; times [rank, round, case, 7]."""
    longest, factor = times[..., 0].amax(0), torch.tensor(work)
    parts = torch.stack(shares(times, factor, longest[:, :1]), 1)
    faster, kernel = factor * longest[:, :1] / longest, times[..., 2]
    uneven = (kernel.amax(0) / kernel.mean(0)).median(0).values
    print(f"  {'':<24}{'ms':>34} {'speed-up':>26}  {' '.join(COLUMNS)}   uneven calls")
    for i, name in enumerate(names):
        columns = " ".join(f"{x:{len(c)}.3f}" for x, c in zip(parts[i], COLUMNS, strict=True))
        last = "" if ONE in name else f"  {uneven[i]:6.3f}"
        calls = f"{times[:, :, i, 6].amax():5.0f}"
        print(
            f"  {name:<24}{quartiles(1e3 * longest[:, i]):>34} {quartiles(faster[:, i]):>26}  "
            f"{columns} {last:>8} {calls}"
        )


def report_attention(tokens: int, kv_heads: int, dtype: torch.dtype, rounds: int) -> bool:
    ranks = on_ranks(measure_attention, tokens, kv_heads, dtype, rounds)
    title = f"attention, {tokens} tokens, {HEADS} heads, {kv_heads} of keys, {dtype}"
    if not ranks[0].agrees(title):
        return False
    names, work, times = ranks[0].names, ranks[0].work, torch.stack([rank.times for rank in ranks])
    table(names, work, times)
    longest = dict(zip(names, times[..., 0].amax(0).unbind(1), strict=True))
    for rotation, comm in itertools.product(torch_ring.ROTATIONS, COMMS):
        ratio = quartiles(longest[f"torch, {rotation}"] / longest[comm])
        print(f"  {f'torch, {rotation} / {comm}':<36} {ratio}")
    for comm in COMMS:
        both = [times[:, :, names.index(name)] for name in (comm, comm + OFF)]
        ratio = quartiles(longest[comm + OFF] / longest[comm])
        on, off = ((x[..., 4] / x[..., 0]).amax(0).median().item() for x in both)
        share = f"waiting {on:.1%} with overlap, {off:.1%} without"
        print(f"  {comm + ', overlap off / on':<36} {ratio}   {share}", flush=True)
    return True


def report_step(tokens: int, dtype: torch.dtype, rounds: int) -> bool:
    ranks = on_ranks(measure_step, tokens, dtype, rounds)
    agree = ranks[0].agrees(f"training step, {tokens} tokens, {dtype}")
    if agree:
        table(ranks[0].names, ranks[0].work, torch.stack([rank.times for rank in ranks]))
    return agree


def report_packed(tokens: int, median: int, dtype: torch.dtype, rounds: int) -> bool:
    lengths = documents(tokens, median)
    ranks = on_ranks(measure_packed, tokens, median, dtype, rounds)
    title = (
        f"packed, {len(lengths)} documents of {min(lengths)} to {max(lengths)} tokens, median "
        f"{int(np.median(lengths))}, beside one of {same_pairs(lengths)}, {dtype}"
    )
    if not ranks[0].agrees(title):
        return False
    names, work, times = ranks[0].names, ranks[0].work, torch.stack([rank.times for rank in ranks])
    half = len(names) // 2
    for part in (slice(0, half), slice(half, None)):
        table(names[part], work[part], times[:, :, part])
    whole, kernel = times[..., 0].amax(0), times[..., 2].sum(0)
    for i, name in enumerate((ONE, *COMMS)):
        ratios = [quartiles(x[:, i] / x[:, half + i]) for x in (whole, kernel)]
        print(f"  packed / one, {name:<22} {ratios[0]}   kernels {ratios[1]}", flush=True)
    return True


def on_ranks(measure: Callable[..., Measured], *args: Any) -> list[Measured]:
    return run_ranks(measure, RANKS, *args, timeout_s=7200, backend="gloo")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="for example: --parts attention --tokens 4096 --rounds 7 --dtype bfloat16",
    )
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (9)")
    parser.add_argument("--tokens", type=int, default=8192, help="a multiple of 4 (8192)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[8, 2], help="of attention")
    parser.add_argument("--medians", type=int, nargs="+", default=[500, 50], help="of documents")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    arguments = parser.parse_args()
    tokens, rounds, dtype = arguments.tokens, arguments.rounds, getattr(torch, arguments.dtype)
    if tokens < 4 or tokens % (2 * RANKS):
        below = max(4, tokens // 4 * 4)
        parser.error(f"--tokens {tokens} is no multiple of {2 * RANKS}: {below} is")
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, gloo, {RANKS} ranks, {rounds} rounds in turn; "
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
        flush=True,
    )
    agree = []
    if "attention" in arguments.parts:
        agree += [report_attention(tokens, g, dtype, rounds) for g in arguments.kv_heads]
    if "step" in arguments.parts:
        agree.append(report_step(tokens, dtype, rounds))
    if "packed" in arguments.parts:
        agree += [report_packed(tokens, m, dtype, rounds) for m in arguments.medians]
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())
