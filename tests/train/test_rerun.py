"""A bad step is run again before anything is kept: what was to blame, and that nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import assert_same_state, curve, metrics, newest, run, write_config
from torch import Tensor

from penteract.mesh import single
from penteract.parallel.buffers import Buffers
from penteract.testing import run_ranks, world_axis
from penteract.train import run as run_module
from penteract.train.rerun import LAST, Outliers, Seen, add_bits, differing
from penteract.train.run import Run


def config_of(folder: Path, *inject: dict[str, Any], **train: Any) -> Path:
    train = {"inject": list(inject), **train}
    return write_config(folder, {"train": train, "checkpoint": {"every": 2}, "optim": {"decay": 6}})


def report(folder: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run" / f"bad-step-{step:08d}.json").read_text())
    return found


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("layout", [[], ["--parallel.tp=2"], ["--parallel.zero=2"]], ids=str)
def test_another_result_is_hardware(tmp_path: Path, rank: int, layout: list[str]) -> None:
    """A NaN once, on one rank: its name and host, exit code 4, and the step before is good."""
    path = config_of(tmp_path, {"step": 3, "rank": rank})
    ranks = run(["train", path, *layout], 2, code=4)
    for said in ranks.err:
        (line,) = (line for line in said.splitlines() if line.startswith("penteract: step 3"))
        assert "run twice from the same inputs it came out differently: first loss = nan" in line
        named = line.split("What differs: ")[1].split(". ")[0]
        if "tp=2" not in "".join(layout):  # over tp a NaN spreads within the step
            assert named.startswith(f"rank {rank} (")
            assert "," not in named
        assert f"rank {rank} (" in named
    assert newest(tmp_path / "run").name == "step-00000002"
    run(["train", config_of(tmp_path), *layout], 2)
    assert len(curve(tmp_path / "run")) == 6


def test_the_same_again_is_data_or_model(tmp_path: Path) -> None:
    path = config_of(tmp_path, {"step": 3, "rank": 1, "times": 0})
    ranks = run(["train", path], 2, code=1)
    assert "run again from the same inputs: the same" in ranks.err[0]
    found = report(tmp_path, 3)
    assert found["same_again"] is True
    assert len(found["samples"]) == 4
    assert found["first_gradient"]
    assert newest(tmp_path / "run").name == "step-00000002"


def test_the_first_module_with_a_bad_value_is_named(tmp_path: Path) -> None:
    path = config_of(tmp_path)

    def prepare(rank: int) -> None:
        real = Run._gradients

        def spoiling(self: Run, step: int, batches: Any) -> Any:
            if step == 3 and rank == 1:
                weight = dict(self.task.model.named_parameters())
                name = next(n for n in weight if n.endswith("attention.o.weight"))
                with torch.no_grad():
                    weight[name].fill_(float("inf"))
            return real(self, step, batches)

        Run._gradients = spoiling

    ranks = run(["train", path], 2, code=1, prepare=prepare)
    assert report(tmp_path, 3)["first_module"].endswith("attention.o on rank 1")
    assert "not finite first in " in ranks.err[0]


def test_a_step_that_is_skipped_after_a_rerun_changes_nothing(tmp_path: Path) -> None:
    """The same as without reruns, to the bit."""
    inject = {"step": 3, "times": 0}
    for rerun in ("nonfinite", "off"):
        path = config_of(tmp_path, inject, on_nonfinite="skip", rerun=rerun)
        run(["train", path, f"--log.dir={tmp_path / rerun}"], 2)
    assert curve(tmp_path / "nonfinite") == curve(tmp_path / "off")
    assert metrics(tmp_path / "off")[3]["skipped"]
    assert_same_state(newest(tmp_path / "nonfinite"), newest(tmp_path / "off"))


LONG = {"steps": 24, "rerun": "outliers", "outlier": 30.0}


def test_an_outlier_that_comes_again_counts(tmp_path: Path) -> None:
    """The loss is that of the data: the step is kept, and said to be odd."""
    path = config_of(tmp_path, {"step": 20, "kind": "spike", "times": 0}, **LONG)
    ranks = run(["train", path, "--optim.decay=24"], 2)
    assert "step 20 is bad" in ranks.err[0]
    assert report(tmp_path, 20)["same_again"] is True
    lines = metrics(tmp_path / "run")
    assert lines[20]["loss"] > 100 * lines[19]["loss"]
    assert "skipped" not in lines[20]
    assert max(lines) == 24
    assert not (tmp_path / "run" / "bad-step-00000019.json").exists()


def test_an_outlier_that_does_not_come_again_is_hardware(tmp_path: Path) -> None:
    path = config_of(tmp_path, {"step": 20, "rank": 1, "kind": "spike"}, **LONG)
    ranks = run(["train", path, "--optim.decay=24"], 2, code=4)
    assert "What differs: rank 1 (" in ranks.err[0]
    assert newest(tmp_path / "run").name == "step-00000018"


def test_where_nothing_is_deterministic_the_second_result_counts(tmp_path: Path) -> None:
    whole = config_of(tmp_path)
    run(["train", whole, f"--log.dir={tmp_path / 'whole'}"], 2)
    path = config_of(tmp_path, {"step": 3, "rank": 1})

    def prepare(rank: int) -> None:
        run_module.is_deterministic = lambda device: False

    ranks = run(["train", path], 2, prepare=prepare)
    assert "run again from the same inputs: another result" in ranks.err[0]
    assert report(tmp_path, 3)["same_again"] is False
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    assert_same_state(newest(tmp_path / "run"), newest(tmp_path / "whole"))


def test_a_fault_in_a_message_names_no_rank(tmp_path: Path) -> None:
    """Every rank's own gradients are the same twice; only their sum was not."""
    path = config_of(tmp_path)

    def prepare(rank: int) -> None:
        real, left = Buffers.finish, [3]

        def spoiling(self: Buffers) -> Any:
            found = real(self)
            left[0] -= 1
            if left[0] == 0:
                self.buckets[0].own_gradient[0] = float("nan")
            return found

        Buffers.finish = spoiling

    ranks = run(["train", path], 2, code=4, prepare=prepare)
    assert "What differs: no rank's own gradients, so the network or a sum" in ranks.err[0]


def test_an_outlier_is_what_the_rule_says() -> None:
    outliers = Outliers(3.0)
    for i in range(LAST // 2 - 1):
        outliers.add(float(i % 2), 10.0)
    assert outliers.limits() == (float("inf"), float("inf"))
    outliers.add(1.0, 10.0)
    loss, norm = outliers.limits()
    values = [float(i % 2) for i in range(LAST // 2)]
    mean, deviation = torch.tensor(values).mean().item(), torch.tensor(values).std().item()
    assert loss == pytest.approx(mean + 3 * deviation)
    assert norm == 10.0
    assert Outliers(None).limits() == (float("inf"), float("inf"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_sum_of_bits_sees_every_bit(dtype: torch.dtype) -> None:
    def total(x: Tensor) -> int:
        found = torch.zeros((), dtype=torch.int64)
        add_bits(found, x)
        return int(found)

    x = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = {4: torch.int32, 8: torch.int64}[x.element_size()]
    before = total(x)
    for bit in range(8 * x.element_size() - 1):
        other = x.clone()
        other.view(whole)[17] ^= 1 << bit
        assert total(other) != before


def test_a_nan_is_like_itself_and_a_zero_is_not_like_minus_zero() -> None:
    nan = Seen({"loss": float("nan")}, 1.0, 7)
    assert differing(nan, Seen({"loss": -float("nan")}, 1.0, 7), single("world")) is None
    zero, minus = Seen({"loss": 0.0}, 1.0, 7), Seen({"loss": -0.0}, 1.0, 7)
    assert differing(zero, minus, single("world")) == []


def test_all_ranks_decide_alike_where_one_ranks_norm_differs() -> None:
    """After a fault a rank's norm may be its own: none may go on while another raises."""

    def decided() -> list[str] | None:
        second = Seen({"loss": 1.0}, 2.0, 7)
        first = second if world_axis().rank == 0 else Seen({"loss": 1.0}, float("nan"), 7)
        return differing(first, second, world_axis("world"))

    assert run_ranks(decided, 2) == [[], []]


def test_an_outlier_in_float16_leaves_the_loss_scale(tmp_path: Path) -> None:
    path = config_of(tmp_path, {"step": 20, "kind": "spike", "times": 0}, **LONG)
    words = ["--train.dtype=float16", "--optim.loss_scale=16", "--optim.decay=24"]
    run(["train", path, *words], 2)
    lines = metrics(tmp_path / "run")
    assert report(tmp_path, 20)["same_again"] is True
    assert [lines[step]["loss_scale"] for step in (19, 20, 21)] == [16, 16, 16]
    assert "skipped" not in lines[20]
