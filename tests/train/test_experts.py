"""What routers keep from step to step, what is said of them, and how strong their losses are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import bridge
from reference.bridge import Fragments
from torch import Tensor

from penteract.checkpoint.io import read_manifest
from penteract.config import resolve
from penteract.config_file import from_dict
from penteract.grid import Grid
from penteract.mesh import create_mesh
from penteract.nn.moe import MoE, Router
from penteract.testing import run_ranks, world_axis
from penteract.train.language_model import synthetic_task
from penteract.train.run import Run

CPU = torch.device("cpu")
MOE = {"experts": 4, "topk": 2, "ffn": 5, "layers": [1]}


def new_run(parallel: dict[str, Any] | None = None, *, moe: dict[str, Any], **train: Any) -> Run:
    values = {
        "model": {
            "layers": 2, "hidden": 8, "ffn": 6, "heads": 2, "vocab": 13, "init_std": 0.5,
        },
        "moe": {**MOE, **moe},
        "parallel": parallel or {},
        "data": {"seq": 6},
        "optim": {"name": "sgd", "lr": 1e-2, "schedule": "constant", "clip": 0.0},
        "train": {"steps": 9, "global_batch": 4, "dtype": "float64", **train},
    }  # fmt: skip
    config, axis = resolve(from_dict({**values, "log": {"every": 2}})), world_axis()
    sizes = {name: getattr(config.parallel, name) for name in ("tp", "cp", "pp", "ep", "etp")}
    mesh = create_mesh(Grid(axis.size, **sizes), axis.rank)
    return Run(synthetic_task(config, mesh, CPU), config, mesh, CPU)


def router(run: Run) -> Router:
    return next(m.router for m in run.task.model.modules() if isinstance(m, MoE))


def bias(run: Run) -> Tensor:
    found = router(run).bias
    assert found is not None
    return found


def test_a_bias_is_float32_under_bfloat16_and_saved_to_the_bit(tmp_path: Path) -> None:
    moe = {"balance": "bias", "bias_rate": 1 / 3}
    run = new_run(moe=moe, dtype="bfloat16")
    run.update()
    assert bias(run).dtype == torch.float32
    assert float(bias(run).abs().max()) > 0.3
    step = run.save(tmp_path)
    assert read_manifest(step).tensors["layers.1.moe.router.bias"].dtype == "float32"
    again = new_run(moe=moe, dtype="bfloat16")
    again.resume(step)
    assert torch.equal(bias(again), bias(run))
    fresh = new_run(moe=moe, dtype="bfloat16")
    fresh.load_weights(step)
    assert torch.equal(bias(fresh), bias(run))
    assert fresh.step == 0


def test_weights_go_on_with_another_balance(tmp_path: Path) -> None:
    """A bias is left behind where none is wanted, and starts at zero where the other had none."""
    run = new_run(moe={"balance": "bias"})
    run.update()
    step = run.save(tmp_path / "bias")
    other = new_run(moe={"balance": "aux"})
    other.load_weights(step)
    other.update()
    back = new_run(moe={"balance": "bias"})
    back.load_weights(other.save(tmp_path / "aux"))
    assert float(bias(back).abs().max()) == 0


def test_loads_of_the_last_step_go_into_the_checkpoint(tmp_path: Path) -> None:
    run = new_run(moe={"balance": "global_aux"})
    run.update()
    load = router(run).load
    assert load is not None
    assert int(load.sum()) == 4 * 6 * 2
    step = run.save(tmp_path)
    again = new_run(moe={"balance": "global_aux"})
    again.resume(step)
    assert torch.equal(router(again).load, load)
    fresh = new_run(moe={"balance": "global_aux"})
    fresh.load_weights(step)  # its first step has no last one
    assert int(router(fresh).load.sum()) == 0


def test_neither_evaluation_nor_a_skipped_step_moves_a_bias() -> None:
    run = new_run(moe={"balance": "bias", "bias_rate": 0.5}, on_nonfinite="skip")
    run.update()
    before = bias(run).clone()
    task, model = run.task, run.task.model
    batches = new_run(moe={"balance": "bias"}).task.batches(1)
    run.task = dataclasses.replace(task, validation={"v": lambda: batches})
    run.evaluate()
    assert torch.equal(bias(run), before)
    seen = dict(router(run).seen)

    def spoiled(*args: Any) -> Any:
        found = task.forward(*args)
        terms = {name: term * float("nan") for name, term in found.terms.items()}
        return dataclasses.replace(found, terms=terms)

    run.task = dataclasses.replace(task, forward=spoiled)
    assert run.update()["skipped"]
    assert torch.equal(bias(run), before)
    assert router(run).seen.keys() == seen.keys()
    run.task = task
    run.update()
    assert not torch.equal(bias(run), before)
    assert model.training


def test_recomputation_counts_a_micro_batch_once() -> None:
    lines = []
    for recompute in ([], ["layer"], ["mlp"], ["experts"]):
        run = new_run({"recompute": recompute}, moe={"balance": "aux", "z_weight": 0.1})
        run.update()
        lines.append(run.update())
    whole = lines[0]["experts"]["layers.1.moe"]
    assert sum(whole["tokens"]) == 4 * 6 * 2
    for line in lines[1:]:
        assert line["experts"] == lines[0]["experts"]
        assert line["balance_loss"] == pytest.approx(lines[0]["balance_loss"], rel=1e-12)
        assert line["router_z_loss"] == pytest.approx(lines[0]["router_z_loss"], rel=1e-12)


def described(parallel: dict[str, Any]) -> dict[str, Any]:
    run = new_run(parallel, moe={"balance": "aux", "capacity": 0.5, "layers": "all"})
    assert "experts" not in run.update()
    return run.update()["experts"]


def test_a_step_says_of_every_layer_what_one_process_says() -> None:
    """On every rank, of the layers of all stages, and each token once."""
    (wanted,) = run_ranks(described, 1, {})
    assert list(wanted) == ["layers.0.moe", "layers.1.moe"]
    for row in wanted.values():
        assert sum(row["tokens"]) == 4 * 6 * 2
        assert 0.3 < row["dropped"] < 0.8
        assert 1 <= row["balance"] <= 4
        assert 0 < row["entropy"] < 1.4
    layouts = ({"tp": 2, "ep": 2, "etp": 1}, {"tp": 2, "sp": True}, {"pp": 2}, {"cp": 2, "ep": 2})
    for layout in layouts:
        for found in run_ranks(described, 2, layout):
            assert list(found) == list(wanted)
            for name, row in found.items():
                assert row.pop("entropy") == pytest.approx(wanted[name]["entropy"], rel=1e-12)
                assert row == {k: v for k, v in wanted[name].items() if k != "entropy"}


LOSSES: dict[str, dict[str, Any]] = {
    "aux": {"balance": "aux", "balance_weight": 0.5},
    "seq_aux": {"balance": "seq_aux", "balance_weight": 0.5, "score": "sigmoid"},
    "global_aux": {"balance": "global_aux", "balance_weight": 0.5},
    "z": {"balance": "none", "z_weight": 0.1},
}
# On each number of ranks layouts with the micro-batches of one process, and with others.
SAME: dict[int, list[dict[str, Any]]] = {
    1: [{"recompute": ["layer"]}],
    2: [{"tp": 2}, {"tp": 2, "sp": True, "ep": 2, "etp": 1}, {"cp": 2}, {"ep": 2}, {"pp": 2}],
    4: [{"tp": 2, "cp": 2, "ep": 4, "etp": 1, "zero": 2}, {"tp": 2, "ep": 2, "sp": True}],
}


def alone(moe: dict[str, Any], layouts: list[dict[str, Any]], micro_batch: int) -> list[Fragments]:
    """Gradients of the second step where no label counts: those of the auxiliary losses."""
    found = []
    for parallel in layouts:
        run = new_run(parallel, moe=moe, micro_batch=micro_batch, global_batch=6)
        batches = run.task.batches

        def masked(step: int, batches: Any = batches) -> list[Any]:
            made = []
            for batch in batches(step):
                weights = torch.zeros_like(batch.sequences.weights)
                sequences = dataclasses.replace(batch.sequences, weights=weights)
                made.append(dataclasses.replace(batch, sequences=sequences))
            return made

        run.task = dataclasses.replace(run.task, batches=masked)
        parts: list[Fragments] = []
        run.on_gradients = lambda run, parts=parts: parts.append(
            bridge.owned(run.buffers, "own_gradient")
        )
        assert run.update()["loss"] == 0
        run.update()
        found.append(parts[-1])
    return found


def gradients(kind: str, world: int, layouts: list[dict[str, Any]], micro_batch: int) -> list[Any]:
    ranks = run_ranks(alone, world, LOSSES[kind], layouts, micro_batch)
    return [
        bridge.logical([part for rank in ranks for part in rank[i]]) for i in range(len(layouts))
    ]


@pytest.mark.parametrize(
    "kind",
    [
        "aux",
        "z",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in LOSSES
            if kind not in ("aux", "z")
        ),
    ],
)
def test_the_strength_of_an_auxiliary_loss_is_that_of_one_process(kind: str) -> None:
    """Its gradient alone: in every layout, and with micro-batches of other sizes but for aux."""
    (wanted,) = gradients(kind, 1, [{}], 2)
    at_router = wanted["layers.1.moe.router.weight"].abs().max()
    assert float(at_router) > 1e-4
    assert float(wanted["layers.1.moe.experts.0.up.weight"].abs().max()) == 0
    for world, layouts in SAME.items():
        for layout, found in zip(layouts, gradients(kind, world, layouts, 2), strict=True):
            gap, name = bridge.worst_difference(found, wanted)
            assert gap <= 1e-9, (kind, layout, name)
    for micro_batch in (1, 4, 6):  # 4 leaves one of 2
        (found,) = gradients(kind, 1, [{}], micro_batch)
        gap, _ = bridge.worst_difference(found, wanted)
        assert (gap <= 1e-9) == (kind != "aux"), (micro_batch, gap)
