"""`penteract verify` from the command line: exit codes, the table, the JSON."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from torch import Tensor

from penteract.cli import main
from penteract.nn.loss import Head
from penteract.train.run import Run
from penteract.verify.fuzz import Drawn, draw

BASE: dict[str, dict[str, Any]] = {
    "model": {"layers": 2, "hidden": 8, "ffn": 7, "heads": 3, "head_size": 2, "vocab": 11},
    "data": {"seq": 4},
    "train": {"steps": 50, "global_batch": 4},
}
KEYS = {
    "layout", "model", "world", "loss_max_rel", "grad_max_rel", "grad_worst", "norm_rel",
    "weights_max_rel", "bytes_sent", "ok", "first_difference",
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(BASE))
    return str(path)


def written(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


def test_equal_layouts_give_0_a_table_and_json(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--layout", "dp=3", "--layout", "tp=2,sp=true,train.micro_batch=2"]
    out = tmp_path / "out.json"
    assert main(["verify", config, *words, "--json", str(out)]) == 0
    said = capsys.readouterr()
    assert said.out.count("equal\n") == 2
    assert "dp-cp" in said.out
    assert said.out.count(" =\n") == 4  # bytes are those of the formula
    assert "optim.eps 1e-08 -> 0.0001" in said.err
    assert "2 of 2: tp=2,sp=true,train.micro_batch=2 on 2: equal" in said.err
    assert max(len(line) for line in said.out.splitlines()) <= 120
    found = written(tmp_path)
    assert len(found["reference"]["loss"]) == 2
    first, second = found["layouts"]
    assert first.keys() == second.keys() == KEYS
    assert first["layout"] == {"dp": 3}
    assert second["layout"] == {"tp": 2, "sp": True, "dp": 1, "train.micro_batch": 2}
    for entry, world in ((first, 3), (second, 2)):
        assert entry["ok"] is True
        assert entry["world"] == world
        assert entry["first_difference"] is None
        numbers = (entry[key] for key in sorted(KEYS) if key.endswith("rel"))
        assert max(numbers) < 1e-9
        assert entry["grad_worst"]
        assert entry["model"]["ffn"] == 7
    assert first["bytes_sent"]["dp-cp"] > 0
    assert second["bytes_sent"]["tp"] > 0


def test_a_difference_gives_1_and_the_json_all_the_same(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    loss = Head.forward

    def more(self: Head, *arguments: Any, **options: Any) -> Any:
        return {k: v * self.tp.axis.size for k, v in loss(self, *arguments, **options).items()}

    monkeypatch.setattr(Head, "forward", more)
    words = ["--layout", "tp=2", "--layout", "dp=2", "--json", str(tmp_path / "out.json")]
    assert main(["verify", config, *words]) == 1
    said = capsys.readouterr().out
    assert "tp=2: first difference: loss, rank 0, step 1: " in said
    assert said.count("DIFFERS") == 1
    bad, good = written(tmp_path)["layouts"]
    assert (bad["ok"], good["ok"]) == (False, True)
    assert bad["loss_max_rel"] == pytest.approx(1.0)
    assert bad["first_difference"].endswith("(twice; tp is 2)")


@pytest.mark.parametrize(("world", "who"), [(2, "rank 1 of 2"), (1, "the reference: rank 0 of 1")])
def test_a_crash_gives_1_and_infinities(
    world: int, who: str, config: str, tmp_path: Path, monkeypatch: Any
) -> None:
    update = Run.update

    def fail(self: Run) -> Any:
        if self.axis.size == world and self.axis.rank == world - 1:
            raise ZeroDivisionError("planted")
        return update(self)

    monkeypatch.setattr(Run, "update", fail)
    assert main(["verify", config, "--layout", "dp=2", "--json", str(tmp_path / "out.json")]) == 1
    assert "Infinity" in (tmp_path / "out.json").read_text()
    (entry,) = written(tmp_path)["layouts"]
    assert entry["first_difference"] == f"{who} failed: ZeroDivisionError: planted"
    assert entry["loss_max_rel"] == entry["weights_max_rel"] == float("inf")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "needs at least one layout"),
        (["--layout", "ep=2"], "parallel.ep = 2"),
        (["--layout", "pp=2,stages=embed|layer"], "norm must be there once"),
        (["--layout", "model.layers=1"], "give --model.layers beside --layout"),
        (["--layout", "dp=2", "--train.stepz", "2"], "did you mean --train.steps?"),
        (["--layout", "dp=2", "--json", "/no/such/folder/out.json"], "there is no folder"),
        (["--layout", "dp=2", "--fuzz", "1"], "--fuzz draws models and layouts itself"),
    ],
)
def test_wrong_input_gives_2_before_anything_starts(
    words: list[str], says: str, config: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr("penteract.verify.verify.run_ranks", refuse)
    assert main(["verify", config, *words]) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert said.out == ""


def test_shrinking_and_other_types(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--layout", "tp=2", "--shrink", "--model.hidden=300", "--train.steps=1"]
    words += ["--train.dtype=float32", "--json", str(tmp_path / "out.json")]
    assert main(["verify", config, *words]) == 0
    said = capsys.readouterr()
    assert "model.hidden 300 -> 8" in said.err
    assert "equal: loss 1e-06, gradients 0.00015" in said.out
    found = written(tmp_path)
    assert found["reference"]["train"]["dtype"] == "float32"
    assert len(found["reference"]["loss"]) == 1
    assert found["layouts"][0]["model"]["hidden"] == 8


def test_a_large_model_is_warned_of(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    from penteract.config_file import load
    from penteract.verify.layouts import parse_layout
    from penteract.verify.verify import prepare, size_warning

    large = load(config, ["--model.hidden=20000", "--model.ffn=60000"])
    large, _ = prepare(large, dtype="float64", steps=2)
    warning = size_warning(large, [parse_layout("dp=4", large)])
    assert warning is not None
    assert "--shrink" in warning
    small, _ = prepare(load(config), dtype="float64", steps=2)
    assert size_warning(small, [parse_layout("dp=4", small)]) is None


def test_fuzzing_equal_layouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--seed", "1", "--max-world", "2", "--json", str(tmp_path / "out.json")]
    assert main(["verify", "--fuzz", "3", *words]) == 0
    said = capsys.readouterr().out
    assert "3 cases, 0 differ" in said
    assert "refused" in said
    entries = written(tmp_path)["layouts"]
    assert len(entries) == 3
    assert all(entry.keys() == KEYS for entry in entries)


def replicated(drawn: Drawn) -> bool:
    """Whether a case has two data ranks, and layers to be cut."""
    return drawn.layout.grid.dp == 2 and drawn.config.model.layers > 1


@pytest.mark.slow
def test_fuzzing_writes_the_smallest_failing_pair_and_how_to_repeat_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Each rank divides by its own number of tokens, whatever the model."""

    def totals(self: Run, *several: list[Tensor]) -> Tensor:
        local = [[torch.as_tensor(part).double() for part in parts] for parts in several]
        return torch.stack([torch.stack(parts).sum() for parts in local])

    monkeypatch.setattr(Run, "_totals", totals)
    monkeypatch.chdir(tmp_path)
    seed = next(s for s in range(99) if replicated(draw(s, 0, max_world=2, refusals=Counter())))
    assert main(["verify", "--fuzz", "1", "--seed", str(seed), "--max-world", "2"]) == 1
    said = capsys.readouterr()
    file = f"verify-failure-{seed}-0.toml"
    assert f'to repeat: penteract verify {file} --layout "dp=2"' in said.out
    assert "layers = 1" in (tmp_path / file).read_text()
    assert main(["verify", file, "--layout", "dp=2"]) == 1
    assert "DIFFERS" in capsys.readouterr().out
