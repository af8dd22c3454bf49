"""What `--layout` takes and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from penteract.config import Config, ConfigError, ParallelConfig, resolve
from penteract.config_file import from_dict
from penteract.verify.layouts import parse_layout, reference


def config(**parallel: Any) -> Config:
    model = {"layers": 1, "hidden": 8, "ffn": 8, "heads": 2, "vocab": 11}
    values = {"model": model, "parallel": parallel, "train": {"steps": 1, "micro_batch": 2}}
    return resolve(from_dict(values))


@pytest.mark.parametrize(
    ("text", "world", "values"),
    [
        ("", 1, {"dp": 1}),
        ("dp=3", 3, {"dp": 3}),
        ("tp=2", 2, {"tp": 2, "dp": 1}),
        (" tp = 2 , sp = true ", 2, {"tp": 2, "sp": True, "dp": 1}),
        ("tp=2,dp=2", 4, {"tp": 2, "dp": 2}),
        ("parallel.tp=2", 2, {"tp": 2, "dp": 1}),
        ("tp=4,etp=2", 4, {"tp": 4, "etp": 2, "dp": 1}),
        ("tp=2,etp=4", 4, {"tp": 2, "etp": 4, "dp": 2}),  # the least dp of both grids
        ('recompute="attention,mlp"', 1, {"recompute": ("attention", "mlp"), "dp": 1}),
        ("recompute='mlp',dp=2", 2, {"recompute": ("mlp",), "dp": 2}),
        ('recompute=["mlp","core"]', 1, {"recompute": ("mlp", "core"), "dp": 1}),
        ("recompute=layer/2", 1, {"recompute": ("layer/2",), "dp": 1}),
        ("order=tp-dp,tp=2,dp=2", 4, {"tp": 2, "order": "tp-dp", "dp": 2}),
        ("train.micro_batch=3,dp=2", 2, {"dp": 2, "train.micro_batch": 3}),
    ],
)
def test_a_layout_is_keys_of_parallel_and_dp(text: str, world: int, values: dict[str, Any]) -> None:
    layout = parse_layout(text, config())
    assert (layout.world, layout.values) == (world, values)
    assert layout.grid.world == world


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tq=2", "tq: unknown key"),
        ("vocab_multipl=2", "did you mean vocab_multiple?"),
        ("train.microbatch=2", "did you mean train.micro_batch?"),
        ("tp", "'tp' is not KEY=VALUE"),
        ("tp=", "'tp=' is not KEY=VALUE"),
        ("tp=2,", "'' is not KEY=VALUE"),
        ("tp=2,tp=4", "tp is given twice"),
        ("tp=2,parallel.tp=4", "tp is given twice"),
        ("tp=two", "parallel.tp = 'two'"),
        ("tp=0", "parallel.tp = 0"),
        ("dp=0", "dp = 0 is not a whole number"),
        ("dp=true", "dp = True is not a whole number"),
        ("recompute=layers", "should be one of layer, attention, mlp, core"),
        ("tp=4,etp=3,dp=2", "world = 8 is not a multiple of etp*ep*pp"),
        ("tp=100000000", "tp = 100000000 is outside"),
        ("dp=1000", "1000 ranks are 1000 processes"),
    ],
)
def test_wrong_layouts_are_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_layout(text, config())
    assert says in str(caught.value)
    assert f'--layout "{text}"' in str(caught.value)


@pytest.mark.parametrize(
    "key", ["model.layers", "data.seq", "optim.eps", "train.steps", "train.seed", "train.dtype",
            "train.global_batch", "train.label_smoothing", "train.z_loss", "train.ramp"],
)  # fmt: skip
def test_a_key_that_changes_what_is_trained_is_refused_with_the_way_out(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} changes what is trained.*give --{key}"):
        parse_layout(f"dp=2,{key}=1", config())


def with_model(**changes: Any) -> Config:
    found = config()
    return dataclasses.replace(found, model=dataclasses.replace(found.model, **changes))


def test_another_backend_of_attention_trains_the_same() -> None:
    layout = parse_layout("cp=2,model.attention=plain", config())
    assert (layout.config.model.attention, layout.values["model.attention"]) == ("plain",) * 2
    assert reference(config()).model.attention == "flash"
    for key, value in (("softcap", 1.5), ("attention_dropout", 0.1)):
        with pytest.raises(ConfigError, match=f"model.{key} = {value}.*give"):
            parse_layout("model.attention=flash", with_model(attention="plain", **{key: value}))


@pytest.mark.parametrize(
    "model", [{"dropout": 0.1}, {"attention_dropout": 0.2, "attention": "plain"}]
)
def test_another_micro_batch_is_refused_under_dropout(model: dict[str, Any]) -> None:
    (key, rate), *_ = model.items()
    dropping = with_model(**model)
    said = f"with model.{key} = {rate}: masks are those of a micro-batch.*give --model.{key} 0"
    with pytest.raises(ConfigError, match=said):
        parse_layout("train.micro_batch=1", dropping)
    assert parse_layout("train.micro_batch=2", dropping).world == 1  # what it is already


def test_sizes_of_the_file_are_left_out_and_other_keys_kept() -> None:
    asked = config(tp=4, sp=True, recompute=["mlp"])
    layout = parse_layout("dp=2", asked)
    assert layout.values == {"sp": True, "recompute": ("mlp",), "dp": 2}
    assert layout.world == 2


def test_groups_of_the_file_are_checked_only_where_heads_are_exchanged_in_them() -> None:
    asked = config(cp_inner=2)
    for text in ("cp=3", "cp=3,cp_comm=all_to_all", "cp_comm=hierarchical", "dp=3"):
        assert parse_layout(text, asked).config.parallel.cp_inner == 2
    assert parse_layout("cp=4,cp_comm=hierarchical", asked).world == 4
    with pytest.raises(ConfigError, match=r"cp_inner = 2 does not divide cp = 3; .* 1 or 3"):
        parse_layout("cp=3,cp_comm=hierarchical", asked)


def test_the_reference_has_every_key_at_its_default() -> None:
    alone = reference(config(tp=4, sp=True, recompute=["mlp"]))
    assert dataclasses.replace(alone.parallel, etp=None) == ParallelConfig()
