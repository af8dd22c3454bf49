"""What every layer of a model is built with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penteract.mesh import Axis
from penteract.placement import Init


@dataclass(frozen=True)
class Build:
    """Over which axis, in which type, and with which initial values layers are built."""

    tp: Axis
    dtype: torch.dtype
    init: Init  # of embeddings and of matrices inside a block
    output_init: Init  # of matrices whose output is added to the residual stream
