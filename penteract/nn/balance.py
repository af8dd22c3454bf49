"""Keeping experts evenly loaded: losses on the router's scores, and a bias on its choice.

Of a micro-batch with T real tokens let f_e be how often expert e was chosen, before any were
dropped, and P_e the sum over tokens of its score, scores of a token adding up to 1. With n the
number of tokens in the whole step, E experts and k of them a token, each kind adds to the loss

    aux          weight · Σ_micro-batches (T/n) · E/(k T²) · Σ_e f_e P_e
    seq_aux      the same with a sequence in place of a micro-batch
    global_aux   weight/n · E · Σ_e (F_e / Σ F) · Σ_tokens s_e     with F of the whole last step
    z            z_weight/n · Σ_tokens (log Σ_e exp z_e)²          with any of them

Every term is a sum over tokens: a rank adds that of its own, with f of all ranks that hold parts of
the micro-batch, and no layout changes it. Before the first step all F are alike. The bias of
balance "bias" only chooses, and these losses do not see it; after each step b_e rises by bias_rate
where expert e had less than the mean of the step's tokens and falls by it where it had more (equal:
nothing), as in the paper, without subtracting the mean of b. Sources: Fedus et al.,
arXiv:2101.03961, section 2.2; DeepSeek-AI, arXiv:2412.19437, section 2.1.2; Zoph et al.,
arXiv:2202.08906, for z.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from penteract.collectives import all_reduce_
from penteract.mesh import Axis
from penteract.nn.router import TINY, RouterSpec, Routing, Tokens, scores_of
from penteract.parallel.expert.places import tally


class Losses(NamedTuple):
    """A rank's part of both terms of a micro-batch, with their weights, scalars."""

    balance: Tensor
    z: Tensor


def losses(
    spec: RouterSpec,
    logits: Tensor,
    routing: Routing,
    tokens: Tokens,
    *,
    sequence: Tensor,
    sequences: int,
    load: Tensor | None,
) -> Losses:
    """Sums over tokens: n times what the step's loss has of them.

    `sequence` [t] says which of the micro-batch's sequences each token belongs to; `load` [E] is
    how often each expert was chosen in the last step.
    """
    real = tokens.real.to(logits.dtype)
    z = torch.zeros_like(logits[:0].sum())
    if spec.z_weight:
        z = spec.z_weight * (real * logits.logsumexp(-1).square()).sum()
    balance = torch.zeros_like(z)
    if spec.balance in ("aux", "seq_aux", "global_aux"):
        scores = scores_of(spec, logits)
        if spec.score == "sigmoid":
            scores = scores / (scores.sum(-1, keepdim=True) + TINY)
        of, n = (sequence, sequences) if spec.balance == "seq_aux" else (sequence * 0, 1)
        mean = scores.new_zeros(n, spec.experts).index_add(0, of, scores * real[:, None])
        if spec.balance == "global_aux":
            shares = _global(spec, load)
        else:
            shares = _shares(spec, routing.chosen, of, n, tokens.parts)
        balance = spec.balance_weight * spec.experts * (shares.to(scores.dtype) * mean).sum()
    return Losses(balance, z)


def _global(spec: RouterSpec, load: Tensor | None) -> Tensor:
    """Each expert's share of the last step, [E]; alike before the first."""
    assert load is not None
    total = load.sum()
    shares = load.double() / total.clamp(min=1)
    return torch.where(total > 0, shares, 1 / spec.experts)


def _shares(spec: RouterSpec, chosen: Tensor, of: Tensor, n: int, parts: Axis) -> Tensor:
    """Each expert's share of what was chosen in each of n sets of tokens, [n, E]."""
    counts = all_reduce_(counted(spec, chosen, of, n).double(), parts)
    return counts / counts.sum(1, keepdim=True).clamp(min=1)


def counted(spec: RouterSpec, chosen: Tensor, of: Tensor | None = None, n: int = 1) -> Tensor:
    """How often each expert was chosen in each of n sets of this rank's tokens, [n, E]."""
    e = spec.experts
    numbers = chosen if of is None else chosen + e * of[:, None]
    return tally(torch.where(chosen < 0, -1, numbers), n * e).unflatten(0, (n, e))


def moved_bias(bias: Tensor, load: Tensor, rate: float) -> Tensor:
    """The bias [E] after a step in which expert e was chosen load[e] times by all ranks."""
    # Whole numbers: n·load against their sum, so that no rounding decides.
    return bias + rate * torch.sign(load.sum() - len(load) * load).to(bias.dtype)
