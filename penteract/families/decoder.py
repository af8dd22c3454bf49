"""What the dense decoder families share: one kind of block, repeated."""

from __future__ import annotations

from typing import Literal

from penteract.config import Config, MoEConfig, moe_layers
from penteract.nn.attention import AttentionSpec
from penteract.nn.block import BlockSpec
from penteract.nn.mlp import MLPSpec
from penteract.nn.model import ModelSpec
from penteract.nn.moe import MoESpec
from penteract.nn.norm import NormSpec
from penteract.nn.router import RouterSpec


def decoder(
    config: Config,
    *,
    norm: Literal["rms", "layer"],
    activation: Literal["swiglu", "gelu"],
    rotary: bool,
) -> ModelSpec:
    """The structure of a resolved configuration; without rotary positions they are learned."""
    model, moe = config.model, config.moe
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
    mlp, norms = MLPSpec(model.ffn, activation, model.bias), NormSpec(norm, model.norm_eps)
    blocks = [BlockSpec(attention, mlp, norms, model.dropout)] * model.layers
    if moe is not None:
        experts = _experts(moe, activation, bias=model.bias)
        for number in moe_layers(moe, model.layers):
            blocks[number] = BlockSpec(attention, experts, norms, model.dropout)
    return ModelSpec(
        vocab=model.vocab,
        hidden=model.hidden,
        blocks=tuple(blocks),
        norm=norms,
        positions=None if rotary else model.max_positions,
        tied=model.tied,
        dropout=model.dropout,
        init_std=model.init_std,
    )


def _experts(moe: MoEConfig, activation: Literal["swiglu", "gelu"], *, bias: bool) -> MoESpec:
    assert moe.ffn
    assert moe.topk_groups
    router = RouterSpec(
        experts=moe.experts,
        topk=moe.topk,
        score=moe.score,
        normalise=moe.normalise,
        scale=moe.route_scale,
        groups=moe.groups,
        topk_groups=moe.topk_groups,
        balance=moe.balance,
        balance_weight=moe.balance_weight,
        z_weight=moe.z_weight,
        bias_rate=moe.bias_rate,
        capacity=moe.capacity,
        drop=moe.drop,
    )
    shared = None if moe.shared_ffn is None else MLPSpec(moe.shared_ffn, activation, bias)
    expert = MLPSpec(moe.ffn, activation, bias)
    return MoESpec(router, expert, shared, moe.shared_gate, moe.pad)
