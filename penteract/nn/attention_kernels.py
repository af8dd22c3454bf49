"""Attention inside each sequence: one function, several backends, output and log-sum-exp.

`attend` is causal softmax attention with grouped key/value heads. Sequences of equal length take
one call of a dense kernel; unequal ones (packed documents) take one call each, so that no row ever
sees another document. The log-sum-exp of every row lets partial results over blocks be merged
exactly.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Backend = Literal["flash", "plain"]


def attend(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], *, backend: Backend = "flash"
) -> tuple[Tensor, Tensor]:
    """Causal attention of q [t, a, d] over k, v [t, g, d], sequence by sequence.

    Returns the output [t, a, d] and the log-sum-exp of the scaled scores [t, a], in at least
    float32. `a` is a multiple of `g`. Source: Dao, arXiv:2307.08691.
    """
    if q.shape[0] * q.shape[1] == 0:
        # No token or no head: still in the graph, so that backward reaches every weight.
        nothing = q + 0 * (k.sum() + v.sum())
        return nothing, nothing.sum(-1).to(torch.promote_types(q.dtype, torch.float32))
    if len(set(lengths)) == 1:
        n = len(lengths)
        q, k, v = (x.unflatten(0, (n, -1)) for x in (q, k, v))
        return _dense(q, k, v, True, backend)
    parts = [
        _dense(one_q[None], one_k[None], one_v[None], True, backend)
        for one_q, one_k, one_v in zip(
            q.split(lengths), k.split(lengths), v.split(lengths), strict=True
        )
        if len(one_q)
    ]
    outputs, lses = zip(*parts, strict=True)
    return torch.cat(outputs), torch.cat(lses)


def attend_cached(q: Tensor, k: Tensor, v: Tensor, *, backend: Backend = "flash") -> Tensor:
    """The newest tokens q [n, 1, a, d] over all keys and values [n, s, g, d] → [n, a, d]."""
    return _dense(q, k, v, False, backend)[0]


def _dense(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, backend: Backend
) -> tuple[Tensor, Tensor]:
    # q [n, s, a, d], k and v [n, s', g, d]; kernels want heads before rows.
    if q.numel() == 0:  # no head
        return q.flatten(0, 1), q.new_zeros(q.shape[0] * q.shape[1], 0)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    kernel = _flash if backend == "flash" else _plain
    out, lse = kernel(q, k, v, causal)  # [n, a, s, d], [n, a, s]
    return out.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The fused kernel of the device; float32 on CUDA takes the memory-efficient one."""
    aten = torch.ops.aten
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out, lse
    if q.dtype == torch.float64:
        return _plain(q, k, v, causal)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    d, scale = q.shape[-1], q.shape[-1] ** -0.5
    q, k, v = (functional.pad(x, (0, -d % 8)) for x in (q, k, v))  # the kernels' heads are 8-fold
    if q.dtype == torch.float32:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, causal, scale=scale
        )
        return out[..., :d], lse[..., : q.shape[2]]  # the kernel pads rows
    out, lse, *_ = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return out[..., :d], lse


def _plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The definition, in at least float32, with the whole score matrix in memory."""
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    k, v = (x.to(wide).repeat_interleave(group, dim=1) for x in (k, v))
    scores = q.to(wide) @ k.transpose(-1, -2) / q.shape[-1] ** 0.5  # [n, a, s, s']
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~mask, float("-inf"))
    lse = scores.logsumexp(-1)
    return (torch.exp(scores - lse[..., None]) @ v).to(q.dtype), lse
