"""Mixture of experts: products, a layer beside transformers' and Megatron-Core's, two CPU ranks.

    python benchmarks/moe.py [--rounds 9] [--parts grouped block ranks shared overlap megatron]

One thread a process, gloo; all cases of a table take turns in the same processes, and a time is
that of the slower rank. Printed are medians, with quartiles in brackets. Everything is forward and
backward of one layer: softmax over two experts a token, SwiGLU, no losses. Loads are "equal" (every
expert has as many rows), "uniform" (experts drawn alike) and "skewed" (drawn by 1/n, so that with
two ranks most tokens go to the first). Exit code 1, and no times, where numbers differ; 2 where a
peer is not installed.

*grouped*: the product of each expert's rows (two a token) with its matrix, by products one by one,
by torch's `grouped_mm`, by a batched product over padded rows, and as `grouped.product` chooses.
The last table is what `penteract/compat.py` has to decide, for forward and the gradient of rows;
ours of weights is always one product an expert, written where it belongs.

*block*: beside transformers' Mixtral layer of the same weights, in each of its ways for a CPU.
Theirs / ours above 1: ours is faster. "plain" leaves weight gradients in the weight's type where
autograd puts them, as theirs are; training keeps them in float32. Differences are from theirs in
float32, relative to the largest value, over output and all gradients; allowed are those of the
rounding of float32, or in bfloat16 twice theirs. A way that takes five times as long as
the other is timed once.

*ranks*: two ranks that hold half of the experts and of the tokens each, by both dispatchers, beside
one process. "Both alone at once", each rank computing all for itself, is the most that two ranks of
this machine can gain. The columns after the speed-up add up the time of both ranks in units of one
process's, to 2 / speed-up: products, waiting for messages, everything else, and for the slower
rank's end. "Waits" is the share of a rank's time; "uneven" is product time of the busier rank over
the mean; bytes and messages are what the busier rank sends in a call.

*shared*: with shared experts, which are computed while tokens travel, beside the sum of the layer
without them and of them alone. What is hidden is that sum less the time of both.

*overlap*: steps of a model of two blocks on two ranks over a link that is made slow: forward and
backward of a pair in turns, so that one is computed while tokens of the other travel, beside the
same pairs one after another, and 1F1B. "Hidden" is the time gained over that which tokens of a step
are on the way. In float32 only.

*megatron*: beside Megatron-Core's all-to-all layer, for information; its kernels need a GPU. Its
bytes and messages are without the counts of rows, which ours include.

With --profile tables follow of where a call's time goes, by kinds of operations, mean over ranks.
The profiler takes its own time, most of it in "rest".

Where a CPU has no instructions for bfloat16 its products are slow, and tokens an eighth as many.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import sys
from collections.abc import Iterator

import torch
from mixture import block, megatron, overlap, products, ranks
from mixture.layer import Shape
from peers import megatron_cpu, mixtral

from penteract.testing import run_ranks

PARTS = ("grouped", "block", "ranks", "shared", "overlap", "megatron")
DTYPES = ("float32", "bfloat16")
PEERS = {"block": mixtral, "megatron": megatron_cpu}


def runnable(parts: list[str]) -> list[str]:
    """Those whose peer is installed; says which are not."""
    found = []
    for part in parts:
        peer = PEERS.get(part)
        # In a process of its own: importing a peer changes the process.
        missing = None if peer is None else run_ranks(peer.missing_module, 1)[0]
        if peer is not None and missing is not None:
            print(f"{part}: no module {missing}: {peer.INSTALL}", file=sys.stderr, flush=True)
        else:
            found.append(part)
    return found


def reports(part: str, shapes: list[Shape], rounds: int, profile: bool) -> Iterator[bool]:
    """Print a part; whether each of its cases agrees."""
    if part == "grouped":
        yield products.report_all(shapes, rounds)
    elif part == "overlap":
        yield from (overlap.report(x, rounds) for x in shapes if x.dtype == torch.float32)
    elif part == "megatron":
        yield from (megatron.report(shape, rounds, profile) for shape in shapes)
    elif part == "shared":
        for shape in shapes:
            both = dataclasses.replace(shape, shared=shape.ffn)
            yield ranks.report_shared(both, rounds, profile)
    else:
        report = {"block": block.report, "ranks": ranks.report}[part]
        for shape in shapes:
            yield report(shape, rounds, profile)
            yield report(dataclasses.replace(shape, load="skewed"), rounds, profile)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="for example: --parts block --experts 64 --dtypes float32 --profile",
    )
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (9)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--tokens", type=int, default=4096, help="of all ranks (4096)")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--ffn", type=int, default=1024, help="width of an expert (1024)")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--profile", action="store_true", help="also where the time goes")
    arguments = parser.parse_args()
    most = max(arguments.experts)
    if arguments.hidden < most or any(arguments.tokens % (2 * e) for e in arguments.experts):
        parser.error(f"--hidden below {most}, or --tokens no multiple of twice --experts")
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, gloo, one thread a process, {arguments.rounds} rounds in "
        f"turn; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
        flush=True,
    )
    slow = not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    shapes = []
    for dtype, e in itertools.product(arguments.dtypes, arguments.experts):
        few = max(2 * e, arguments.tokens // 8) if slow and dtype == "bfloat16" else None
        sizes = (few or arguments.tokens, arguments.hidden, arguments.ffn)
        shapes.append(Shape(e, *sizes, getattr(torch, dtype)))
    parts = runnable(arguments.parts)
    agree = [
        good
        for part in parts
        for good in reports(part, shapes, arguments.rounds, arguments.profile)
    ]
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")
    if not all(agree):
        return 1
    return 0 if parts == arguments.parts else 2


if __name__ == "__main__":
    sys.exit(main())
