"""A model whose stages lie on several ranks, for generation: each rank runs its own in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from penteract.collectives import broadcast_, start_receive, start_send
from penteract.mesh import Axis
from penteract.nn.attention import Cache
from penteract.nn.model import ModelSpec, Stages
from penteract.nn.sequences import Sequences


class Pipelined:
    """What `generate` needs of a model; all ranks of the pipeline `pp` call it together.

    Stage s lies on rank `placement[s]`; `channels` are those between neighbours, onwards.
    """

    def __init__(
        self,
        stages: Stages,
        placement: Sequence[int],
        pp: Axis,
        channels: Mapping[tuple[int, int], Axis],
        dtype: torch.dtype,
    ) -> None:
        self.stages, self.placement, self.pp, self.channels = stages, placement, pp, channels
        self.dtype = dtype

    @property
    def spec(self) -> ModelSpec:
        return self.stages.spec

    def new_caches(self, n: int, capacity: int) -> dict[str, Cache]:
        """A key/value cache for each block on this rank."""
        caches: dict[str, Cache] = {}
        for number in self.stages.numbers:
            caches |= self.stages[number].new_caches(n, capacity)
        return caches

    def logits(self, tokens: Tensor, sequences: Sequences, caches: dict[str, Cache]) -> Tensor:
        """tokens [t] → logits of each sequence's last token [n, v], on every rank."""
        here = self.pp.rank
        x: Tensor | None = None
        for stage, rank in enumerate(self.placement):
            before = self.placement[stage - 1] if stage else rank
            if before != rank and here == before:
                assert x is not None
                start_send(x, self.channels[before, rank]).wait()
            if before != rank and here == rank:
                x = torch.empty(
                    len(tokens), self.spec.hidden, dtype=self.dtype, device=tokens.device
                )
                start_receive(x, self.channels[before, rank]).wait()
            if here == rank:
                x = self.stages[stage].inference(tokens, x, sequences, caches)
        last = self.placement[-1]
        if here != last:
            shape = len(sequences.lengths), self.spec.vocab
            x = torch.empty(shape, dtype=self.dtype, device=tokens.device)
        assert x is not None
        return broadcast_(x.contiguous(), self.pp, source=last)
