"""Where tokens go, and the losses that balance it: against values from the field, hand-made cases,
and an independent reference.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from reference import mixture
from reference.mixture import Mixture
from torch import Tensor

from penteract.mesh import Axis, single
from penteract.nn.balance import Losses, counted, losses, moved_bias
from penteract.nn.router import RouterSpec, Routing, Tokens, route
from penteract.testing import run_ranks, world_axis

LOGITS = [[2.0, 1.0, 0.0, -1.0], [0.0, 3.0, 1.0, 0.0], [1.0, 1.0, 2.0, 0.0]]
F64 = torch.float64
BIAS = [0.0, 0.0, 0.0, 5.0]
LOAD = [2, 3, 1, 0]
WITH_LOAD = [[0, 1], [1, 2], [1, 0]]  # chosen so often

ALONE = single("tp-cp")

Dense = Callable[..., Tensor]


def spec_of(**how: Any) -> RouterSpec:
    return RouterSpec(**{"experts": 4, "topk": 2, **how})


def all_real(logits: Tensor) -> Tokens:
    t = len(logits)
    return Tokens(torch.arange(t), torch.ones(t, dtype=torch.bool), ALONE)


def dense(routing: Routing, experts: int) -> Tensor:
    """The weight of every expert [t, E], 0 where it takes nothing."""
    weights = routing.weights.new_zeros(len(routing.weights), experts + 1)
    at = torch.where(routing.experts < 0, experts, routing.experts)
    return weights.scatter(1, at, routing.weights)[:, :experts]


def ours(logits: Tensor, bias: list[float] | None = None, **how: Any) -> Tensor:
    spec = spec_of(**how)
    given = None if bias is None else torch.tensor(bias, dtype=F64)
    return dense(route(spec, logits, given, all_real(logits)), spec.experts)


def theirs(logits: Tensor, bias: list[float] | None = None, **how: Any) -> Tensor:
    m = Mixture(**{"layers": (), "experts": 4, "topk": 2, **how})
    routed = mixture.route(list(logits.double()), m, kept=bias)
    return filled(torch.zeros_like(logits), routed, range(len(logits)))


def filled(weights: Tensor, routed: mixture.Routed, places: Sequence[int]) -> Tensor:
    """The weights [t, E] with those of the tokens at some places."""
    for i, taken in zip(places, routed.taken, strict=True):
        for e, weight in taken.items():
            weights = weights.index_put((torch.tensor(i), torch.tensor(e)), weight)
    return weights


GOLDEN: list[tuple[dict[str, Any], int, list[float]]] = [  # how, row, its weights
    ({}, 0, [0.731059, 0.268941, 0, 0]),
    ({"normalise": False}, 0, [0.643914, 0.236883, 0, 0]),
    ({"score": "sigmoid"}, 0, [0.546449, 0.453551, 0, 0]),
    ({"score": "sigmoid", "balance": "bias", "bias": BIAS, "scale": 2.5}, 0,
     [1.915212, 0, 0, 0.584788]),
    ({"score": "sigmoid", "groups": 2}, 1, [0.344217, 0.655783, 0, 0]),
]  # fmt: skip


@pytest.mark.parametrize("way", [ours, theirs])
@pytest.mark.parametrize(("how", "row", "wanted"), GOLDEN)
def test_weights_of_the_field(
    way: Dense, how: dict[str, Any], row: int, wanted: list[float]
) -> None:
    found = way(torch.tensor(LOGITS, dtype=F64), **how)
    assert found[row].tolist() == pytest.approx(wanted, abs=5e-7)


@pytest.mark.parametrize("balance", ["aux", "seq_aux", "global_aux"])
def test_losses_of_the_field(balance: str) -> None:
    """Given loads, by the tokens of this micro-batch or by those of the last step."""
    logits, how = (
        torch.tensor(LOGITS),
        {"balance": balance, "balance_weight": 1e-2, "z_weight": 1e-3},
    )
    chosen = torch.tensor(WITH_LOAD)
    routing = Routing(torch.ones(3, 2), chosen, chosen)
    found = loss_of(spec_of(**how), logits, routing, load=torch.tensor(LOAD))
    assert (found.balance / 3).item() == pytest.approx(0.01382818, abs=5e-9)
    assert (found.z / 3).item() == pytest.approx(0.00772122, abs=5e-9)

    m, rows = Mixture((), 4, **how), list(logits.double())
    scores = [mixture.score_row(z, m) for z in rows]
    sums = mixture.balance_sum(scores, WITH_LOAD, m, [0, 0, 0], LOAD), mixture.z_sum(rows, m)
    assert [float(x) / 3 for x in sums] == pytest.approx([0.01382818, 0.00772122], abs=5e-9)


def loss_of(
    spec: RouterSpec,
    logits: Tensor,
    routing: Routing,
    *,
    tokens: Tokens | None = None,
    lengths: tuple[int, ...] = (),
    load: Tensor | None = None,
) -> Losses:
    """Of tokens that belong to sequences of these lengths, or to one."""
    tokens = all_real(logits) if tokens is None else tokens
    lengths = lengths or (len(logits),)
    number = torch.repeat_interleave(torch.tensor(lengths))[tokens.rows]
    return losses(spec, logits, routing, tokens, sequence=number, sequences=len(lengths), load=load)


# --- everything at once, against the reference


def drawn(seed: int) -> tuple[RouterSpec, dict[str, Any]]:
    """A way to route, and what else the tokens of a micro-batch have."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (), generator=generator))]

    experts, groups = pick((4, 1), (4, 2), (6, 1), (6, 2), (6, 3), (5, 1), (1, 1))
    best = pick(*range(1, groups + 1))
    how = {
        "topk": min(pick(1, 2, 3), experts // groups * best),
        "score": pick("softmax", "sigmoid"),
        "normalise": pick(True, False),
        "scale": pick(1.0, 2.5),
        "groups": groups,
        "topk_groups": best,
        "balance": pick("none", "aux", "seq_aux", "global_aux", "bias", "sinkhorn"),
        "balance_weight": 0.3,
        "z_weight": pick(0.0, 0.2),
        "capacity": pick(None, 0.5, 1.0, 1.3),
        "drop": pick("score", "position"),
    }
    lengths = pick((9,), (1, 5, 3), (2, 1, 1, 3), (1,), (40,))
    t = sum(lengths)
    facts = {
        "lengths": lengths,
        "logits": 2 * torch.randn(t, experts, generator=generator, dtype=F64),
        "real": torch.rand(t, generator=generator) < pick(1.0, 0.7, 0.0),
        "kept": torch.randint(0, 5, (experts,), generator=generator) * pick(1, 0),
        "factors": torch.randn(t, experts, generator=generator, dtype=F64),
    }
    if how["balance"] == "sinkhorn" and facts["real"].sum() == 1:
        facts["real"][:] = False  # one token alone is balanced whoever takes it: rounding decides
    return RouterSpec(experts, **how), facts


def results(
    spec: RouterSpec,
    facts: dict[str, Any],
    mine: Tensor | slice = slice(None),
    parts: Axis = ALONE,
) -> list[Tensor]:
    """Of the tokens `mine`: weights, both losses, gradients of their sum, all choices, counts."""
    logits = facts["logits"][mine].clone().requires_grad_()
    every = torch.arange(len(facts["logits"]))
    tokens = Tokens(every[mine], facts["real"][mine], parts)
    kept = facts["kept"].double() * 0.1 if spec.balance == "bias" else None
    routing = route(spec, logits, kept, tokens)
    weights = dense(routing, spec.experts)
    load = facts["kept"] if spec.balance == "global_aux" else None
    found = loss_of(spec, logits, routing, tokens=tokens, lengths=facts["lengths"], load=load)
    total = (weights * facts["factors"][mine]).sum() + found.balance + found.z
    (gradient,) = torch.autograd.grad(total, [logits])
    counts = counted(spec, routing.chosen)
    every = (weights, found.balance, found.z, gradient, routing.chosen, counts)
    return [x.detach() for x in every]


def wanted_of(spec: RouterSpec, facts: dict[str, Any]) -> list[Tensor]:
    """The same by the reference, which knows of no padding: what it needs is taken out before."""
    fields = {k: v for k, v in vars(spec).items() if k not in ("experts", "bias_rate")}
    m, places = Mixture((), spec.experts, **fields), facts["real"].nonzero()[:, 0].tolist()
    logits = facts["logits"].clone().requires_grad_()
    numbers = [n for n, length in enumerate(facts["lengths"]) for _ in range(length)]
    kept = (facts["kept"].double() * (0.1 if spec.balance == "bias" else 1.0)).tolist()
    rows, inside = [logits[i] for i in places], [numbers[i] for i in places]
    routed = mixture.route(rows, m, sequences=inside, kept=kept)
    weights = filled(torch.zeros_like(logits), routed, places)
    total = (weights * facts["factors"]).sum() + routed.balance + routed.z + 0 * logits.sum()
    (gradient,) = torch.autograd.grad(total, [logits])
    chosen = torch.full((len(logits), spec.topk), -1)
    chosen[places] = torch.tensor(routed.chosen, dtype=torch.long).view(-1, spec.topk)
    counts = torch.tensor([routed.counts(spec.experts)])
    every = (weights, routed.balance, routed.z, gradient, chosen, counts)
    return [x.detach() for x in every]


def assert_same(found: list[Tensor], wanted: list[Tensor], where: object) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda m: f"{where}: {m}")


@pytest.mark.parametrize("seed", range(200))
def test_the_reference_routes_alike(seed: int) -> None:
    spec, facts = drawn(seed)
    assert_same(results(spec, facts), wanted_of(spec, facts), (spec, facts["lengths"]))


# --- tokens on several ranks


def dealt(seeds: range) -> list[list[Tensor]]:
    """What each rank finds of its tokens; the last rank has none of some micro-batches."""
    axis, found = world_axis("tp-cp"), []
    for seed in seeds:
        spec, facts = drawn(seed)
        owner = (torch.arange(len(facts["logits"])) * 5 + seed) % 7 % (2 + seed % 2)
        mine = (owner == axis.rank).nonzero()[:, 0]
        found.append([mine, *results(spec, facts, mine, axis)])
    return found


def test_ranks_that_share_a_micro_batch_decide_as_one() -> None:
    seeds = range(60)
    by_rank = run_ranks(dealt, 3, seeds)
    for seed in seeds:
        spec, facts = drawn(seed)
        weights, balance, z, gradient, chosen, counts = results(spec, facts)
        parts = [found[seed] for found in by_rank]
        for mine, *found in parts:
            assert torch.equal(found[0], weights[mine]), spec
            assert torch.equal(found[4], chosen[mine]), spec
            torch.testing.assert_close(found[3], gradient[mine], rtol=1e-12, atol=1e-12)
        for i, whole in ((2, balance), (3, z), (6, counts)):
            torch.testing.assert_close(sum(part[i] for part in parts), whole, rtol=1e-12, atol=0)


# --- padding


@pytest.mark.parametrize("seed", range(40))
def test_padding_changes_nothing(seed: int) -> None:
    """Neither what real tokens get nor any loss, whatever the logits of padding are."""
    spec, facts = drawn(seed)
    facts["real"][:] = True
    more = facts | {
        "lengths": (*facts["lengths"], 4),
        "logits": torch.cat([facts["logits"], 50 * torch.ones(4, spec.experts, dtype=F64)]),
        "real": torch.cat([facts["real"], torch.zeros(4, dtype=torch.bool)]),
        "factors": torch.cat([facts["factors"], torch.ones(4, spec.experts, dtype=F64)]),
    }
    weights, balance, z, gradient, chosen, counts = results(spec, more)
    plain = results(spec, facts)
    found = [weights[:-4], balance, z, gradient[:-4], chosen[:-4], counts]
    assert_same(found, plain, spec)
    assert not weights[-4:].any()
    assert not gradient[-4:].any()
    assert (chosen[-4:] == -1).all()


# --- ties


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [1, 2])
def test_of_equal_logits_some_are_chosen_whoever_is_beside(score: str, groups: int) -> None:
    """Layouts put other tokens beside one, which must not change who is chosen."""
    rows = torch.tensor([[1.0, 1, 2, 0, 1, 1], [0, 0, 0, 0, 0, 0], [3, 3, 3, 1, 3, 3]], dtype=F64)
    many = rows.repeat(50, 1)
    spec = spec_of(experts=6, score=score, groups=groups)
    whole = route(spec, many, None, all_real(many))
    assert all(len(set(experts)) == 2 for experts in whole.chosen.tolist())
    assert torch.equal(whole.weights[2], torch.full((2,), 0.5, dtype=F64))
    assert whole.chosen[0, 0] == 2 or groups == 2
    for n in (1, 2, 3, 7):
        few = route(spec, many[:n], None, all_real(many[:n]))
        assert torch.equal(few.chosen, whole.chosen[:n])
        assert torch.equal(whole.chosen[-3:], whole.chosen[:3])


# --- by hand


def logits_for(scores: list[list[float]]) -> Tensor:
    return torch.tensor(scores, dtype=F64).log()


QUEUE = [[0.6, 0.4], [0.9, 0.1], [0.7, 0.3], [0.2, 0.8]]  # three want expert 0, one expert 1


@pytest.mark.parametrize("way", [ours, theirs])
@pytest.mark.parametrize(
    ("drop", "capacity", "kept"),
    [
        ("score", 0.5, [1, 3]),  # one place for each
        ("position", 0.5, [0, 3]),
        ("score", 1.0, [1, 2, 3]),
        ("position", 1.0, [0, 1, 3]),
        ("score", 0.6, [1, 2, 3]),  # 1.2 places are 2
        ("position", 1.5, [0, 1, 2, 3]),
    ],
)
def test_a_full_expert_takes_the_best_or_the_first(
    way: Dense, drop: str, capacity: float, kept: list[int]
) -> None:
    how = {"experts": 2, "topk": 1, "normalise": False, "capacity": capacity, "drop": drop}
    found = way(logits_for(QUEUE), **how)
    wanted = torch.zeros(4, 2, dtype=F64)
    for i in kept:
        wanted[i, int(i == 3)] = max(QUEUE[i])
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("way", [ours, theirs])
def test_of_equal_scores_the_first_have_their_place(way: Dense) -> None:
    found = way(logits_for([[0.75, 0.25]] * 5), experts=2, topk=1, capacity=1.0)
    assert found[:, 0].tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]  # 2.5 places are 3


@pytest.mark.parametrize("way", [ours, theirs])
def test_what_is_dropped_leaves_the_other_weights_as_they_are(way: Dense) -> None:
    """Weights add up to 1 over the chosen experts, not over those that have a place."""
    found = way(logits_for([[0.5, 0.25, 0.15, 0.1]] * 2), capacity=0.5)
    assert found.tolist() == [pytest.approx([2 / 3, 1 / 3, 0, 0]), [0.0] * 4]


@pytest.mark.parametrize("way", [ours, theirs])
@pytest.mark.parametrize(("score", "chosen"), [("softmax", [0, 1]), ("sigmoid", [2, 3])])
def test_a_group_is_as_good_as_its_best_or_its_best_two(
    way: Dense, score: str, chosen: list[int]
) -> None:
    found = way(torch.tensor([[2.0, -9, 1.5, 1.4, -9, -9]], dtype=F64), experts=6, score=score,
                groups=3)  # fmt: skip
    assert found[0].nonzero()[:, 0].tolist() == chosen


@pytest.mark.parametrize("way", [ours, theirs])
def test_sinkhorn_chooses_evenly_and_weighs_by_scores(way: Dense) -> None:
    """All tokens like expert 0 best, each a little differently."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 4, generator=generator, dtype=F64)
    logits[:, 0] += 6
    how = {"topk": 1, "normalise": False}
    raw, even = way(logits, **how), way(logits, balance="sinkhorn", **how)
    assert (raw > 0).sum(0).tolist() == [64, 0, 0, 0]
    assert (even > 0).sum(0).max() <= 20
    assert torch.equal((even > 0).sum(1), torch.ones(64, dtype=torch.long))
    at = even.argmax(1, keepdim=True)
    torch.testing.assert_close(even.gather(1, at), logits.softmax(-1).gather(1, at))


LOADS = [
    ([3, 1, 2, 2], [-1, 1, 0, 0]),
    ([2, 2, 2, 2], [0, 0, 0, 0]),
    ([0, 0, 0, 0], [0, 0, 0, 0]),
    ([7, 0, 0, 0], [-1, 1, 1, 1]),
    ([2**53 + 1, 2**53, 2**53, 2**53], [-1, 1, 1, 1]),  # a mean in float64 would see no difference
    ([3, 3, 1], [-1, -1, 1]),  # the mean is no whole number
]


@pytest.mark.parametrize(("load", "signs"), LOADS)
def test_a_bias_moves_by_sign_against_the_load(load: list[int], signs: list[int]) -> None:
    """By the whole rate and not by how much; without taking off the mean of the bias."""
    bias = torch.linspace(-1, 1, len(load), dtype=F64)
    found = moved_bias(bias, torch.tensor(load), 0.1)
    wanted = [b + 0.1 * sign for b, sign in zip(bias.tolist(), signs, strict=True)]
    assert found.tolist() == wanted
    if max(load) < 2**53:
        assert mixture.moved(bias.tolist(), load, 0.1) == wanted


@pytest.mark.parametrize("way", [ours, theirs])
def test_a_bias_chooses_and_does_not_weigh(way: Dense) -> None:
    logits = torch.tensor(LOGITS, dtype=F64)
    how = {"score": "sigmoid", "balance": "bias", "normalise": False}
    found = way(logits, bias=BIAS, **how)
    assert found[:, 3].tolist() == pytest.approx(logits[:, 3].sigmoid().tolist())


def test_losses_do_not_see_what_was_dropped() -> None:
    """Loads are counted before any are dropped."""
    spec, facts = drawn(0)
    logits = facts["logits"]
    free = replace(spec, capacity=None, balance="aux", z_weight=0.1)
    tight = replace(free, capacity=0.5)
    found = [loss_of(s, logits, route(s, logits, None, all_real(logits))) for s in (free, tight)]
    assert found[0] == found[1]
    dropped = route(tight, logits, None, all_real(logits))
    assert (dropped.experts < 0).any()
    assert not (dropped.chosen < 0).any()
