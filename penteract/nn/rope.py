"""Rotary positions: each pair (i, i + d/2) of a head is turned by its row's angle.

Source: Su et al., arXiv:2104.09864, with the pairing of Llama (halves, not neighbours).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penteract.collectives import Operation


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    """x [t, heads, d] turned by `direction` times the angles, in the type of cos, rounded once."""
    cos, sin = cos[:, None], sin[:, None]  # [t, 1, d/2]
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=direction)
    return out.to(x.dtype)


class _Rotary(Operation):
    """A rotation; its backward is the rotation the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(dy, cos, sin, -1.0), None, None


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [t, heads, d] turned by the angles whose cos and sin [t, d/2] `Sequences.rotary` gives."""
    result: Tensor = _Rotary.apply(x, cos, sin)
    return result
