"""A Transformer block: pre-norm attention and feed-forward, each added to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from penteract.nn.attention import Attention, AttentionSpec, Cache
from penteract.nn.build import Build
from penteract.nn.dropout import dropout
from penteract.nn.mlp import MLP, MLPSpec
from penteract.nn.moe import MoE, MoESpec
from penteract.nn.norm import Norm, NormSpec
from penteract.nn.sequences import Sequences, Training
from penteract.parallel.parameters import Boundary


@dataclass(frozen=True)
class BlockSpec:
    """What one block is made of."""

    attention: AttentionSpec
    mlp: MLPSpec | MoESpec
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
        self.mlp: MLP | MoE
        if isinstance(spec.mlp, MoESpec):
            self.mlp = MoE(f"{name}.moe", hidden, spec.mlp, build)
        else:
            self.mlp = MLP(f"{name}.mlp", hidden, spec.mlp, build)

    def forward(
        self, x: Tensor, sequences: Sequences, training: Training | None, cache: Cache | None = None
    ) -> Tensor:
        result: Tensor = self.recompute("layer", self._both, x, sequences, training, cache)
        return result

    def _both(
        self, x: Tensor, sequences: Sequences, training: Training | None, cache: Cache | None
    ) -> Tensor:
        x = self.recompute("attention", self._attention, x, sequences, training, cache)
        result: Tensor = self.recompute("mlp", self._mlp, x, sequences, training)
        return result

    def _attention(
        self, x: Tensor, sequences: Sequences, training: Training | None, cache: Cache | None
    ) -> Tensor:
        y = self.attention(self.attention_norm(x), sequences, training, cache)
        return x + self._drop(y, "attention", sequences, training)

    def _mlp(self, x: Tensor, sequences: Sequences, training: Training | None) -> Tensor:
        y = self.mlp_norm(x)
        if isinstance(self.mlp, MoE):
            y = self.mlp(y, sequences, training)
        else:
            y = self.mlp(y, sequences.part(self.stream).sizes)
        return x + self._drop(y, "mlp", sequences, training)

    def _drop(
        self, y: Tensor, part: str, sequences: Sequences, training: Training | None
    ) -> Tensor:
        name, rows = f"{self.name}.{part}", sequences.part(self.stream).rows
        return dropout(y, self.dropout, name=name, rows=rows, training=training)
