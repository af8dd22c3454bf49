"""Attention in float64: one document, one head, one query, one key at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from reference.plain import attention_row
from torch import Tensor


def attention(
    x: Mapping[str, Tensor],
    lengths: Sequence[int],
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of packed documents, q [t, a, d] over k and v [t, g, d] → [t, a, d].

    A query sees itself and the `window` - 1 tokens before it; "sinks" [a] are scores without a
    value. Neighbouring query heads share a key/value head.
    """
    q, k, v = (x[name].double() for name in ("q", "k", "v"))
    outputs = []
    for stop, length in zip(accumulate(lengths), lengths, strict=True):
        for i in range(stop - length, stop):
            first = stop - length if window is None else max(stop - length, i + 1 - window)
            for head in range(q.shape[1]):
                at = head // (q.shape[1] // k.shape[1])
                keys, values = (list(y[first : i + 1, at]) for y in (k, v))
                sink = x["sinks"][head].double() if "sinks" in x else None
                outputs.append(attention_row(q[i, head], keys, values, sink=sink, softcap=softcap))
    return torch.stack(outputs).view_as(q) if outputs else q * 0


def results(
    x: Mapping[str, Tensor],
    lengths: Sequence[int],
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> dict[str, Tensor]:
    """The output "out" and, of Σ out · x["d_out"], the gradients "dq", "dk", "dv" and "dsinks"."""
    leaves = {n: y.detach().double().requires_grad_() for n, y in x.items() if n != "d_out"}
    out = attention(leaves, lengths, window=window, softcap=softcap)
    found = torch.autograd.grad(
        (out * x["d_out"].double()).sum(), list(leaves.values()), allow_unused=True
    )
    gradients = zip(leaves.items(), found, strict=True)
    named = {f"d{n}": torch.zeros_like(y) if g is None else g for (n, y), g in gradients}
    return {"out": out.detach(), **named}
