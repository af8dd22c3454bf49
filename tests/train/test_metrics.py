"""The record of a run: its file after kills, and numbers that are short to read."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from penteract.config import ConfigError
from penteract.train.metrics import Metrics, short

LINE = dict.fromkeys(
    ["loss", "grad_norm", "lr", "tokens_per_second", "flops_per_second", "step_ms", "memory_bytes"],
    1.0,
)


def test_short_numbers() -> None:
    assert [short(x) for x in (0, 0.5, 12, 1234567.0, 5.147e10, 2e18)] == [
        "0", "0.5", "12", "1.23M", "51.5G", "2e+03P",
    ]  # fmt: skip


def test_lines_are_appended_after_a_cut_one(tmp_path: Path) -> None:
    """A kill may cut the last line short; what a later run writes must not be glued to it."""
    whole = '{"step": 1}\n'
    for left in ("", whole, whole + '{"step": 2, "lo'):
        (tmp_path / "metrics.jsonl").write_text(left)
        metrics = Metrics(tmp_path, steps=3, every=1)
        metrics.step({"step": 3, **LINE})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        metrics.close()
        assert json.loads(lines[-1])["step"] == 3, "written as it happens"
        assert "\n".join(lines[:-1]) == left.rstrip("\n")


def test_a_skipped_step_says_so_and_has_no_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = Metrics(tmp_path, steps=3, every=1, tensorboard=True)
    nothing = {"loss": None, "grad_norm": None}
    metrics.step({"step": 2, **LINE, **nothing, "skipped": True, "loss_scale": 512.0})
    metrics.close()
    assert "step      2  skipped: loss or gradient not finite  scale 512  lr 1 " in (
        capsys.readouterr().err
    )
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (line["loss"], line["grad_norm"], line["skipped"]) == (None, None, True)


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = Metrics(tmp_path / "none", steps=3, every=1, active=False)
    metrics.step({"step": 1, **LINE})
    metrics.evaluation(1, {"a": 1.0})
    metrics.say("nothing")
    metrics.close()
    assert not (tmp_path / "none").exists()
    assert capsys.readouterr().err == ""


def test_a_hopeless_loss_has_a_perplexity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = Metrics(tmp_path, steps=3, every=1)
    metrics.evaluation(1, {"a": 5000.0})
    metrics.close()
    assert "loss 5000.0000  perplexity 1" in capsys.readouterr().err


def test_missing_tensorboard_is_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if "tensorboard" in name:
            raise ImportError("no tensorboard here")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r"log.tensorboard = true needs tensorboard"):
        Metrics(tmp_path, steps=3, every=1, tensorboard=True)
