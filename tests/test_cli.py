"""The commands: help, output, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from runs import BASE, newest, run, write_config

from penteract.checkpoint.format import CheckpointError, SaveError
from penteract.cli import main
from penteract.data.loader import TrainSource
from penteract.errors import UserError

COMMANDS = (
    "train", "verify", "layout", "loads", "data build", "data chat", "data inspect", "data show",
    "checkpoint inspect", "checkpoint verify", "checkpoint reshard", "checkpoint diff",
    "checkpoint pin", "checkpoint unpin", "generate",
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_launcher_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def exit_code(words: list[str]) -> int:
    """Of `penteract WORDS` in this process; argparse ends its own errors by SystemExit."""
    try:
        return main(words)
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code([*command.split(), "--help"]) == 0
    said = capsys.readouterr().out
    assert f"example:\n  penteract {command} " in said
    assert "usage: penteract" in said


def test_help_lists_every_command_and_train_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["--help"]) == 0
    said = capsys.readouterr().out
    for command in COMMANDS:
        assert command.split()[0] in said
    assert exit_code(["train", "--help"]) == 0
    said = capsys.readouterr().out
    assert "--model.layers" in said
    assert "--optim.lr" in said
    assert "--nproc" in said


@pytest.mark.parametrize(
    "words",
    [
        [], ["nonsense"], ["data"], ["layout"], ["layout", "--world", "x"], ["generate"],
        ["layout", "--world", "8", "--tq", "2"], ["data", "show", "x.toml"],
        ["train", "x.toml", "--nproc", "0"], ["train", "x.toml", "--nproc", "two"],
        ["layout", "--world", "12", "--tp", "5"], ["layout", "--world", "0"],
        ["layout", "--world", "8", "--order", "tp-xx"], ["data", "inspect", "no/such"],
        ["checkpoint", "inspect", "no/such"], ["checkpoint", "verify", "no/such"],
        ["checkpoint", "reshard", "no/such", "out"], ["checkpoint", "reshard", "no/such"],
        ["checkpoint", "reshard", "a", "b", "--files", "0"],
        ["checkpoint", "reshard", "a", "b", "--files", "2", "--max-bytes", "9"],
        ["checkpoint", "diff", "no/such", "no/such"], ["checkpoint", "diff", "no/such"],
        ["checkpoint", "pin", "no/such"], ["checkpoint", "unpin", "no/such"],
        ["generate", "no/such"], ["data", "build", "--input", "no/such", "--output", "x"],
        ["verify"], ["verify", "no/such.toml", "--layout", "dp=2"], ["verify", "--fuzz", "0"],
        ["data", "show", "no/such.toml", "--step", "1"], ["data", "show", "--step", "1"],
        ["data", "chat", "--input", "no/such", "--output", "x"], ["data", "chat"],
    ],
)  # fmt: skip
def test_wrong_words_give_2_without_a_traceback(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.strip()
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (UserError("what is wrong"), 2, "penteract: what is wrong\n"),
        (CheckpointError("damaged"), 2, "penteract: damaged\n"),
        (SaveError("the disk is full"), 1, "penteract: the disk is full\n"),
        (FileNotFoundError(2, "No such file", "a/b"), 2, "penteract: a/b: No such file\n"),
        (PermissionError(13, "Permission denied", "a"), 2, "penteract: a: Permission denied\n"),
        (FileNotFoundError(2, "No such file"), 1, None),
        (OSError(5, "Input/output error", "a"), 1, None),
        (ValueError("a fault of ours"), 1, None),
        (ZeroDivisionError(), 1, None),
    ],
)
def test_errors_give_codes_and_messages(
    error: Exception,
    code: int,
    says: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("penteract.layout_picture.draw", fail)
    assert exit_code(["layout", "--world", "1"]) == code
    said = capsys.readouterr().err
    assert said == says if says is not None else said.startswith("Traceback"), said


def test_a_fault_of_ours_shows_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        np.zeros(3).reshape(2, 2)  # a ValueError, but numpy's

    monkeypatch.setattr("penteract.layout_picture.draw", fail)
    monkeypatch.setattr("penteract.config_file.load", fail)
    assert exit_code(["train", "x.toml"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_layout_json_prints_only_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["layout", "--world=32", "--tp=8", "--pp=2", "--etp=2", "--ep=4", "--json"]
    assert exit_code(words) == 0
    said = capsys.readouterr()
    assert said.err == ""
    found = json.loads(said.out)
    sizes = {name: found[name] for name in ("world", "tp", "pp", "dp", "etp", "ep", "edp")}
    assert sizes == {"world": 32, "tp": 8, "pp": 2, "dp": 2, "etp": 2, "ep": 4, "edp": 2}
    assert found["groups"]["tp"][1] == [8, 9, 10, 11, 12, 13, 14, 15]
    assert exit_code(words[:-1]) == 0
    assert "node 0" in capsys.readouterr().out


def test_data_build_inspect_and_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(f"document {i} " * 20)
    prefix = tmp_path / "text"
    built = ["data", "build", "--input", str(tmp_path), "--output", str(prefix)]
    assert exit_code(built) == 0
    said = capsys.readouterr()
    assert "3 documents, 663 tokens" in said.err
    assert said.out == ""
    assert exit_code(["data", "inspect", str(prefix), "--tokenizer", "bytes"]) == 0
    assert "document 0" in capsys.readouterr().out
    config = write_config(tmp_path, {"data": {"seq": 10}, "train": {"global_batch": 3}})
    assert exit_code(["data", "show", str(config), "--step", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    source = TrainSource([(prefix, None)], seq=10, seed=0, valid_fraction=0.1)
    shown = source.describe(range(9, 12))  # the fourth batch of 3
    assert exit_code(["data", "show", "--data.seq=5", str(config), "--step", "4"]) == 0
    assert capsys.readouterr().out.splitlines() != lines
    assert len(lines) == 3
    for line, sample in zip(lines, shown, strict=True):
        assert f"{sample.index}  text  epoch 0  sample {sample.sample} " in line
        text = bytes(source.samples([sample.index]).tokens[0].tolist()).decode()
        assert repr(text) in line


def test_data_chat_inspect_and_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talk = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hi."}]
    chats = tmp_path / "chats.jsonl"
    chats.write_text((json.dumps({"messages": talk}) + "\n") * 3)
    built = ["data", "chat", "--input", str(chats), "--output", str(tmp_path / "text")]
    assert exit_code(built) == 0
    said = capsys.readouterr()
    assert "3 conversations, 90 tokens, 12 of them the assistant's, template (default)" in said.err
    assert said.out == ""
    assert exit_code(["data", "inspect", str(tmp_path / "text")]) == 0
    assert "12 tokens are the assistant's" in capsys.readouterr().out
    keys = {"seq": 62, "packing": True, "balance": True, "valid_fraction": 0.0}
    config = write_config(tmp_path, {"data": keys, "train": {"global_batch": 2}})
    assert exit_code(["data", "show", str(config), "--step", "1"]) == 0
    shown = capsys.readouterr().out.splitlines()
    places = [line.partition("  conversations ")[2].partition("  ")[0] for line in shown]
    assert sorted(places) == ["0 1", "2"]
    assert "'user:\\nHello!" in shown[0]
    assert exit_code(["data", "show", str(config), "--step", "1", "--data.packing=false"]) == 2
    assert "need data.packing = true" in capsys.readouterr().err
    chats.write_text(json.dumps({"messages": talk[:1]}))
    assert exit_code(built) == 2
    said = capsys.readouterr()
    assert "chats.jsonl, line 1: no message is the assistant's" in said.err
    assert "Traceback" not in said.err
    assert said.out == ""


def test_show_follows_the_ramp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, {"train": {"ramp": [[2, 1], [3, 2]]}})
    seen = []
    for step in range(1, 6):
        assert exit_code(["data", "show", str(config), "--step", str(step)]) == 0
        seen.append([int(line.split()[0]) for line in capsys.readouterr().out.splitlines()])
    assert seen == [[0], [1], [2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--data.train=[]"], "data.train is empty"),
        (['--data.train=["none"]'], "none.bin: no such file"),
        (['--data.train=["text",{"prefix":"text","weight":2}]'], "a weight or none"),
        (["--data.tokenizer=none.json"], "none.json: No such file"),
        (["--data.seq=100000"], "data.seq can be at most"),
        (["--data.valid_fraction=0.0001"], "both need at least one"),
        (["--train.global_batch=100000"], "fewer than one global batch of 100000"),
        (["--train.eval_steps=0"], "train.eval_steps = 0 evaluates nothing"),
        (["--model.vocab=100"], "smaller than the tokenizer's 257"),
        (["--parallel.tp=2"], "world = 1 is not a multiple"),
        (["--train.device=cuda"], "no device: 0 cuda devices"),
        (["--dry-run", "--world", "4", "--rank", "4"], "--rank 4 is outside 0 .. 3"),
        (["--world", "2"], "--world and --rank are for --dry-run"),
        (["--rank", "0"], "--world and --rank are for --dry-run"),
        (["--dry-run", "--nproc", "2"], "give --world, not --nproc"),
        (["--checkpoint.load=none"], "neither a step"),
    ],
)
def test_a_run_that_cannot_start_says_why(tmp_path: Path, words: list[str], says: str) -> None:
    config = write_config(tmp_path)
    ranks = run(["train", config, *words], code=2)
    assert says in ranks.err[0]
    assert "Traceback" not in ranks.err[0]
    assert ranks.out[0] == ""
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


def test_an_evaluation_of_nothing_is_told_apart_from_none(tmp_path: Path) -> None:
    """Without validation data eval_steps is not looked at; with it, 0 is refused (above)."""
    config = write_config(tmp_path, {"data": {"valid_fraction": 0.0}})
    ranks = run(["train", config, "--train.eval_steps=0", "--train.steps=2"])
    assert "valid" not in ranks.err[0]


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"RANK": "0"}, "environment variable WORLD_SIZE is missing"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "MASTER_ADDR is missing"),
        ({"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK = 'x' is not a whole number"),
        ({"SLURM_PROCID": "0"}, "SLURM_NTASKS is missing"),
    ],
)
def test_a_broken_environment_is_a_message(
    tmp_path: Path, variables: dict[str, str], says: str
) -> None:
    config = write_config(tmp_path)
    prepare = lambda rank: os.environ.update(variables)  # noqa: E731
    ranks = run(["train", config], code=2, prepare=prepare)
    assert says in ranks.err[0]
    assert "Traceback" not in ranks.err[0]


def test_nproc_inside_a_launcher_is_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    prepare = lambda rank: os.environ.update(RANK="0")  # noqa: E731
    ranks = run(["train", config, "--nproc", "2"], code=2, prepare=prepare)
    assert "RANK is set" in ranks.err[0]


def test_a_dry_run_needs_no_data(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    words = ["--dry-run", "--world", "64", "--rank", "63", '--data.train=["none"]']
    # A process of its own: under fake tensors CUDA builds of torch start threads, fatal in a fork.
    command = [sys.executable, "-m", "penteract", "train", config, *words]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert "rank 63 of 64: one step ran on shapes alone" in said
    assert "all_reduce" in said


def test_checkpoint_inspect_and_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["train", write_config(tmp_path), "--train.steps=2"])
    checkpoints = tmp_path / "run/checkpoints"
    for command in ("inspect", "verify"):
        assert exit_code(["checkpoint", command, str(checkpoints)]) == 0
    said = capsys.readouterr().out
    assert "layers.0" in said
    assert "every file is as it was written" in said
    path = next(newest(tmp_path / "run").glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert exit_code(["checkpoint", "verify", str(checkpoints)]) == 1
    assert path.name in capsys.readouterr().out


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    words = ["--train.steps=30", "--optim.lr=0.03", "--train.dtype=float32"]
    run(["train", write_config(folder), *words])
    return folder / "run/checkpoints"


def test_generate_writes_the_prompt_and_more(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def text(*words: str) -> str:
        base = ["generate", str(trained), "--prompt", "abc ", "--max-tokens", "20"]
        assert exit_code([*base, "--ignore-end", *words]) == 0
        said = capsys.readouterr()
        assert said.err == ""
        return said.out

    first = text("--seed", "1")
    assert first.startswith("abc ")
    assert first == text("--seed", "1")
    assert first != text("--seed", "2")
    likeliest = text("--temperature", "0")
    assert likeliest == text("--temperature", "0", "--seed", "5")
    assert likeliest == text("--top-k", "1")
    assert likeliest == text("--top-p", "1e-9")
    assert likeliest == text("--temperature", "1e-300")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--temperature", "-1"], "temperature = -1.0"),
        (["--temperature", "nan"], "temperature = nan"),
        (["--top-p", "0"], "top_p = 0.0"),
        (["--top-p", "nan"], "top_p = nan"),
        (["--top-k", "0"], "'0' is not a whole number of 1 or more"),
        (["--tokenizer", "none.json"], "none.json: No such file"),
        (["--prompt", "abc", "--temperature", "-1"], "temperature = -1.0"),
    ],
)
def test_generate_refuses(
    trained: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(["generate", str(trained), *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err
    assert "Traceback" not in said.err


def test_the_module_starts_as_a_program(tmp_path: Path) -> None:
    """One real process, for what a fork cannot show: the entry point and a start without torch."""
    config = write_config(tmp_path, {"train": {"steps": "ten"}})
    words = [sys.executable, "-X", "importtime", "-m", "penteract", "train", str(config)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert len(said) == 1, said
    assert "train.steps = 'ten'" in said[0]
    assert "| torch\n" not in done.stderr, "a typing mistake should not cost the import of torch"
    assert BASE["train"]["steps"] == 6
