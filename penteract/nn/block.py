"""A Transformer block: pre-norm attention and feed-forward, each added to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from penteract.nn.attention import Attention, AttentionSpec, Cache
from penteract.nn.build import Build
from penteract.nn.dropout import dropout
from penteract.nn.mlp import MLP, MLPSpec
from penteract.nn.norm import Norm, NormSpec
from penteract.nn.sequences import Noise, Sequences


@dataclass(frozen=True)
class BlockSpec:
    """What one block is made of."""

    attention: AttentionSpec
    mlp: MLPSpec
    norm: NormSpec
    dropout: float


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the stream stays [t, h]."""

    def __init__(self, name: str, hidden: int, spec: BlockSpec, build: Build) -> None:
        super().__init__()
        self.name, self.dropout = name, spec.dropout
        self.attention_norm = Norm(f"{name}.attention_norm", hidden, spec.norm, dtype=build.dtype)
        self.attention = Attention(f"{name}.attention", hidden, spec.attention, build)
        self.mlp_norm = Norm(f"{name}.mlp_norm", hidden, spec.norm, dtype=build.dtype)
        self.mlp = MLP(f"{name}.mlp", hidden, spec.mlp, build)

    def forward(
        self, x: Tensor, sequences: Sequences, noise: Noise | None, cache: Cache | None = None
    ) -> Tensor:
        y = self.attention(self.attention_norm(x), sequences, cache)
        x = x + self._drop(y, "attention", sequences, noise)
        y = self.mlp(self.mlp_norm(x))
        return x + self._drop(y, "mlp", sequences, noise)

    def _drop(self, y: Tensor, part: str, sequences: Sequences, noise: Noise | None) -> Tensor:
        name = f"{self.name}.{part}"
        return dropout(y, self.dropout, name=name, rows=sequences.rows, noise=noise)
