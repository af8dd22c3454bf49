"""Model families: each a spec, in a file of its own."""

from __future__ import annotations

from penteract.config import ModelConfig
from penteract.families import gpt2, llama
from penteract.nn.model import ModelSpec


def model_spec(model: ModelConfig) -> ModelSpec:
    """The structure that a resolved `[model]` section asks for."""
    return {"llama": llama.spec, "gpt2": gpt2.spec}[model.family](model)
