"""ZeRO: what ranks own, what they hold when, what they send, and that nothing is read early."""

import dataclasses
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # optimizers import it at their first step: here once, not in every rank
from torch import Tensor, nn

from penteract.collectives import Pending, start_all_gather_into
from penteract.config import Config, resolve
from penteract.config_file import from_dict
from penteract.grid import Grid
from penteract.mesh import create_mesh, single, split_axis
from penteract.parallel import buffers as buffers_module
from penteract.parallel import zero as zero_module
from penteract.parallel.buckets import ALIGNMENT, Bucket, Sharding
from penteract.parallel.buffers import Buffers
from penteract.parallel.parameters import Layer, replicated
from penteract.parallel.pipeline.actions import actions
from penteract.parallel.pipeline.schedules import schedule
from penteract.placement import Init
from penteract.testing import run_ranks, world_axis
from penteract.train.language_model import synthetic_task
from penteract.train.run import Run
from penteract.train.traffic import gathers

F64 = torch.float64
MODEL = {"layers": 3, "hidden": 24, "ffn": 40, "heads": 3, "vocab": 29, "bias": True}


def config_of(
    dtype: str = "float64", batch: int = 6, optim: dict[str, Any] | None = None, **parallel: Any
) -> Config:
    values = {
        "model": {**MODEL, "init_std": 0.2},
        "data": {"seq": 5},
        "optim": {"lr": 1e-2, "schedule": "constant", "eps": 1e-4, **(optim or {})},
        "train": {"steps": 3, "global_batch": batch, "micro_batch": 1, "dtype": dtype},
        "parallel": parallel,
    }
    return resolve(from_dict(values))


def run_of(config: Config) -> Run:
    axis = world_axis()
    mesh, device = (
        create_mesh(Grid(axis.size, tp=config.parallel.tp), axis.rank),
        torch.device("cpu"),
    )
    return Run(synthetic_task(config, mesh, device), config, mesh, device)


def trained(config: Config, steps: int = 2) -> list[Tensor]:
    """The master slices of this rank after some steps."""
    run = run_of(config)
    for _ in range(steps):
        run.update()
    return [bucket.master.clone() for bucket in run.buffers.buckets]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_overlap_changes_no_bit(stage: int, dtype: str) -> None:
    on, off = (
        run_ranks(trained, 2, config_of(dtype, zero=stage, dp_overlap=overlap))
        for overlap in (True, False)
    )
    for a, b in zip(on, off, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


ROWS: dict[str, tuple[str, dict[str, Any]]] = {  # of the table in docs/data.md
    "bfloat16, float16: parameters + gradients + masters + moments": ("bfloat16", {}),
    "float32": ("float32", {}),
    "float64 (verification)": ("float64", {}),
    "bfloat16, moments in bfloat16": ("bfloat16", {"moments": "bfloat16"}),
    "float32, moments in bfloat16": ("float32", {"moments": "bfloat16"}),
    "bfloat16 with offload: on the device": ("bfloat16", {"offload": True}),
    "and in host memory: masters + moments": ("bfloat16", {"offload": True}),
    "float32 with offload: on the device": ("float32", {"offload": True}),
    "and in the host's memory, masters too": ("float32", {"offload": True}),
}


def documented(n: int) -> dict[str, list[float]]:
    """The table's bytes a parameter on n data ranks, by row and stage."""
    text = (Path(__file__).parents[2] / "docs/data.md").read_text()
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {
        row: [sum(float(Fraction(t.replace("/n", f"/{n}"))) for t in x.split(" + ")) for x in found]
        for row, *found in cells
        if row in ROWS
    }


@pytest.mark.parametrize("n", [2, 3])
def test_memory_falls_by_the_stage(n: int) -> None:
    """Each row of the table, to the byte; in stage 3 vectors and tied weights stay whole."""

    def held(row: str, stage: int) -> float:
        dtype, optim = ROWS[row]
        run = run_of(config_of(dtype, zero=stage, optim=optim))
        buckets = run.buffers.buckets
        numel = sum(bucket.numel for bucket in buckets)
        whole = sum(b.numel for b in buckets if b.kept)
        assert (whole == numel) == (stage < 3)
        parameters, gradients, masters = run.buffers.held_bytes()
        moments = sum(moment.nbytes for _, _, moment in run.optimizer.state())
        if stage == 3:  # as if nothing were kept whole
            parameters -= (n - 1) * sum(b.own_parameters.nbytes for b in buckets if b.kept)
        state = 0 if row.endswith("on the device") else masters + moments
        return (state if row.startswith("and") else parameters + gradients + state) / numel

    def measured() -> dict[str, list[float]]:
        return {row: [held(row, stage) for stage in range(4)] for row in ROWS}

    wanted = documented(n)
    assert wanted.keys() == ROWS.keys()
    for found in run_ranks(measured, n):
        for row, values in found.items():
            assert values == pytest.approx(wanted[row], rel=1e-12), row


def test_every_element_has_one_owner_and_empty_slices_are_fine() -> None:
    """Parameters of 1 and 3 elements on three ranks: some own nothing of them."""

    def owned() -> dict[str, int]:
        model = nn.Module()
        for name, n in (("a", 1), ("b", 3), ("c", 5 * ALIGNMENT)):
            layer = Layer()
            layer.declare("weight", replicated(name, (n,), Init("ones"), decay=True), F64)
            model.add_module(name, layer)
        buffers = Buffers(model, Sharding(world_axis("dp-cp"), single("dp-cp"), 1), seed=0)
        sizes: dict[str, int] = {}
        for _, fragment, view in buffers.owned("master"):
            assert bool((view == 1).all())
            sizes[fragment.tensor] = sizes.get(fragment.tensor, 0) + view.numel()
        buffers.wait()
        assert all(bool((slot.entry.parameter == 1).all()) for slot in buffers.slots())
        return sizes

    ranks = run_ranks(owned, 3)
    totals = {name: sum(rank.get(name, 0) for rank in ranks) for name in "abc"}
    assert totals == {"a": 1, "b": 3, "c": 5 * ALIGNMENT}
    assert sum("a" in rank for rank in ranks) == 1


def test_a_parameter_that_is_not_gathered_is_nan_and_the_ring_holds_two_units() -> None:
    def look() -> tuple[list[int], int]:
        run = run_of(config_of(zero=3))
        model, seen = run.task.model, []
        matrices = [p for layer in model.units[1:4] for p in layer.parameters() if p.ndim == 2]

        def count(*_: Any) -> None:
            seen.append(sum(not bool(p.isnan().any()) for p in matrices))

        assert all(bool(p.isnan().all()) for p in matrices)
        for layer in model.units[1:4]:
            layer.mlp.register_forward_hook(count)
        run.update()
        return seen, len(matrices) // 3

    for seen, per_layer in run_ranks(look, 2):
        assert len(seen) == 3 * 3  # layers, micro-batches of this rank
        assert max(seen) <= 2 * per_layer
        assert min(seen) >= per_layer


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gathers_are_as_many_as_the_formula_says(
    micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[int] = []
    fetch = zero_module.start_all_gather_into

    def counting(out: Tensor, x: Tensor, axis: Any) -> Any:
        fetched.append(out.numel())
        return fetch(out, x, axis)

    def count() -> int:
        run = run_of(config_of(zero=3, batch=2 * micro_batches))
        fetched.clear()
        run.update()
        return len(fetched)

    monkeypatch.setattr(zero_module, "start_all_gather_into", counting)
    program = schedule("1f1b", ranks=1, micro_batches=micro_batches).programs[0]
    units = [0] * (3 + 2)  # the stage of blocks, embedding, head
    wanted = sum(gathers(units, list(actions(program))))
    assert run_ranks(count, 2) == [wanted, wanted]


@pytest.mark.parametrize(("stage", "reductions"), [(0, 1), (1, 1), (2, 3), (3, 3)])
def test_stages_reduce_once_a_step_or_once_a_micro_batch(stage: int, reductions: int) -> None:
    def count() -> tuple[int, int]:
        run = run_of(config_of(zero=stage))
        before = dict(run.axis.traffic.calls)
        run.update()
        call = "reduce_scatter" if stage else "all_reduce"
        # Besides gradients stage 0 all-reduces the count.
        found = run.axis.traffic.calls[call] - before.get(call, 0) - (0 if stage else 1)
        return found, len(run.buffers.buckets)

    for found, buckets in run_ranks(count, 2):
        assert found == reductions * buckets


def late(out: Tensor, x: Tensor, axis: Any) -> Pending:
    """A gather whose result is there only once somebody has waited for it."""
    gathered = start_all_gather_into(torch.empty_like(out), x, axis).wait()
    return Pending([], lambda: out.copy_(gathered))


def losses(stage: int) -> list[float]:
    """Of updates, and of an evaluation after each."""
    run = run_of(config_of(zero=stage))
    batches = run_of(config_of()).task.batches(1)
    run.task = dataclasses.replace(run.task, validation={"v": lambda: iter(batches)})
    found = []
    for _ in range(2):
        found += [run.update()["loss"], run.evaluate()["v"]]
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_reads_parameters_that_are_on_their_way(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = run_ranks(losses, 2, 0)
    for module in (buffers_module, zero_module):
        monkeypatch.setattr(module, "start_all_gather_into", late)
    for found, right in zip(run_ranks(losses, 2, stage), wanted, strict=True):
        assert found == pytest.approx(right, rel=1e-12)
    # And it would be seen.
    monkeypatch.setattr(Bucket, "wait", lambda self: None)
    if stage == 3:
        with pytest.raises(RuntimeError, match="gradient norm = nan"):
            run_ranks(losses, 2, stage)
        return
    for found, right in zip(run_ranks(losses, 2, stage), wanted, strict=True):
        assert found != pytest.approx(right, rel=1e-9)


def test_replicas_split_the_axis() -> None:
    def split() -> tuple[tuple[int, ...], tuple[int, ...]]:
        inside, across = split_axis(world_axis("dp-cp"), 2)
        return inside.ranks, across.ranks

    assert run_ranks(split, 4) == [
        ((0, 1), (0, 2)), ((0, 1), (1, 3)), ((2, 3), (0, 2)), ((2, 3), (1, 3)),
    ]  # fmt: skip
