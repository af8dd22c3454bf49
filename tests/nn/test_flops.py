"""Model FLOPs against published numbers and against what a step really does."""

from typing import Any

import pytest
import torch
from parity.matrix import MODELS
from torch.utils.flop_counter import FlopCounterMode

from penteract.config import resolve
from penteract.config_file import from_dict
from penteract.families import model_spec
from penteract.mesh import single
from penteract.nn.attention import Attention
from penteract.nn.flops import layer_flops, training_flops
from penteract.nn.model import ModelSpec, Stage
from penteract.nn.sequences import MicroBatch, Sequences
from penteract.parallel.context.kernels import kernel_of
from penteract.parallel.parameters import materialise
from penteract.parallel.tensor import TensorParallel


def spec_of(moe: dict[str, Any] | None = None, **model: object) -> ModelSpec:
    sections = {"model": model, "data": {"seq": 8}, "train": {"steps": 1}}
    sections |= {} if moe is None else {"moe": moe}
    return model_spec(resolve(from_dict(sections)))


def test_gpt3() -> None:
    sizes = {"layers": 96, "hidden": 12288, "ffn": 4 * 12288, "heads": 96, "vocab": 51200}
    found = training_flops(spec_of(family="gpt2", **sizes), [2048] * 1536)
    assert found == pytest.approx(3.3406e18, rel=1e-4)


def test_llama3_8b() -> None:
    sizes = {"layers": 32, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8}
    found = training_flops(spec_of(vocab=128256, **sizes), [8192]) / 8192
    assert found == pytest.approx(51.47e9, rel=1e-3)


@pytest.mark.parametrize("window", [1, 3, 5, 6, 100, None])
def test_a_window_counts_the_pairs_that_it_leaves(window: int | None) -> None:
    """One by one, but for half of the diagonal, which the convention leaves out."""
    model, lengths = MODELS["llama"], (6, 1, 5)
    reach = window or max(lengths)
    pairs = sum(min(i + 1, reach) for n in lengths for i in range(n))
    diagonal = sum(min(n, reach) for n in lengths)
    width = model["layers"] * model["heads"] * model["head_size"]
    whole, found = (training_flops(spec_of(**model, window=w), lengths) for w in (None, window))
    attention = 6 * width * (2 * pairs - diagonal)
    assert found - attention == whole - 6 * width * sum(n * n for n in lengths)
    spec = spec_of(**model, window=window)
    layers = sum(layer_flops(spec, 6, name) for name in ("layers.0", "layers.1", "head"))
    assert layers == training_flops(spec, [6])


@pytest.mark.parametrize("name", MODELS)
def test_formula_equals_what_is_counted(name: str) -> None:
    """The plain backend multiplies whole score matrices, twice the causal half of the formula, and
    makes the scores again in backward.
    """
    spec, lengths = spec_of(**MODELS[name]), (5, 3, 1)
    assert counted_flops(spec, lengths) == training_flops(spec, lengths) + more(spec, lengths)


@pytest.mark.parametrize("shared", [None, 6])
@pytest.mark.parametrize("topk", [1, 3])
def test_experts_count_as_often_as_a_token_takes_them(topk: int, shared: int | None) -> None:
    """And the router, which the formula leaves out, once."""
    moe = {"experts": 4, "topk": topk, "ffn": 5, "balance": "none"}
    moe |= {} if shared is None else {"shared_ffn": shared}
    spec, lengths = spec_of(moe=moe, **MODELS["llama"]), (5, 3, 1)
    routers = 6 * sum(lengths) * spec.hidden * 4 * len(spec.blocks)
    found = counted_flops(spec, lengths)
    assert found == training_flops(spec, lengths) + more(spec, lengths) + routers


def more(spec: ModelSpec, lengths: tuple[int, ...]) -> int:
    """What the plain backend does beyond the formula."""
    return sum(
        (6 + 2) * block.attention.heads * block.attention.head_size * sum(n * n for n in lengths)
        for block in spec.blocks
    )


def counted_flops(spec: ModelSpec, lengths: tuple[int, ...]) -> int:
    model = Stage(spec, TensorParallel(single("tp")), dtype=torch.float32)
    materialise(model, seed=0)
    for module in model.modules():
        if isinstance(module, Attention):
            module.kernel = kernel_of("plain")
    tokens = torch.zeros(sum(lengths), dtype=torch.int64)
    batch = MicroBatch(tokens, tokens, Sequences.of(lengths))
    with FlopCounterMode(display=False) as counter:
        model(batch, scale=torch.ones(())).terms["loss"].backward()
    return counter.get_total_flops()
