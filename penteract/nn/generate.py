"""Text from a model: one token after another, with a key/value cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penteract.nn.model import Stage
from penteract.nn.pipelined import Pipelined
from penteract.nn.sequences import Sequences
from penteract.random import uniform


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; temperature 0 takes the most likely one.

    `top_k` keeps the k most likely tokens (None: all), `top_p` the smallest set of most likely
    tokens whose probabilities reach p. Source of top-p: Holtzman et al., arXiv:1904.09751.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature = {self.temperature}: must be a number of 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k = {self.top_k}: must be 1 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}: must be above 0 and at most 1")


def choose(logits: Tensor, sampling: Sampling, step: int) -> Tensor:
    """The next token of each of n sequences, [n], from their logits [n, v].

    Sequence i at `step` draws its number from (seed, step, i) alone, so that a text does not depend
    on how many others are generated beside it.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    # The largest logit becomes 0 first, so that a tiny temperature gives no infinity.
    logits = logits.double() - logits.double().amax(-1, keepdim=True)
    probabilities = (logits / sampling.temperature).softmax(-1)
    probabilities, tokens = probabilities.sort(dim=-1, descending=True, stable=True)  # [n, v]
    before = probabilities.cumsum(-1) - probabilities  # probability of all likelier tokens
    drop = before >= sampling.top_p
    if sampling.top_k is not None:
        drop[:, sampling.top_k :] = True
    cumulative = probabilities.masked_fill(drop, 0.0).cumsum(-1)
    rows = torch.arange(logits.shape[0], device=logits.device)
    draw = uniform(sampling.seed, f"generate/{step}", rows).double()
    place = torch.searchsorted(cumulative, (draw * cumulative[:, -1])[:, None], right=True)
    kept = (~drop).sum(-1, keepdim=True)
    return tokens.gather(1, place.minimum(kept - 1)).squeeze(1)


@torch.no_grad()
def generate(
    model: Stage | Pipelined,
    prompts: Tensor,
    *,
    max_tokens: int,
    sampling: Sampling,
    stop: int | None = None,
) -> Iterator[Sequence[int]]:
    """Yield the next token of each of n sequences, until all produced `stop` or `max_tokens`.

    `prompts` [n, s] are equally long, s at least 1. A sequence that has stopped yields `stop`
    again. Raises ValueError where a model with learned positions has too few of them.
    """
    n, s = prompts.shape
    if s == 0:
        raise ValueError("the prompt is empty: give at least one token")
    limit = model.spec.positions
    if limit is not None and s + max_tokens > limit:
        raise ValueError(
            f"a prompt of {s} tokens and {max_tokens} more are {s + max_tokens}, but the model has "
            f"{limit} positions: ask for at most {max(0, limit - s)}"
        )
    caches = model.new_caches(n, s + max_tokens)
    tokens = prompts
    done = torch.zeros(n, dtype=torch.bool, device=prompts.device)
    for step in range(max_tokens):
        past = 0 if step == 0 else s + step - 1
        sequences = Sequences.of((tokens.shape[1],) * n, past=past, device=prompts.device)
        logits = model.logits(tokens.flatten(), sequences, caches)  # [n, v]
        chosen = choose(logits, sampling, step)
        if stop is not None:
            chosen = torch.where(done, stop, chosen)
            done |= chosen == stop
        yield chosen.tolist()
        if stop is not None and bool(done.all()):
            return
        tokens = chosen[:, None]
