"""What autograd keeps for backward, in bytes: all of it a tp-th with sequence parallelism.

A block keeps, in numbers a token, with q, k, v standing for the features of its projections:

    the stream before each half, and each norm's output      4h              whole without sp
    what the norms divided by (LayerNorm: and subtracted)    2 (4)           whole without sp
    the projections, since v is a view of them               q + k + v       a tp-th
    rotated queries and keys (none with learned positions)   q + k           a tp-th
    the output of attention, and its log-sum-exp             q + a           a tp-th
    the activation's input and output                        3f (GELU: 2f)   a tp-th

The tables of the rotation, d a token, are whole everywhere, once for all blocks.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penteract.config import resolve
from penteract.config_file import from_dict
from penteract.families import model_spec
from penteract.mesh import Axis, single
from penteract.nn.block import Block
from penteract.nn.build import Build
from penteract.nn.model import ModelSpec, Stage
from penteract.nn.sequences import MicroBatch, Sequences, Training
from penteract.parallel.parameters import materialise
from penteract.parallel.recompute import Recompute
from penteract.parallel.tensor import TensorParallel
from penteract.placement import Init
from penteract.testing import run_ranks, world_axis

H, F, HEADS, KV, D, VOCAB = 32, 48, 8, 4, 6, 64
TOKENS, SEQ = 32, 16
NORMAL = Init("normal", 0.4)
RECOMPUTE: list[tuple[str, ...]] = [(), ("core",), ("attention",), ("mlp",), ("layer",)]


def spec_of(family: str, layers: int = 1) -> ModelSpec:
    model = {"family": family, "layers": layers, "hidden": H, "ffn": F, "vocab": VOCAB}
    model |= {"heads": HEADS, "kv_heads": KV, "head_size": D}
    values = {"model": model, "data": {"seq": SEQ}, "train": {"steps": 1}}
    return model_spec(resolve(from_dict(values)))


def kept_bytes(run: Callable[[], Any], module: nn.Module) -> int:
    """Storages that the graph of `run()` holds, each once, without those of parameters."""
    ours = {p.untyped_storage().data_ptr() for p in module.parameters()}
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = run()  # the graph stays alive, so that no storage takes another's place
    del out
    return sum(size for pointer, size in storages.items() if pointer not in ours)


def of_block(
    family: str, axis: Axis, *, sp: bool, dtype: torch.dtype, kinds: tuple[str, ...] = ()
) -> int:
    """Kept by one block."""
    build = Build(TensorParallel(axis, sp), dtype, NORMAL, NORMAL, Recompute.of(kinds, 0))
    block = Block("block", H, spec_of(family).blocks[0], build)
    materialise(block, seed=0)
    sequences = Sequences.of((SEQ,) * (TOKENS // SEQ))
    rows = TOKENS // axis.size if sp else TOKENS
    x = torch.randn(rows, H, dtype=dtype, requires_grad=True)
    return kept_bytes(lambda: block(x, sequences, None), block)


def of_model(
    family: str, axis: Axis, *, sp: bool, dropout: bool = False, kinds: tuple[str, ...] = ()
) -> int:
    """Kept by a whole model with its loss."""
    spec = spec_of(family, layers=3)
    model = Stage(spec, TensorParallel(axis, sp), dtype=torch.float32, recompute=kinds)
    for module in model.modules():
        if dropout and hasattr(module, "dropout"):
            module.dropout = 0.1
    materialise(model, seed=0)
    tokens = (torch.arange(TOKENS) % VOCAB).view(-1, SEQ)
    flat = tokens.flatten().numpy()
    batch = MicroBatch.of(flat, flat, (SEQ,) * len(tokens))
    scale, training = torch.ones(()), Training(0, 1, 0)
    return kept_bytes(lambda: model(batch, scale=scale, training=training).terms["loss"], model)


def branch_bytes(family: str, dtype: torch.dtype) -> int:
    """A norm's input and output, and what it keeps of a row: torch's LayerNorm in its own type."""
    wide = torch.promote_types(dtype, torch.float32)
    return 2 * H * dtype.itemsize + (wide.itemsize if family == "llama" else 2 * dtype.itemsize)


def expected(
    family: str, n: int, *, sp: bool, dtype: torch.dtype, kinds: tuple[str, ...] = ()
) -> int:
    """The table above, in bytes, for recomputed parts by that of `parallel/recompute.py`."""
    e, w = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    s = n if sp else 1  # by which the stream is divided
    q, k = HEADS * D, KV * D
    llama = family == "llama"
    branch = branch_bytes(family, dtype)
    core = (q + k) * e * llama + HEADS * w
    projections, tables = (q + 2 * k + q) * e, D * w * llama
    inner = (3 if llama else 2) * F * e
    if "layer" in kinds:
        return TOKENS * H * e // s
    attention = branch / s + (projections + core * ("core" not in kinds)) / n
    attention += tables * ("core" not in kinds)
    mlp = branch / s + inner / n
    attention = H * e / s if "attention" in kinds else attention
    mlp = H * e / s if "mlp" in kinds else mlp
    return round(TOKENS * (attention + mlp))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("kinds", RECOMPUTE, ids="+".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_block_alone(family: str, kinds: tuple[str, ...], dtype: torch.dtype) -> None:
    found = of_block(family, single("tp"), sp=False, dtype=dtype, kinds=kinds)
    assert found == expected(family, 1, sp=False, dtype=dtype, kinds=kinds)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("n", [2, 4])
def test_a_block_of_several_ranks(family: str, n: int) -> None:
    """With sp a tp-th of everything but the tables; without it the stream's 4h stay whole."""
    cases = [(sp, kinds) for sp in (False, True) for kinds in RECOMPUTE]
    f32 = torch.float32

    def of_rank() -> list[int]:
        axis = world_axis("tp")
        return [of_block(family, axis, sp=sp, dtype=f32, kinds=kinds) for sp, kinds in cases]

    ranks = run_ranks(of_rank, n)
    for i, (sp, kinds) in enumerate(cases):
        said = expected(family, n, sp=sp, dtype=f32, kinds=kinds)
        assert [found[i] for found in ranks] == [said] * n, (sp, kinds)


@pytest.mark.parametrize(("family", "dropout"), [("llama", False), ("gpt2", True)])
@pytest.mark.parametrize("n", [2, 4])
def test_a_model_with_sequence_parallelism_keeps_a_tpth(family: str, dropout: bool, n: int) -> None:
    """All but what is counted by the token and no wider than a head."""
    alone = of_model(family, single("tp"), sp=False, dropout=dropout)
    # In bytes a token: the tables of the rotation or the position; the token; of the loss its
    # log-sum-exp and its factor.
    whole = TOKENS * ((4 * D if family == "llama" else 8) + 8 + 4 + 4)
    # And whether a token's row of the embedding is this rank's.
    wanted = (alone - whole) // n + whole + TOKENS
    ranks = run_ranks(lambda: of_model(family, world_axis("tp"), sp=True, dropout=dropout), n)
    assert ranks == [wanted] * n
    assert wanted < 1.04 * alone / n
    # Without sp what lies on the stream is whole: three layers of two halves, and the last norm.
    stream = (3 * 2 + 1) * (branch_bytes(family, torch.float32) + dropout * 4 * H)
    plain = run_ranks(lambda: of_model(family, world_axis("tp"), sp=False, dropout=dropout), n)
    assert plain == [wanted + TOKENS * stream * (n - 1) // n] * n


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_whose_layers_are_recomputed_keeps_the_stream(family: str) -> None:
    """And every second layer alone, half of what the others keep."""
    none, half, every = (
        of_model(family, single("tp"), sp=False, kinds=kinds)
        for kinds in ((), ("layer/2",), ("layer",))
    )
    whole = expected(family, 1, sp=False, dtype=torch.float32)
    tables = TOKENS * 4 * D * (family == "llama")
    stream = TOKENS * 4 * H
    assert none - every == 3 * (whole - tables - stream) + tables
    assert none - half == 2 * (whole - tables - stream)  # layers 0 and 2 of three
