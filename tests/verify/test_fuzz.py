"""Random cases are functions of (seed, number); shrinking ends at the smallest that fails."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from penteract.config import Config
from penteract.config_file import load
from penteract.verify.fuzz import (
    Drawn,
    case_toml,
    draw,
    fields_with_examples,
    layout_text,
    possible,
    shrink_case,
)
from penteract.verify.layouts import parse_layout


def cases(n: int, *, seed: int = 1, max_world: int = 8) -> list[Drawn]:
    return [draw(seed, i, max_world=max_world, refusals=Counter()) for i in range(n)]


def test_a_case_is_a_function_of_seed_and_number() -> None:
    first = cases(20)
    assert [d.case for d in first] == [d.case for d in cases(20)]
    assert first[7].case == draw(1, 7, max_world=8, refusals=Counter()).case
    assert [d.case for d in first] != [d.case for d in cases(20, seed=2)]


def test_cases_cover_every_example_and_most_are_on_several_ranks() -> None:
    drawn = cases(300)
    for key, field in fields_with_examples():
        tried = {str(d.case[key]) for d in drawn if key in d.case}  # not all have experts
        possible_here = {str(x) for x in field.examples or []}
        assert possible_here <= tried, key
    worlds = Counter(d.layout.world for d in drawn)
    assert worlds[1] < 30
    assert max(worlds) == 8
    split = sum(d.layout.config.parallel.tp == 1 for d in drawn)
    assert 60 < split < 240


def test_refusals_are_counted_by_rule() -> None:
    refusals: Counter[str] = Counter()
    for number in range(50):
        draw(1, number, max_world=2, refusals=refusals)
    assert refusals["model.heads = n is no multiple of model.kv_heads = n"] > 5
    assert refusals["more than 2 ranks"] > 5


@pytest.mark.parametrize("number", range(12))
def test_what_is_written_down_reads_back_as_the_case(number: int, tmp_path: Path) -> None:
    drawn = draw(4, number, max_world=8, refusals=Counter())
    file = tmp_path / "case.toml"
    file.write_text(case_toml(drawn.case))
    read: Config = load(file)
    assert read.model == drawn.config.model
    assert (read.train, read.optim) == (drawn.config.train, drawn.config.optim)
    layout = parse_layout(layout_text(drawn.case), read)
    assert (layout.world, layout.values) == (drawn.layout.world, drawn.layout.values)


def test_shrinking_finds_the_smallest_case_that_fails() -> None:
    """The fault needs sp on two ranks or more, at least 2 key/value heads, and a bias."""
    tried = []

    def fails(drawn: Drawn) -> bool:
        tried.append(drawn)
        model, parallel = drawn.config.model, drawn.layout.config.parallel
        several = parallel.tp > 1 and (model.kv_heads or 0) > 1
        return parallel.sp and several and bool(model.bias)

    start = next(d for d in cases(100, seed=9) if fails(d))
    tried.clear()
    smallest = possible(shrink_case(start.case, fails))
    model, parallel = smallest.config.model, smallest.layout.config.parallel
    assert layout_text(smallest.case) == "tp=2,sp=true"
    assert (model.kv_heads, model.layers, model.hidden, model.bias) == (2, 1, 8, True)
    assert parallel.recompute == ()
    assert len(tried) <= 60


def test_shrinking_a_case_that_never_fails_again_keeps_it() -> None:
    start = cases(1)[0]
    assert shrink_case(start.case, lambda _: False) == start.case


def test_shrinking_ends_when_everything_fails() -> None:
    start = cases(1, seed=5)[0]
    smallest = possible(shrink_case(start.case, lambda _: True))
    assert smallest.layout.world == 1
    assert smallest.layout.text == ""
