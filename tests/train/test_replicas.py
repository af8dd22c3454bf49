"""Copies of a tensor that are not equal to the bit end a run, and the odd rank is named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import curve, run, write_config

from penteract.checkpoint.examine import verify
from penteract.checkpoint.steps import steps
from penteract.collectives import exchange
from penteract.config import resolve
from penteract.config_file import from_dict
from penteract.grid import Grid
from penteract.mesh import create_mesh
from penteract.testing import run_ranks, world_axis
from penteract.train.language_model import synthetic_task
from penteract.train.replicas import COLUMNS, Replicas, bit_sum, check_replicas, copied
from penteract.train.rerun import HardwareError
from penteract.train.run import Run

CPU = torch.device("cpu")
MOE = {"experts": 4, "topk": 2, "ffn": 5, "layers": [1], "balance": "bias"}


def new_run(parallel: dict[str, Any], *, moe: bool = False, **sections: dict[str, Any]) -> Run:
    values: dict[str, Any] = {
        "model": {"layers": 2, "hidden": 8, "ffn": 6, "heads": 2, "vocab": 13, "tied": True},
        "parallel": parallel,
        "data": {"seq": 6},
        "train": {"steps": 9, "global_batch": 4, "dtype": "bfloat16"},
    }
    values |= {"moe": MOE} if moe else {}
    config, axis = resolve(from_dict(values | sections)), world_axis()
    sizes = {name: getattr(config.parallel, name) for name in ("tp", "cp", "pp", "ep", "etp")}
    mesh = create_mesh(Grid(axis.size, **sizes), axis.rank)
    return Run(synthetic_task(config, mesh, CPU), config, mesh, CPU)


def said(run: Run) -> str:
    try:
        check_replicas(run)
    except HardwareError as error:
        return str(error)
    return ""


def flip(x: torch.Tensor, at: int) -> None:
    x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])[at] ^= 1


def flipped(parallel: dict[str, Any], each: int, **more: Any) -> list[tuple[str, int, str]]:
    """A bit of each (third, …) copied tensor of rank 2 in turn: (tensor, ranks that hold it, what
    is said). Nothing is said of a sound run.
    """
    run, found = new_run(parallel, **more), []
    for _ in range(2):
        run.update()
        assert said(run) == ""
    world, own = run.mesh.axis("world"), [name for item in copied(run) for name, _ in item.boxes()]
    told = [json.loads(answer) for answer in exchange(json.dumps(own).encode(), world)]
    mine = run.mesh.rank == 2
    items = list(copied(run))[::each] if mine else []
    count = torch.tensor(len(items))
    torch.distributed.broadcast(count, 2)
    for i in range(int(count)):
        if mine:
            flip(items[i].flat, 0)
        text = said(run)
        if mine:
            name, _ = next(items[i].boxes(), ("", None))
            copies = sum(name in names for names in told)  # whatever the axes are said to be
            found += [(name, copies, text)] if name else []  # a slice may be padding
            flip(items[i].flat, 0)
    return found


LAYOUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"zero": 1}, {}),
    ({"zero": 3, "replicas": 2}, {"optim": {"name": "muon"}}),
    ({"tp": 2, "sp": True, "zero": 2}, {}),
    ({"tp": 2, "pp": 2}, {}),
    ({"pp": 2, "cp": 2}, {"train": {"steps": 9, "dtype": "float64"}}),
    ({"ep": 2}, {"moe": True}),
    ({"tp": 2, "etp": 1, "ep": 2, "zero": 3}, {"moe": True}),
    ({"etp": 2, "zero": 1}, {"moe": True}),
    ({"tp": 4, "pp": 1, "etp": 4}, {"moe": True}),
]


@pytest.mark.parametrize(
    ("which", "each"),
    [([4, 7], 3), pytest.param(range(len(LAYOUTS)), 1, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_every_flipped_bit_is_seen_and_its_rank_named(which: Sequence[int], each: int) -> None:
    """Weights, masters, moments, routers' biases, in layouts of four ranks."""
    layouts = [LAYOUTS[i] for i in which]
    ranks = run_ranks(lambda: [flipped(p, each, **more) for p, more in layouts], 4)
    for (parallel, _), found in zip(layouts, ranks[2], strict=True):
        assert len(found) > 2
        seen = 0
        for name, copies, text in found:
            assert bool(text) == (copies > 1), (parallel, name, copies, text)
            if text:
                seen += 1
                tensors, _, named = text.partition("The odd ones: ")
                named = named.partition(";")[0]
                assert name in tensors, (parallel, name, text)
                assert "rank 2 (" in named
                assert named.count("rank ") == (2 if copies == 2 else 1), (parallel, name, text)
        assert seen, parallel


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [6, 5, 2 * COLUMNS + 3])
def test_the_sum_sees_every_bit_every_swap_and_the_sign_of_zero(dtype: torch.dtype, n: int) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0], x[-1] = 0.0, 1.5
    x[-2] = -1.5
    before = bit_sum(x)
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    others = []
    for place in (0, 3, n - 1):
        for bit in range(8 * x.element_size() - 1):
            others.append(x.clone())
            others[-1].view(whole)[place] ^= 1 << bit
    others.append(x.clone())
    others[-1][0] = -0.0
    for a, b in ((0, 1), (2, 4), (n - 1, n - 2), (0, n - 1)):
        others.append(x.clone())
        others[-1][[a, b]] = x[[b, a]]
    assert all(bit_sum(other) != before for other in others)
    assert bit_sum(x.clone()) == before


INJECT = {"step": 4, "rank": 1, "kind": "weight"}


def test_a_damaged_copy_is_saved_with_a_mark_and_not_gone_on_from(tmp_path: Path) -> None:
    sections = {"train": {"inject": [INJECT], "check_replicas": 3}, "checkpoint": {"every": 2}}
    config = write_config(tmp_path, sections)
    ranks = run(["train", config, "--parallel.zero=1"], 2, code=4)
    assert (
        "penteract: after step 4 copies that must be equal to the bit are not: weight "
        in (ranks.err[0])
    )
    checkpoints = tmp_path / "run/checkpoints"
    assert [number for number, _ in steps(checkpoints)] == [2, 4]
    (fault,) = verify(checkpoints / "step-00000004")
    assert "copies were not equal when it was saved: weight " in fault
    # It can be had, by its name.
    words = [f"--checkpoint.load={checkpoints}/step-00000004", "--checkpoint.load_state=true"]
    ranks = run(["train", config, "--train.inject=[]", *words, f"--log.dir={tmp_path}/x"], 2)
    assert "its step 4" in ranks.err[0]
    ranks = run(["train", config, "--train.inject=[]"], 2)
    assert "step 4 is damaged: " in ranks.err[0]
    assert "at step 2 of 6" in ranks.err[0]
    assert len(curve(tmp_path / "run")) == 6


def test_it_looks_when_it_is_due() -> None:
    """Every so many steps, before a save, never twice, and not at all where it is off."""
    run = new_run({}, train={"steps": 9, "global_batch": 4, "check_replicas": 3})
    replicas, looked = Replicas(run), []
    for step in range(1, 8):
        run.step = step
        replicas.look(saving=step == 5)
        looked += [step] if replicas.checked == step else []
    assert looked == [3, 5, 6]
    off = Replicas(new_run({}))
    off.run.step = 4
    off.look(saving=True)
    assert off.checked == 0
