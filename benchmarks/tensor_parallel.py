"""Tensor parallelism beside torch's own (DTensor, `parallelize_module`), on two CPU ranks.

    python benchmarks/tensor_parallel.py [--rounds 9] [--hidden 256 1024]

The same Llama in float32, the same weights and tokens, gloo, one thread a process: a block forward
and backward, and a whole training step (4 blocks, vocabulary 8192, clipping, fused AdamW), without
and with sequence parallelism. Ours, ours with `parallel.tp_overlap` off, and torch's take turns in
the same processes; a time is that of the slower rank. Printed are medians with quartiles, the ratio
torch / ours round by round (above 1: ours is faster), and the longer rank's share of our time in
`Pending.wait`: for its peer, for gloo, and adding up what came. Exit code 1 where the two differ in
a block's output or input gradient, or in the loss or gradient norm of the first steps. There is one
sequence; of more, DTensor would have to copy the parts.
"""

from __future__ import annotations

import argparse
import itertools
import operator
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from peers.llama import HEAD_SIZE, VOCAB, Model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import parallel as spread
from torch.nn import functional as F

from penteract.config import Config, resolve
from penteract.config_file import from_dict
from penteract.data.synthetic import SyntheticSource
from penteract.grid import Grid
from penteract.mesh import create_mesh
from penteract.nn.sequences import Sequences
from penteract.pending import Pending
from penteract.testing import run_ranks, world_axis
from penteract.train.language_model import synthetic_task
from penteract.train.run import Run
from penteract.wire import all_reduce_, barrier

RANKS, LAYERS, SEQ = 2, 4, 512
WARM_UP, TOLERANCE = 3, 1e-4
ROUND_S = 0.1  # a round repeats a call until it takes about so long
NAMES = ("penteract", "overlap off", "torch")
Call = Callable[[], list[Tensor]]  # returns what it computed, to be compared


def configuration(hidden: int, *, sp: bool, overlap: bool = True, tp: int = RANKS) -> Config:
    model = {"layers": LAYERS, "hidden": hidden, "ffn": 11 * hidden // 4, "vocab": VOCAB}
    model |= {"heads": hidden // HEAD_SIZE, "kv_heads": hidden // HEAD_SIZE // 2}
    parallel = {"tp": tp, "sp": sp, "tp_overlap": overlap}
    train = {"steps": 1, "global_batch": 1, "micro_batch": 1}
    sections = {"model": model, "parallel": parallel, "data": {"seq": SEQ}, "train": train}
    return resolve(from_dict({**sections, "optim": {"schedule": "constant"}}))


def new_run(config: Config) -> Run:
    """Our run of a configuration as this rank: of all ranks, or of one."""
    tp, device = config.parallel.tp, torch.device("cpu")
    mesh = create_mesh(Grid(tp, tp=tp), world_axis().rank if tp > 1 else 0)
    return Run(synthetic_task(config, mesh, device), config, mesh, device)


def parallelize(model: Model, sp: bool) -> None:
    """As torch's tutorial does; a prepared input makes one message of its matrices' gradients."""
    mesh, whole = init_device_mesh("cpu", (RANKS,)), Replicate()
    stream: Placement = Shard(1) if sp else whole
    norm, row = spread.SequenceParallel(), spread.RowwiseParallel(output_layouts=stream)
    embed = spread.RowwiseParallel(input_layouts=whole, output_layouts=stream)
    head = spread.ColwiseParallel(input_layouts=stream, use_local_output=False)
    block: dict[str, spread.ParallelStyle] = {
        name: spread.PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(whole,))
        for name in ("attention", "mlp")
    }
    block |= {f"attention.{x}": spread.ColwiseParallel() for x in "qkv"}
    block |= {"mlp.gate": spread.ColwiseParallel(), "mlp.up": spread.ColwiseParallel()}
    block |= {"attention.o": row, "mlp.down": row}
    block |= {"attention_norm": norm, "mlp_norm": norm} if sp else {}
    outer = {"embed": embed, "head": head} | ({"norm": norm} if sp else {})
    for layer in model.layers:
        spread.parallelize_module(layer, mesh, block)
    spread.parallelize_module(model, mesh, outer)


def torch_model(config: Config) -> Model:
    """torch's model on this rank, with our initial weights."""
    model, start = Model(config), new_run(configuration(config.model.hidden, sp=False, tp=1))
    model.load_state_dict({shard.tensor: values for shard, values in start.weights()})
    parallelize(model, config.parallel.sp)
    return model


def torch_step(config: Config) -> Call:
    model, optim, steps = torch_model(config), config.optim, itertools.count()
    source = SyntheticSource(seq=SEQ, vocab=VOCAB, seed=config.data.seed)
    # Plain and distributed tensors cannot share a fused update, and norms are plain without sp.
    matrices, norms = groups = [[p for p in model.parameters() if p.ndim == n] for n in (2, 1)]
    adamw = torch.optim.AdamW(
        matrices, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
    )
    adamw.add_param_group({"params": norms, "weight_decay": 0.0})

    def whole(x: Tensor) -> Tensor:
        return x.full_tensor() if isinstance(x, DTensor) else x

    def call() -> list[Tensor]:
        found = source.samples([next(steps)])
        tokens, labels = map(torch.from_numpy, (found.tokens, found.labels))
        with spread.loss_parallel():
            loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
            loss.backward()
        gradients = [[p.grad for p in group] for group in groups]
        parts = [whole(nn.utils.get_total_norm(x)) for x in gradients]  # type: ignore[arg-type]
        norm = torch.linalg.vector_norm(torch.stack(parts))
        for group in groups:
            nn.utils.clip_grads_with_norm_(group, optim.clip, norm)
        adamw.step()
        adamw.zero_grad()
        return [whole(loss.detach()), norm]

    return call


def our_step(config: Config) -> Call:
    run, pick = new_run(config), operator.itemgetter("loss", "grad_norm")
    return lambda: [torch.tensor(value) for value in pick(run.update())]


def of_block(block: Callable[[Tensor], Tensor], config: Config, start: Callable[[], None]) -> Call:
    """Forward and backward of `block`, [s, h] → [s, h] or this rank's rows of them."""
    parts = RANKS if config.parallel.sp else 1
    both = torch.randn(2, SEQ, config.model.hidden, generator=torch.Generator().manual_seed(1))
    x, dy = both.chunk(parts, dim=1)[world_axis().rank % parts]
    x.requires_grad_()

    def call() -> list[Tensor]:
        start()
        x.grad = None
        y = block(x)
        y.backward(dy)
        return [y.detach(), cast(Tensor, x.grad)]

    return call


def torch_block(config: Config) -> Call:
    model = torch_model(config)
    block: Any = model.layers[0]
    return of_block(lambda x: block(x[None], model.angles)[0], config, block.zero_grad)


def our_block(config: Config) -> Call:
    run, sequences = new_run(config), Sequences.of((SEQ,))
    block: Any = run.task.model[0].get_submodule("layers.1")  # after the embedding
    return of_block(lambda x: block(x, sequences, None), config, run.buffers.begin)


def count_waiting() -> list[float]:
    """From here on this process adds the seconds that pass in `Pending.wait` to the number."""
    wait, spent = Pending.wait, [0.0]

    def timed(self: Pending) -> Tensor:
        spent[0] -= time.perf_counter()
        result = wait(self)
        spent[0] += time.perf_counter()
        return result

    Pending.wait = timed  # type: ignore[method-assign]
    return spent


def seconds(call: Call, calls: int, spent: list[float]) -> tuple[float, float]:
    """Seconds of a call, and those of them in `Pending.wait`; all ranks start together."""
    barrier(world_axis())
    began, before = time.perf_counter(), spent[0]
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls, (spent[0] - before) / calls


def difference(a: Tensor, b: Tensor) -> float:
    """The largest over all ranks, relative to the largest of `b`."""
    apart = (a - b).abs().max().nan_to_num(nan=torch.inf)
    worst = all_reduce_(torch.stack([apart, b.abs().max()]), world_axis(), "max")
    return (worst[0] / worst[1]).item()


def measure(whole_step: bool, hidden: int, sp: bool, rounds: int) -> tuple[float, Tensor]:
    """On one rank: the largest difference, and [rounds, who, (seconds, those waiting)]."""
    on, off = (configuration(hidden, sp=sp, overlap=overlap) for overlap in (True, False))
    ours, theirs = (our_step, torch_step) if whole_step else (our_block, torch_block)
    calls, spent, apart = [ours(on), ours(off), theirs(on)], count_waiting(), [0.0]
    for _ in range(WARM_UP):
        *our_values, wanted = (call() for call in calls)
        for values in our_values:
            apart += [difference(a, b) for a, b in zip(values, wanted, strict=True)]
    slowest = all_reduce_(torch.tensor(seconds(calls[-1], 2, spent)), world_axis(), "max")
    repeats = max(1, round(ROUND_S / slowest[0].item()))
    times = torch.zeros(rounds, len(calls), 2, dtype=torch.float64)
    for i in range(rounds):
        for who in range(len(calls))[:: 1 if i % 2 else -1]:
            times[i, who] = torch.tensor(seconds(calls[who], repeats, spent))
    return torch.tensor(apart).max().item(), times  # NaN where one is


def quartiles(x: Tensor) -> str:
    low, median, high = x.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=x.dtype)).tolist()
    return f"{median:8.2f}  ({low:.2f} .. {high:.2f})"


def report(whole_step: bool, hidden: int, sp: bool, rounds: int) -> bool:
    """Measure and print one case; whether ours and torch's compute the same."""
    ranks = run_ranks(measure, 2, whole_step, hidden, sp, rounds, timeout_s=3600, backend="gloo")
    apart, times = ranks[0][0], torch.maximum(ranks[0][1], ranks[1][1])
    what = f"{'step' if whole_step else 'block'}, hidden {hidden}, tp = {RANKS}, sp = {sp}"
    warning = "" if apart <= TOLERANCE else f", above {TOLERANCE:g}"
    print(f"\n{what}: largest difference {apart:.1e}{warning}")
    for name, ms, wait_ms in zip(NAMES, *(1e3 * times).permute(2, 1, 0), strict=True):
        share = "" if name == "torch" else f"   waiting {(wait_ms / ms).median().item():.0%}"
        print(f"  {name:<12} {quartiles(ms)} ms{share}")
    print(f"  {'torch / ours':<12} {quartiles(times[:, 2, 0] / times[:, 0, 0])}", flush=True)
    return not warning


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (9)")
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 1024])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, gloo, {SEQ} tokens, {arguments.rounds} rounds in turn")
    cases = itertools.product((False, True), arguments.hidden, (False, True))
    agree = [report(*case, arguments.rounds) for case in cases]
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())
