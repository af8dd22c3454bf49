"""Loading a part of a checkpoint: what is asked for and nothing else, in every layout."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import metrics, newest, run, tensors, write_config

from penteract.config import CheckpointConfig, ConfigError
from penteract.train.partial import left_out, taken

SECTIONS: dict[str, dict[str, Any]] = {"model": {"layers": 2}, "optim": {"warmup": 0}}
WEIGHTS = {"embed.weight": "embed.weight", "a.weight": "a.weight", "b.weight": "b.weight"}


def options(only: tuple[str, ...] = (), missing: tuple[str, ...] = ()) -> CheckpointConfig:
    return CheckpointConfig(load="x", load_only=only, load_missing=missing)


@pytest.mark.parametrize(
    ("only", "missing", "has", "names"),
    [
        ((), (), "eab", "eab"),
        ((), (), "ea", "eab"),  # what is missing is wanted, and refused
        (("a*",), (), "eab", "a"),
        (("a*", "e*"), (), "eab", "ea"),
        (("[ab].*",), (), "ea", "ab"),
        ((), ("b*",), "ea", "ea"),
        ((), ("b*",), "eab", "eab"),
        ((), ("*",), "a", "a"),
        (("a*", "b*"), ("b*",), "ea", "a"),
    ],
)
def test_what_is_taken(
    only: tuple[str, ...], missing: tuple[str, ...], has: str, names: str
) -> None:
    weights = {name for name in WEIGHTS if name[0] in has}
    found = taken(WEIGHTS, weights, options(only, missing))
    assert {name[0] for name in found} == set(names)


def test_what_starts_fresh_is_never_taken() -> None:
    sources = {**WEIGHTS, "a.weight": None, "b.weight": "other"}
    assert taken(sources, {"embed.weight", "other"}, options()) == {"embed.weight", "b.weight"}


def test_patterns_that_match_nothing_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        taken(WEIGHTS, set(WEIGHTS), options(("a*", "emb"), ("head*",)))
    first, second = str(caught.value).splitlines()
    said = "matches no tensor of the model; near names:"
    assert first.startswith(f"checkpoint.load_only: 'emb' {said} embed.weight")
    assert second.startswith(f"checkpoint.load_missing: 'head*' {said} ")
    with pytest.raises(ConfigError, match="leave nothing that the checkpoint has: it has z"):
        taken(WEIGHTS, {"z"}, options(("a*",), ("*",)))


def test_what_is_said() -> None:
    sources = {**WEIGHTS, "c": None, "up": "dense"}
    weights = {*WEIGHTS, "dense", "x2", "x1", "x3", "x4"}
    assert list(left_out(sources, weights, {"embed.weight", "up"})) == [
        "in the checkpoint, not loaded: a.weight, b.weight, x1 and 3 more",
        "in the model, not loaded, initial values: a.weight, b.weight, c",
    ]
    assert list(left_out(WEIGHTS, set(WEIGHTS), set(WEIGHTS))) == []


# --- runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoints of a run in each type."""
    found = {}
    for dtype in ("float64", "bfloat16"):
        folder = tmp_path_factory.mktemp(dtype)
        config = write_config(folder, {**SECTIONS, "train": {"dtype": dtype}})
        run(["train", config, "--train.steps=3", "--train.seed=9"])
        found[dtype] = folder / "run/checkpoints"
    return found


def started(folder: Path, words: list[str], n: int = 1, code: int = 0, **sections: Any) -> Any:
    """A run of no step: what it saves is what it starts from."""
    config = write_config(folder, {**SECTIONS, **sections})
    return run(["train", config, "--train.steps=0", *words], n, code=code)


@pytest.mark.parametrize(
    ("n", "layout", "dtype"),
    [
        (1, [], "float64"),
        (2, ["--parallel.tp=2"], "bfloat16"),
        (2, ["--parallel.pp=2"], "float64"),
        pytest.param(2, ["--parallel.zero=3"], "bfloat16", marks=pytest.mark.slow),
    ],
    ids=["one", "tp", "pp", "zero"],
)
def test_only_what_matches_is_loaded(
    tmp_path: Path, trained: dict[str, Path], n: int, layout: list[str], dtype: str
) -> None:
    only = ["embed.weight", "layers.1.*"]
    words = [f"--train.dtype={dtype}", *layout]
    load = [
        f"--checkpoint.load={trained[dtype]}",
        "--checkpoint.load_only",
        "embed.weight,layers.1.*",
    ]
    started(tmp_path, [*words, f"--log.dir={tmp_path}/seed"], n)
    ranks = started(tmp_path, [*words, *load], n)
    assert (
        "in the checkpoint, not loaded: head.weight, layers.0.attention.k.weight, " in ranks.err[0]
    )
    assert "in the model, not loaded, initial values: head.weight, " in ranks.err[0]
    seed, saved = tensors(newest(tmp_path / "seed")), tensors(newest(trained[dtype].parent))
    found = tensors(newest(tmp_path / "run"))
    assert found.keys() == seed.keys()
    for name, x in found.items():
        kind, _, tensor = name.rpartition("/")
        if kind.startswith("exp_avg"):
            assert not x.any()
        else:
            loaded = any(fnmatchcase(tensor, pattern) for pattern in only)
            assert torch.equal(x, (saved if loaded else seed)[name]), name
            assert loaded or "norm" in name or not torch.equal(x, saved[name])


@pytest.mark.parametrize(
    ("n", "layout"), [(1, []), pytest.param(2, ["--parallel.pp=2"], marks=pytest.mark.slow)]
)
def test_what_may_be_missing(
    tmp_path: Path, trained: dict[str, Path], n: int, layout: list[str]
) -> None:
    """A model that is one block deeper."""
    deeper = {"model": {"layers": 3}}
    load = [*layout, f"--checkpoint.load={trained['float64']}"]
    ranks = started(tmp_path, load, n, 2, **deeper)
    for said in ranks.err:
        assert "layers.2.mlp.up.weight: not in the checkpoint (wanted [24, 16] float64)" in said
    allow = "--checkpoint.load_missing=layers.2.*"
    ranks = started(tmp_path, [*load, allow], n, **deeper)
    assert "in the checkpoint, not loaded" not in ranks.err[0]
    assert "not loaded, initial values: layers.2.attention.k.weight, layers.2." in ranks.err[0]
    started(tmp_path, [*layout, f"--log.dir={tmp_path}/seed"], n, **deeper)
    seed, saved = tensors(newest(tmp_path / "seed")), tensors(newest(trained["float64"].parent))
    for name, x in tensors(newest(tmp_path / "run")).items():
        if not name.startswith("exp_avg"):
            assert torch.equal(x, saved.get(name, seed[name])), name
    # What may be missing and is there is loaded, and a wrong shape is refused.
    ranks = started(
        tmp_path, [f"--log.dir={tmp_path}/all", *load, "--checkpoint.load_missing=*"], n
    )
    assert "not loaded" not in ranks.err[0]
    wrong = [*load, allow, "--model.ffn=32", f"--log.dir={tmp_path}/wrong"]
    ranks = started(tmp_path, wrong, n, 2, **deeper)
    for said in ranks.err:
        assert "layers.0.mlp.up.weight: checkpoint [24, 16] float64, wanted [32, 16]" in said
    assert not list((tmp_path / "wrong").glob("checkpoints/step-*"))


def test_all_else_stays_strict(tmp_path: Path, trained: dict[str, Path]) -> None:
    load = f"--checkpoint.load={trained['float64']}"
    shallow = {"model": {"layers": 1}}
    ranks = started(tmp_path, [load, "--checkpoint.load_only=layers.*"], 2, 2, **shallow)
    for said in ranks.err:
        assert "layers.1.mlp.up.weight: in the checkpoint, not in the model" in said
        assert "embed.weight" not in said
        assert "Traceback" not in said
    ranks = started(tmp_path, [load, "--checkpoint.load_only=layers.0.*"], 2, 0, **shallow)
    assert "in the checkpoint, not loaded: embed.weight, head.weight, layers.1." in ranks.err[0]
    words = [load, "--checkpoint.load_only=layer.*", f"--log.dir={tmp_path}/typo"]
    ranks = started(tmp_path, words, 2, 2)
    for said in ranks.err:
        assert (
            "checkpoint.load_only: 'layer.*' matches no tensor of the model; near names: " in said
        )


def test_frozen_tensors_and_a_first_step(tmp_path: Path, trained: dict[str, Path]) -> None:
    """A frozen body from the checkpoint under a head that learns from the seed."""
    rules = [{"match": "layers.*", "freeze": True}]
    words = [f"--checkpoint.load={trained['float64']}", "--checkpoint.load_only=layers.*"]
    config = write_config(tmp_path, {**SECTIONS, "optim": {"rules": rules}})
    for n in (1, 2):
        folder = tmp_path / f"{n}"
        run(["train", config, *words, "--train.steps=2", f"--log.dir={folder}"], n)
        saved, found = tensors(newest(trained["float64"].parent)), tensors(newest(folder))
        assert all(torch.equal(x, saved[k]) for k, x in found.items() if k.startswith("layers."))
        assert not torch.equal(found["head.weight"], saved["head.weight"])
        assert not any("/layers." in name for name in found)
    losses = [metrics(tmp_path / n)[2]["loss"] for n in ("1", "2")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_a_part_of_an_upcycled_model(tmp_path: Path, trained: dict[str, Path]) -> None:
    """Names are the model's: experts of one block are copies, those of the other are fresh."""
    load = [f"--checkpoint.load={trained['float64']}", "--checkpoint.upcycle=true"]
    only = "--checkpoint.load_only=layers.1.moe.experts.[01].*"
    moe = {"moe": {"experts": 4}}
    ranks = started(tmp_path, [*load, only, "--parallel.ep=2"], 2, **moe)
    assert "in the model, not loaded, initial values: embed.weight, " in ranks.err[0]
    started(tmp_path, [f"--log.dir={tmp_path}/seed"], **moe)
    seed, saved = tensors(newest(tmp_path / "seed")), tensors(newest(trained["float64"].parent))
    for name, x in tensors(newest(tmp_path / "run")).items():
        if name.startswith(("layers.1.moe.experts.0.", "layers.1.moe.experts.1.")):
            assert torch.equal(x, saved[f"layers.1.mlp.{name.split('.', 5)[5]}"]), name
        elif "/" not in name:
            assert torch.equal(x, seed[name]), name


def test_a_run_that_goes_on_does_not_load_again(tmp_path: Path, trained: dict[str, Path]) -> None:
    words = [f"--checkpoint.load={trained['float64']}", "--checkpoint.load_only=embed.*"]
    config = write_config(tmp_path, SECTIONS)
    run(["train", config, *words, "--train.steps=1"])
    ranks = run(["train", config, *words, "--train.steps=2"])
    assert "continuing" in ranks.err[0]
    assert "not loaded" not in ranks.err[0]
