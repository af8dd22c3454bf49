"""The layout rules against brute force over a small grid, and their messages."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penteract import layout_rules as rules
from penteract.errors import UserError
from penteract.grid import DENSE, EXPERT, Grid

ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-pp-ep-dp", "pp-tp-dp-cp-ep", "dp-ep-pp-cp-tp")


def pipeline_groups(order: str, sizes: dict[str, int]) -> set[tuple[int, ...]] | None:
    """Pipeline groups by explicit counting over one grid; None where it does not fill its ranks."""
    names = [name for name in order.split("-") if name in sizes]
    places = list(product(*(range(sizes[name]) for name in reversed(names))))
    groups: dict[tuple[int, ...], list[int]] = {}
    at = len(names) - 1 - names.index("pp")
    for rank, place in enumerate(places):
        groups.setdefault(place[:at] + place[at + 1 :], []).append(rank)
    return {tuple(group) for group in groups.values()}


def is_valid(world: int, sizes: dict[str, int], order: str) -> bool:
    dense = sizes["tp"] * sizes["cp"] * sizes["pp"]
    expert = sizes["etp"] * sizes["ep"] * sizes["pp"]
    if world % dense or world % expert:
        return False
    dense_grid = {"tp": sizes["tp"], "cp": sizes["cp"], "dp": world // dense, "pp": sizes["pp"]}
    expert_grid = {
        "tp": sizes["etp"],
        "ep": sizes["ep"],
        "dp": world // expert,
        "pp": sizes["pp"],
    }
    return pipeline_groups(order, dense_grid) == pipeline_groups(order, expert_grid)


@pytest.mark.parametrize("order", ORDERS)
def test_a_layout_is_valid_exactly_if_it_constructs_two_partitions(order: str) -> None:
    accepted = 0
    for world, tp, cp, pp, ep, etp in product(
        (1, 4, 6, 8), (1, 2, 3, 4), (1, 2), (1, 2, 3), (1, 2, 3, 4), (1, 2, 4)
    ):
        sizes = {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp}
        expected = is_valid(world, sizes, order)
        try:
            grid = Grid(world, **sizes, order=order)
        except UserError:
            assert not expected, (world, sizes, order)
            continue
        assert expected, (world, sizes, order)
        accepted += 1
        for name in {*DENSE, *EXPERT}:
            assert sorted(grid.groups(name).flat) == list(range(world))
    assert accepted > 50


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(1, 48),
    st.fixed_dictionaries({name: st.integers(1, 6) for name in rules.SIZES}),
    st.sampled_from(ORDERS),
)
def test_every_suggested_value_works(world: int, sizes: dict[str, int], order: str) -> None:
    try:
        rules.check_layout(world, sizes, order)
    except UserError as error:
        _, _, listed = str(error).partition("changing one: ")
        for name, values in re.findall(r"(\w+) ([\d or]+)", listed):
            for value in map(int, re.findall(r"\d+", values)):
                changed = {"world": world, **sizes, name: value}
                rules.check_layout(changed.pop("world"), changed, order)


@pytest.mark.parametrize(
    ("world", "sizes", "order", "words"),
    [
        (
            12,
            {"tp": 8},
            rules.DEFAULT_ORDER,
            ["tp*cp*pp = 8*1*1 = 8", "world 8 or 16", "tp 6 or 12"],
        ),
        (
            32,
            {"tp": 8, "pp": 2, "etp": 3},
            rules.DEFAULT_ORDER,
            ["etp*ep*pp = 3*1*2", "etp 2 or 4"],
        ),
        (8, {"tp": 2, "ep": 3}, rules.DEFAULT_ORDER, ["etp*ep*pp = 2*3*1 = 6", "ep 2 or 4"]),
        (
            16,
            {"tp": 2, "pp": 2, "etp": 1, "ep": 2},
            "tp-cp-pp-ep-dp",
            ["different pipeline", "etp 2"],
        ),
        (8, {"tp": 2}, "tp-pp", ["leaves out dp", "'tp-pp-dp'"]),
        (8, {"tp": 2}, "tp-tp-dp", ["at most once", rules.DEFAULT_ORDER]),
        (8, {"tp": 2}, "tp-xp-dp", ["at most once"]),
        (8, {"tp": 0}, rules.DEFAULT_ORDER, ["tp = 0 is outside 1"]),
        (-8, {}, rules.DEFAULT_ORDER, ["world = -8 is outside 1"]),
        (10**30, {"tp": 3}, rules.DEFAULT_ORDER, ["is outside 1"]),
        (8, {"tp": True}, rules.DEFAULT_ORDER, ["tp = True is not a whole number"]),
    ],
)
def test_an_error_says_the_rule_the_numbers_and_what_works(
    world: int, sizes: dict[str, int], order: str, words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        rules.check_layout(world, sizes, order)
    assert all(word in str(caught.value) for word in words), caught.value


def test_what_need_not_divide_is_accepted() -> None:
    rules.check_layout(8, {"tp": 2, "etp": 4, "ep": 2})  # etp > tp
    rules.check_layout(16, {"tp": 2, "pp": 4}, "tp-pp-dp")  # axes of size 1 left out
    rules.check_layout(6, {"tp": 3, "cp": 2})


def test_virtual_stages_need_a_pipeline() -> None:
    rules.check_chunks(4, pp=2)
    rules.check_chunks(1, pp=1)
    with pytest.raises(UserError, match=r"chunks = 2 with pp = 1.*pp = 2"):
        rules.check_chunks(2, pp=1)
    with pytest.raises(UserError, match="chunks = 0"):
        rules.check_chunks(0, pp=2)


def test_experts_divide_over_ep() -> None:
    rules.check_experts(8, ep=4)
    with pytest.raises(UserError, match=r"experts = 6 .* ep = 4.* ep 3 or 6; experts 4 or 8"):
        rules.check_experts(6, ep=4)
    with pytest.raises(UserError, match="ep 3; experts 4"):
        rules.check_experts(3, ep=4)


def test_replicas_divide_dp() -> None:
    rules.check_replicas(3, dp=6)
    with pytest.raises(UserError, match=r"replicas = 4 does not divide dp = 6.* 3 or 6"):
        rules.check_replicas(4, dp=6)


@pytest.mark.parametrize(
    ("sizes", "dp"),
    [
        ({}, 1),
        ({"tp": 2}, 1),
        ({"ep": 4}, 4),
        ({"tp": 2, "ep": 3, "etp": 1}, 3),
        ({"cp": 2, "ep": 2}, 1),
    ],
)
def test_least_dp_satisfies_both_factorisations(sizes: dict[str, int], dp: int) -> None:
    assert rules.least_dp(sizes) == dp
    full = {name: sizes.get(name, 1) for name in ("tp", "cp", "pp")}
    world = dp * full["tp"] * full["cp"] * full["pp"]
    rules.check_layout(world, sizes)
    for smaller in range(1, dp):
        with pytest.raises(UserError):
            rules.check_layout(smaller * world // dp, sizes)
