"""Freezing and thawing over a checkpoint, and starting from weights where some are frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import assert_same_state, curve, metrics, newest, run, tensors, write_config

from penteract.checkpoint.io import read_manifest, read_tensor
from penteract.checkpoint.model import STATE_PREFIXES
from penteract.checkpoint.plan import changed_state, stored_as
from penteract.config_file import load as load_config
from penteract.grid import Grid
from penteract.mesh import create_mesh
from penteract.train.language_model import language_model
from penteract.train.run import Run
from penteract.train.saved_state import held

FROZEN = ["embed.weight", "layers.0.attention.q.weight", "layers.0.attention_norm.weight"]
RULES = [
    {"match": "embed*", "freeze": True},
    {"match": "layers.0.attention.[qkv].weight", "freeze": True},
    {"match": "layers.0.attention_norm.weight", "freeze": True},
]
LAYOUTS: list[tuple[int, dict[str, Any]]] = [(1, {}), (2, {"tp": 2}), (2, {"zero": 1}),
                                             (2, {"zero": 3})]  # fmt: skip


def config_at(folder: Path, *, frozen: bool, dtype: str = "float64", **more: Any) -> Path:
    """`folder/run.toml` for six steps."""
    optim = {"decay": 10, "rules": RULES if frozen else [], **more.pop("optim", {})}
    return write_config(folder, {"optim": optim, "train": {"dtype": dtype}, **more})


def steps_of(run_folder: Path) -> list[Path]:
    return sorted((run_folder / "checkpoints").glob("step-*"))


def state_names(step: Path, tensor: str) -> set[str]:
    names = read_manifest(step).tensors
    return {name for name in names if name.endswith(f"/{tensor}")}


def resumed(config: Path, step: Path) -> tuple[Run, list[str]]:
    """A run in this process that continues `step`."""
    mesh, device = create_mesh(Grid(1), 0), torch.device("cpu")
    task, resolved = language_model(load_config(config), mesh, device)
    here = Run(task, resolved, mesh, device)
    lines = here.resume(step)
    task.close()
    return here, lines


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_thawed_tensors_start_with_moments_of_zero(tmp_path: Path, dtype: str) -> None:
    run(["train", config_at(tmp_path, frozen=True, dtype=dtype), "--train.steps=3"])
    step = newest(tmp_path / "run")
    assert all(not state_names(step, name) for name in FROZEN)
    config = config_at(tmp_path, frozen=False, dtype=dtype)
    here, lines = resumed(config, step)
    assert lines[-1] == (
        "moments start at zero, the checkpoint has none of embed.weight, "
        "layers.0.attention.k.weight, layers.0.attention.q.weight and 2 more"
    )
    saved, zero, kept = tensors(step), 0, 0
    for shard, view in held(here.task.model, here.buffers, here.optimizer):
        prefix, _, tensor = shard.tensor.rpartition("/")
        if shard.tensor in saved:
            assert torch.equal(view, saved[shard.tensor][shard.box.slices()]), shard.tensor
            kept += bool(prefix)
        elif prefix == "master":
            assert torch.equal(view, saved[tensor][shard.box.slices()].to(view.dtype))
        else:
            assert not view.any(), shard.tensor
            zero += 1
    assert zero == 2 * 5  # two moments of five tensors
    assert kept > zero
    ranks = run(["train", config])
    assert lines[-1] in ranks.err[0]
    after = tensors(newest(tmp_path / "run"))
    for name in FROZEN:
        assert not torch.equal(after[name], saved[name]), "it learns now"
        assert after[f"exp_avg/{name}"].any()


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_tensors_frozen_later_keep_their_values_and_lose_their_state(
    tmp_path: Path, dtype: str
) -> None:
    run(["train", config_at(tmp_path, frozen=False, dtype=dtype), "--train.steps=3"])
    step = newest(tmp_path / "run")
    assert all(state_names(step, name) for name in FROZEN)
    saved = tensors(step)
    ranks = run(["train", config_at(tmp_path, frozen=True, dtype=dtype)])
    assert "moments start" not in ranks.err[0]
    after = tensors(newest(tmp_path / "run"))
    for name in FROZEN:
        assert torch.equal(after[name], saved[name])
        assert not state_names(newest(tmp_path / "run"), name)
    assert not torch.equal(after["head.weight"], saved["head.weight"])
    # And back: twice over a checkpoint.
    ranks = run(["train", config_at(tmp_path, frozen=False, dtype=dtype), "--train.steps=8"])
    assert "moments start at zero, the checkpoint has none of embed.weight" in ranks.err[0]
    assert not torch.equal(tensors(newest(tmp_path / "run"))["embed.weight"], saved["embed.weight"])


def test_freezing_and_thawing_are_the_same_in_every_layout(tmp_path: Path) -> None:
    """Frozen for two steps, thawed for two, frozen again: in turn on other ranks and stages."""
    for name in ("alone", "moved"):
        for turn, (n, layout) in enumerate(LAYOUTS):
            moved = name == "moved"
            parallel = layout if moved else {}
            config = config_at(tmp_path, frozen=turn % 2 == 0, parallel=parallel)
            words = [f"--train.steps={2 * turn + 2}", f"--log.dir={tmp_path}/{name}"]
            run(["train", config, *words], n if moved else 1)
    assert [x[0] for x in curve(tmp_path / "moved")] == list(range(1, 9))
    for mine, other in zip(curve(tmp_path / "moved"), curve(tmp_path / "alone"), strict=True):
        assert mine == pytest.approx(other, rel=1e-11)
    pair = (newest(tmp_path / name) for name in ("moved", "alone"))
    assert_same_state(*pair, tolerance=1e-11)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("was_frozen", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_run_starts_from_weights_with_some_frozen(
    tmp_path: Path, stored: str, was_frozen: bool, frozen: bool
) -> None:
    """Into bfloat16: a master is rounded into what is frozen, and widened where there was none."""
    run(["train", config_at(tmp_path, frozen=was_frozen, dtype=stored), "--train.steps=2"])
    saved = tensors(newest(tmp_path / "run"))
    config = config_at(tmp_path, frozen=frozen, dtype="bfloat16", optim={"warmup": 0})
    words = [f"--log.dir={tmp_path}/fresh", f"--checkpoint.load={tmp_path}/run/checkpoints"]
    run(["train", config, *words, "--train.steps=0"], 2)
    for name, x in tensors(newest(tmp_path / "fresh")).items():
        weight = name.removeprefix("master/")
        if not name.startswith("exp_avg"):
            best = saved.get(f"master/{weight}", saved[weight])
            assert torch.equal(x, best.to(x.dtype)), name
        assert (weight in FROZEN) <= (not frozen or name == weight), "it is frozen"


@pytest.mark.parametrize("parallel", [{"pp": 2}, {"zero": 1}, {"zero": 3}])
def test_masters_are_found_where_no_rank_holds_all_weights(
    tmp_path: Path, parallel: dict[str, Any]
) -> None:
    model = {"layers": 2}
    run(["train", config_at(tmp_path, frozen=True, dtype="bfloat16", model=model)])
    saved = tensors(newest(tmp_path / "run"))
    more = {"model": model, "parallel": parallel}
    config = config_at(tmp_path, frozen=True, dtype="bfloat16", **more)
    words = [f"--log.dir={tmp_path}/fresh", f"--checkpoint.load={tmp_path}/run/checkpoints"]
    run(["train", config, *words, "--train.steps=0", "--optim.warmup=0"], 2)
    loaded = tensors(newest(tmp_path / "fresh"))
    assert loaded.keys() == saved.keys()
    for name, x in loaded.items():
        assert torch.equal(x, saved[name]) or name.startswith("exp_avg"), name


def test_moments_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    config = config_at(tmp_path, frozen=True)
    run(["train", config, "--train.steps=2"])
    ranks = run(["train", config, "--optim.name=lion"], 2, code=2)
    for said in ranks.err:
        assert "optim.name: saved 'adamw', now 'lion'" in said
        assert "checkpoint.load" in said
    load_it = [f"--checkpoint.load={tmp_path}/run/checkpoints", f"--log.dir={tmp_path}/fresh"]
    words = ["train", config, "--optim.name=lion", *load_it]
    ranks = run([*words, "--checkpoint.load_state=true"], code=2)
    assert "optim.name: saved 'adamw', now 'lion'" in ranks.err[0]
    run(words)
    assert metrics(tmp_path / "fresh")[1]["loss"] < metrics(tmp_path / "run")[1]["loss"]


def test_only_a_tensor_without_any_state_was_frozen() -> None:
    whole = {"a", "b", "master/a", "exp_avg/a", "exp_avg_sq/a", "exp_avg/b", "exp_avg_sq/b"}
    none = frozenset[str]()
    assert changed_state(whole, whole, STATE_PREFIXES) == (none, none)
    thawed = whole - {"exp_avg/b", "exp_avg_sq/b"}
    lost = {"exp_avg/b", "exp_avg_sq/b"}
    assert changed_state(thawed, whole, STATE_PREFIXES) == (none, lost)
    assert changed_state(whole, thawed, STATE_PREFIXES) == (lost, none)
    for part in (whole - {"exp_avg_sq/b"}, whole - {"master/a"}, whole - lost - {"b"}):
        assert changed_state(part, whole, STATE_PREFIXES) == (none, none), "it is refused"
        assert changed_state(whole, part, STATE_PREFIXES) == (none, none)


def test_a_weight_of_no_fitting_type_is_refused_by_its_name(tmp_path: Path) -> None:
    run(["train", config_at(tmp_path, frozen=True, dtype="bfloat16"), "--train.steps=1"])
    step = newest(tmp_path / "run")
    stored = read_manifest(step).tensors
    assert stored_as(stored, "norm.weight", ["float32"]) == ("master/norm.weight", "float32")
    assert stored_as(stored, "norm.weight", ["bfloat16"]) == ("norm.weight", "bfloat16")
    assert stored_as(stored, "norm.weight", ["float64"]) == ("norm.weight", "float64")
    assert read_tensor(step, "embed.weight").dtype == torch.bfloat16
    config = config_at(tmp_path, frozen=False, dtype="float64")
    words = [f"--log.dir={tmp_path}/fresh", f"--checkpoint.load={tmp_path}/run/checkpoints"]
    ranks = run(["train", config, *words], code=2)
    assert "norm.weight: checkpoint [16] bfloat16, wanted [16] float64" in ranks.err[0]
