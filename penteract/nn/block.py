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
from penteract.parallel.parameters import Boundary


@dataclass(frozen=True)
class BlockSpec:
    """What one block is made of."""

    attention: AttentionSpec
    mlp: MLPSpec
    norm: NormSpec
    dropout: float


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), on the stream."""

    def __init__(self, name: str, hidden: int, spec: BlockSpec, build: Build) -> None:
        super().__init__()
        self.name, self.dropout = name, spec.dropout
        self.stream, self.recompute = build.tp.stream, build.recompute
        self.boundary = Boundary.of(name, hidden, self.stream)
        self.attention_norm = Norm(f"{name}.attention_norm", hidden, spec.norm, build)
        self.attention = Attention(f"{name}.attention", hidden, spec.attention, build)
        self.mlp_norm = Norm(f"{name}.mlp_norm", hidden, spec.norm, build)
        self.mlp = MLP(f"{name}.mlp", hidden, spec.mlp, build)

    def forward(
        self, x: Tensor, sequences: Sequences, noise: Noise | None, cache: Cache | None = None
    ) -> Tensor:
        result: Tensor = self.recompute("layer", self._both, x, sequences, noise, cache)
        return result

    def _both(
        self, x: Tensor, sequences: Sequences, noise: Noise | None, cache: Cache | None
    ) -> Tensor:
        x = self.recompute("attention", self._attention, x, sequences, noise, cache)
        result: Tensor = self.recompute("mlp", self._mlp, x, sequences, noise)
        return result

    def _attention(
        self, x: Tensor, sequences: Sequences, noise: Noise | None, cache: Cache | None
    ) -> Tensor:
        y = self.attention(self.attention_norm(x), sequences, noise, cache)
        return x + self._drop(y, "attention", sequences, noise)

    def _mlp(self, x: Tensor, sequences: Sequences, noise: Noise | None) -> Tensor:
        y = self.mlp(self.mlp_norm(x), sequences.part(self.stream).sizes)
        return x + self._drop(y, "mlp", sequences, noise)

    def _drop(self, y: Tensor, part: str, sequences: Sequences, noise: Noise | None) -> Tensor:
        name, rows = f"{self.name}.{part}", sequences.part(self.stream).rows
        return dropout(y, self.dropout, name=name, rows=rows, noise=noise)
