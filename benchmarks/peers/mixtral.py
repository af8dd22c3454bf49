"""The sparse layer of Hugging Face transformers' Mixtral, with given weights.

It has three ways to compute experts on a CPU. "eager" takes one expert after another, with its
tokens; "grouped_mm", which models take unless told otherwise, sorts rows and calls torch's kernel.
"batched_mm" copies the matrices of its experts for each token, gigabytes for a thousand tokens, and
is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

INSTALL = "pip install transformers"
WAYS = ("grouped_mm", "eager")


def missing_module() -> str | None:
    """The module without which the layer cannot be imported, or None."""
    try:
        from transformers.models.mixtral import modeling_mixtral  # noqa: F401
    except ModuleNotFoundError as error:
        return error.name
    return None


def layer(router: Tensor, inner: Tensor, down: Tensor, topk: int) -> Any:
    """With router [E, h], gate above up [E, 2f, h], and down [E, h, f]."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    experts, hidden, ffn = down.shape
    config = MixtralConfig(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_local_experts=experts,
        num_experts_per_tok=topk,
        hidden_act="silu",
    )
    with torch.device("meta"):
        made = MixtralSparseMoeBlock(config)
    values = ((made.gate, "weight", router), (made.experts, "gate_up_proj", inner))
    for module, name, value in (*values, (made.experts, "down_proj", down)):
        setattr(module, name, torch.nn.Parameter(value.clone()))
    return made.train()


def forward(made: Any, way: str) -> Callable[[Tensor], Tensor]:
    """[t, h] → [t, h], experts computed in this way."""

    def call(x: Tensor) -> Tensor:
        made.experts.config._experts_implementation = way
        y: Tensor = made(x[None])[0]
        return y

    return call


def gradients(made: Any) -> list[Tensor]:
    """Of router, inner and down."""
    return [p.grad for p in (made.gate.weight, made.experts.gate_up_proj, made.experts.down_proj)]
