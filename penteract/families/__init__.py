"""Model families: each a spec, in a file of its own."""

from __future__ import annotations

from penteract.config import Config
from penteract.families import gpt2, llama
from penteract.nn.model import ModelSpec


def model_spec(config: Config) -> ModelSpec:
    """The structure that `[model]` and `[moe]` of a resolved configuration ask for."""
    return {"llama": llama.spec, "gpt2": gpt2.spec}[config.model.family](config)
