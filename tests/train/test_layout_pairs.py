"""A checkpoint of one layout, read in another: equal to the bit, and it goes on alike."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
from runs import assert_same_state, metrics, newest, run, write_config

STEPS = 3
EXPERTS = {"experts": 4, "topk": 2, "ffn": 12, "balance": "bias", "capacity": 1.0}

# Kind of model and optimizer: (sections, {layout: (ranks, keys of [parallel])}).
Layouts = dict[str, tuple[int, dict[str, Any]]]
KINDS: dict[str, tuple[dict[str, dict[str, Any]], Layouts]] = {
    "dense": (
        {},
        {
            "one": (1, {}),
            "tp-sp-zero1": (4, {"tp": 2, "sp": True, "zero": 1, "vocab_multiple": 8}),
            "cp-zero3": (4, {"cp": 2, "zero": 3}),
            "pp-chunks": (2, {"pp": 2, "chunks": 2, "schedule": "interleaved"}),
            "uneven-tp": (3, {"tp": 3}),
        },
    ),
    "moe": (
        {"moe": EXPERTS},
        {
            "one": (1, {}),
            "ep-zero1": (4, {"ep": 2, "zero": 1}),
            "tp-etp1": (4, {"tp": 2, "sp": True, "ep": 4, "etp": 1}),
            "etp-only": (2, {"etp": 2, "zero": 2}),
            "pp-cp-ep": (8, {"pp": 2, "cp": 2, "ep": 4, "zero": 1}),
        },
    ),
    "tied": (
        {"model": {"tied": True}},
        {
            "replicas": (4, {"zero": 1, "replicas": 2}),
            "pp-tp": (4, {"pp": 2, "tp": 2, "vocab_multiple": 4}),
            "zero3": (3, {"zero": 3}),
        },
    ),
    "muon": (
        {"moe": EXPERTS, "optim": {"name": "muon"}},
        {
            "zero1": (2, {"zero": 1}),
            "tp-ep": (4, {"tp": 2, "ep": 2}),
            "pp-zero1": (4, {"pp": 2, "zero": 1}),
        },
    ),
    "float16": (
        {"train": {"dtype": "float16"}},
        {
            "zero3": (2, {"zero": 3}),
            "tp-zero1": (4, {"tp": 2, "zero": 1}),
            "pp": (2, {"pp": 2}),
        },
    ),
    "narrow moments": (
        {"train": {"dtype": "bfloat16"}, "optim": {"moments": "bfloat16"}, "moe": EXPERTS},
        {"zero2": (2, {"zero": 2}), "ep": (2, {"ep": 2}), "tp": (2, {"tp": 2, "sp": True})},
    ),
}
PAIRS = [
    (kind, *pair)
    for kind, (_, layouts) in KINDS.items()
    for pair in itertools.permutations(layouts, 2)
]


def train(kind: str, layout: str, folder: Path, *words: str, steps: int) -> None:
    ranks, keys = KINDS[kind][1][layout]
    options = [f"--parallel.{key}={str(value).lower()}" for key, value in keys.items()]
    run(["train", folder / "run.toml", *options, f"--train.steps={steps}", *words], ranks)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """{kind: its folder}, where runs are kept by the name of their layout."""
    found = {}
    for kind, (sections, _) in KINDS.items():
        folder = found[kind] = tmp_path_factory.mktemp("source")
        base = {
            "model": {"layers": 3, "dropout": 0.1},
            "optim": {"decay": 9},
            "train": {"micro_batch": 1, "global_batch": 8},
        }
        write_config(folder, {name: base.get(name, {}) | sections.get(name, {})
                              for name in base | sections})  # fmt: skip
    return found


def saved(kind: str, layout: str, folder: Path) -> Path:
    """The run in its first layout, up to `STEPS`; and one step further, in another directory."""
    if not (folder / layout).exists():
        train(kind, layout, folder, f"--log.dir={folder}/{layout}", steps=STEPS)
        shutil.copytree(folder / layout, folder / f"{layout}-on")
        train(kind, layout, folder, f"--log.dir={folder}/{layout}-on", steps=STEPS + 1)
    return folder / layout


@pytest.mark.slow
@pytest.mark.xdist_group("layout_pairs")
@pytest.mark.parametrize(("kind", "before", "after"), PAIRS)
def test_a_step_of_one_layout_goes_on_in_another(
    tmp_path: Path, sources: dict[str, Path], kind: str, before: str, after: str
) -> None:
    folder = sources[kind]
    source = saved(kind, before, folder)
    load = f"--checkpoint.load={source}/checkpoints", "--checkpoint.load_state=true"
    words = [f"--log.dir={tmp_path}/there", *load]
    # No step to be made: what was loaded is written again as it is.
    train(kind, after, folder, *words, steps=STEPS)
    assert_same_state(newest(tmp_path / "there"), newest(source))

    train(kind, after, folder, *words, steps=STEPS + 1)
    found, wanted = (metrics(f)[STEPS + 1] for f in (tmp_path / "there", folder / f"{before}-on"))
    exact = KINDS[kind][0].get("train", {}).get("dtype") is None
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-9 if exact else 5e-3)
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-8 if exact else 5e-2)


def test_there_are_enough_pairs() -> None:
    assert len(PAIRS) >= 40
