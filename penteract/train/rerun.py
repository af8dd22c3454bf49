"""A step whose numbers are bad is run again from the same inputs, before anything of it is kept.

Bad is a loss or a gradient norm that is not finite, or, with `train.rerun = "outliers"`, one that
lies more than `train.outlier` standard deviations above the mean of the last `LAST` good steps,
once there are half as many. The weights are then still those before the step, and so are the loss
scale, the routers' biases and the position in the data. Comes the same out again, to the bit, it is
the doing of the data or the model, and a file says where. Comes something else out, a machine is at
fault: each rank knows the sum of its gradients' bits before they were reduced, of both times, so
the ranks that made other ones are named. On a GPU that is sure only where torch's deterministic
algorithms are on; elsewhere the second result counts.

Ranks that share tensors (tp, cp, pp, experts) can pass a wrong number on within a step; all ranks
whose gradients differ are named.
"""

from __future__ import annotations

import json
import logging
import math
import socket
import statistics
import struct
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from penteract.collectives import exchange
from penteract.config import InjectConfig
from penteract.mesh import Axis
from penteract.parallel.pipeline.executor import Output

log = logging.getLogger(__name__)

LAST = 32  # steps that an outlier is measured by
SLEEP_S = 1.0  # of a rank that is to be slow


class HardwareError(RuntimeError):
    """The same inputs gave other numbers: a machine is at fault. Nothing of the step is kept."""


Limits = tuple[float, float]  # of the loss, of the gradient norm
NO_LIMITS: Limits = (math.inf, math.inf)


@dataclass(frozen=True)
class Tried:
    """What a step came to, on the device."""

    terms: dict[str, Tensor]
    norm: Tensor
    finite: Tensor  # on all ranks
    within: Tensor  # loss and norm within their limits, on all ranks
    zeros: list[Tensor]  # how many gradient elements are exactly 0, where that is asked for


@dataclass(frozen=True)
class Found:
    """The same, read; and whether the update is made."""

    terms: dict[str, float]
    norm: float
    finite: bool  # on all ranks
    within: bool  # on all ranks
    made: bool
    zeros: list[float]


class Outliers:
    """What losses and norms of good steps were, and the most that they may be."""

    def __init__(self, deviations: float | None) -> None:
        """Without `deviations` there is no limit."""
        self.deviations = deviations
        self._seen: deque[tuple[float, float]] = deque(maxlen=LAST)

    def add(self, loss: float, norm: float) -> None:
        self._seen.append((loss, norm))

    def state(self) -> dict[str, Any]:
        """What a checkpoint says of them, so that a run that continues judges alike."""
        return {} if self.deviations is None else {"outliers": [list(seen) for seen in self._seen]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Be as `state` of a checkpoint says; where it says nothing, begin anew."""
        self._seen.clear()
        self._seen.extend((loss, norm) for loss, norm in state.get("outliers", ()))

    def limits(self) -> Limits:
        if self.deviations is None or 2 * len(self._seen) < LAST:
            return NO_LIMITS
        columns = list(zip(*self._seen, strict=True))
        loss, norm = (statistics.fmean(x) + self.deviations * statistics.stdev(x) for x in columns)
        return loss, norm


@dataclass(frozen=True)
class Seen:
    """What came of a step on this rank: its numbers, and the bits of its own gradients."""

    terms: Mapping[str, float]
    norm: float
    bits: int

    def packed(self) -> bytes:
        """The numbers as bits: a NaN is like itself."""
        values = (self.norm, *self.terms.values())
        return struct.pack(f"{len(values)}d", *(math.nan if x != x else x for x in values))

    def said(self) -> str:
        terms = ", ".join(f"{name} = {value:.9g}" for name, value in self.terms.items())
        return f"{terms}, gradient norm = {self.norm:.9g}"


def add_bits(total: Tensor, flat: Tensor) -> None:
    """Add a tensor's bits to `total`, as whole numbers: one that changes shows."""
    whole = {4: torch.int32, 8: torch.int64}[flat.element_size()]
    total.add_(flat.view(whole).sum(dtype=whole))  # it wraps; a wider sum would copy the tensor


def differing(first: Seen, second: Seen, world: Axis) -> list[str] | None:
    """The ranks whose own gradients differ, "rank 3 (host)"; None where all numbers are the same.

    All ranks call it together. An empty list: only what was made of the ranks' parts differs.
    """
    # A rank's own norm may be another than its peers', after a fault: all decide by what all say.
    same = first.bits == second.bits, first.packed() == second.packed()
    answers = exchange(json.dumps([socket.gethostname(), *same]).encode(), world)
    told = [json.loads(answer) for answer in answers]
    found = [f"rank {rank} ({host})" for rank, (host, bits, _) in enumerate(told) if not bits]
    return None if not found and all(numbers for *_, numbers in told) else found


def is_deterministic(device: torch.device) -> bool:
    """Whether the same inputs must give the same bits."""
    return device.type == "cpu" or torch.are_deterministic_algorithms_enabled()


def blame(step: int, first: Seen, second: Seen, ranks: Sequence[str]) -> HardwareError:
    where = ", ".join(ranks) or "no rank's own gradients, so the network or a sum over ranks"
    return HardwareError(
        f"step {step}: run twice from the same inputs it came out differently: first "
        f"{first.said()}; then {second.said()}. What differs: {where}. Nothing of the step was "
        "kept. Test or replace that machine before going on from the newest checkpoint"
    )


@contextmanager
def watching_modules(model: nn.Module) -> Iterator[list[str]]:
    """Meanwhile the names of modules whose output is not finite are noted, in their order."""
    found: list[str] = []

    def noting(name: str) -> Callable[..., None]:
        def look(_module: nn.Module, _args: Any, output: Any) -> None:
            for x in _pytree.tree_leaves(output):
                floats = isinstance(x, Tensor) and x.is_floating_point()
                if floats and not bool(torch.isfinite(x).all()):
                    found.append(name)
                    return

        return look

    hooks = [
        module.register_forward_hook(noting(name)) for name, module in model.named_modules() if name
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def first_module(found: Sequence[str], stage: int, world: Axis) -> str | None:
    """Of the ranks' first such modules that of the earliest pipeline stage, with its rank.

    All ranks call it together; `stage` is the number of this rank's first one.
    """
    mine = json.dumps([stage, found[0] if found else None]).encode()
    told = [(*json.loads(answer), rank) for rank, answer in enumerate(exchange(mine, world))]
    bad = sorted((stage, rank, name) for stage, name, rank in told if name is not None)
    return f"{bad[0][2]} on rank {bad[0][1]}" if bad else None


@dataclass(frozen=True)
class Report:
    """What is known of a bad step that is not blamed on hardware."""

    step: int
    seen: Seen
    same: bool  # the second time
    facts: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"bad-step-{self.step:08d}.json"

    def write(self, folder: Path) -> None:
        """For people, and for programs that read NaN as Python writes it. `folder` is the run's,
        where there is one.
        """
        if not folder.is_dir():
            return
        numbers = {**self.seen.terms, "grad_norm": self.seen.norm}
        facts = {"step": self.step, "same_again": self.same, **numbers, **self.facts}
        try:
            (folder / self.name).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        except OSError as error:  # one rank writes it: the others would wait for it
            log.warning("%s: could not be written (%s)", folder / self.name, error.strerror)

    def again(self) -> str:
        """What came of running it again, and where more is written."""
        result = "the same" if self.same else "another result"
        module = self.facts.get("first_module")
        where = f"; not finite first in {module}" if module else ""
        return f"run again from the same inputs: {result}{where}; see {self.name}"

    def said(self) -> str:
        return f"step {self.step} is bad ({self.seen.said()}); {self.again()}"


class Injected:
    """Faults of one rank, planted by `train.inject`, to see what a run does about them."""

    FACTORS: ClassVar[Mapping[str, float]] = {"nan": math.nan, "inf": math.inf, "spike": 1e3}

    def __init__(self, wanted: Sequence[InjectConfig], rank: int) -> None:
        self._left = {(w.step, w.kind): w.times or math.inf for w in wanted if w.rank == rank}

    def begin(self, step: int) -> float:
        """The factor of everything that a forward of `step` makes, run once more now."""
        if self._due(step, ("slow",)):
            time.sleep(SLEEP_S)
        kind = self._due(step, self.FACTORS)
        return 1.0 if kind is None else self.FACTORS[kind]

    def flips(self, step: int) -> bool:
        """Whether a bit of a weight is to be flipped now that `step` is done."""
        return self._due(step, ("weight",)) is not None

    def _due(self, step: int, kinds: Collection[str]) -> str | None:
        for (at, kind), left in self._left.items():
            if at == step and kind in kinds and left > 0:
                self._left[at, kind] -= 1
                return kind
        return None


def spoiled(output: Output, factor: float) -> Output:
    """A forward's output times `factor`."""
    if factor == 1.0:
        return output
    stream = None if output.stream is None else output.stream * factor
    return Output(stream, {name: term * factor for name, term in output.terms.items()})
