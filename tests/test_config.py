"""Reading a configuration: what is understood, what is refused, and how the refusal reads."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from penteract.cli import main
from penteract.config import (
    ConfigError,
    DataConfig,
    ParallelConfig,
    SourceConfig,
    TrainConfig,
    check_world,
    moe_layers,
)
from penteract.config_file import from_dict, help_text, keys, load, split_config, to_dict, to_toml
from penteract.errors import UserError
from penteract.train.batch_ramp import cursor, global_batch

SMALL: dict[str, dict[str, Any]] = {
    "model": {"layers": 2, "hidden": 64, "ffn": 96, "heads": 4},
    "train": {"steps": 100},
}


def write(folder: Path, **sections: dict[str, Any]) -> Path:
    merged = {s: {**SMALL.get(s, {}), **sections.get(s, {})} for s in {*SMALL, *sections}}
    path = folder / "c.toml"
    path.write_text(tomli_w.dumps(merged))
    return path


def refused(path: Path, capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What `penteract train PATH WORDS` says on its way to exit code 2."""
    code = main(["train", str(path), *map(str, words)])
    said = capsys.readouterr()
    assert (code, said.out) == (2, ""), said
    assert "Traceback" not in said.err
    assert said.err.startswith("penteract: ")
    return said.err


# --- what is understood


def test_every_key_but_sizes_and_steps_has_a_default(tmp_path: Path) -> None:
    config = load(write(tmp_path))
    assert (config.model.kv_heads, config.model.head_size) == (4, 16)
    assert (config.model.bias, config.model.max_positions) == (False, 1024)
    assert (config.optim.decay, config.optim.cooldown) == (100, 10)  # resolved, not 1000
    assert config.checkpoint.dir == "runs/default/checkpoints"
    assert config.parallel.etp == 1
    assert config.model.vocab is None  # the tokenizer's, once it is read


def test_every_key_of_the_contract_is_there() -> None:
    contract = {
        "model": "family layers hidden ffn heads kv_heads head_size vocab norm_eps rope_theta tied "
        "qk_norm bias dropout",
        "parallel": "tp cp pp ep etp order",
        "data": "train valid seq tokenizer seed",
        "optim": "name lr min_lr warmup decay schedule weight_decay betas eps clip",
        "train": "steps global_batch micro_batch dtype seed eval_every eval_steps max_minutes",
        "checkpoint": "dir every keep asynchronous keep_every verify fall_back load load_state "
        "load_only load_missing upcycle",
        "log": "dir every tensorboard",
    }
    for section, names in contract.items():
        assert {f"{section}.{name}" for name in names.split()} <= set(keys())


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, data={"train": ["a"]})
    config = load(path, ["--train.steps", "7", "--optim.lr=0.5", "--model.tied", "true"])
    assert (config.train.steps, config.optim.lr, config.model.tied) == (7, 0.5, True)
    assert config.optim.decay == 7
    config = load(path, ["--data.train", '["b", "c"]', "--optim.betas", "[0.8, 0.9]"])
    prefixes = [source.prefix for source in config.data.train]
    assert prefixes == [str(tmp_path / "b"), str(tmp_path / "c")]
    assert config.optim.betas == (0.8, 0.9)


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "configs"
    inner.mkdir()
    sources = ["../data/a", {"prefix": "b"}, "/abs/c"]
    path = write(inner, data={"train": sources, "tokenizer": "t.json"})
    monkeypatch.chdir(tmp_path)
    config = load(path.relative_to(tmp_path))
    found = [(Path(source.prefix), source.weight) for source in config.data.train]
    assert [(p.resolve(), w) for p, w in found] == [
        (tmp_path / "data/a", None),
        (inner / "b", None),
        (Path("/abs/c"), None),
    ]
    assert Path(config.data.tokenizer) == inner / "t.json"


FULL: dict[str, dict[str, Any]] = {
    "model": {
        **SMALL["model"], "family": "gpt2", "kv_heads": 2, "head_size": 24, "vocab": 501,
        "norm_eps": 1e-2, "tied": True, "qk_norm": True, "bias": False, "dropout": 0.1,
    },
    "data": {
        "train": [{"prefix": "a", "weight": 2}, {"prefix": "b", "weight": 0.3}], "valid": ["v"],
        "seq": 32, "seed": 3, "packing": True, "predict_across": True,
    },
    "optim": {"lr": 1e-3, "min_lr": 1e-5, "warmup": 3, "schedule": "wsd", "cooldown": 5},
    "train": {"steps": 50, "ramp": [[10, 2], [20, 4]], "max_minutes": 1.5, "dtype": "bfloat16"},
    "checkpoint": {
        "every": 5, "keep": 2, "keep_every": 3, "verify": "sizes", "fall_back": False,
        "asynchronous": True, "when_busy": "skip",
        "load": "other", "load_only": ["a*", "b.[0-9]"], "load_missing": ["b"],
    },
    "log": {"dir": "x y", "tensorboard": True},
}  # fmt: skip


@pytest.mark.parametrize("sections", [{}, FULL], ids=["small", "full"])
def test_what_is_printed_loads_back_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sections: dict[str, Any]
) -> None:
    path = write(tmp_path, **sections)
    assert main(["train", str(path), "--print-config", "--train.seed=5"]) == 0
    printed = capsys.readouterr().out
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "resolved.toml").write_text(printed)
    vocab = sections.get("model", {}).get("vocab", 257)  # the tokenizer's, filled in
    config = load(path, ["--train.seed=5", f"--model.vocab={vocab}"])
    assert load(elsewhere / "resolved.toml") == config
    assert to_toml(config) == printed
    assert from_dict(to_dict(config)) == config  # as a checkpoint keeps it


def test_a_source_is_a_string_or_a_table_for_a_library_user_too() -> None:
    data = DataConfig(train=("x", SourceConfig(prefix="y")), valid=("z",))  # type: ignore[arg-type]
    assert [source.prefix for source in (*data.train, *data.valid)] == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("words", "path", "others"),
    [
        ("", None, ""),
        ("run.toml", "run.toml", ""),
        ("--train.steps 5 run.toml", "run.toml", "--train.steps 5"),
        ("--train.steps=5 run.toml --optim.lr 1", "run.toml", "--train.steps=5 --optim.lr 1"),
        ("--data.tokenizer t.toml run.toml", "run.toml", "--data.tokenizer t.toml"),
        ("--log.dir x.toml", None, "--log.dir x.toml"),
        ("--stps run.toml", "run.toml", "--stps"),
        ("settings --train.steps 5", "settings", "--train.steps 5"),
        ("stray run.toml", "run.toml", "stray"),
    ],
)
def test_the_file_stands_anywhere(words: str, path: str | None, others: str) -> None:
    assert split_config(words.split()) == (path, others.split())


def test_help_has_every_key_and_its_meaning() -> None:
    text = help_text()
    for key in keys():
        assert f"--{key} " in text, key
    assert "Updates in the whole run." in text


# --- what is refused


@pytest.mark.parametrize(
    ("section", "key", "value", "says"),
    [
        ("train", "stps", 5, "train.stps: unknown key (did you mean train.steps?)"),
        ("model", "hddn", 5, "did you mean model.hidden?"),
        ("optm", "lr", 1.0, "optm: unknown key (did you mean optim?)"),
        ("train", "steps", "ten", "train.steps = 'ten'"),
        ("train", "steps", "80GiB", "train.steps = '80GiB'"),
        ("train", "steps", True, "should be a number, not true or false"),
        ("train", "steps", 2.5, "train.steps = 2.5"),
        ("train", "steps", -1, "train.steps = -1"),
        ("train", "steps", 2**63, "train.steps = 9223372036854775808"),
        ("train", "steps", [5], "train.steps = [5]"),
        ("train", "global_batch", 0, "train.global_batch = 0"),
        ("train", "dtype", "float23", "'float32'"),
        ("train", "max_minutes", 0, "train.max_minutes = 0"),
        ("train", "ramp", [[5, 0]], "train.ramp.0.1 = 0"),
        ("train", "ramp", [[10, 2], [5, 4]], "train.ramp: steps must rise, got [10, 5]"),
        ("model", "layers", 2**63, "model.layers = 9223372036854775808"),
        ("model", "layers", False, "model.layers = False"),
        ("model", "norm_eps", 0.0, "model.norm_eps = 0.0"),
        ("model", "dropout", 1.0, "model.dropout = 1.0"),
        ("model", "tied", "maybe", "model.tied = 'maybe'"),
        ("model", "kv_heads", 3, "kv_heads that work: 1, 2, 4"),
        ("model", "heads", 5, "hidden = 60 or 65"),
        ("model", "head_size", 5, "model.head_size = 4 or 6"),
        ("optim", "lr", float("nan"), "optim.lr = nan"),
        ("optim", "lr", float("inf"), "optim.lr = inf"),
        ("optim", "lr", -1.0, "optim.lr = -1.0"),
        ("optim", "min_lr", 1.0, "above optim.lr = 0.0003: optim.min_lr can be at most 0.0003"),
        ("optim", "betas", [0.9], "optim.betas"),
        ("optim", "betas", [0.9, 1.0], "optim.betas.1 = 1.0"),
        ("data", "seq", 0, "data.seq = 0"),
        ("data", "packing", "some", "data.packing = 'some'"),
        ("data", "predict_across", True, "data.predict_across = true needs data.packing = true"),
        ("data", "train", "a", "data.train = 'a'"),
        ("data", "train", [{"prefix": "a", "weght": 1}], "weght"),
        ("data", "valid", ["x/a", "y/a"], "data.valid: names of validation sets must differ"),
        ("data", "train", ["a", {"prefix": "b", "weight": 1}], "a weight or none; without one: "),
        ("data", "valid_fraction", 1.0, "data.valid_fraction = 1.0"),
        ("checkpoint", "keep", 0, "checkpoint.keep = 0"),
        ("log", "dir", "s3://bucket/run", "is a URL: logs need a disk; checkpoint.dir can be"),
        ("checkpoint", "keep_every", 5, "keep_every = 5: all steps are kept: give checkpoint.keep"),
        ("checkpoint", "verify", "size", "checkpoint.verify = 'size'"),
        ("checkpoint", "load_state", True, "load_state = true needs checkpoint.load"),
        ("checkpoint", "load_only", ["a", "b"], "load_only = ['a', 'b'] needs checkpoint.load"),
        ("checkpoint", "load_missing", "a*", "load_missing = ['a*'] needs checkpoint.load"),
        ("log", "every", 0, "log.every = 0"),
    ],
)
def test_a_wrong_value_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    section: str,
    key: str,
    value: Any,
    says: str,
) -> None:
    said = refused(write(tmp_path, **{section: {key: value}}), capsys)
    assert says in said
    assert "c.toml" in said or f"{section}." in said
    assert len(said.splitlines()) <= 2, said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--train.stps", "5"], "--train.stps: unknown key (did you mean --train.steps?)"),
        (["--train.stps=5"], "did you mean --train.steps?"),
        (["--lr", "5"], "--lr: unknown key (did you mean --optim.lr?)"),
        (["--xyzzy=5"], "--xyzzy: unknown key\n"),
        (["--train.steps", "ten"], "train.steps = 'ten'"),
        (["--train.steps"], "--train.steps: expected one argument"),
        (["--train.steps", "80GiB"], "train.steps = '80GiB'"),
        (["--optim.lr", "nan"], "optim.lr = "),
        (["--train.steps", str(2**63)], "train.steps = "),
        (["stray"], "'stray' is no option; they are --section.key VALUE"),
        (["--data.train", "[1"], "data.train"),
        (["--data.train", "[" * 100_000], "data.train"),
    ],
)
def test_a_wrong_option_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    said = refused(write(tmp_path), capsys, *words)
    assert says in said
    assert len(said) < 1000, len(said)


def test_several_faults_are_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(write(tmp_path, train={"steps": -1, "stps": 5}, optim={"lr": 0}), capsys)
    assert "train.stps" in said
    assert "train.steps = -1" in said
    assert "optim.lr = 0" in said


def test_required_keys_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.toml"
    path.write_text("")
    said = refused(path, capsys)
    assert "model: required" in said
    assert "train: required" in said
    path.write_text("[model]\nlayers = 1\n[train]\n")
    said = refused(path, capsys)
    for key in ("model.hidden", "model.ffn", "model.heads", "train.steps"):
        assert f"{key}: required, and not given" in said


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[train]\nsteps = 1\nsteps = 2\n", "not valid TOML"),
        (b"[train]\n[train]\n", "not valid TOML"),
        (b"a = " + b"[" * 50_000, "nested too deeply"),
        (b"a." * 2_000 + b"a = 1", "a: unknown key"),
        (b"# " + b"x" * (2 << 20), "2097154 bytes"),
        (bytes(range(256)), "not UTF-8 text at byte 128"),
        (b"\x00\x01\x02", "not valid TOML"),
        (b"a = __import__('os')", "not valid TOML"),
        (b"= 5", "not valid TOML"),
    ],
    ids=["key twice", "table twice", "brackets", "dots", "huge", "binary", "nul", "code", "no key"],
)
def test_a_file_that_cannot_be_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, says: str
) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(content)
    said = refused(path, capsys)
    assert says in said
    assert str(path) in said
    assert len(said) < 1000


def test_a_missing_file_or_a_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "No such file" in refused(tmp_path / "none.toml", capsys)
    assert "Is a directory" in refused(tmp_path, capsys)
    assert main(["train"]) == 2
    assert "needs a configuration file" in capsys.readouterr().err


def test_nothing_in_a_file_is_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "made"
    code = f"__import__('pathlib').Path({str(target)!r}).touch()"
    for section, key in (("model", "layers"), ("data", "seq"), ("optim", "betas")):
        refused(write(tmp_path, **{section: {key: code}}), capsys)
        refused(write(tmp_path), capsys, f"--{section}.{key}={code}")
    assert not target.exists()


# --- rules between keys


def test_learned_positions_cover_a_sequence(tmp_path: Path) -> None:
    gpt2 = {"family": "gpt2", "max_positions": 16}
    with pytest.raises(
        ConfigError, match=r"data.seq = 17 .* model.max_positions = 16: .* at least 17"
    ):
        load(write(tmp_path, model=gpt2, data={"seq": 17}))
    assert load(write(tmp_path, model=gpt2, data={"seq": 16})).model.max_positions == 16
    assert load(write(tmp_path, data={"seq": 17})).model.max_positions == 17


def test_head_size_follows_or_is_given(tmp_path: Path) -> None:
    assert load(write(tmp_path, model={"heads": 5, "head_size": 8})).model.head_size == 8
    assert load(write(tmp_path, model={"family": "gpt2", "head_size": 5})).model.head_size == 5


def test_warm_up_ends_before_decay_does_where_there_is_decay(tmp_path: Path) -> None:
    for schedule in ("cosine", "linear", "wsd"):
        optim = {"warmup": 101, "schedule": schedule, "cooldown": 1, "decay": 100}
        with pytest.raises(ConfigError, match=r"10\d is longer .* at most 100, .* at least 10\d"):
            load(write(tmp_path, optim=optim))
    for schedule in ("constant", "inverse_sqrt"):
        config = load(write(tmp_path, optim={"warmup": 101, "schedule": schedule, "decay": 100}))
        assert config.optim.warmup == 101


@pytest.mark.parametrize(("schedule", "decay"), [("cosine", 40), ("wsd", 45), ("linear", 40)])
def test_a_short_run_of_a_long_schedule_stays_in_its_warm_up(
    tmp_path: Path, schedule: str, decay: int
) -> None:
    path = write(tmp_path, optim={"warmup": 40, "cooldown": 5, "schedule": schedule})
    assert load(path, ["--train.steps", "2"]).optim.decay == decay
    assert load(path).optim.decay == 100


def test_the_cool_down_fits(tmp_path: Path) -> None:
    wsd = {"schedule": "wsd", "warmup": 50, "cooldown": 51, "decay": 100}
    with pytest.raises(ConfigError, match=r"cooldown = 101 is longer than optim.decay = 100"):
        load(write(tmp_path, optim=wsd))
    assert load(write(tmp_path, optim={**wsd, "cooldown": 50})).optim.cooldown == 50
    assert load(write(tmp_path, optim={**wsd, "schedule": "cosine"})).optim.cooldown == 51


def test_an_evaluation_evaluates_something_under_names_of_its_own(tmp_path: Path) -> None:
    """Without validation data neither rule is looked at."""
    for data in ({"valid": ["v"]}, {"train": ["t"], "valid_fraction": 0.1}):
        with pytest.raises(ConfigError, match=r"train.eval_steps = 0 evaluates nothing"):
            load(write(tmp_path, data=data, train={"eval_steps": 0}))
    twice = {"train": ["x/a", "y/a"]}
    with pytest.raises(ConfigError, match=r"data.train: names .* must differ, got \['a', 'a'\]"):
        load(write(tmp_path, data={**twice, "valid_fraction": 0.1}))
    load(write(tmp_path, data={"train": ["x/a", "y/a"]}, train={"eval_steps": 0}))
    load(write(tmp_path, data={**twice, "valid_fraction": 0.1, "valid": ["v"]}))


def test_no_steps_is_a_configuration(tmp_path: Path) -> None:
    assert load(write(tmp_path, train={"steps": 0})).optim.decay == 1


def test_sizes_that_no_world_of_the_layout_has_are_named() -> None:
    check_world(ParallelConfig(tp=2), 6)
    check_world(ParallelConfig(ep=2), 4)
    with pytest.raises(UserError, match=r"world = 5 .*world 4 or 6"):
        check_world(ParallelConfig(ep=2), 5)
    with pytest.raises(UserError, match=r"replicas = 2 does not divide edp = 1; .*replicas 1"):
        check_world(ParallelConfig(ep=4, replicas=2), 4)


MOE = {"experts": 8, "topk": 3, "groups": 4, "topk_groups": 2}


@pytest.mark.parametrize(
    ("moe", "said"),
    [
        ({"experts": 6}, r"experts = 6 do not divide evenly over ep = 4; .* ep 3 or 6"),
        ({"groups": 3}, r"moe.groups = 3 does not divide moe.experts = 8: it can be 1, 2, 4, 8"),
        ({"topk_groups": 5}, r"moe.topk_groups = 5 of moe.groups = 4"),
        ({"topk": 5}, r"moe.topk = 5 experts .* among 4: moe.topk can be at most 4"),
        ({"shared_gate": True}, r"moe.shared_gate = true needs .*moe.shared_ffn"),
        ({"pad": True}, r"moe.pad = true needs moe.capacity"),
        ({"balance": "sinkhorn"}, r"use moe.groups = 1"),
        ({"layers": [7]}, r"moe.layers = \(7,\): blocks are 0 to 1"),
        ({"layers": 3}, r"moe.layers = 3: .* at least one has experts"),
        ({"score": "sofmax"}, r"moe.score"),
        ({"expert": 8}, r"moe.expert: unknown key \(did you mean moe.experts\?\)"),
    ],
)  # fmt: skip
def test_experts_that_cannot_be_are_refused(
    tmp_path: Path, moe: dict[str, object], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        load(write(tmp_path, moe={**MOE, **moe}, parallel={"ep": 4}))


def test_expert_parallelism_without_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"parallel.ep = 2: the model has no experts"):
        load(write(tmp_path, parallel={"ep": 2}))
    with pytest.raises(ConfigError, match=r'recompute: "expert_act": the model has no experts'):
        load(write(tmp_path, parallel={"recompute": ["core", "expert_act"]}))


@pytest.mark.parametrize(
    ("word", "layers"),
    [("all", "all"), ("2", 2), ("0,1", (0, 1)), ("[1]", (1,)), ("[0, 1]", (0, 1))],
)
def test_layers_with_experts_on_the_command_line(tmp_path: Path, word: str, layers: object) -> None:
    found = load(write(tmp_path, moe={"experts": 8}), [f"--moe.layers={word}"])
    assert found.moe is not None
    assert found.moe.layers == layers
    with pytest.raises(ConfigError, match=r"moe.layers = 'x1': .* n for every n-th"):
        load(write(tmp_path, moe={"experts": 8}), ["--moe.layers", "x1"])


def test_experts_have_the_width_of_the_model_unless_told(tmp_path: Path) -> None:
    found = load(write(tmp_path, moe={"experts": 8}))
    assert found.moe is not None
    assert (found.moe.ffn, found.moe.topk_groups) == (found.model.ffn, 1)
    assert moe_layers(found.moe, 4) == (0, 1, 2, 3)
    assert moe_layers(dataclasses.replace(found.moe, layers=2), 5) == (1, 3)


def test_a_wrong_order_is_refused() -> None:
    with pytest.raises(UserError, match=r"order = 'tp-xx'"):
        check_world(ParallelConfig(order="tp-xx"), 1)


# --- batch ramp


@given(
    steps=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 7)), max_size=4),
    batch=st.integers(1, 9),
    step=st.integers(0, 40),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_cursor_is_the_sum_of_the_batches(
    steps: list[tuple[int, int]], batch: int, step: int
) -> None:
    until, ramp = 0, []
    for length, size in steps:
        until += length
        ramp.append((until, size))
    train = TrainConfig(steps=40, global_batch=batch, ramp=tuple(ramp))
    sizes = []
    for number in range(1, step + 1):
        stage = [size for until, size in ramp if number <= until]
        sizes.append(stage[0] if stage else batch)
    assert [global_batch(n, train) for n in range(1, step + 1)] == sizes
    assert cursor(step, train) == sum(sizes)


def test_the_shipped_configuration_is_read() -> None:
    path = Path(__file__).parents[1] / "configs" / "demo.toml"
    assert load(path).model.family == tomllib.loads(path.read_text())["model"]["family"]
