"""Experts in every layout train to the reference's numbers, in what they choose and keep to the
same ones, and go on from a checkpoint that another layout wrote.
"""

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from parity.continued import check, rotated
from parity.matrix import Cell, Factors, placed, sampled, tuples, values, varied
from parity.mixtures import EXPERTS, LAYOUTS, MIXTURES, SIZES, mixture_of
from parity.training import mesh_of, meshes, new_run, reference, set_weights

from penteract.testing import run_ranks

QUICK: Factors = {
    **EXPERTS,
    "moe": (
        "aux", "global_aux", "sinkhorn", "groups", "padded-to-capacity", "shared-gate", "skewed",
    ),
    "model": ("llama", "gpt2"),
    "recompute": ((), ("layer",), ("experts",), ("expert_act", "mlp")),
}  # fmt: skip


def layout_of(cell: Cell) -> dict[str, int]:
    return {name: getattr(cell, name) for name in SIZES}


def partners(cells: Sequence[Cell], others: Sequence[Cell]) -> list[Cell]:
    """For each cell another, by turns, in whose layout its experts have a place."""
    found = []
    for i, cell in enumerate(cells):
        turned = (*others[i:], *others[:i])
        found.append(next(o for o in turned if MIXTURES[cell.moe]["experts"] % o.ep == 0))
    return found


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_pairwise_sample(half: int, tmp_path: Path) -> None:
    every = sampled(QUICK, 4)
    chosen = every[half::2]
    check(chosen, partners(chosen, rotated(every, 1)), tmp_path)


@functools.cache
def every_cell() -> tuple[list[Cell], list[Cell]]:
    """Every mixture in every layout, and for each in which layout it goes on."""
    cells = varied(EXPERTS, placed(8), 8)
    return cells, partners(cells, random.Random(0).sample(cells, len(cells)))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_mixture_in_every_layout(
    layout: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Checkpoints go on in the layout of any other cell that has a place for the experts."""
    cells, others = every_cell()
    mine = [i for i, cell in enumerate(cells) if layout_of(cell) == LAYOUTS[layout]]
    check([cells[i] for i in mine], [others[i] for i in mine], tmp_path)
    product = len(LAYOUTS) * len(MIXTURES)
    record_property("cells", ("experts", len(mine), product, product - len(cells)))


def test_the_sample_holds_every_pair() -> None:
    sample = sampled(QUICK, 4)
    assert len(sample) < 60
    held = set().union(*(values(cell, QUICK, 2) for cell in sample))
    assert held == tuples(QUICK, 2, 4)


def test_only_layouts_that_do_not_divide_the_experts_have_no_place() -> None:
    have = [(tuple(some[n] for n in SIZES), some["moe"]) for some in placed(8)]
    for layout in LAYOUTS.values():
        for moe, mixture in MIXTURES.items():
            whole = mixture["experts"] % layout["ep"] == 0
            assert ((tuple(layout.values()), moe) in have) == whole
    assert len(have) == len(set(have))


def test_a_skewed_router_sends_every_token_to_one_expert() -> None:
    for model in EXPERTS["model"]:
        cell = Cell(model, 1, 1, 3, 256, 0.0, moe="skewed")
        for step in reference(cell).routed:
            for counts, dropped in step.values():
                assert counts[0] > 0
                assert (counts[1:], dropped) == ([0, 0, 0], 0)


@pytest.mark.parametrize("moe", MIXTURES)
def test_a_mixture_does_what_it_is_there_for(moe: str) -> None:
    """Some are dropped where there is a capacity; losses are there; what is kept moves."""
    m, outcome = mixture_of(moe), reference(Cell("gpt2", 1, 1, 3, 256, 0.0, moe=moe))
    first, *_ = outcome.routed[0].values()
    assert (first[1] > 0) == (m.capacity is not None)
    assert (max(outcome.balance_losses) > 0) == m.balance.endswith("aux")
    assert (max(outcome.router_z_losses) > 0) == (m.z_weight > 0)
    moves = m.topk < m.experts  # where every expert takes every token, loads are equal
    assert all(bool(x.any()) == (moves or x.dtype == torch.int64) for x in outcome.kept[0].values())
    assert bool(outcome.kept[0]) == (m.balance in ("bias", "global_aux"))
    norms = [g.norm() for name, g in outcome.gradients[0].items() if name.endswith("router.weight")]
    assert len(norms) == len(m.layers)
    assert bool((torch.stack(norms) > 1e-6).all())


def unused(cell: Cell) -> list[str]:
    run = new_run(cell, mesh_of(cell, meshes()))
    set_weights(run, cell.moe)
    run.update()
    return run.unused


@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (1, 2)])
def test_a_rank_reaches_every_parameter_that_it_has(ep: int, etp: int) -> None:
    """Of experts without a token too: else reductions behind it wait for the end of the block, and
    ranks that wait for each other's gradients inside it wait for ever.
    """
    cell = Cell("gpt2", 2, 1, 3, 256, 0.0, moe="skewed", ep=ep, etp=etp)
    assert run_ranks(unused, cell.world, cell) == [[], []]
