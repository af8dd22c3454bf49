"""Experts that start from a dense checkpoint: the same model at first, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reference import bridge
from runs import curve, metrics, newest, run, tensors, write_config
from torch import Tensor

from penteract.checkpoint.io import read_manifest
from penteract.config import resolve
from penteract.config_file import from_dict
from penteract.grid import Grid
from penteract.mesh import create_mesh
from penteract.testing import run_ranks, world_axis
from penteract.train.language_model import synthetic_task
from penteract.train.run import Run

CPU = torch.device("cpu")
MOE: dict[str, Any] = {"experts": 4, "topk": 2}
LLAMA: dict[str, Any] = {"family": "llama"}
GPT2: dict[str, Any] = {"family": "gpt2", "bias": True}  # which has biases in experts too
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}, {"recompute": ["layer"]}],
    2: [{"ep": 2}, {"tp": 2, "etp": 1}, {"tp": 2, "sp": True}, {"pp": 2}, {"zero": 3}],
    4: [{"tp": 2, "etp": 1, "ep": 2, "zero": 3}, {"tp": 2, "pp": 2, "zero": 1}],
}


def new_run(
    model: dict[str, Any],
    moe: dict[str, Any] | None = None,
    load: Path | None = None,
    parallel: dict[str, Any] | None = None,
    **train: Any,
) -> Run:
    """A small run; with `load` started from there, upcycled where it has experts."""
    sizes = {"layers": 2, "hidden": 8, "ffn": 6, "heads": 2, "vocab": 13, "init_std": 0.5}
    values: dict[str, Any] = {
        "model": {**sizes, **model},
        "parallel": parallel or {},
        "data": {"seq": 6},
        "optim": {"name": "sgd", "lr": 0.1, "schedule": "constant", "clip": 0.0},
        "train": {"steps": 9, "global_batch": 4, "dtype": "float64", "seed": 3, **train},
    }
    if moe is not None:
        values["moe"] = moe
    if load is not None:
        values["checkpoint"] = {"load": str(load), "upcycle": moe is not None}
    config, axis = resolve(from_dict(values)), world_axis()
    grid = {name: getattr(config.parallel, name) for name in ("tp", "cp", "pp", "ep", "etp")}
    mesh = create_mesh(Grid(axis.size, **grid), axis.rank)
    made = Run(synthetic_task(config, mesh, CPU), config, mesh, CPU)
    if load is not None:
        made.load_weights(load)
    return made


def saved(
    folder: Path, model: dict[str, Any], moe: dict[str, Any] | None = None, **how: Any
) -> Path:
    """A checkpoint after two steps, of another seed than the runs that load it."""
    made = new_run(model, moe, seed=7, **how)
    made.update()
    made.update()
    return made.save(folder)


def expert(block: int, number: int, part: str) -> str:
    return f"layers.{block}.moe.experts.{number}.{part}"


def upcycled(
    model: dict[str, Any], load: Path, layouts: list[dict[str, Any]]
) -> list[tuple[bridge.Fragments, list[float], bridge.Fragments]]:
    """For each layout the weights at first, the losses of three steps, and the weights then."""
    found = []
    for parallel in layouts:
        made = new_run(model, MOE, load, parallel)
        before = bridge.owned(made.buffers, "master")
        losses = [made.update()["loss"] for _ in range(3)]
        found.append((before, losses, bridge.owned(made.buffers, "master")))
    return found


@pytest.mark.parametrize(
    "model",
    [pytest.param(LLAMA, id="llama"), pytest.param(GPT2, id="gpt2", marks=pytest.mark.slow)],
)
def test_the_first_loss_is_the_dense_models_in_every_layout(
    tmp_path: Path, model: dict[str, Any]
) -> None:
    step = saved(tmp_path, model)
    dense, fresh = tensors(step), new_run(model, MOE)
    routers = bridge.logical(bridge.owned(fresh.buffers, "master"))
    first = new_run(model, load=step).update()["loss"]
    assert abs(first - fresh.update()["loss"]) > 1e-3, "the checkpoint makes a difference"
    wanted: list[float] = []
    for world, layouts in LAYOUTS.items():
        ranks = run_ranks(upcycled, world, model, step, layouts)
        for i, layout in enumerate(layouts):
            weights = bridge.logical([part for rank in ranks for part in rank[i][0]])
            check_start(weights, dense, routers)
            after = bridge.logical([part for rank in ranks for part in rank[i][2]])
            check_apart(after)
            for rank in ranks:
                losses = rank[i][1]
                assert losses[0] == pytest.approx(first, rel=1e-12), layout
                wanted = wanted or losses
                assert losses == pytest.approx(wanted, rel=1e-9), layout


def check_start(
    weights: dict[str, Tensor], dense: dict[str, Tensor], fresh: dict[str, Tensor]
) -> None:
    """Experts are the dense layers, routers of the seed, all else the checkpoint's."""
    assert weights.keys() == fresh.keys()
    for name, x in weights.items():
        block, _, part = name.partition(".moe.")
        if part == "router.weight":
            assert torch.equal(x, fresh[name])
        elif part:
            assert torch.equal(x, dense[f"{block}.mlp.{part.split('.', 2)[2]}"]), name
        else:
            assert torch.equal(x, dense[name]), name


def check_apart(weights: dict[str, Tensor]) -> None:
    for block in (0, 1):
        for part in ("up.weight", "down.weight"):
            experts = [weights[expert(block, number, part)] for number in range(4)]
            for number, x in enumerate(experts[1:]):
                assert not torch.equal(x, experts[number]), (block, number, part)


@pytest.mark.parametrize("moe", [{"score": "sigmoid", "balance": "bias"}, {"balance": "sinkhorn"},
                                 {"topk": 1}, {"groups": 2, "topk_groups": 1}])  # fmt: skip
def test_it_holds_for_every_router_whose_weights_add_up_to_one(
    tmp_path: Path, moe: dict[str, Any]
) -> None:
    step = saved(tmp_path, LLAMA)
    first = new_run(LLAMA, load=step).update()["loss"]
    assert new_run(LLAMA, {**MOE, **moe}, step).update()["loss"] == pytest.approx(first, rel=1e-12)
    for other in ({"capacity": 0.5}, {"normalise": False}, {"route_scale": 2.0}):
        loss = new_run(LLAMA, {**MOE, **moe, **other}, step).update()["loss"]
        assert abs(loss - first) > 1e-6, other


def test_only_some_blocks_have_experts_and_some_had_them_before(tmp_path: Path) -> None:
    dense = saved(tmp_path / "dense", LLAMA)
    some = new_run(LLAMA, {**MOE, "layers": [1]}, dense)
    some.update()
    before = tensors(some.save(tmp_path / "some"))
    assert "layers.0.mlp.up.weight" in before
    every = new_run(LLAMA, MOE, tmp_path / "some/step-00000001")
    after = bridge.logical(bridge.owned(every.buffers, "master"))
    for number in range(4):
        name = expert(1, number, "up.weight")
        assert torch.equal(after[name], before[name])
        assert torch.equal(after[expert(0, number, "up.weight")], before["layers.0.mlp.up.weight"])
    router = "layers.1.moe.router.weight"
    assert torch.equal(after[router], before[router])


def masters(step: Path, parallel: dict[str, Any]) -> bridge.Fragments:
    made = new_run(LLAMA, MOE, step, parallel, dtype="bfloat16")
    return bridge.owned(made.buffers, "master")


@pytest.mark.parametrize("parallel", [{"zero": 1}, {"pp": 2}, {"ep": 2}])
def test_masters_are_filled_from_masters(tmp_path: Path, parallel: dict[str, Any]) -> None:
    stored = tensors(saved(tmp_path, LLAMA, dtype="bfloat16"))
    step = tmp_path / "step-00000002"
    parts = [part for rank in run_ranks(masters, 2, step, parallel) for part in rank]
    found = bridge.logical(parts)
    for block in (0, 1):
        for part in ("gate", "up", "down"):
            master = stored[f"master/layers.{block}.mlp.{part}.weight"]
            assert master.dtype == torch.float32
            assert torch.equal(found[expert(block, 3, f"{part}.weight")], master)


DENSE = {"model": {"layers": 2}}
WITH = {**DENSE, "moe": {"experts": 4, "balance": "bias"}}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a dense run."""
    folder = tmp_path_factory.mktemp("dense")
    run(["train", write_config(folder, DENSE), "--train.steps=3"])
    return folder / "run/checkpoints"


@pytest.fixture
def upcycle(tmp_path: Path, dense: Path) -> list[str]:
    """Options of a run in `tmp_path/fresh` that starts from the dense one's weights."""
    load = f"--checkpoint.load={dense}"
    return [f"--log.dir={tmp_path}/fresh", load, "--checkpoint.upcycle=true"]


def test_a_run_says_what_it_fills_and_goes_on_by_itself(tmp_path: Path, upcycle: list[str]) -> None:
    config = write_config(tmp_path, WITH)
    ranks = run(["train", config, *upcycle, "--train.steps=4", "--optim.decay=6"], 2)
    assert (
        "8 experts take the feed-forward layers' values; fresh: "
        "layers.0.moe.router.weight, layers.1.moe.router.weight"
    ) in ranks.err[0]
    assert "experts take" not in ranks.err[1]
    ranks = run(["train", config, *upcycle, "--optim.decay=6"], 2)
    assert "continuing" in ranks.err[0]
    assert "at step 4 of 6" in ranks.err[0]
    assert "experts take" not in ranks.err[0]
    whole = [*upcycle, f"--log.dir={tmp_path}/whole", "--optim.decay=6"]
    run(["train", config, *whole], 2)
    assert curve(tmp_path / "fresh") == curve(tmp_path / "whole")
    words = [f"--log.dir={tmp_path}/again", f"--checkpoint.load={tmp_path}/fresh/checkpoints"]
    run(["train", config, *words, "--train.steps=1"])
    assert metrics(tmp_path / "again")[1]["loss"] < metrics(tmp_path / "fresh")[1]["loss"]
    assert read_manifest(newest(tmp_path / "fresh")).config["checkpoint"]["upcycle"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--moe.ffn=20"], ["moe.ffn = 20", "moe.ffn = 24"]),
        (["--moe.shared_ffn=24"], ["moe.shared_ffn = 24", "shared experts"]),
        (["--checkpoint.load_state=true"], ["leave out checkpoint.load_state"]),
        (["--model.bias=true"], ["layers.0.mlp.up.bias: not in the checkpoint (wanted [24]"]),
        (["--model.family=gpt2"], ["layers.1.mlp.gate.weight: in the checkpoint, not in the"]),
        (["--model.layers=3"], ["layers.2.moe.experts.0.up.weight: not in the checkpoint"]),
        (["--train.dtype=float32"], ["layers.0.mlp.up.weight: checkpoint [24, 16] float64, want"]),
    ],
    ids=lambda x: x[0],
)
def test_what_does_not_fit_is_refused_on_every_rank(
    tmp_path: Path, upcycle: list[str], words: list[str], says: list[str]
) -> None:
    ranks = run(["train", write_config(tmp_path, WITH), *upcycle, *words], 2, code=2)
    for said in ranks.err:
        assert all(part in said for part in says), said
        assert "Traceback" not in said
    assert not list((tmp_path / "fresh").glob("checkpoints/step-*"))


def test_experts_of_a_checkpoint_are_not_replaced(tmp_path: Path, upcycle: list[str]) -> None:
    """Where all blocks have some nothing is to be done; where one has, they must be as many."""
    config = write_config(tmp_path, WITH)
    for name, layers in (("all", "[0, 1]"), ("one", "[1]")):
        options = [*upcycle, f"--log.dir={tmp_path}/{name}", f"--moe.layers={layers}"]
        run(["train", config, *options, "--train.steps=1", "--optim.warmup=0"])
    again = [*upcycle, "--moe.experts=8"]
    ranks = run(["train", config, *again, f"--checkpoint.load={tmp_path}/all/checkpoints"], code=2)
    assert "no feed-forward layer in layers.0, layers.1, where experts are now" in ranks.err[0]
    ranks = run(["train", config, *again, f"--checkpoint.load={tmp_path}/one/checkpoints"], code=2)
    assert "layers.1.moe.experts.4.up.weight: not in the checkpoint" in ranks.err[0]
    assert "layers.1.moe.router.weight: checkpoint [4, 16] float64, wanted [8, 16]" in ranks.err[0]


def test_it_needs_experts_and_a_checkpoint(tmp_path: Path) -> None:
    dense = write_config(tmp_path, DENSE)
    ranks = run(["train", dense, "--checkpoint.upcycle=true"], code=2)
    assert "checkpoint.upcycle = true needs checkpoint.load" in ranks.err[0]
    words = ["--checkpoint.upcycle=true", "--checkpoint.load=x"]
    assert "they need [moe]" in run(["train", dense, *words], code=2).err[0]
