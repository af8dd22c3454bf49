"""Moments in bfloat16: what rounding at random is, and that every layout does it alike."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optim import logical
from optim.logical import NAMES, Layout, Outcome
from optim.test_offload import assert_same, config_of, new_run, state
from reference import bridge
from torch import Tensor

from penteract.checkpoint.format import CheckpointError
from penteract.checkpoint.io import read_manifest
from penteract.config import Config, OptimConfig
from penteract.grid import Grid
from penteract.mesh import create_mesh
from penteract.optim import moments as moments_module
from penteract.optim.moments import Moments, rounded
from penteract.testing import run_ranks, world_axis

BF16 = torch.bfloat16
HALF = 1 << 16
UNEVEN = "llama-tied-bias"  # three query heads, one key/value head held whole
LAYOUTS = [*(Layout(dp=4, zero=z) for z in range(4)), Layout(dp=2, tp=2), Layout(tp=4, zero=1)]
LAYOUTS += [Layout(dp=2, tp=2, zero=3), Layout(dp=4, zero=1, replicas=2)]


def neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 numbers next to `x`, towards 0 and away from it, as float32."""
    word = x.view(torch.int32)
    down = word & -HALF
    up = torch.where(word == down, down, down + HALF)
    return down.view(torch.float32), up.view(torch.float32)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.floats(width=32, allow_nan=False), st.integers(0, HALF - 1))
def test_a_number_becomes_one_of_its_neighbours(value: float, noise: int) -> None:
    x = torch.tensor([value])
    found = rounded(x, torch.tensor([noise], dtype=torch.int32)).float()
    down, up = neighbours(x)
    lost = int(x.view(torch.int32)) & (HALF - 1)
    wanted = up if lost + noise >= HALF else down
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))  # -0.0 too
    assert rounded(x.double(), torch.tensor([noise], dtype=torch.int32)).float() == wanted


def test_the_mean_over_all_random_numbers_is_the_number() -> None:
    noise = torch.arange(HALF, dtype=torch.int32)
    for value in (1.001, -3.7e-12, 0.999, 2.0):
        x = torch.full((HALF,), value)
        mean = rounded(x, noise).double().mean()
        assert float(mean) == pytest.approx(float(x[0]), rel=1e-7)
    assert rounded(torch.tensor([float("nan")]), noise[:1]).isnan().all()


CASES = [(layout, name) for layout in LAYOUTS for name in NAMES]


def narrow(name: str, **values: object) -> OptimConfig:
    return logical.optim_of(name, moments="bfloat16", **values)


def train(cases: list[tuple[Layout, str]]) -> list[Outcome]:
    axis = world_axis()
    meshes = {tp: create_mesh(Grid(axis.size, tp=tp), axis.rank) for tp in {x.tp for x, _ in cases}}
    return [
        logical.updated(UNEVEN, narrow(name), mesh=meshes[layout.tp], layout=layout)
        for layout, name in cases
    ]


def test_every_layout_rounds_alike() -> None:
    """Row and column slices, fused and tied tensors, slices of slices: moments to the bit."""
    alone = dict(zip(NAMES, train([(Layout(), name) for name in NAMES]), strict=True))
    for case, *outcomes in zip(CASES, *run_ranks(train, 4, CASES), strict=True):
        found, right = logical.joined(outcomes), logical.joined([alone[case[1]]])
        assert found.keys() == right.keys()
        for kind, tensors in right.items():
            worst, where = bridge.worst_difference(found[kind], tensors)
            assert worst <= (1e-12 if kind == "weights" else 0.0), f"{case}: {kind} of {where}"


@pytest.mark.parametrize("name", NAMES)
def test_moments_are_those_of_the_formulas_but_for_their_last_digit(name: str) -> None:
    """After one step, each within a step of bfloat16, not all below or above."""
    buffers, optimizer, weights = logical.setting("llama", narrow(name))
    wide, wide_optimizer, _ = logical.setting("llama", logical.optim_of(name))
    for some, one in ((buffers, optimizer), (wide, wide_optimizer)):
        logical.fill(some, "own_gradient", logical.gradients(weights, 1))
        one.step(1e-3, torch.tensor(0.5), torch.tensor(False))
    signs = []
    for (kind, _, x), (same, _, y) in zip(optimizer.state(), wide_optimizer.state(), strict=True):
        assert (kind, x.dtype, y.dtype) == (same, BF16, torch.float64)
        difference = x.double() - y
        assert bool((difference.abs() <= y.abs() * 2.0**-7).all())
        signs.append(difference[y != 0].sign())
    signs = torch.cat(signs)
    assert abs(float(signs.mean())) < 5 / len(signs) ** 0.5
    assert bool((signs != 0).all())
    for bucket in buffers.buckets:
        assert bucket.master.dtype == torch.float64


def test_an_average_falls_that_is_rounded_to_the_nearest_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With beta2 = 0.999 and no gradients, 300 steps leave 74 % of a second moment."""
    rules = [{"match": "embed.weight"}, {"match": "*", "freeze": True}]
    optim = narrow("adamw", betas=[0.9, 0.999], rules=rules)

    def left() -> float:
        buffers, optimizer, _ = logical.setting("gpt2", optim, dtype=torch.float32)
        (bucket,) = buffers.buckets
        _, (_, _, second) = optimizer.state()
        second.fill_(1.0)
        for _ in range(300):
            optimizer.step(0.0, torch.tensor(1.0), torch.tensor(False))
        ((_, _, view),) = bucket.owned(second)
        return float(view.double().mean())

    assert left() == pytest.approx(0.999**300, rel=0.01)
    monkeypatch.setattr(moments_module, "rounded", lambda x, noise: x.to(BF16))
    assert left() == 1.0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, BF16])
def test_a_skipped_step_changes_nothing_and_gaps_stay_zero(name: str, dtype: torch.dtype) -> None:
    buffers, optimizer, weights = logical.setting("gpt2-plain", narrow(name), dtype=dtype)
    logical.fill(buffers, "own_gradient", logical.gradients(weights, 1))
    optimizer.step(1e-2, torch.tensor(1.0), torch.tensor(False))
    before = [x.clone() for _, _, x in optimizer.state()]
    for bucket in buffers.buckets:
        bucket.own_gradient.fill_(float("nan"))
    optimizer.step(1e-2, torch.tensor(1.0), torch.tensor(True))
    for x, (_, bucket, moment) in zip(before, optimizer.state(), strict=True):
        assert torch.equal(x.view(torch.int16), moment.view(torch.int16))
        for _, _, view in bucket.owned(x):
            view.zero_()
        assert not x.any()


def test_random_numbers_are_others_in_every_step_moment_tensor_and_seed() -> None:
    """Moments that are 1 + 1/512 everywhere go up in a half of all places, each time in others."""
    buffers, _, _ = logical.setting("llama", narrow("adamw"), dtype=torch.float32)
    ups = {}
    for seed, updates in ((0, 1), (0, 2), (1, 1)):
        kept = Moments(("a", "b"), buffers.kinds, narrow("adamw"), seed=seed)
        for bucket in kept.buckets:
            with kept.widened(bucket, torch.tensor(updates)) as wide:
                for x in wide:
                    x.fill_(1 + 2.0**-8)
        for name, bucket, x in kept.state():
            for _, fragment, view in bucket.owned(x):
                if fragment.tensor.endswith(("q.weight", "k.weight")) and view.numel() > 50:
                    ups[seed, updates, name, fragment.tensor] = (view > 1).flatten()
    assert len(ups) >= 3 * 2 * 2
    for key, up in ups.items():
        assert 0.3 < float(up.double().mean()) < 0.7, key
    for (a, x), (b, y) in itertools.combinations(ups.items(), 2):
        n = min(len(x), len(y))
        assert 0.25 < float((x[:n] == y[:n]).double().mean()) < 0.75, (a, b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_rounds_as_the_one_that_went_on(tmp_path: Path, dtype: str) -> None:
    config = config_of(dtype, {}, moments="bfloat16")
    run = new_run(config)
    run.update()
    path = run.save(tmp_path)
    saved = {entry: x.dtype for entry, x in read_manifest(path).tensors.items()}
    assert {kind for entry, kind in saved.items() if "exp_avg" in entry} == {"bfloat16"}
    other = new_run(config)
    assert other.resume(path) == []
    for _ in range(2):
        run.update()
        other.update()
    assert_same(state(other), state(run), dtype)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(("then", "now"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_moments_of_the_other_type_are_converted(
    tmp_path: Path, dtype: str, then: str, now: str
) -> None:
    run = new_run(config_of(dtype, {}, moments=then))
    for _ in range(2):
        run.update()
    other = new_run(config_of(dtype, {}, moments=now))
    said = other.resume(run.save(tmp_path))
    assert said == [f"optim.moments: saved {then!r}, now {now!r}"]
    for (_, _, x), (_, _, y) in zip(run.optimizer.state(), other.optimizer.state(), strict=True):
        assert x.dtype != y.dtype
        assert torch.equal(x.to(y.dtype), y)
    assert other.update()["loss"] == run.update()["loss"]


def test_another_type_of_weights_is_refused_as_ever(tmp_path: Path) -> None:
    run = new_run(config_of("float64", {}, moments="bfloat16"))
    run.update()
    path = run.save(tmp_path)
    with pytest.raises(CheckpointError, match="float64, wanted"):
        new_run(config_of("float32", {}, moments="float32")).resume(path)


def losses(configs: list[Config]) -> list[list[float]]:
    found = []
    for config in configs:
        run = new_run(config)
        found.append([run.update()["loss"] for _ in range(4)])
    return found


@pytest.mark.slow
def test_training_is_the_same_in_every_layout() -> None:
    """Gradients that differ in float64's last digits are rounded to the same neighbours."""
    layouts = [{"zero": 0}, {"zero": 3}, {"tp": 2}, {"tp": 2, "sp": True}]
    cases = [
        config_of("float64", layout, name=name, moments="bfloat16")
        for name in NAMES
        for layout in layouts
    ]
    alone = losses([config_of("float64", {}, name=name, moments="bfloat16") for name in NAMES])
    for ranks in run_ranks(losses, 2, cases):
        for i, found in enumerate(ranks):
            assert found == pytest.approx(alone[i // len(layouts)], rel=1e-9), cases[i]
    wide = losses([config_of("float64", {}, name=name) for name in NAMES])
    assert all(a != pytest.approx(b, rel=1e-9) for a, b in zip(alone, wide, strict=True))
