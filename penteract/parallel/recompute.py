"""Activation recomputation: parts of a block keep their inputs only and run again in backward.

A part is a function of tensors. Its forward keeps what it was given; when backward first needs an
activation from inside, the part runs once more, as far as the last activation that is needed. The
collectives inside run again too, in the order of the forward, on every rank alike: which parts are
recomputed is a function of the configuration and of a layer's number alone. A reduction that ends
a part is not repeated unless dropout follows it, since nothing inside needs its result. What comes
back from experts is repeated where a loss of their router follows too (`train.block_traffic`).

| part      | kept of a block, [t, …] elements a token          | computed again                 |
|-----------|---------------------------------------------------|--------------------------------|
| layer     | the stream, h                                     | all but the last reduction     |
| attention | as without, but for the branch its input, h       | norm, projections, attention   |
| mlp       | as without, but for the branch its input, h       | norm, the first projection     |
| core      | the projections q|k|v and the output              | qk-norms, rotations, attention |

`layer/N` is `layer` in every N-th block, from the first on. Experts have two parts of their own,
`experts` and `expert_act`, which send nothing again: see `nn.grouped_mlp`. Dropout masks are
functions of the step and the place (`random`), so they come out the same without any state.
Sources: Chen et al., arXiv:1604.06174; Korthikanti et al., arXiv:2205.05198, section 5, for `core`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

Keeps = Literal["all", "expert_act", "experts"]


@dataclass(frozen=True)
class Recompute:
    """The parts of one block that are recomputed."""

    parts: frozenset[str] = frozenset()

    @classmethod
    def of(cls, kinds: Sequence[str], layer: int) -> Recompute:
        """What `parallel.recompute` asks of block number `layer`, from 0."""
        parts = set()
        for kind in kinds:
            part, _, every = kind.partition("/")
            if layer % int(every or 1) == 0:
                parts.add(part)
        # What a part recomputes for itself would be computed twice within another.
        if "mlp" in parts:
            parts -= {"experts", "expert_act"}
        return cls(frozenset({"layer"} & parts or parts))

    @property
    def of_experts(self) -> Keeps:
        """What experts keep, as `nn.grouped_mlp` says it."""
        if "experts" in self.parts:
            return "experts"
        return "expert_act" if "expert_act" in self.parts else "all"

    def __call__(self, part: str, fn: Callable[..., Any], *args: Any) -> Any:
        """fn(*args), whose activations are recomputed if `part` is."""
        if part not in self.parts or not torch.is_grad_enabled():
            return fn(*args)
        return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False)
