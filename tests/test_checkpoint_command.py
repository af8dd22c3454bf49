"""`penteract checkpoint`: reshard, diff, pin and unpin, on checkpoints of real runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from runs import newest, run, tensors, write_config

from penteract.checkpoint.examine import read_manifest
from penteract.cli import main

MOE = {"moe": {"experts": 4, "balance": "bias"}, "optim": {"warmup": 0}, "model": {"layers": 2}}


@pytest.fixture(autouse=True)
def no_launcher_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 2 and 3 of a mixture of experts in bfloat16, with masters, on two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    words = ["--train.dtype=bfloat16", "--train.steps=3", "--checkpoint.every=2"]
    run(["train", write_config(folder, MOE), *words, "--parallel.ep=2"], 2)
    return folder / "run/checkpoints"


def said(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> tuple[str, str]:
    """What `penteract checkpoint WORDS` writes on its way to this exit code."""
    capsys.readouterr()
    assert main(["checkpoint", *map(str, words)]) == code
    found = capsys.readouterr()
    assert "Traceback" not in found.err
    return found.out, found.err


def test_a_resharded_run_is_no_other_and_goes_on(
    tmp_path: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run/checkpoints"
    _, err = said(capsys, "reshard", trained, out, "--files", 3)
    assert re.fullmatch(
        rf"{out}/step-00000003: \d+ tensors in 3 files, \d+ to \d+ bytes each\n", err
    )
    lines, _ = said(capsys, "diff", trained, out)
    assert lines.splitlines()[0].startswith(f"a: {trained}/step-00000003, step 3, world=2 tp=1")
    assert lines.splitlines()[1] == f"b: {out}/step-00000003, step 3, files=3"
    assert lines.splitlines()[-1] == "equal"
    assert len(lines.splitlines()) == 4
    config = write_config(tmp_path, MOE)
    words = ["--train.dtype=bfloat16", "--train.steps=4", "--optim.decay=3"]
    ranks = run(["train", config, *words, f'--data.train=["{trained.parents[1]}/text"]'])
    assert "at step 3 of 4" in ranks.err[0]


def test_weights_alone_write_and_start_a_run(
    tmp_path: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, "reshard", trained, tmp_path / "weights", "--weights-only")
    step = tmp_path / "weights/step-00000003"
    names = read_manifest(step).tensors
    assert not any("/" in name for name in names)
    assert "layers.1.moe.router.bias" in names
    texts = []
    for path in (trained, tmp_path / "weights"):
        capsys.readouterr()
        words = ["--prompt", "a", "--max-tokens", "8", "--top-k", "1", "--ignore-end"]
        assert main(["generate", str(path), *words]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    config = write_config(tmp_path, MOE)
    words = ["--train.dtype=bfloat16", "--train.steps=0", f"--checkpoint.load={step}"]
    run(["train", config, *words, "--parallel.tp=2"], 2)
    found = tensors(newest(tmp_path / "run"))
    assert all(torch.equal(found[name], x) for name, x in tensors(step).items())
    out, _ = said(capsys, "diff", trained, tmp_path / "weights", code=1)
    assert re.search(r"^only in a: exp_avg/embed.weight\n.*\n  and \d+ more \(--all\)$", out, re.M)


def test_largest_files(tmp_path: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "reshard", trained, tmp_path / "out", "--max-bytes", 40_000)
    assert all(f.stat().st_size <= 40_000 for f in (tmp_path / "out").rglob("*.safetensors"))


def test_what_reshard_refuses(
    tmp_path: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, "reshard", trained, tmp_path)
    for words, says in (
        (["reshard", trained, tmp_path], "step-00000003: is there already"),
        (["reshard", trained, tmp_path / "step-00000003"], "give the folder"),
        (["reshard", trained, tmp_path / "x", "--files", 10**5], "cannot be cut into 100000 files"),
        (["reshard", trained, tmp_path / "x", "--max-bytes", 9], "files of at most 9 bytes"),
        (["reshard", tmp_path / "absent", tmp_path / "x"], "neither a step"),
        (["diff", trained, tmp_path / "absent"], "neither a step"),
        (["pin", tmp_path / "absent"], "neither a step"),
    ):
        out, err = said(capsys, *words, code=2)
        assert says in err
        assert out == ""
    file = next((tmp_path / "step-00000003").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert file.name in said(capsys, "reshard", tmp_path, tmp_path / "x", code=2)[1]
    file.write_bytes(content[:-1])
    assert file.name in said(capsys, "diff", trained, tmp_path, code=2)[1]
    assert not (tmp_path / "x").exists()


def test_a_difference_is_short_unless_all_is_asked_for(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["diff", trained / "step-00000002", trained / "step-00000003"]
    short, _ = said(capsys, *words, code=1)
    assert len(short.splitlines()) <= 20
    assert re.search(r"^tensor +largest +relative  elements$", short, re.M)
    assert re.search(r"^  and \d+ more \(--all\)$", short, re.M)
    assert "state step: 2, 3" in short
    assert short.splitlines()[-1] == "different"
    full, _ = said(capsys, *words, "--all", code=1)
    assert "--all" not in full
    rows = re.findall(r"^\S+ +(\d\.\d\de[+-]\d\d)  (\d\.\d\de[+-]\d\d)  \d+ of \S+$", full, re.M)
    assert len(rows) > 40
    relative = [float(row[1]) for row in rows]
    assert relative == sorted(relative, reverse=True)
    found = json.loads(said(capsys, *words, "--json", code=1)[0])
    assert not found["equal"]
    assert len(found["tensors"]["different"]) == len(rows)
    assert found["state"]["step"] == [2, 3]
    assert found["b"]["path"] == str(trained / "step-00000003")
    name, worst = next(iter(found["tensors"]["different"].items()))
    a, b = (tensors(trained / f"step-0000000{n}")[name].double() for n in (2, 3))
    assert worst["largest"] == (a - b).abs().max()
    assert worst["relative"] == worst["largest"] / max(a.abs().max(), b.abs().max())
    assert worst["elements"] == (a != b).sum()
    equal = json.loads(said(capsys, "diff", trained, trained, "--json")[0])
    assert equal["equal"]
    assert not equal["tensors"]["different"]


def test_a_run_keeps_pinned_steps_and_every_mth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    checkpoints = tmp_path / "run/checkpoints"
    words = ["--checkpoint.every=1", "--checkpoint.keep=2", "--checkpoint.keep_every=4"]
    run(["train", config, *words, "--train.steps=3", "--optim.decay=9"])
    _, err = said(capsys, "pin", checkpoints / "step-00000002")
    assert err == f"{checkpoints}/step-00000002: pinned: no run removes it\n"
    assert "pinned" in said(capsys, "inspect", checkpoints / "step-00000002")[0]
    run(["train", config, *words, "--train.steps=7", "--optim.decay=9"])
    kept = sorted(path.name[-1] for path in checkpoints.glob("step-*"))
    assert kept == ["2", "4", "6", "7"]
    said(capsys, "unpin", checkpoints / "step-00000002")
    run(["train", config, *words, "--train.steps=8", "--optim.decay=9"])
    assert sorted(path.name[-1] for path in checkpoints.glob("step-*")) == ["4", "7", "8"]
