"""A model is an ordered list of globally named layers; a stage is a slice of that list.

The list is `embed`, `layers.0` … `layers.n-1`, `norm`, `head`. Building takes a range of it, and
names stay global, so a checkpoint does not know how the model was cut. `Stages` are all ranges that
one pipeline rank holds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penteract.collectives import declare
from penteract.nn.attention import Cache
from penteract.nn.block import Block, BlockSpec
from penteract.nn.build import Build
from penteract.nn.embedding import Embedding
from penteract.nn.loss import CROSS_ENTROPY, Head, Objective
from penteract.nn.norm import Norm, NormSpec
from penteract.nn.sequences import MicroBatch, Sequences, Training
from penteract.parallel.context.exchange import Exchange
from penteract.parallel.expert.dispatchers import Name as Dispatch
from penteract.parallel.expert.places import ExpertParallel
from penteract.parallel.pipeline.executor import Output
from penteract.parallel.recompute import Recompute
from penteract.parallel.tensor import TensorParallel
from penteract.placement import Init


@dataclass(frozen=True)
class ModelSpec:
    """Everything that says what a model computes; nothing about where."""

    vocab: int
    hidden: int
    blocks: tuple[BlockSpec, ...]
    norm: NormSpec  # after the last block
    positions: int | None  # learned positions, or None
    tied: bool
    dropout: float
    init_std: float

    @property
    def layer_names(self) -> tuple[str, ...]:
        blocks = (f"layers.{i}" for i in range(len(self.blocks)))
        return ("embed", *blocks, "norm", "head")


class Stage(nn.Module):
    """A contiguous range of a model's layers; it may be empty.

    A tied head takes the weight of the embedding before it, or of `embedding` in another stage of
    this rank.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tp: TensorParallel,
        *,
        dtype: torch.dtype,
        names: Sequence[str] | None = None,
        recompute: Sequence[str] = (),
        vocab_multiple: int = 1,
        embedding: Embedding | None = None,
        exchange: Exchange | None = None,
        experts: ExpertParallel | None = None,
        dispatcher: Dispatch = "all_to_all",
    ) -> None:
        super().__init__()
        self.spec, self.tp = spec, tp
        # Each block adds two outputs to the stream, whose variance would grow with their number.
        output_std = spec.init_std / math.sqrt(2 * max(1, len(spec.blocks)))
        inits = Init("normal", spec.init_std), Init("normal", output_std)
        build = Build(tp, dtype, *inits, vocab_multiple=vocab_multiple, tied=spec.tied)
        build = dataclasses.replace(build, dispatcher=dispatcher)
        if exchange is not None:
            build = dataclasses.replace(build, exchange=exchange)
        if experts is not None:
            build = dataclasses.replace(build, experts=experts)
        self.names = tuple(spec.layer_names if names is None else names)
        start = spec.layer_names.index(self.names[0]) if self.names else 0
        assert self.names == spec.layer_names[start : start + len(self.names)], "not a slice"
        self.layers = nn.ModuleList()
        self.embedding = [] if embedding is None else [embedding]  # in a list: it is no part of it
        for name in self.names:
            layer = _build(spec, name, build, recompute, self.embedding)
            self.embedding += [layer] if isinstance(layer, Embedding) else []
            self.layers.append(layer)

    def forward(
        self,
        batch: MicroBatch,
        stream: Tensor | None = None,
        *,
        scale: Tensor,
        training: Training | None = None,
        objective: Objective = CROSS_ENTROPY,
    ) -> Output:
        """Run the stage's layers. `stream` comes from the stage before; the first has none.

        `scale` multiplies the summed loss: 1 / the step's global number of counted tokens. The
        output is the stream, or scaled loss terms where the stage holds the head.
        """
        if stream is not None:
            stream = declare(stream, self.tp.axis, self.tp.stream_kind)
        for layer in self.layers:
            if isinstance(layer, Head):
                assert stream is not None
                return Output(None, layer(stream, batch, scale, objective))
            stream = _apply(layer, stream, batch.tokens, batch.sequences, training)
        return Output(stream)

    @property
    def units(self) -> Sequence[nn.Module]:
        """The parts whose parameters are needed together, in the order of forward."""
        return list(self.layers)

    def logits(
        self, tokens: Tensor, sequences: Sequences, caches: dict[str, Cache] | None = None
    ) -> Tensor:
        """tokens [t] → logits [t, v]; with caches those of each sequence's last token, [n, v]."""
        logits = self.inference(tokens, None, sequences, caches)
        if "head" not in self.names:
            raise ValueError(f"this stage has no head: {self.names}")
        return logits

    def inference(
        self,
        tokens: Tensor,
        stream: Tensor | None,
        sequences: Sequences,
        caches: dict[str, Cache] | None = None,
    ) -> Tensor:
        """The stream [t, h] after this stage, or the logits of `logits` where it has the head."""
        for name, layer in zip(self.names, self.layers, strict=True):
            if isinstance(layer, Head):
                assert stream is not None
                if caches is None:
                    return layer.logits(stream, sequences.part(self.tp.stream).sizes)
                assert self.tp.stream.size == 1, "generation runs without sequence parallelism"
                stream = stream.unflatten(0, (len(sequences.lengths), -1))[:, -1]  # [n, h]
                return layer.logits(stream)
            cache = None if caches is None else caches.get(name)
            stream = _apply(layer, stream, tokens, sequences, None, cache)
        assert stream is not None
        return stream

    def new_caches(self, n: int, capacity: int) -> dict[str, Cache]:
        """An empty key/value cache per block, for `n` sequences of up to `capacity` tokens."""
        return {name: Cache(n, capacity) for name in self.names if name.startswith("layers.")}


class Stages(nn.Module):
    """What one pipeline rank holds: the stages of its numbers, which name their layers.

    The keyword arguments are those of `Stage`.
    """

    def __init__(
        self, spec: ModelSpec, tp: TensorParallel, cut: Mapping[int, Sequence[str]], **build: Any
    ) -> None:
        super().__init__()
        self.spec, self.numbers = spec, sorted(cut)
        self.held = nn.ModuleList()
        embedding: Embedding | None = None
        for number in self.numbers:
            stage = Stage(spec, tp, names=cut[number], embedding=embedding, **build)
            embedding = next(iter(stage.embedding), None)
            self.held.append(stage)

    def __getitem__(self, number: int) -> Stage:
        stage = self.held[self.numbers.index(number)]
        assert isinstance(stage, Stage)
        return stage

    @property
    def units(self) -> list[nn.Module]:
        """The parts whose parameters are needed together, in the order of forward."""
        return [unit for number in self.numbers for unit in self[number].units]

    @property
    def unit_stages(self) -> list[int]:
        """The stage of every unit."""
        return [number for number in self.numbers for _ in self[number].units]


def _build(
    spec: ModelSpec,
    name: str,
    build: Build,
    recompute: Sequence[str],
    embedding: Sequence[Embedding],
) -> nn.Module:
    if name == "embed":
        positions, dropout = spec.positions, spec.dropout
        return Embedding(name, spec.vocab, spec.hidden, build, positions=positions, dropout=dropout)
    if name == "norm":
        return Norm(name, spec.hidden, spec.norm, build)
    if name == "head":
        tied_to = embedding[0] if spec.tied and embedding else None
        return Head(name, spec.vocab, spec.hidden, build, tied_to=tied_to)
    number = int(name.removeprefix("layers."))
    build = dataclasses.replace(build, recompute=Recompute.of(recompute, number))
    return Block(name, spec.hidden, spec.blocks[number], build)


def _apply(
    layer: nn.Module,
    stream: Tensor | None,
    tokens: Tensor,
    sequences: Sequences,
    training: Training | None,
    cache: Cache | None = None,
) -> Tensor:
    if isinstance(layer, Embedding):
        return layer(tokens, sequences, training)
    if isinstance(layer, Block):
        return layer(stream, sequences, training, cache)
    return layer(stream)
