"""What the dense decoder families share: one kind of block, repeated."""

from __future__ import annotations

from typing import Literal

from penteract.config import ModelConfig
from penteract.nn.attention import AttentionSpec
from penteract.nn.block import BlockSpec
from penteract.nn.mlp import MLPSpec
from penteract.nn.model import ModelSpec
from penteract.nn.norm import NormSpec


def decoder(
    model: ModelConfig,
    *,
    norm: Literal["rms", "layer"],
    activation: Literal["swiglu", "gelu"],
    rotary: bool,
) -> ModelSpec:
    """The structure of a resolved `[model]` section; without rotary positions they are learned."""
    assert model.vocab
    assert model.kv_heads
    assert model.head_size
    assert model.bias is not None
    attention = AttentionSpec(
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_size=model.head_size,
        rope_theta=model.rope_theta if rotary else None,
        bias=model.bias,
        qk_norm=NormSpec("rms", model.norm_eps) if model.qk_norm else None,
        window=model.window,
        sinks=model.sinks,
        softcap=model.softcap,
        backend=model.attention,
        dropout=model.attention_dropout,
    )
    mlp = MLPSpec(model.ffn, activation, model.bias)
    norms = NormSpec(norm, model.norm_eps)
    return ModelSpec(
        vocab=model.vocab,
        hidden=model.hidden,
        blocks=(BlockSpec(attention, mlp, norms, model.dropout),) * model.layers,
        norm=norms,
        positions=None if rotary else model.max_positions,
        tied=model.tied,
        dropout=model.dropout,
        init_std=model.init_std,
    )
