"""A Llama as torch's users write it, in ours' names and sizes: what torch's ways are measured on.

Heads of 64, half as many key/value heads as heads.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penteract.config import Config
from penteract.nn.sequences import Sequences

HEAD_SIZE, VOCAB = 64, 8192
matrix = functools.partial(nn.Linear, bias=False)


def turned(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    (first, second), (cos, sin) = x.chunk(2, dim=-1), angles
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, h: int) -> None:
        super().__init__()
        self.q, self.o = matrix(h, h), matrix(h, h)
        self.k, self.v = matrix(h, h // 2), matrix(h, h // 2)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (  # [b, a/tp, s, d], and [b, g/tp, s, d] twice
            layer(x).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        q, k = turned(q, angles), turned(k, angles)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, h: int, f: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = matrix(h, f), matrix(h, f), matrix(f, h)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, h: int, f: int, eps: float) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(h, eps=eps), Attention(h)
        self.mlp_norm, self.mlp = nn.RMSNorm(h, eps=eps), MLP(h, f)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles=angles)
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        h, f, eps = config.model.hidden, config.model.ffn, config.model.norm_eps
        self.embed = nn.Embedding(VOCAB, h)
        self.layers = nn.ModuleList(Block(h, f, eps) for _ in range(config.model.layers))
        self.norm, self.head = nn.RMSNorm(h, eps=eps), matrix(h, VOCAB)
        sequence, theta = Sequences.of((config.data.seq,)), config.model.rope_theta
        self.angles = sequence.rotary(HEAD_SIZE, theta, torch.float32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.angles)
        return self.head(self.norm(x))
