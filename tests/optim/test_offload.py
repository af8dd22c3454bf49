"""Masters and moments in host memory: the same numbers to the bit, wherever they lie."""

import dataclasses
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from optim import logical
from torch import Tensor

from penteract.config import Config, resolve
from penteract.config_file import from_dict
from penteract.grid import Grid
from penteract.mesh import create_mesh
from penteract.optim.offload import on_host
from penteract.testing import run_ranks, world_axis
from penteract.train.dry_run import dry_run
from penteract.train.language_model import synthetic_task
from penteract.train.run import Run
from penteract.train.saved_state import held

MODEL = {"layers": 2, "hidden": 16, "ffn": 24, "heads": 2, "vocab": 19, "bias": True}
RULES = [{"match": "layers.0.*", "lr": 0.5}, {"match": "embed.*", "freeze": True}]
DTYPES = ("float64", "float32", "bfloat16")
State = dict[str, Tensor]


def config_of(dtype: str, parallel: dict[str, Any], **optim: Any) -> Config:
    train = {"steps": 3, "global_batch": 4, "dtype": dtype, "on_nonfinite": "skip"}
    values = {
        "model": {**MODEL, "init_std": 0.2},
        "data": {"seq": 4},
        "optim": {"lr": 1e-2, "schedule": "constant", "clip": 0.05, "rules": RULES, **optim},
        "train": train,
        "parallel": parallel,
    }
    return resolve(from_dict(values))


def moved(config: Config, *, offload: bool) -> Config:
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, offload=offload))


def new_run(config: Config) -> Run:
    axis, device = world_axis(), torch.device("cpu")
    mesh = create_mesh(Grid(axis.size, tp=config.parallel.tp), axis.rank)
    return Run(synthetic_task(config, mesh, device), config, mesh, device)


def state(run: Run) -> State:
    """All that a checkpoint would hold of this rank, and its parameters as they are stored."""
    parts = held(run.task.model, run.buffers, run.optimizer)
    found = {f"{s.tensor}{s.box}": x.clone() for s, x in parts}
    run.buffers.wait()
    for i, bucket in enumerate(run.buffers.all_buckets):
        if bucket.parameters is not None:
            found[f"bucket {i}"] = bucket.parameters.clone()
    return found


def trained(config: Config) -> State:
    """After three steps, the second of which is skipped."""
    run = new_run(config)

    def spoil(run: Run) -> None:
        if run.step == 1:
            for _, _, view in run.buffers.owned("own_gradient"):
                view.fill_(float("nan"))

    run.on_gradients = spoil
    lines = [run.update() for _ in range(3)]
    assert [line.get("skipped", False) for line in lines] == [False, True, False]
    for bucket in run.buffers.buckets:
        apart = config.optim.offload or config.train.dtype == "bfloat16"
        assert (bucket.master is not bucket.own_parameters) == apart
    return state(run)


def with_and_without(configs: Sequence[Config]) -> list[tuple[State, State]]:
    both = [[moved(config, offload=offload) for offload in (False, True)] for config in configs]
    return [(trained(plain), trained(offloaded)) for plain, offloaded in both]


def assert_same(found: State, wanted: State, of: object) -> None:
    assert found.keys() == wanted.keys(), of
    for name, x in wanted.items():
        assert torch.equal(found[name], x), f"{of}: {name}"


LAYOUTS: list[dict[str, Any]] = [
    *({"zero": zero} for zero in range(4)),
    {"tp": 2, "zero": 1},
    {"zero": 2, "dp_overlap": False},
]
TYPES = [("float32", dtype) for dtype in DTYPES] + [("bfloat16", "bfloat16")]  # moments, weights


def check(name: str, cells: Sequence[tuple[dict[str, Any], tuple[str, str]]]) -> None:
    configs = [config_of(dtype, layout, name=name, moments=m) for layout, (m, dtype) in cells]
    for ranks in run_ranks(with_and_without, 2, configs):
        for config, (plain, offloaded) in zip(configs, ranks, strict=True):
            assert_same(offloaded, plain, config)


@pytest.mark.parametrize("name", ["adamw", "muon"])  # the full product has all
def test_no_bit_differs(name: str) -> None:
    """Under clipping, with a skipped step, a frozen tensor and another rate for some.

    Every stage with every optimizer, and with every type.
    """
    first = logical.NAMES.index(name)
    check(name, [(layout, TYPES[(first + i) % 4]) for i, layout in enumerate(LAYOUTS)])


@pytest.mark.slow
@pytest.mark.parametrize("name", logical.NAMES)
def test_no_bit_differs_in_the_full_product(name: str) -> None:
    check(name, list(product(LAYOUTS, TYPES)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offload", [False, True])
def test_a_checkpoint_does_not_know_of_it(tmp_path: Path, dtype: str, *, offload: bool) -> None:
    """Saved with or without, resumed the other way: the run that never stopped, to the bit."""
    first = moved(config_of(dtype, {"zero": 1}), offload=offload)

    def halves() -> tuple[State, State, list[str]]:
        run = new_run(first)
        run.update()
        path = run.save(tmp_path)
        other = new_run(moved(first, offload=not offload))
        said = other.resume(path)
        for _ in range(2):
            run.update()
            other.update()
        return state(run), state(other), said

    for whole, resumed, said in run_ranks(halves, 2):
        assert_same(resumed, whole, dtype)
        assert said == [f"optim.offload: saved {offload}, now {not offload}"]


def test_weights_are_loaded_into_masters_on_the_host(tmp_path: Path) -> None:
    run = new_run(config_of("float32", {}))
    run.update()
    other = new_run(moved(run.config, offload=True))
    other.load_weights(run.save(tmp_path))
    for (_, mine), (_, theirs) in zip(other.weights(), run.weights(), strict=True):
        assert torch.equal(mine, theirs)
    other.buffers.wait()
    for mine, theirs in zip(other.buffers.buckets, run.buffers.buckets, strict=True):
        assert torch.equal(mine.own_parameters, theirs.own_parameters)


@pytest.mark.parametrize("offload", [False, True])
def test_the_host_works_on_copies_that_come_in_order(*, offload: bool) -> None:
    optim = logical.optim_of("adamw", offload=offload)
    buffers, _, _ = logical.setting("llama", optim, bucket_bytes=256)
    flats = [(bucket, bucket.own_gradient) for bucket in buffers.buckets]
    for i, (_, flat) in enumerate(flats):
        flat.fill_(float(i))
    assert len(flats) > 3
    for i, ((bucket, flat), (came_for, came)) in enumerate(zip(flats, on_host(flats), strict=True)):
        assert came_for is bucket
        assert torch.equal(came, torch.full_like(flat, float(i)))
        assert (came is flat) != offload


def test_a_dry_run_says_what_the_host_holds() -> None:
    config = config_of("bfloat16", {"zero": 2}, rules=[])
    plain, offloaded = (
        dry_run(moved(config, offload=offload), Grid(4), 1) for offload in (False, True)
    )
    host = [line for line in offloaded if line.endswith("bytes of the host's memory")]
    assert [line.split()[0] for line in host] == ["masters", "optimizer"]
    assert [line.removesuffix(" of the host's memory") for line in offloaded] == plain
