"""Which experts a token goes to, and with which weight: a function of its logits.

In at least float32. With z [E] the logits of a token:

    s = softmax(z) or sigmoid(z)          c = s, or s + b with balance "bias", or sinkhorn(z)
    the k experts of largest c            w_e = scale · s_e, normalised: scale · s_e / Σ_chosen s

Softmax of the chosen logits alone is softmax, normalised. With groups only the experts of the best
groups can be chosen; a group is as good as its best expert, with sigmoid as its best two together.

Tokens of one micro-batch lie on several ranks (`ExpertParallel.parts`), which decide alike: what
depends on other tokens, a capacity and sinkhorn, is computed from the logits of all of them in the
order of the micro-batch, so that a layout changes nothing. Expert e takes the first
⌈capacity · k · t / E⌉ of its tokens, t in the micro-batch, in their order or by s. Padding goes
nowhere and takes no place. Sources: Shazeer et al., arXiv:1701.06538; Fedus et al.,
arXiv:2101.03961, for capacity; DeepSeek-AI, arXiv:2405.04434 and arXiv:2412.19437, for groups and
the bias; Clark et al., arXiv:2202.01169, for sinkhorn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from penteract import compat
from penteract.collectives import start_all_gather
from penteract.mesh import Axis
from penteract.parallel.expert.places import lengths_over, tally

SINKHORN_ROUNDS = 30
# Added to sums that are divided by: those of sigmoids may all be 0.
TINY = 1e-20


@dataclass(frozen=True)
class RouterSpec:
    """How tokens are routed, and how the load is balanced (`balance`)."""

    experts: int
    topk: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    topk_groups: int = 1
    balance: str = "none"
    balance_weight: float = 0.0
    z_weight: float = 0.0
    bias_rate: float = 0.0
    capacity: float | None = None
    drop: Literal["score", "position"] = "score"


class Routing(NamedTuple):
    """Of this rank's tokens: who takes them."""

    weights: Tensor  # [t, k]
    experts: Tensor  # [t, k] int64, −1 where an expert is full or the token is padding
    chosen: Tensor  # [t, k] int64, −1 for padding: before any were dropped


class Tokens(NamedTuple):
    """The rows whose tokens this rank routes."""

    rows: Tensor  # [t] their numbers in the micro-batch
    real: Tensor  # [t] bool: not padding
    parts: Axis  # the ranks that hold the micro-batch's tokens


def route(spec: RouterSpec, logits: Tensor, bias: Tensor | None, tokens: Tokens) -> Routing:
    """logits [t, E] → who takes each token."""
    scores = scores_of(spec, logits)
    choice = scores.detach() if bias is None else scores.detach() + bias
    if spec.balance == "sinkhorn":
        choice = _balanced(logits.detach(), tokens)
    best = _in_best_groups(spec, choice).topk(spec.topk, dim=-1).indices  # [t, k]
    weights = scores.gather(1, best)
    chosen = torch.where(tokens.real[:, None], best, -1)
    experts = chosen if spec.capacity is None else _within(spec, weights.detach(), chosen, tokens)
    if spec.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    weights = torch.where(experts >= 0, spec.scale * weights, 0.0)
    return Routing(weights, experts, chosen)


def scores_of(spec: RouterSpec, logits: Tensor) -> Tensor:
    return logits.softmax(-1) if spec.score == "softmax" else logits.sigmoid()


def _in_best_groups(spec: RouterSpec, choice: Tensor) -> Tensor:
    """`choice` with −∞ for experts of groups that are not among the best."""
    if spec.groups == 1:
        return choice
    grouped = choice.unflatten(1, (spec.groups, -1))  # [t, g, E/g]
    best = 1 if spec.score == "softmax" else min(2, grouped.shape[2])
    worth = grouped.topk(best, dim=-1).values.sum(-1)
    chosen = worth.topk(spec.topk_groups, dim=-1).indices
    out = torch.ones_like(worth, dtype=torch.bool).scatter_(1, chosen, False)
    return grouped.masked_fill(out[:, :, None], -math.inf).flatten(1)


def _balanced(logits: Tensor, tokens: Tokens) -> Tensor:
    """exp(z) scaled until rows and columns of the whole micro-batch each have equal sums."""
    whole = _Whole.of(logits, tokens)
    if len(whole.rows) == 0:  # which has no largest
        return torch.zeros_like(logits)
    cost = (whole.rows - whole.rows.amax()).exp()
    for _ in range(SINKHORN_ROUNDS):
        cost = cost / (cost.sum(0, keepdim=True) * cost.shape[1] + TINY)
        cost = cost / (cost.sum(1, keepdim=True) * cost.shape[0] + TINY)
    return whole.put(cost, torch.zeros_like(logits))


def _within(spec: RouterSpec, scores: Tensor, chosen: Tensor, tokens: Tokens) -> Tensor:
    """`chosen`, with −1 for those that come too late or score too low for an expert's capacity."""
    # In one message: an expert's number is exact.
    whole = _Whole.of(torch.cat([chosen.to(scores.dtype), scores], 1), tokens)
    experts = whole.rows[:, : spec.topk].flatten().long()  # [T·k], in the order of the micro-batch
    first = torch.arange(len(experts), device=experts.device)
    if spec.drop == "score":
        first = whole.rows[:, spec.topk :].flatten().argsort(descending=True, stable=True)
    by_expert = first[experts[first].argsort(stable=True)]
    counts = tally(experts, spec.experts)
    starts = counts.cumsum(0) - counts
    place = torch.empty_like(by_expert)
    place[by_expert] = torch.arange(len(first), device=first.device) - starts[experts[by_expert]]
    kept = torch.where(place < capacity(spec, len(whole.rows)), experts, -1)
    return whole.put(kept.view(-1, spec.topk), chosen)


def capacity(spec: RouterSpec, tokens: int) -> int:
    """How many of a micro-batch's tokens an expert takes."""
    if spec.capacity is None:
        return tokens
    return math.ceil(spec.capacity * spec.topk * tokens / spec.experts)


class _Whole(NamedTuple):
    """All real rows of a micro-batch in its order, and the way back to this rank's."""

    rows: Tensor
    order: Tensor  # where each row was, those of rank after rank one behind the other
    mine: slice  # which of these are this rank's
    at: Tensor  # where they are among its tokens

    @classmethod
    def of(cls, x: Tensor, tokens: Tokens) -> _Whole:
        at, axis = _places(tokens.real), tokens.parts
        mine = x[at]
        sizes = lengths_over(mine, axis)
        every = start_all_gather(mine, axis, sizes=sizes)
        order = start_all_gather(tokens.rows[at], axis, sizes=sizes).wait().argsort()
        start = sum(sizes[: axis.rank])
        return cls(every.wait()[order], order, slice(start, start + len(mine)), at)

    def put(self, values: Tensor, into: Tensor) -> Tensor:
        """A copy of `into` with this rank's rows of `values` [T, …] in their places."""
        by_rank = torch.empty_like(values).index_copy_(0, self.order, values)
        return into.index_copy(0, self.at, by_rank[self.mine])


def _places(real: Tensor) -> Tensor:
    """Where there is no padding; in a dry run there is none."""
    if not compat.has_values(real):
        return torch.arange(len(real), device=real.device)
    return real.nonzero()[:, 0]
