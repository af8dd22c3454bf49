"""What recomputation and sequence parallelism keep for backward, and what recomputation costs.

    python benchmarks/recompute.py [--rounds 9]

First the bytes that autograd keeps of one forward of a Llama of 8 billion parameters (8192 tokens,
bfloat16), counted on shapes alone, for tp = 1 and 8. Then forward and backward of a small model on
one thread, kinds of recomputation in turn, process time, median and spread of the ratio to none.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

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

KINDS = ((), ("core",), ("attention",), ("mlp",), ("layer/2",), ("layer",))
LARGE = {"layers": 32, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256}
SMALL = {"layers": 4, "hidden": 512, "ffn": 1408, "heads": 8, "kv_heads": 2, "vocab": 512}


def spec_of(model: dict[str, int], seq: int) -> ModelSpec:
    values: dict[str, Any] = {"model": model, "data": {"seq": seq}, "train": {"steps": 1}}
    return model_spec(resolve(from_dict(values)))


def loss_of(model: Stage, tokens: Tensor) -> Tensor:
    flat = tokens.flatten().numpy()
    batch = MicroBatch.of(flat, flat, (tokens.shape[1],) * len(tokens))
    return model(batch, scale=torch.ones(()), training=Training(0, 1, 0)).terms["loss"]


def kept_bytes(tp: int, sp: bool, recompute: tuple[str, ...], seq: int = 8192) -> int:
    """Bytes of the storages that one forward keeps on a rank, parameters left out."""
    if tp > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
    axis = create_mesh(Grid(tp, tp=tp), 0).axis("tp")
    storages: dict[int, Any] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        storages[storage._cdata] = storage  # held, or another would get its number
        return x

    with FakeTensorMode(allow_non_fake_inputs=True):
        spec, how = spec_of(LARGE, seq), TensorParallel(axis, sp)
        model = Stage(spec, how, dtype=torch.bfloat16, recompute=recompute)
        for entry in declared_parameters(model):
            entry.replace(torch.empty(entry.placement.shape, dtype=torch.bfloat16))
        own = {p.untyped_storage()._cdata for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = loss_of(model, torch.zeros(1, seq, dtype=torch.int64))
        total = sum(x.nbytes() for number, x in storages.items() if number not in own)
        del loss
    if tp > 1:
        dist.destroy_process_group()
    return total


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
    models: dict[tuple[str, ...], Stage] = {}
    for kind in KINDS:
        alone = TensorParallel(single("tp"))
        models[kind] = Stage(spec_of(SMALL, 1024), alone, dtype=torch.float32, recompute=kind)
        materialise(models[kind], seed=0)
    tokens = (torch.arange(1024) % SMALL["vocab"]).view(1, -1)
    times: dict[tuple[str, ...], list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds + 1):
        for kind, model in models.items():
            began = time.process_time()
            loss_of(model, tokens).backward()
            times[kind].append(time.process_time() - began)
    print(f"forward and backward, 4 layers, hidden 512, 1024 tokens, one thread, {rounds} rounds")
    for kind in KINDS:
        ratios = [a / b for a, b in zip(times[kind][1:], times[()][1:], strict=True)]
        middle = statistics.median(ratios)
        name = "+".join(kind) or "nothing"
        print(
            f"  {name:10} {middle:5.2f} ({min(ratios):.2f} to {max(ratios):.2f}) of nothing's time"
        )


if __name__ == "__main__":
    main()
