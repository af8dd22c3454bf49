"""A step of any rank of a large world on shapes alone: fake tensors, a fake process group."""

import math
import re
from typing import Any

import pytest
import torch.distributed as dist
from parity.matrix import MODELS

from penteract.config import Config, resolve
from penteract.config_file import from_dict
from penteract.families import model_spec
from penteract.grid import Grid
from penteract.nn.model import ModelSpec
from penteract.train.dry_run import dry_run
from penteract.train.traffic import step_bytes


def parameters(spec: ModelSpec, name: str) -> int:
    """Counted from the sizes, by hand."""
    model = MODELS[name]
    h, f, v = model["hidden"], model["ffn"], model["vocab"]
    attention = spec.blocks[0].attention
    q, kv = (n * attention.head_size for n in (attention.heads, attention.kv_heads))
    matrices = (3 if model["family"] == "llama" else 2) * h * f + 2 * h * q + 2 * h * kv
    inner = (2 if model["family"] == "llama" else 1) * f
    biases = q + 2 * kv + h + inner + h if attention.bias else 0
    norm = h * (1 if model["family"] == "llama" else 2)
    qk_norm = 2 * attention.head_size if attention.qk_norm else 0
    block = matrices + biases + 2 * norm + qk_norm
    ends = v * h * (1 if spec.tied else 2) + norm + (spec.positions or 0) * h
    return len(spec.blocks) * block + ends


def number(lines: list[str], what: str) -> int:
    found = [re.search(rf"{what}\s+([\d,]+)", line) for line in lines]
    return next(int(m[1].replace(",", "")) for m in found if m)


@pytest.mark.parametrize(("name", "dtype"), [("llama", "bfloat16"), ("gpt2", "float32")])
def test_rank_17_of_4096(name: str, dtype: str) -> None:
    check(name, dtype, dropout=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_rank_17_of_4096_with_dropout(name: str, dtype: str) -> None:
    check(name, dtype, dropout=0.1)


def check(name: str, dtype: str, *, dropout: float) -> None:
    values = {
        "model": {**MODELS[name], "dropout": dropout},
        "data": {"seq": 8},
        "train": {"steps": 1, "dtype": dtype, "global_batch": 8192},
    }
    config = resolve(from_dict(values))
    lines = dry_run(config, Grid(4096), 17)
    held = parameters(model_spec(config), name)
    assert lines[0].startswith("rank 17 of 4096")
    assert number(lines, "parameters held") == held
    # Storage is rounded up to 64 elements a parameter.
    size = {"float32": 4, "bfloat16": 2}[dtype]
    weights = number(lines, "weights")
    assert weights >= size * held
    assert number(lines, "gradients") == weights * 4 // size
    assert number(lines, "masters") == (0 if dtype == "float32" else 2 * weights)
    assert number(lines, "optimizer moments") == 8 * weights // size
    sent = number(lines, "sent over dp-cp")
    exact = 2 * 4095 / 4096 * weights * 4 / size
    assert math.isclose(sent, exact, abs_tol=64)  # and two scalars of 8 bytes
    assert not dist.is_initialized()


def test_no_initial_value_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Billions of numbers would take minutes, and nothing would hold them."""

    def refuse(*_: object) -> None:
        raise AssertionError("values for a tensor that has none")

    monkeypatch.setattr("penteract.parallel.buffers.fill", refuse)
    values = {"model": MODELS["llama"], "data": {"seq": 8}, "train": {"steps": 1}}
    dry_run(resolve(from_dict(values)), Grid(2), 1)


@pytest.mark.parametrize(
    ("rank", "name", "parallel", "train"),
    [
        (0, "llama", {"sp": True}, {"dtype": "bfloat16"}),
        (13, "gpt2", {"sp": True, "recompute": "layer"}, {}),
        (31, "gpt2-plain", {"recompute": ["attention", "mlp"]}, {"label_smoothing": 0.1}),
        (7, "llama-tied-bias", {"sp": True, "vocab_multiple": 4}, {"z_loss": 1e-3}),
    ],
)
def test_tensor_ranks(
    rank: int, name: str, parallel: dict[str, Any], train: dict[str, Any]
) -> None:
    """tp = 8 has more ranks than heads, and rows of the stream and the vocabulary run out."""
    values = {
        "model": {**MODELS[name], "dropout": 0.1},
        "parallel": {"tp": 8, **parallel},
        "data": {"seq": 6},
        "train": {"steps": 1, "global_batch": 7, **train},
    }
    agree(resolve(from_dict(values)), Grid(32, tp=8), rank)


def agree(config: Config, grid: Grid, rank: int) -> None:
    """What a dry run counts is what the formulas say."""
    lines, wanted = dry_run(config, grid, rank), step_bytes(config, grid, rank)
    assert {m[1] for line in lines if (m := re.search(r"sent over (\S+)", line))} == wanted.keys()
    for axis, what in wanted.items():
        sent = [re.search(rf"sent over {axis}\s+([\d,]+)", line) for line in lines]
        total = sum(int(m[1].replace(",", "")) for m in sent if m)
        assert total == sum(what.values()) > 0, (axis, lines)


@pytest.mark.parametrize(
    ("rank", "comm", "model", "parallel"),
    [
        (0, "ring", {"window": 3}, {"sp": True, "tp": 2}),
        (5, "all_gather", {"sinks": True}, {"recompute": ["core"]}),
        (13, "all_to_all", {"sinks": True}, {"recompute": ["attention", "core"]}),
        (31, "hierarchical", {"softcap": 2.0, "attention": "plain"}, {"recompute": "layer/2"}),
    ],
)
def test_context_ranks(
    rank: int, comm: str, model: dict[str, Any], parallel: dict[str, Any]
) -> None:
    """cp = 8 has more ranks than heads, and rows that it does not divide."""
    values = {
        "model": {**MODELS["llama"], **model},
        "parallel": {"cp": 8, "cp_comm": comm, **parallel},
        "data": {"seq": 13, "packing": True},
        "train": {"steps": 1, "global_batch": 7, "micro_batch": 2, "dtype": "bfloat16"},
    }
    config = resolve(from_dict(values))
    agree(config, Grid(32, cp=8, tp=config.parallel.tp), rank)
