"""Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU. arXiv:2302.13971."""

from __future__ import annotations

from penteract.config import Config
from penteract.families.decoder import decoder
from penteract.nn.model import ModelSpec


def spec(config: Config) -> ModelSpec:
    return decoder(config, norm="rms", activation="swiglu", rotary=True)
