"""One step of a cell by the reference, and what its routers did."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from parity.matrix import Cell
from parity.mixtures import mixture_of
from parity.outcome import Routed
from reference import bridge, mixture, plain
from reference.plain import Document, Weights
from torch import Tensor

from penteract.config import Config
from penteract.families import model_spec
from penteract.random import keep_mask


def dropping(cell: Cell, config: Config, step: int, micro_batch: int) -> plain.Drop:
    """Dropout with the mask of a global micro-batch."""
    name_of = f"dropout/{step}/{micro_batch}/{{}}".format

    def drop(name: str, x: Tensor, first_row: int) -> Tensor:
        rows = first_row + torch.arange(x.shape[0])
        index = rows[:, None] * x.shape[1] + torch.arange(x.shape[1])
        mask = keep_mask(config.train.seed, name_of(name), index, 1 - cell.dropout)
        return x * mask / (1 - cell.dropout)

    return drop


def dropping_scores(
    config: Config, step: int, micro_batch: int, tokens: int
) -> plain.Scores | None:
    """Dropout of probabilities with the mask of a global micro-batch of so many tokens."""
    rate = config.model.attention_dropout

    def factors(name: str, head: int, query: int, keys: range) -> Tensor:
        index = (head * tokens + query) * tokens + torch.arange(keys.start, keys.stop)
        stream = f"dropout/{step}/{micro_batch}/{name}.scores"
        return keep_mask(config.train.seed, stream, index, 1 - rate).double() / (1 - rate)

    return factors if rate else None


@dataclass
class Step:
    """What the reference finds of one step."""

    losses: list[float]  # in the order of `LOSSES`
    gradients: Weights  # of their sum
    counts: dict[str, list[int]]  # by layer: how often each expert was chosen
    routed: Routed


def reference_step(
    cell: Cell,
    config: Config,
    sample: Callable[[int], list[Document]],
    weights: Weights,
    kept: Weights,
    step: int,
) -> Step:
    """A step, micro-batch by micro-batch, in one process; counts are those of the whole step."""
    described, m = bridge.describe(model_spec(config)), mixture_of(cell.moe)
    leaves = {name: x.clone().requires_grad_() for name, x in weights.items()}
    first = (step - 1) * cell.global_batch
    aim = plain.Aim(cell.label_smoothing, cell.z_loss)
    results, count = [], 0.0
    for start in range(0, cell.global_batch, cell.micro_batch):
        drop, number = plain.keep, start // cell.micro_batch
        if cell.dropout:
            drop = dropping(cell, config, step, number)
        samples = range(start, min(start + cell.micro_batch, cell.global_batch))
        docs = with_rows(doc for i in samples for doc in sample(first + i))
        count += sum(sum(doc.weights) for doc in docs)
        scores = dropping_scores(config, step, number, sum(len(doc.tokens) for doc in docs))
        d = dataclasses.replace(described, scores=scores)
        found = mixture.micro_batch(docs, leaves, d, m, kept=kept, aim=aim, drop=drop)
        results.append(found)
    # Without a counted token the loss is 0.
    counts = [max(count, 1.0)] * 2 + [max(sum(r.tokens for r in results), 1)] * 2
    sums = [(r.loss, r.z_loss, r.balance, r.router_z) for r in results]
    losses = torch.stack([sum(x) / n for x, n in zip(zip(*sums, strict=True), counts, strict=True)])
    gradients = torch.autograd.grad(
        losses.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    return Step(
        losses.tolist(), dict(zip(leaves, gradients, strict=True)), *routed_in(results, m.experts)
    )


def with_rows(documents: Iterable[Document]) -> list[Document]:
    """The documents with their first rows in the micro-batch."""
    row, found = 0, []
    for doc in documents:
        found.append(dataclasses.replace(doc, first_row=row))
        row += len(doc.tokens)
    return found


def routed_in(
    results: Sequence[mixture.Result], experts: int
) -> tuple[dict[str, list[int]], Routed]:
    """Of the micro-batches of a step, by layer: its counts, and what is said of it."""
    counts, routed = {}, {}
    for name in results[0].routed:
        every = [result.routed[name] for result in results]
        counts[name] = [sum(n) for n in zip(*(r.counts(experts) for r in every), strict=True)]
        chosen, dropped = sum(counts[name]), sum(r.dropped for r in every)
        routed[name.removesuffix(".router")] = counts[name], dropped / chosen if chosen else 0.0
    return counts, routed
