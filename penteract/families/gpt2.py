"""GPT-2: LayerNorm, learned positions, biases, GELU. Radford et al., 2019."""

from __future__ import annotations

from penteract.config import Config
from penteract.families.decoder import decoder
from penteract.nn.model import ModelSpec


def spec(config: Config) -> ModelSpec:
    return decoder(config, norm="layer", activation="gelu", rotary=False)
