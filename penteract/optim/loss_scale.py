"""Dynamic loss scaling for float16: small gradients are lifted above what the type can hold.

The loss is multiplied by `scale`, and gradients are divided by it before anything reads them. A
step with a gradient that is not finite is skipped and the scale falls; after `every` good steps in
a row it rises. Micikevicius et al., arXiv:1710.03740. All ranks are told the same, so they agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penteract.config import OptimConfig


class LossScaleError(RuntimeError):
    """Gradients are not finite at the smallest loss scale: scaling cannot help."""


@dataclass
class LossScale:
    """The scale, and how many good steps it has lasted; constant where it is not `dynamic`."""

    scale: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    every: int = 1000  # good steps before it grows
    least: float = 1.0
    dynamic: bool = True
    good: int = 0

    @classmethod
    def of(cls, optim: OptimConfig, dtype: str) -> LossScale:
        """As `optim` says for float16; other types have the range of float32 and need none."""
        if dtype != "float16":
            return cls(1.0, dynamic=False)
        return cls(optim.loss_scale, every=optim.loss_scale_every, least=min(1.0, optim.loss_scale))

    def update(self, finite: bool) -> None:
        """After a step: whether its loss and gradients were finite on every rank.

        Raises LossScaleError where they were not and the scale is at its least already.
        """
        if not self.dynamic:
            return
        if finite:
            self.good += 1
            if self.good >= self.every:
                self.scale, self.good = self.scale * self.growth, 0
            return
        if self.scale <= self.least:
            raise LossScaleError(
                f"loss or gradients are not finite at loss scale {self.scale:g}, the least: a "
                'lower optim.lr, a longer optim.warmup or train.dtype = "bfloat16" may help'
            )
        self.scale, self.good = max(self.least, self.scale * self.backoff), 0

    def state(self) -> dict[str, float] | None:
        """What a checkpoint keeps; None where the scale is constant."""
        return {"scale": self.scale, "good": self.good} if self.dynamic else None

    def load(self, state: Mapping[str, float] | None) -> None:
        """Go on from what `state` gave; from the start where the saved run had no scale."""
        if self.dynamic and state is not None:
            self.scale, self.good = float(state["scale"]), int(state["good"])
