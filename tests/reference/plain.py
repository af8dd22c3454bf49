"""An independent model and optimizer: float64, one row, one head, one document at a time.

Nothing here is shared with `penteract.nn`. A model is a dictionary {logical name: tensor}; what it
computes stands in a `Description`. Gradients come from autograd over plain operations, the update
from AdamW's formulas written out.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Weights = dict[str, Tensor]
Drop = Callable[[str, Tensor, int], Tensor]  # (layer name, [s, h], first row) -> [s, h]
Scores = Callable[[str, int, int, range], Tensor]  # (layer, head, row, rows it sees) -> factors


@dataclass(frozen=True)
class Description:
    """Sizes and choices of a decoder."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    norm: Literal["rms", "layer"]
    eps: float
    activation: Literal["swiglu", "gelu"]
    theta: float | None  # None: learned positions
    qk_norm: bool
    tied: bool
    window: int | None = None  # tokens that a token attends to, itself included
    sinks: bool = False  # weights `{name}.sinks` [heads], one more score in every row
    softcap: float | None = None  # c of c·tanh(score / c)
    scores: Scores | None = None  # dropout of probabilities


@dataclass(frozen=True)
class Document:
    """Tokens that see only each other; `weights` say how much each label's loss counts."""

    tokens: list[int]
    labels: list[int]
    weights: list[float]
    first_position: int = 0
    first_row: int = 0  # of the micro-batch, for dropout


def keep(name: str, x: Tensor, first_row: int) -> Tensor:
    """No dropout."""
    return x


def norm(x: Tensor, w: Weights, name: str, kind: str, eps: float) -> Tensor:
    """One row [n]: x / sqrt(mean(x²) + eps) · weight; or centred, with the variance, and a bias."""
    n = x.shape[0]
    if kind == "rms":
        return x / torch.sqrt((x * x).sum() / n + eps) * w[f"{name}.weight"]
    centred = x - x.sum() / n
    scaled = centred / torch.sqrt((centred * centred).sum() / n + eps)
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


def linear(x: Tensor, w: Weights, name: str) -> Tensor:
    """One row [i] -> [o]."""
    y = w[f"{name}.weight"] @ x
    bias = w.get(f"{name}.bias")
    return y if bias is None else y + bias


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """One head [d]: element i and element i + d/2 turned by position · theta^(-2i/d)."""
    half = x.shape[0] // 2
    first, second = [], []
    for i in range(half):
        angle = position * theta ** (-2 * i / x.shape[0])
        a, b = x[i], x[i + half]
        first.append(a * math.cos(angle) - b * math.sin(angle))
        second.append(b * math.cos(angle) + a * math.sin(angle))
    return torch.stack(first + second)


def attention_row(
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    *,
    sink: Tensor | None = None,
    softcap: float | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """One query [d] over the keys and values that it sees -> [d]; `sink` is a score without one.

    Probabilities are multiplied by `factors`, those of dropout.
    """
    scores = torch.stack([(q * k).sum() / math.sqrt(q.shape[0]) for k in keys])
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if sink is not None:
        scores = torch.cat([scores, sink.reshape(1)])
    exponentials = torch.exp(scores - scores.max())
    probabilities = exponentials / exponentials.sum()
    if factors is not None:
        probabilities = probabilities[: len(values)] * factors
    result = torch.zeros_like(values[0])
    for p, v in zip(probabilities, values, strict=sink is None):
        result = result + p * v
    return result


def attention(
    rows: Sequence[Tensor],
    w: Weights,
    name: str,
    d: Description,
    first_position: int,
    first_row: int = 0,
) -> list[Tensor]:
    """Causal attention of one document's rows, each [h] -> [h]."""

    projected = {part: [linear(row, w, f"{name}.{part}") for row in rows] for part in "qkv"}

    def head_rows(part: str, head: int) -> list[Tensor]:
        result = []
        for i, row in enumerate(projected[part]):
            x = row[head * d.head_size : (head + 1) * d.head_size]
            if d.qk_norm and part in "qk":
                x = norm(x, w, f"{name}.{part}_norm", "rms", d.eps)
            if d.theta is not None and part in "qk":
                x = rotate(x, first_position + i, d.theta)
            result.append(x)
        return result

    keys = [head_rows("k", g) for g in range(d.kv_heads)]
    values = [head_rows("v", g) for g in range(d.kv_heads)]
    outputs: list[list[Tensor]] = [[] for _ in rows]
    for head in range(d.heads):
        g = head // (d.heads // d.kv_heads)  # neighbouring query heads share a key/value head
        sink = w[f"{name}.sinks"][head] if d.sinks else None
        for i, q in enumerate(head_rows("q", head)):
            first = 0 if d.window is None else max(0, i + 1 - d.window)
            k, v = keys[g][first : i + 1], values[g][first : i + 1]
            at = range(first_row + first, first_row + i + 1)
            factors = d.scores and d.scores(name, head, first_row + i, at)
            outputs[i].append(attention_row(q, k, v, sink=sink, softcap=d.softcap, factors=factors))
    return [linear(torch.cat(parts), w, f"{name}.o") for parts in outputs]


def mlp(x: Tensor, w: Weights, name: str, d: Description) -> Tensor:
    """One row [h] -> [h]."""
    up = linear(x, w, f"{name}.up")
    if d.activation == "swiglu":
        gate = linear(x, w, f"{name}.gate")
        y = gate / (1 + torch.exp(-gate)) * up
    else:
        y = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    return linear(y, w, f"{name}.down")


def embedded(document: Document, w: Weights, d: Description, drop: Drop) -> list[Tensor]:
    """The rows [h] before the first block."""
    rows = [w["embed.weight"][token] for token in document.tokens]
    if d.theta is None:
        rows = [x + w["embed.positions"][document.first_position + i] for i, x in enumerate(rows)]
    return list(drop("embed", torch.stack(rows), document.first_row))


def attended(
    rows: list[Tensor], w: Weights, name: str, d: Description, document: Document, drop: Drop
) -> list[Tensor]:
    """The rows after a block's attention."""
    y = [norm(x, w, f"{name}.attention_norm", d.norm, d.eps) for x in rows]
    y = attention(y, w, f"{name}.attention", d, document.first_position, document.first_row)
    return added(rows, drop(f"{name}.attention", torch.stack(y), document.first_row))


def added(rows: list[Tensor], y: Tensor) -> list[Tensor]:
    return list(torch.stack(rows) + y)


def head(rows: list[Tensor], w: Weights, d: Description) -> Tensor:
    """Rows [h] after the last block -> [s, v]."""
    matrix = w["embed.weight"] if d.tied else w["head.weight"]
    return torch.stack([matrix @ norm(x, w, "norm", d.norm, d.eps) for x in rows])


def logits(document: Document, w: Weights, d: Description, drop: Drop = keep) -> Tensor:
    """[s, v] of one document."""
    rows = embedded(document, w, d, drop)
    for layer in range(d.layers):
        name = f"layers.{layer}"
        rows = attended(rows, w, name, d, document, drop)
        y = [mlp(norm(x, w, f"{name}.mlp_norm", d.norm, d.eps), w, f"{name}.mlp", d) for x in rows]
        rows = added(rows, drop(f"{name}.mlp", torch.stack(y), document.first_row))
    return head(rows, w, d)


@dataclass(frozen=True)
class Aim:
    """What is made small: the cross-entropy with labels smoothed by ε, plus ζ (log Σ exp z)²."""

    smoothing: float = 0.0
    z: float = 0.0


def loss_sum(document: Document, w: Weights, d: Description, drop: Drop = keep) -> Tensor:
    """Σ weight · (log Σ exp z - z[label]) over the document's tokens."""
    return loss_sums(document, w, d, Aim(), drop)[0]


def loss_sums(
    document: Document, w: Weights, d: Description, aim: Aim, drop: Drop = keep
) -> tuple[Tensor, Tensor]:
    """Σ weight · the cross-entropy of (1-ε) · label + ε · uniform; Σ weight · ζ (log Σ exp z)²."""
    return sums_of(logits(document, w, d, drop), document, aim)


def sums_of(z: Tensor, document: Document, aim: Aim) -> tuple[Tensor, Tensor]:
    """Those of given logits [s, v]."""
    total, squares = torch.zeros(2, dtype=torch.float64)
    for row, label, weight in zip(z, document.labels, document.weights, strict=True):
        top = row.max()
        log_sum = top + torch.log(torch.exp(row - top).sum())
        share = aim.smoothing / row.shape[0]  # of every token; the label has the rest besides
        surprises = [log_sum - x for x in row]
        smoothed = share * sum(surprises) + (1 - aim.smoothing) * surprises[label]
        total = total + weight * smoothed
        squares = squares + weight * aim.z * log_sum * log_sum
    return total, squares


def gradients(
    documents: Sequence[Document], weights: Weights, d: Description, drop: Drop = keep
) -> tuple[float, Weights]:
    """The mean loss over all counted tokens of all documents, and its gradients.

    Without a counted token the loss and every gradient are exactly 0.
    """
    count = sum(sum(document.weights) for document in documents)
    leaves = {name: x.detach().clone().requires_grad_() for name, x in weights.items()}
    total = torch.zeros((), dtype=torch.float64)
    for document in documents:
        total = total + loss_sum(document, leaves, d, drop)
    loss = total / max(count, 1.0)
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    zipped = zip(leaves.items(), found, strict=True)
    return loss.item(), {n: torch.zeros_like(x) if g is None else g for (n, x), g in zipped}


@dataclass(frozen=True)
class Rates:
    """AdamW's numbers; `decayed` names what weight decay applies to."""

    lr: Callable[[int], float]
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip: float
    decayed: frozenset[str]


@dataclass
class State:
    """Weights and moments after `step` updates, and the last step's loss and gradient norm."""

    weights: Weights
    first: Weights
    second: Weights
    step: int = 0
    loss: float = 0.0
    norm: float = 0.0

    @classmethod
    def start(cls, weights: Weights) -> "State":
        zeros = [{name: torch.zeros_like(x) for name, x in weights.items()} for _ in range(2)]
        return cls({name: x.clone() for name, x in weights.items()}, *zeros)


def update(state: State, loss: float, grads: Weights, rates: Rates) -> None:
    """One AdamW update of every tensor, in place, after clipping by the global norm."""
    squares = 0.0
    for g in grads.values():
        for x in g.flatten().tolist():
            squares += x * x
    state.step, state.loss, state.norm = state.step + 1, loss, math.sqrt(squares)
    coefficient = min(1.0, rates.clip / (state.norm + 1e-6)) if rates.clip else 1.0
    lr, (beta1, beta2) = rates.lr(state.step), rates.betas
    for name, w in state.weights.items():
        g = coefficient * grads[name]
        m = state.first[name] = beta1 * state.first[name] + (1 - beta1) * g
        v = state.second[name] = beta2 * state.second[name] + (1 - beta2) * g * g
        if name in rates.decayed:
            w = w - lr * rates.weight_decay * w
        unbiased = m / (1 - beta1**state.step), v / (1 - beta2**state.step)
        state.weights[name] = w - lr * unbiased[0] / (torch.sqrt(unbiased[1]) + rates.eps)
