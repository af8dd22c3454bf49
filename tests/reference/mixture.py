"""A decoder some of whose blocks have experts: float64, one token and one expert at a time.

Capacity, sinkhorn and the losses join the tokens of a micro-batch, so one micro-batch runs at once,
layer by layer. Nothing here is shared with `penteract.nn`. Kept is what routers have besides
weights: with balance "bias" `{router}.bias`, with "global_aux" `load/{router}`, how often each
expert was chosen in the step before. A document of `Padding` attends to itself and goes nowhere.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from reference import plain
from reference.plain import Aim, Description, Document, Drop, Weights
from torch import Tensor

NEAR = 1e-11  # another way of adding up may order numbers otherwise that are so close


def zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


@dataclass(frozen=True)
class Mixture:
    """Which blocks have experts, and how tokens are sent to them."""

    layers: tuple[int, ...]
    experts: int
    topk: int = 2
    score: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    topk_groups: int = 1
    balance: str = "none"
    balance_weight: float = 0.0
    z_weight: float = 0.0
    capacity: float | None = None
    drop: str = "score"
    shared: bool = False
    shared_gate: bool = False


class Padding(Document):
    """A document that fills a micro-batch up; none of its labels counts."""


@dataclass
class Routed:
    """Where the tokens of a micro-batch go, and what that adds to the loss."""

    chosen: list[list[int]]  # of each token: best first, before any are dropped
    taken: list[dict[int, Tensor]]  # of each token: the weight of each expert that takes it
    balance: Tensor  # both sums over tokens, with their weights
    z: Tensor

    def counts(self, experts: int) -> list[int]:
        every = [e for token in self.chosen for e in token]
        return [every.count(e) for e in range(experts)]

    @property
    def dropped(self) -> int:
        return sum(map(len, self.chosen)) - sum(map(len, self.taken))


@dataclass
class Result:
    """Sums over the tokens of a micro-batch; `routed` is by the name of the layer's router."""

    loss: Tensor = field(default_factory=zero)
    z_loss: Tensor = field(default_factory=zero)
    balance: Tensor = field(default_factory=zero)
    router_z: Tensor = field(default_factory=zero)
    tokens: int = 0  # without padding
    routed: dict[str, Routed] = field(default_factory=dict)


def score_row(z: Tensor, m: Mixture) -> Tensor:
    """One token's logits [E] -> scores [E]."""
    if m.score == "sigmoid":
        return 1 / (1 + torch.exp(-z))
    exponentials = torch.exp(z - z.max())
    return exponentials / exponentials.sum()


def choose_row(choice: Sequence[float], m: Mixture) -> list[int]:
    """The experts of the largest numbers among those of the best groups, the largest first."""
    size = m.experts // m.groups
    together = 2 if m.score == "sigmoid" else 1
    groups = [list(range(g * size, (g + 1) * size)) for g in range(m.groups)]
    worth = [sum(sorted((choice[e] for e in group), reverse=True)[:together]) for group in groups]
    open_to = [e for g in largest(worth, m.topk_groups) for e in groups[g]]
    ties = m.balance != "sinkhorn"  # whose numbers are the results of many operations
    return [open_to[i] for i in largest([choice[e] for e in open_to], m.topk, ties=ties)]


def largest(numbers: Sequence[float], n: int, *, ties: bool = True) -> list[int]:
    """Where the n largest are, the largest first; with ties, of equal ones the first."""
    order = sorted(range(len(numbers)), key=lambda i: (-numbers[i], i))
    if 0 < n < len(order):
        gap, size = numbers[order[n - 1]] - numbers[order[n]], abs(numbers[order[n]])
        assert gap > NEAR * size or (ties and gap == 0), "rounding decides who is chosen"
    return order[:n]


def weigh_row(scores: Tensor, chosen: Sequence[int], m: Mixture) -> dict[int, Tensor]:
    total = torch.stack([scores[e] for e in chosen]).sum() if m.normalise else 1.0
    return {e: m.scale * scores[e] / total for e in chosen}


def choose(logits: Sequence[Tensor], m: Mixture, bias: Sequence[float] | None) -> list[list[int]]:
    """Of every token of a micro-batch its experts, the best first."""
    if m.balance == "sinkhorn":
        choice = balanced([z.tolist() for z in logits])
    else:
        added = [0.0] * m.experts if bias is None else bias
        rows = [score_row(z, m).tolist() for z in logits]
        choice = [[s + b for s, b in zip(row, added, strict=True)] for row in rows]
    return [choose_row(row, m) for row in choice]


def balanced(logits: Sequence[Sequence[float]], rounds: int = 30) -> list[list[float]]:
    """exp(z) with rows and columns scaled in turn: factors for each that make their sums equal."""
    if not logits:
        return []
    t, e = len(logits), len(logits[0])
    top = max(map(max, logits))
    x = [[math.exp(z - top) for z in row] for row in logits]
    by_row, by_column = [1.0] * t, [1.0] * e
    for _ in range(rounds):
        for j in range(e):
            by_column[j] = 1 / (e * sum(by_row[i] * x[i][j] for i in range(t)))
        for i in range(t):
            by_row[i] = 1 / (t * sum(by_column[j] * x[i][j] for j in range(e)))
    return [[by_row[i] * by_column[j] * x[i][j] for j in range(e)] for i in range(t)]


def within_capacity(
    scores: Sequence[Sequence[float]], chosen: Sequence[Sequence[int]], m: Mixture
) -> set[tuple[int, int]]:
    """The pairs of token and expert for which there is a place."""
    pairs = {(i, e) for i, experts in enumerate(chosen) for e in experts}
    if m.capacity is None:
        return pairs
    places = math.ceil(m.capacity * m.topk * len(chosen) / m.experts)
    kept: set[tuple[int, int]] = set()
    for e in range(m.experts):
        tokens = [i for i, experts in enumerate(chosen) if e in experts]
        if m.drop == "score":
            tokens = [tokens[i] for i in largest([scores[i][e] for i in tokens], places)]
        kept |= {(i, e) for i in tokens[:places]}
    return kept


def balance_sum(
    scores: Sequence[Tensor],
    chosen: Sequence[Sequence[int]],
    m: Mixture,
    sequences: Sequence[int],
    load: Sequence[float] | None,
) -> Tensor:
    """n times what the loss of a step with n tokens has of it; `sequences` are the tokens'."""
    total = zero()
    if m.balance == "global_aux":
        assert load is not None
        every = sum(load)
        for s in shares(scores, m):
            for e in range(m.experts):
                part = load[e] / every if every else 1 / m.experts
                total = total + m.balance_weight * m.experts * part * s[e]
    if m.balance in ("aux", "seq_aux"):
        apart = sequences if m.balance == "seq_aux" else [0] * len(sequences)
        for number in sorted(set(apart)):
            inside = [i for i, other in enumerate(apart) if other == number]
            t = len(inside)
            for e in range(m.experts):
                f = sum(e in chosen[i] for i in inside)
                p = torch.stack([shares([scores[i]], m)[0][e] for i in inside]).sum()
                total = total + m.balance_weight * t * m.experts / (m.topk * t * t) * f * p
    return total


def shares(scores: Sequence[Tensor], m: Mixture) -> list[Tensor]:
    """Scores that add up to 1 for each token."""
    return [s / s.sum() if m.score == "sigmoid" else s for s in scores]


def z_sum(logits: Sequence[Tensor], m: Mixture) -> Tensor:
    total = zero()
    for z in logits:
        total = total + m.z_weight * (z.max() + torch.log(torch.exp(z - z.max()).sum())) ** 2
    return total


def route(
    logits: Sequence[Tensor],
    m: Mixture,
    *,
    sequences: Sequence[int] = (),
    kept: Sequence[float] | None = None,
) -> Routed:
    """All tokens of a micro-batch that are no padding, by their logits [E]; `kept` as above."""
    chosen = choose(logits, m, kept if m.balance == "bias" else None)
    scores = [score_row(z, m) for z in logits]
    room = within_capacity([s.tolist() for s in scores], chosen, m)
    taken = [
        {e: x for e, x in weigh_row(s, experts, m).items() if (i, e) in room}
        for i, (s, experts) in enumerate(zip(scores, chosen, strict=True))
    ]
    numbers = sequences or [0] * len(scores)
    balance = balance_sum(scores, chosen, m, numbers, kept if m.balance == "global_aux" else None)
    return Routed(chosen, taken, balance, z_sum(logits, m))


def experts(
    x: Tensor, taken: Mapping[int, Tensor], w: Weights, name: str, d: Description
) -> Tensor:
    """One row [h] -> [h]: the weighted sum of the experts that take it."""
    result = torch.zeros_like(x)
    for e, weight in taken.items():
        result = result + weight * plain.mlp(x, w, f"{name}.experts.{e}", d)
    return result


def shared(x: Tensor, w: Weights, name: str, m: Mixture, d: Description) -> Tensor:
    """One row [h] -> [h]: what every token passes, padding too."""
    if not m.shared:
        return torch.zeros_like(x)
    y = plain.mlp(x, w, f"{name}.shared", d)
    if m.shared_gate:
        y = y / (1 + torch.exp(-(w[f"{name}.shared_gate.weight"][0] * x).sum()))
    return y


Kept = Mapping[str, Tensor]
PLAIN = Aim()


def mixed(
    documents: Sequence[Document],
    streams: Sequence[Sequence[Tensor]],
    w: Weights,
    name: str,
    d: Description,
    *,
    m: Mixture,
    kept: Kept,
) -> tuple[list[list[Tensor]], Routed]:
    """Of the normed rows of every document what the experts make of them."""
    places = [
        (n, i)
        for n, document in enumerate(documents)
        for i in range(len(document.tokens))
        if not isinstance(document, Padding)
    ]
    router = f"{name}.router"
    logits = [plain.linear(streams[n][i], w, router) for n, i in places]
    mine = kept.get(f"{router}.bias", kept.get(f"load/{router}"))
    numbers = [n for n, _ in places]
    routed = route(logits, m, sequences=numbers, kept=None if mine is None else mine.tolist())
    out = [[shared(x, w, name, m, d) for x in rows] for rows in streams]
    for (n, i), taken in zip(places, routed.taken, strict=True):
        out[n][i] = out[n][i] + experts(streams[n][i], taken, w, name, d)
    return out, routed


def micro_batch(
    documents: Sequence[Document],
    w: Weights,
    d: Description,
    m: Mixture,
    *,
    kept: Kept,
    aim: Aim = PLAIN,
    drop: Drop = plain.keep,
) -> Result:
    """One micro-batch, layer by layer."""
    result = Result()
    streams = [plain.embedded(document, w, d, drop) for document in documents]
    for layer in range(d.layers):
        name = f"layers.{layer}"
        each = zip(streams, documents, strict=True)
        streams = [plain.attended(rows, w, name, d, doc, drop) for rows, doc in each]
        x = [[plain.norm(r, w, f"{name}.mlp_norm", d.norm, d.eps) for r in s] for s in streams]
        if layer in m.layers:
            y, routed = mixed(documents, x, w, f"{name}.moe", d, m=m, kept=kept)
            result.routed[f"{name}.moe.router"] = routed
            result.balance = result.balance + routed.balance
            result.router_z = result.router_z + routed.z
        else:
            y = [[plain.mlp(row, w, f"{name}.mlp", d) for row in rows] for rows in x]
        streams = [
            plain.added(rows, drop(f"{name}.mlp", torch.stack(out), document.first_row))
            for rows, out, document in zip(streams, y, documents, strict=True)
        ]
    for rows, document in zip(streams, documents, strict=True):
        loss, z_loss = plain.sums_of(plain.head(rows, w, d), document, aim)
        result.loss, result.z_loss = result.loss + loss, result.z_loss + z_loss
    real = [document for document in documents if not isinstance(document, Padding)]
    result.tokens = sum(len(document.tokens) for document in real)
    return result


def moved(bias: Sequence[float], counts: Sequence[int], rate: float) -> list[float]:
    """The bias after a step: up where an expert was chosen less often than the mean, else down."""
    mean = sum(counts) / len(counts)
    return [
        b + rate if n < mean else b - rate if n > mean else b
        for b, n in zip(bias, counts, strict=True)
    ]
