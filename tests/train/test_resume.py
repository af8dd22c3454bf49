"""A run that stopped and went on is the run that never stopped."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import (
    assert_same_state,
    curve,
    evaluations,
    metrics,
    newest,
    numbers,
    run,
    tensors,
    write_config,
    write_corpus,
)

import penteract.train.loop
from penteract.checkpoint.io import read_manifest

SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"dropout": 0.1},
    "optim": {"decay": 10},
    "train": {"steps": 10, "eval_every": 4},
    "checkpoint": {"every": 5},
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, SECTIONS)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    run(["train", write_config(folder, SECTIONS)])
    return folder / "run"


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_resuming_is_going_on_to_the_bit(tmp_path: Path, config: Path, dtype: str) -> None:
    words = ["train", config, f"--train.dtype={dtype}"]
    run([*words, f"--log.dir={tmp_path}/whole"])
    run([*words, "--train.steps=5"])
    assert newest(tmp_path / "run").name == "step-00000005"
    ranks = run(words)
    assert "continuing" in ranks.err[0]
    assert "at step 5 of 10" in ranks.err[0]
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    assert evaluations(tmp_path / "run")[10] == evaluations(tmp_path / "whole")[10]
    assert_same_state(newest(tmp_path / "run"), newest(tmp_path / "whole"))
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert len([line for line in lines if '"loss"' in line]) == 10, "lines are appended"


def test_resuming_at_every_step(tmp_path: Path, config: Path, undisturbed: Path) -> None:
    for steps in range(1, 11):
        run(["train", config, f"--train.steps={steps}", "--optim.warmup=2"])
    assert curve(tmp_path / "run") == curve(undisturbed)
    assert_same_state(newest(tmp_path / "run"), newest(undisturbed))


def test_resuming_on_other_numbers_of_ranks(
    tmp_path: Path, config: Path, undisturbed: Path
) -> None:
    for steps, n in ((3, 1), (6, 3), (10, 2)):
        run(["train", config, f"--train.steps={steps}"], n)
    np.testing.assert_allclose(curve(tmp_path / "run"), curve(undisturbed), rtol=1e-12)
    assert_same_state(newest(tmp_path / "run"), newest(undisturbed), tolerance=1e-12)


def test_resuming_in_other_layouts(tmp_path: Path, config: Path, undisturbed: Path) -> None:
    """257 tokens: padded to 272 on 2 ranks, uneven on 3; files hold those that are real."""
    padded = ["--parallel.vocab_multiple=8", "--parallel.sp=true"]
    for steps, n, layout in (
        (3, 1, []),
        (6, 4, ["--parallel.tp=2", *padded]),
        (8, 3, ["--parallel.tp=3", "--parallel.recompute=layer"]),
        (10, 1, ["--parallel.vocab_multiple=4"]),
    ):
        run(["train", config, f"--train.steps={steps}", *layout], n)
        assert tensors(newest(tmp_path / "run"))["head.weight"].shape == (257, 16)
    np.testing.assert_allclose(curve(tmp_path / "run"), curve(undisturbed), rtol=1e-12)
    assert_same_state(newest(tmp_path / "run"), newest(undisturbed), tolerance=1e-11)


def test_the_weights_are_those_that_were_saved(tmp_path: Path, config: Path) -> None:
    """The first loss after a resume is that of the saved weights; a fresh start would show ln v."""
    run(["train", config, "--optim.lr=0.05", "--train.steps=8"])
    run(["train", config, "--optim.lr=0.05", "--train.steps=9"])
    line = metrics(tmp_path / "run")
    assert line[9]["loss"] < line[1]["loss"] - 0.5


def test_more_steps_with_the_decay_kept(tmp_path: Path, config: Path) -> None:
    whole = ["train", config, "--train.steps=12", "--optim.decay=20"]
    run([*whole, f"--log.dir={tmp_path}/whole"])
    run(["train", config, "--train.steps=7", "--optim.decay=20"])
    run(whole)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_a_step_that_is_done_already_says_so(tmp_path: Path, config: Path) -> None:
    run(["train", config, "--train.steps=5"])
    before = sorted((tmp_path / "run").rglob("*.safetensors")), metrics(tmp_path / "run")
    for steps in (5, 3):
        ranks = run(["train", config, f"--train.steps={steps}", "--optim.decay=5"])
        assert f"step 5 of {steps} is done already; raise train.steps to go on" in ranks.err[0]
    after = sorted((tmp_path / "run").rglob("*.safetensors")), metrics(tmp_path / "run")
    assert before == after


def test_a_new_learning_rate_applies_at_once(tmp_path: Path, config: Path) -> None:
    words = ["train", config, "--optim.schedule=constant"]
    run([*words, "--train.steps=5"])
    run([*words, "--train.steps=6"])
    ranks = run([*words, "--train.steps=7", "--optim.lr=0.5"])
    assert "optim.lr: saved 0.01, now 0.5" in ranks.err[0]
    line = metrics(tmp_path / "run")
    assert [line[step]["lr"] for step in (5, 6, 7)] == [0.01, 0.01, 0.5]
    steps = [newest(tmp_path / "run").with_name(f"step-{n:08d}") for n in (5, 6, 7)]
    heads = [tensors(step)["head.weight"] for step in steps]
    moved = [(b - a).abs().max().item() for a, b in pairwise(heads)]
    assert moved[1] > 10 * moved[0]


def test_another_run_is_refused_with_every_difference(tmp_path: Path, config: Path) -> None:
    write_corpus(tmp_path / "other", seed=1)
    run(["train", config, "--train.steps=2"])
    before = curve(tmp_path / "run")
    options = {
        "--model.ffn=32": "model.ffn: saved 24, now 32",
        "--model.tied=true": "model.tied: saved False, now True",
        "--model.rope_theta=5": "model.rope_theta: saved 10000.0, now 5.0",
        "--data.seq=13": "data.seq: saved 12, now 13",
        "--data.seed=1": "data.seed: saved 0, now 1",
        '--data.train=["other"]': "data.files: saved ",
        "--data.valid_fraction=0.2": "data.files: saved ",
    }
    for option, difference in options.items():
        ranks = run(["train", config, option], code=2)
        assert difference in ranks.err[0], option
        assert "checkpoint.load" in ranks.err[0]
        assert "Traceback" not in ranks.err[0]
    ranks = run(["train", config, *options], 2, code=2)
    for difference in options.values():
        assert difference in ranks.err[0]
    assert curve(tmp_path / "run") == before
    assert "ffn = 24" in (tmp_path / "run/config.toml").read_text(), "it is still the run's own"
    ranks = run(["train", config, "--train.dtype=float32"], code=2)
    assert "float64" in ranks.err[0]


def test_another_tokenizer_is_refused(tmp_path: Path, config: Path) -> None:
    run(["train", config, "--train.steps=2"])
    manifest = newest(tmp_path / "run") / "manifest.json"
    record = json.loads(manifest.read_text())
    record["state"]["tokenizer"] = "another"
    manifest.write_text(json.dumps(record))
    ranks = run(["train", config], code=2)
    assert "tokenizer: saved 'another', now " in ranks.err[0]


def test_another_batch_goes_on_with_the_next_sample(tmp_path: Path, config: Path) -> None:
    """A changed batch must not move the cursor: refused, unless the ramp keeps what was done."""
    run(["train", config, "--train.steps=5"])
    larger = ["train", config, "--train.global_batch=6", "--train.steps=7"]
    ranks = run(larger, code=2)
    assert "its 5 steps took 20 samples" in ranks.err[0]
    assert "they would have taken 30" in ranks.err[0]
    assert "train.ramp = [[5, 4]]" in ranks.err[0]
    run([*larger, "--train.ramp=[[5, 4]]"])
    assert read_manifest(newest(tmp_path / "run")).state["cursor"] == 5 * 4 + 2 * 6
    run([*larger, "--train.ramp=[[5, 4]]", f"--log.dir={tmp_path}/whole"])
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    # The advice keeps a ramp that was under way.
    ranks = run(["train", config, "--train.global_batch=2", "--train.steps=9"], code=2)
    assert "train.ramp = [[5, 4], [7, 6]]" in ranks.err[0]


def test_other_logging_and_saving_is_no_other_run(tmp_path: Path, config: Path) -> None:
    run(["train", config, "--train.steps=5"])
    words = [
        "--log.every=3",
        "--checkpoint.every=1",
        "--train.micro_batch=2",
        "--train.eval_every=0",
    ]
    run(["train", config, *words], 2)
    assert newest(tmp_path / "run").name == "step-00000010"


def test_another_backend_of_attention_goes_on(
    tmp_path: Path, config: Path, undisturbed: Path
) -> None:
    run(["train", config, "--train.steps=5"])
    run(["train", config, "--model.attention=plain"])
    np.testing.assert_allclose(curve(tmp_path / "run"), curve(undisturbed), rtol=1e-12)


def test_loading_weights_starts_a_fresh_run(tmp_path: Path, config: Path) -> None:
    write_corpus(tmp_path / "other", seed=1)
    run(["train", config, "--train.steps=5"])
    checkpoints = tmp_path / "run/checkpoints"
    fresh = ["--train.steps=2", f"--log.dir={tmp_path}/fresh", '--data.train=["other"]']
    for n, source in ((1, checkpoints), (2, checkpoints / "step-00000005")):
        shutil.rmtree(tmp_path / "fresh", ignore_errors=True)
        ranks = run(["train", config, *fresh, f"--checkpoint.load={source}"], n)
        assert "starting from the weights of" in ranks.err[0]
        line = metrics(tmp_path / "fresh")
        assert sorted(line) == [1, 2]
        assert (line[1]["tokens"], line[1]["lr"]) == (48, 0.005)
        assert line[1]["loss"] < metrics(tmp_path / "run")[1]["loss"] - 0.3
    # A directory that holds steps goes on with them: the load was for its start.
    ranks = run(["train", config, *fresh, "--train.steps=3", f"--checkpoint.load={checkpoints}"])
    assert "continuing" in ranks.err[0]


def test_loaded_weights_are_those_of_the_checkpoint(tmp_path: Path, config: Path) -> None:
    run(["train", config, "--train.steps=5"])
    source = tmp_path / "run/checkpoints"
    for dtype in ("float64", "bfloat16"):
        if dtype == "bfloat16":
            source = tmp_path / "narrow/checkpoints"
            run(["train", config, "--train.steps=2", "--train.dtype=bfloat16",
                 f"--log.dir={tmp_path}/narrow"])  # fmt: skip
        folder = tmp_path / f"from-{dtype}"
        run(["train", config, "--train.steps=0", "--optim.warmup=0", f"--train.dtype={dtype}",
             f"--log.dir={folder}", f"--checkpoint.load={source}"])  # fmt: skip
        saved, loaded = tensors(newest(source.parent)), tensors(newest(folder))
        for name, value in loaded.items():
            if name.startswith("exp_avg"):
                assert not value.any(), name
            else:
                assert torch.equal(value, saved[name]), name


def test_one_rank_chooses_the_step_that_all_load(tmp_path: Path, config: Path) -> None:
    """Another run may save a newer one just then: ranks that look each for themselves differ."""
    run(["train", config, "--train.steps=4", "--checkpoint.every=2"])

    def prepare(rank: int) -> None:
        find = penteract.train.loop.find_step
        older = tmp_path / "run/checkpoints/step-00000002"
        penteract.train.loop.find_step = lambda path: find(older if rank else path)

    words = [f"--checkpoint.load={tmp_path}/run/checkpoints", f"--log.dir={tmp_path}/fresh"]
    ranks = run(["train", config, *words, "--train.steps=1"], 2, prepare=prepare)
    assert "starting from the weights of" in ranks.err[0]
    run(["train", config, *words[:1], "--train.steps=1", f"--log.dir={tmp_path}/alone"])
    found, alone = (curve(tmp_path / name) for name in ("fresh", "alone"))
    np.testing.assert_allclose(found, alone, rtol=1e-12)


def test_loading_the_state_too_goes_on_elsewhere(
    tmp_path: Path, config: Path, undisturbed: Path
) -> None:
    run(["train", config, "--train.steps=5"])
    words = [f"--checkpoint.load={tmp_path}/run/checkpoints", "--checkpoint.load_state=true"]
    ranks = run(["train", config, *words, f"--log.dir={tmp_path}/elsewhere"])
    assert "its moments, its step 5" in ranks.err[0]
    whole = metrics(undisturbed)
    later = metrics(tmp_path / "elsewhere")
    assert sorted(later) == [6, 7, 8, 9, 10]
    assert [numbers(later[s]) for s in later] == [numbers(whole[s]) for s in later]
    assert_same_state(newest(tmp_path / "elsewhere"), newest(undisturbed))
    run(["train", config, *words, "--train.steps=5", f"--log.dir={tmp_path}/there"])
    assert newest(tmp_path / "there").name == "step-00000005", "the last step is always saved"


def test_weights_of_another_model_are_refused(tmp_path: Path, config: Path) -> None:
    run(["train", config, "--train.steps=2"])
    words = [f"--log.dir={tmp_path}/fresh", f"--checkpoint.load={tmp_path}/run/checkpoints"]
    ranks = run(["train", config, *words, "--model.ffn=32", "--model.layers=2"], code=2)
    assert "layers.0.mlp" in ranks.err[0]
    assert "layers.1." in ranks.err[0]
    assert not list((tmp_path / "fresh").glob("checkpoints/step-*"))


def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path, config: Path) -> None:
    run(["train", config, "--train.steps=5"])
    path = next(newest(tmp_path / "run").glob("*.safetensors"))
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for damage in (whole[:-1], bytes(flipped)):
        path.write_bytes(damage)
        ranks = run(["train", config], code=2)
        assert path.name in ranks.err[0]
        assert sorted(metrics(tmp_path / "run")) == [1, 2, 3, 4, 5]
    path.write_bytes(whole)
    run(["train", config])


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, config: Path, undisturbed: Path, damage: str
) -> None:
    run(["train", config, "--train.steps=8"])
    path = next(newest(tmp_path / "run").glob("*.safetensors"))
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole if damage == "flipped" else path.read_bytes()[:-1])
    ranks = run(["train", config], 2)
    assert "step 8 is damaged" in ranks.err[0]
    assert path.name in ranks.err[0]
    assert "at step 5 of 10" in ranks.err[0]
    np.testing.assert_allclose(curve(tmp_path / "run"), curve(undisturbed), rtol=1e-12)


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_without_falling_back_a_damaged_step_stops_the_run(
    tmp_path: Path, config: Path, damage: str
) -> None:
    run(["train", config, "--train.steps=8"])
    path = next(newest(tmp_path / "run").glob("*.safetensors"))
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole if damage == "flipped" else path.read_bytes()[:-1])
    ranks = run(["train", config, "--checkpoint.fall_back=false"], 2, code=2)
    for said in ranks.err:
        assert f"step 8 is damaged: {path}: " in said
        assert f"the newest good step is {path.parent.with_name('step-00000005')}\n" in said
        assert "Traceback" not in said
    assert sorted(metrics(tmp_path / "run")) == list(range(1, 9))


def test_sizes_alone_do_not_see_a_flipped_bit(tmp_path: Path, config: Path) -> None:
    """What the option is for: nothing is read twice. A file that was cut is found all the same."""
    run(["train", config, "--train.steps=8"])
    path = next(newest(tmp_path / "run").glob("*.safetensors"))
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    sizes = ["train", config, "--checkpoint.verify=sizes", "--train.steps=9"]
    load = [f"--checkpoint.load={path.parent}", f"--log.dir={tmp_path}/other"]
    state = ["--checkpoint.load_state=true", f"--log.dir={tmp_path}/another"]
    for words in (sizes, [*sizes, *load], [*sizes, *load, *state]):
        ranks = run(words, 2)
        if words == sizes:
            assert "at step 8 of 9" in ranks.err[0]
        else:
            ranks = run([*words, "--checkpoint.verify=hashes", f"--log.dir={tmp_path}/x"], code=2)
            assert path.name in ranks.err[0]
    shutil.rmtree(path.parent.with_name("step-00000009"))
    path.write_bytes(whole[:-1])
    ranks = run(sizes)
    assert "step 8 is damaged" in ranks.err[0]
    assert "at step 5 of 9" in ranks.err[0]


def test_a_step_that_was_never_finished_is_passed_over(
    tmp_path: Path, config: Path, undisturbed: Path
) -> None:
    run(["train", config, "--train.steps=5"])
    half = newest(tmp_path / "run").with_name("step-00000009")
    half.mkdir()
    (half / "rank-00000.safetensors").write_bytes(b"half")
    ranks = run(["train", config])
    assert f"{half}: passed over: it has no manifest" in ranks.err[0]
    assert curve(tmp_path / "run") == curve(undisturbed)


def test_an_epochs_end_is_no_end(tmp_path: Path) -> None:
    """A corpus of 10 samples: 12 steps of 4 go through it nearly five times, with stops between."""
    write_corpus(tmp_path / "text", tokens=120)
    sections = {"data": {"valid_fraction": 0.0}, "train": {"steps": 12}, "optim": {"decay": 12}}
    config = write_config(tmp_path, sections)
    run(["train", config, f"--log.dir={tmp_path}/whole"])
    for steps in (3, 5, 6, 10, 12):
        run(["train", config, f"--train.steps={steps}"])
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
