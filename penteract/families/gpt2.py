"""GPT-2: LayerNorm, learned positions, biases, GELU. Radford et al., 2019."""

from __future__ import annotations

from penteract.config import ModelConfig
from penteract.families.decoder import decoder
from penteract.nn.model import ModelSpec


def spec(model: ModelConfig) -> ModelSpec:
    return decoder(model, norm="layer", activation="gelu", rotary=False)
