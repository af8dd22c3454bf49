"""Runs whose checkpoints lie at a URL are the runs that keep them on a disk."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from runs import assert_same_state, curve, newest, run, write_config

from penteract.checkpoint.io import latest_good, read_manifest
from penteract.cli import main

SECTIONS = {
    "optim": {"decay": 4},
    "train": {"steps": 4, "dtype": "float32"},
    "checkpoint": {"every": 1, "keep": 2},
}


@pytest.fixture(autouse=True)
def no_launcher_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def in_two_layouts(config: Path, *words: str) -> None:
    """Two steps on two data ranks, and two on two of tensor parallelism."""
    run(["train", config, "--train.steps=2", *words], 2)
    ranks = run(["train", config, "--parallel.tp=2", *words], 2)
    assert "step-00000002 at step 2 of 4" in ranks.err[0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    in_two_layouts(write_config(folder, SECTIONS))
    return folder / "run"


@pytest.mark.parametrize("asynchronous", [pytest.param("false", marks=pytest.mark.slow), "true"])
def test_a_run_at_a_url_is_the_plain_run(tmp_path: Path, plain: Path, asynchronous: str) -> None:
    url = f"file://{tmp_path}/there"
    words = [f"--checkpoint.dir={url}", f"--checkpoint.asynchronous={asynchronous}"]
    in_two_layouts(write_config(tmp_path, SECTIONS), *words)
    assert curve(tmp_path / "run") == curve(plain)
    found = latest_good(url, hashes=True)
    assert str(found) == f"{url}/step-00000004"
    assert_same_state(found, newest(plain))
    kept = sorted(path.name for path in (tmp_path / "there").iterdir())
    assert kept == [".lock", "latest", "step-00000003", "step-00000004"]
    assert not (tmp_path / "run/checkpoints").exists()


def test_starting_from_weights_and_from_state_at_a_url(
    tmp_path: Path, plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the commands take it: from there, and to there."""
    there, state, url = plain / "checkpoints", tmp_path / "state", f"file://{tmp_path}/moved"
    assert main(["checkpoint", "reshard", str(there), url]) == 0
    assert main(["checkpoint", "diff", str(there), f"{url}/step-00000004"]) == 0
    for command in ("inspect", "verify", "pin", "unpin"):
        assert main(["checkpoint", command, url]) == 0
    assert main(["generate", url, "--prompt=a", "--max-tokens=2"]) == 0
    capsys.readouterr()
    config = write_config(tmp_path, SECTIONS)
    words = ["train", config, f"--checkpoint.load={url}", "--train.steps=5", "--optim.decay=5"]
    ranks = run(words, 2)
    assert f"starting from the weights of {url}/step-00000004" in ranks.err[0]
    run([*words, f"--log.dir={state}", "--checkpoint.load_state=true"])
    assert read_manifest(newest(state)).state["step"] == 5


def test_a_protocol_that_is_not_there_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as where it is not installed
    config = write_config(tmp_path, SECTIONS)
    for n, word in ((2, "dir=s3://bucket/run"), (1, "load=s3://bucket/run")):
        ranks = run(["train", config, f"--checkpoint.{word}"], n, code=2)
        assert "s3://bucket/run: Install s3fs to access S3" in ranks.err[0]
        assert "Traceback" not in ranks.err[0]
