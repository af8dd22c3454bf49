"""What recomputation and sequence parallelism keep for backward, and what recomputation costs.

    python benchmarks/recompute.py [--rounds 9]

First the bytes that autograd keeps of one forward of a Llama of 8 billion parameters (8192 tokens,
bfloat16), counted on shapes alone, for tp = 1 and 8. Then forward and backward of small models,
dense and with experts, on one thread, kinds of recomputation in turn: bytes, process time, and
median and spread of the ratio to none.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from penteract.config import resolve
from penteract.config_file import from_dict
from penteract.families import model_spec
from penteract.grid import Grid
from penteract.mesh import create_mesh, single
from penteract.nn.model import ModelSpec, Stage
from penteract.nn.sequences import MicroBatch, Training
from penteract.parallel.parameters import declared_parameters, materialise
from penteract.parallel.tensor import TensorParallel

Kinds = tuple[str, ...]
Sections = dict[str, dict[str, Any]]

KINDS: tuple[Kinds, ...] = ((), ("core",), ("attention",), ("mlp",), ("layer/2",), ("layer",))
MOE_KINDS: tuple[Kinds, ...] = ((), ("expert_act",), ("experts",), ("mlp",), ("layer",))
LARGE = {"layers": 32, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256}
SMALL = {"layers": 4, "hidden": 512, "ffn": 1408, "heads": 8, "kv_heads": 2, "vocab": 512}


def spec_of(sections: Sections, seq: int) -> ModelSpec:
    values: Sections = {**sections, "data": {"seq": seq}, "train": {"steps": 1}}
    return model_spec(resolve(from_dict(values)))


def batch_of(length: int) -> MicroBatch:
    tokens = np.arange(length) % SMALL["vocab"]
    return MicroBatch.of(tokens, tokens, (length,))


def loss_of(model: Stage, batch: MicroBatch) -> Tensor:
    return model(batch, scale=torch.ones(()), training=Training(0, 1, 0)).terms["loss"]


@contextmanager
def kept(model: Stage) -> Iterator[dict[int, int]]:
    """Bytes of every storage that graphs made meanwhile keep, parameters left out."""
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    sizes: dict[int, int] = {}
    held = []  # or another storage would get its number

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in own:
            held.append(storage)
            sizes[storage._cdata] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield sizes


def kept_bytes(tp: int, sp: bool, recompute: Kinds, seq: int = 8192) -> int:
    """Bytes of the storages that one forward keeps on a rank, parameters left out."""
    if tp > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
    axis = create_mesh(Grid(tp, tp=tp), 0).axis("tp")
    batch = batch_of(seq)
    with FakeTensorMode(allow_non_fake_inputs=True):
        spec, how = spec_of({"model": LARGE}, seq), TensorParallel(axis, sp)
        model = Stage(spec, how, dtype=torch.bfloat16, recompute=recompute)
        for entry in declared_parameters(model):
            entry.replace(torch.empty(entry.placement.shape, dtype=torch.bfloat16))
        with kept(model) as storages:
            loss = loss_of(model, batch)
        del loss
    if tp > 1:
        dist.destroy_process_group()
    return sum(storages.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print("kept of a Llama-3-8B shape, 8192 tokens, bfloat16")
    layouts = [(1, False, ()), (8, False, ()), *((8, True, kind) for kind in KINDS)]
    for tp, sp, kind in [*layouts, (8, False, ("layer",))]:
        size = kept_bytes(tp, sp, kind) / 1e9
        print(f"  tp={tp}{' sp' if sp else '   '}  {'+'.join(kind) or 'nothing':10} {size:7.2f} GB")
    print(f"\n4 layers, hidden 512, 1024 tokens, float32, one thread, {rounds} rounds in turn")
    report({"model": SMALL}, KINDS, rounds)
    print("\nthe same with 8 experts of half the width, of which a token takes 2")
    moe = {"experts": 8, "topk": 2, "ffn": SMALL["ffn"] // 2}
    report({"model": SMALL, "moe": moe}, MOE_KINDS, rounds)


def report(sections: Sections, kinds: Sequence[Kinds], rounds: int) -> None:
    """What each kind keeps, and its time as a ratio to that of none."""
    spec = spec_of(sections, 1024)
    models: dict[Kinds, Stage] = {}
    for kind in kinds:
        alone = TensorParallel(single("tp"))
        models[kind] = Stage(spec, alone, dtype=torch.float32, recompute=kind)
        materialise(models[kind], seed=0)
    batch = batch_of(1024)
    times: dict[Kinds, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds + 1):
        for kind, model in models.items():
            began = time.process_time()
            loss_of(model, batch).backward()
            times[kind].append(time.process_time() - began)
    for kind, model in models.items():
        with kept(model) as storages:
            loss = loss_of(model, batch)
        del loss
        middle = statistics.median(times[kind][1:])
        ratios = [a / b for a, b in zip(times[kind][1:], times[()][1:], strict=True)]
        print(
            f"  {'+'.join(kind) or 'nothing':15} kept {sum(storages.values()) / 2**20:6.1f} MiB"
            f"  {1e3 * middle:7.0f} ms  {statistics.median(ratios):5.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) of nothing's time"
        )


if __name__ == "__main__":
    main()
