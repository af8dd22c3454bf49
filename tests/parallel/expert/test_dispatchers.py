"""Every dispatcher brings each token to its experts and their sum back, forward and backward."""

from typing import Any

import pytest
import torch
from parallel.expert.deep_ep_double import DeepEP
from torch import Tensor

from penteract.errors import UserError
from penteract.grid import Grid
from penteract.mesh import create_mesh
from penteract.parallel.expert import all_to_all as all_to_all_module
from penteract.parallel.expert.all_gather import AllGather
from penteract.parallel.expert.all_to_all import AllToAll
from penteract.parallel.expert.dispatch import Dispatcher
from penteract.parallel.expert.dispatchers import dispatcher_of
from penteract.parallel.expert.fused import Fused
from penteract.parallel.expert.local import Local
from penteract.parallel.expert.places import ExpertParallel
from penteract.parallel.expert.travel import Travel
from penteract.testing import run_ranks, world_axis

F64 = torch.float64
H, K, EXPERTS = 3, 2, 12
SHAPES = [(2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (1, 4)]  # ep, etp
ROUTINGS = ("even", "one expert", "own rank", "none", "padding")
KINDS = ("all_gather", "all_to_all", "fused")


def places_of(ep: int, etp: int) -> ExpertParallel:
    axis = world_axis()
    return ExpertParallel.of(create_mesh(Grid(axis.size, ep=ep, etp=etp), axis.rank))


def make(kind: str, places: ExpertParallel) -> Dispatcher:
    if kind == "fused":
        return Fused(EXPERTS, places, DeepEP(places.group))
    return (AllGather if kind == "all_gather" else AllToAll)(EXPERTS, places)


def routed(routing: str, rank: int, places: ExpertParallel) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, weights, experts of a rank, whose numbers of tokens differ; one has none."""
    t = (5, 0, 7, 2)[rank]
    generator = torch.Generator().manual_seed(rank)
    x, weights = (torch.randn(t, n, generator=generator, dtype=F64) for n in (H, K))
    experts = torch.randn(t, EXPERTS, generator=generator).topk(K).indices
    if routing == "one expert":
        experts = torch.tensor([7, 8]).repeat(t, 1)
    elif routing == "own rank":
        experts = experts % len(places.held(EXPERTS)) + places.held(EXPERTS).start
    elif routing == "none":
        experts = torch.full_like(experts, -1)
    elif routing == "padding":
        experts[::2, 1] = -1
        experts[1::3] = -1
    return x, weights, experts


def factor(number: Tensor) -> Tensor:
    """What an expert multiplies its tokens by."""
    return torch.where(number < 0, 0.0, 1.0 + number.double() ** 2)


def passed(kind: str, routing: str, places: ExpertParallel) -> dict[str, Tensor]:
    """Outputs and gradients of this rank's tokens."""
    x, weights, experts = routed(routing, world_axis().rank, places)
    leaves = [v.clone().requires_grad_() for v in (x, weights)]
    visit = make(kind, places).send(*leaves, experts)
    arrived = visit.arrive()
    numbers = torch.where(arrived.experts < 0, -1, arrived.experts + places.held(EXPERTS).start)
    share = (places.etp.rank + 1) / sum(range(1, places.etp.size + 1))
    mine = (arrived.weights * factor(numbers)).sum(1) * share
    y = visit.leave(arrived.x * mine[:, None])
    g = torch.arange(y.numel(), dtype=F64).view(y.shape) + 1
    d_x, d_weights = torch.autograd.grad(y, leaves, g)
    return {"y": y.detach(), "x": d_x, "weights": d_weights}


def expected(routing: str, places: ExpertParallel) -> dict[str, Tensor]:
    x, weights, experts = routed(routing, world_axis().rank, places)
    a = factor(experts)
    total = (weights * a).sum(1, keepdim=True)
    g = torch.arange(x.numel(), dtype=F64).view(x.shape) + 1
    return {"y": x * total, "x": g * total, "weights": a * (x * g).sum(1, keepdim=True)}


def worst(ep: int, etp: int) -> dict[str, float]:
    places, found = places_of(ep, etp), {}
    for kind in KINDS:
        for routing in ROUTINGS:
            wanted = expected(routing, places)
            for name, value in passed(kind, routing, places).items():
                gap = (value - wanted[name]).abs().max() if value.numel() else torch.zeros(())
                scale = wanted[name].abs().max().clamp(min=1) if value.numel() else 1.0
                found[f"{kind}, {routing}, {name}"] = float(gap / scale)
    return found


@pytest.mark.parametrize(("ep", "etp"), SHAPES)
def test_tokens_come_to_their_experts_and_back(ep: int, etp: int) -> None:
    for rank in run_ranks(worst, ep * etp, ep, etp):
        assert {name: gap for name, gap in rank.items() if not gap <= 1e-14} == {}


def planted() -> float:
    """The first of several rows that come back for a token is lost."""

    def leave(self: Any, y: Tensor) -> Tensor:
        seen = dict.fromkeys(self.token.tolist())
        first = [self.token.tolist().index(token) for token in seen]
        kept = torch.zeros(len(self.token), 1, dtype=F64)
        kept[torch.tensor(first, dtype=torch.int64)] = 1
        back = Travel(self.turns, self.back, self.there, y).wait()[0] * kept
        return back.new_zeros(self.length, H).index_add(0, self.token, back)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(all_to_all_module._Sent, "leave", leave)
        places = places_of(2, 1)
        gap = passed("all_to_all", "even", places)["y"] - expected("even", places)["y"]
    return float(gap.abs().max()) if gap.numel() else 0.0


def test_a_token_that_visits_two_ranks_needs_both() -> None:
    assert max(run_ranks(planted, 2)) > 1


def rows_sent() -> list[tuple[int, int]]:
    """Bytes forward that an all-to-all sends, and by hand."""
    places, found = places_of(2, 1), []
    for routing in ROUTINGS:
        x, weights, experts = routed(routing, world_axis().rank, places)
        before = sum(places.group.traffic.bytes.values())
        make("all_to_all", places).send(x, weights, experts).arrive()
        sent = sum(places.group.traffic.bytes.values()) - before
        away = torch.where(experts < 0, places.ep.rank, experts // (EXPERTS // 2))
        u = int((away != places.ep.rank).any(1).sum())
        found.append((sent, u * (H * 8 + K * 16) + 8))
    return found


def test_a_token_goes_to_a_rank_once() -> None:
    for rank in run_ranks(rows_sent, 2):
        assert [sent for sent, _ in rank] == [wanted for _, wanted in rank]


def test_one_rank_sends_nothing() -> None:
    assert isinstance(dispatcher_of("all_to_all", 4, ExpertParallel.alone()), Local)


def test_the_library_is_named_where_it_is_missing() -> None:
    def send() -> str:
        places = places_of(2, 1)
        x, weights, experts = routed("even", 0, places)
        with pytest.raises(UserError, match="needs DeepEP") as caught:
            dispatcher_of("fused", EXPERTS, places).send(x, weights, experts)
        return str(caught.value)

    assert "all_to_all" in run_ranks(send, 2)[0]
