"""What every layer of a model is built with."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from penteract.mesh import single
from penteract.parallel.context.exchange import Exchange
from penteract.parallel.context.ring import Ring
from penteract.parallel.expert.dispatchers import Name as Dispatch
from penteract.parallel.expert.places import ExpertParallel
from penteract.parallel.recompute import Recompute
from penteract.parallel.tensor import TensorParallel
from penteract.placement import Init


@dataclass(frozen=True)
class Build:
    """How layers are split, in which type, with which initial values, and what is recomputed."""

    tp: TensorParallel
    dtype: torch.dtype
    init: Init  # of embeddings and of matrices inside a block
    output_init: Init  # of matrices whose output is added to the residual stream
    recompute: Recompute = field(default_factory=Recompute)
    vocab_multiple: int = 1  # rows of the vocabulary on a rank are padded to a multiple of it
    tied: bool = False  # embedding and head are one tensor, maybe on two pipeline ranks
    exchange: Exchange = field(default_factory=lambda: Ring(single("cp")))  # of attention
    dispatcher: Dispatch = "all_to_all"
    experts: ExpertParallel = field(default_factory=ExpertParallel.alone)
