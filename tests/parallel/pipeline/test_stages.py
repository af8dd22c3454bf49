"""Cuts lose no layer, are even or cheapest as they promise, and wrong words say what is wrong."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penteract.errors import UserError
from penteract.parallel.pipeline.stages import cut

COSTS = {"embed": 0.5, "norm": 0.25, "head": 3.0}


def names(layers: int) -> tuple[str, ...]:
    return ("embed", *(f"layers.{i}" for i in range(layers)), "norm", "head")


def counts(stages: tuple[tuple[str, ...], ...]) -> list[int]:
    return [sum(name.startswith("layers.") for name in stage) for stage in stages]


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.integers(0, 40), st.integers(1, 30))
def test_an_even_cut_differs_by_at_most_one_and_loses_nothing(layers: int, stages: int) -> None:
    found = cut(names(layers), stages)
    assert len(found) == stages
    assert sum(found, ()) == names(layers)
    assert max(counts(found)) - min(counts(found)) <= 1
    assert found[0][0] == "embed"
    assert found[-1][-2:] == ("norm", "head")


def test_what_does_not_divide_goes_to_the_middle() -> None:
    assert counts(cut(names(10), 4)) == [2, 3, 3, 2]
    assert cut(names(2), 4) == (("embed",), ("layers.0",), ("layers.1",), ("norm", "head"))
    assert cut(names(1), 5)[1] == ()


def every_cut(items: tuple[str, ...], stages: int) -> list[tuple[tuple[str, ...], ...]]:
    """All cuts whose first and last stage hold something."""
    inner = range(1, len(items))
    bounds = {
        tuple(sorted(c))
        for c in combinations([i for i in inner for _ in range(stages)], stages - 1)
    }
    return [tuple(items[a:b] for a, b in pairwise((0, *c, len(items)))) for c in bounds]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_a_cut_by_cost_has_the_cheapest_most_expensive_stage(layers: int, stages: int) -> None:
    cost = {name: COSTS.get(name, 1.0 + i % 3) for i, name in enumerate(names(layers))}

    def spread(found: tuple[tuple[str, ...], ...]) -> tuple[float, float]:
        weights = [sum(cost[name] for name in stage) for stage in found]
        return max(weights), sum(w * w for w in weights)

    found = cut(names(layers), stages, "cost", cost=cost.__getitem__)
    assert spread(found) == min(spread(c) for c in every_cut(names(layers), stages))


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(st.floats(0, 10), min_size=3, max_size=20), st.integers(1, 9))
def test_a_cut_by_cost_loses_nothing_and_does_not_depend_on_luck(
    costs: list[float], stages: int
) -> None:
    items = names(len(costs) - 3)
    cost = dict(zip(items, costs, strict=True))
    found = cut(items, stages, "cost", cost=cost.__getitem__)
    assert sum(found, ()) == items
    assert found == cut(items, stages, "cost", cost=cost.__getitem__)
    heaviest = max(sum(cost[name] for name in stage) for stage in found)
    assert heaviest >= max(costs)
    assert found[0]
    assert found[-1]


def test_equal_costs_give_an_even_cut() -> None:
    blocks = {"embed": 0.0, "norm": 0.0, "head": 0.0}
    found = cut(names(8), 4, "cost", cost=lambda name: blocks.get(name, 0.1))
    assert counts(found) == [2, 2, 2, 2]


@settings(deadline=None, derandomize=True, max_examples=150)
@given(st.data())
def test_any_cut_in_words_gives_back_every_layer(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=2, max_size=6).filter(any))
    layers = sum(sizes)
    stages = [[f"{n}*layer"] if n != 1 else ["layer"] for n in sizes]
    stages = [[] if s == ["0*layer"] and data.draw(st.booleans()) else s for s in stages]
    stages[0].insert(0, "embed")
    stages[-1] += ["norm", "head"]
    gap = data.draw(st.sampled_from(["", " ", "\t"]))
    text = f"{gap}|{gap}".join(f"{gap},{gap}".join(s) for s in stages)
    found = cut(names(layers), len(sizes), text)
    assert counts(found) == sizes
    assert sum(found, ()) == names(layers)
    hidden = data.draw(st.integers(1, len(sizes) - 1))
    if len(sizes) > 2 and hidden < len(sizes) - 1:
        shown = [",".join(s) for s in stages]
        shown[1 : 1 + hidden] = [data.draw(st.sampled_from(["...", "…"]))]
        found = cut(names(layers), len(sizes), "|".join(shown))
        assert sum(found, ()) == names(layers)
        inside = counts(found)[1 : 1 + hidden]
        assert max(inside) - min(inside) <= 1
        assert counts(found)[1 + hidden :] == sizes[1 + hidden :]


def test_the_example_of_the_design() -> None:
    found = cut(names(14), 4, "embed,3*layer | 4*layer | … | 3*layer,norm,head")
    assert counts(found) == [3, 4, 4, 3]
    assert counts(cut(names(4), 3, "embed | | 4*layer,norm,head")) == [0, 0, 4]
    assert cut(names(4), 2, "embed,4*layer,norm | head")[1] == ("head",)
    assert counts(cut(names(4), 2, "embed,2*layer | ... | 2*layer,norm,head")) == [2, 2]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("evn", "did you mean 'even'"),
        ("embed,3*layer,norm,head", r"stages: 1; needed .*: 3"),
        ("embed||||norm|...|head", r"stages: 6 besides \.\.\.; needed .*: 3"),
        ("embed | 4*layer | head,norm", "head comes before norm"),
        ("embed | norm | 4*layer,head", "norm comes before layer"),
        ("embed | 5*layer,norm | head", "5 layers, the model 4: 1 too many"),
        ("embed | 2*layer,norm | head", "2 layers, the model 4: 2 too few"),
        ("embed,2*layer | layer | norm,head", "1 too few"),
        ("embed,6*layer | ... | norm,head", "2 too many"),
        ("... | embed,4*layer,norm | head", "first stage must hold embed"),
        ("| embed,4*layer,norm | head", "first stage must hold embed"),
        ("embed | 4*layer,norm,head |", "last stage must hold head"),
        ("embed,layer,norm | ... | head", "norm comes before layer"),
        ("embed,4*lyer | | norm,head", r"unknown item '4\*lyer', did you mean 'layer'"),
        ("embed,4layer | | norm,head", "unknown item '4layer'"),
        ("embed,,4*layer | | norm,head", "unknown item ''"),
        ("embed,4*layer | | 2*norm,head", r"'2\*norm': only layers are counted"),
        ("embed,... | norm | head", "stands alone"),
        ("embed | ... | ... | norm,head", "at most one"),
        ("embed,4*layer | | head", "norm must be there once; it is there 0 times"),
        ("embed,4*layer | embed | norm,head", "embed must be there once; it is there 2 times"),
        ("", "stages: 1; needed"),
    ],
)
def test_wrong_words_say_what_is_wrong(how: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        cut(names(4), 3, how)
