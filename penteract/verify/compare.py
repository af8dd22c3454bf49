"""A layout's outcome beside the reference's: four numbers, and the first bad step. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penteract.checkpoint.cover import subtract_all
from penteract.placement import Box, whole
from penteract.verify.gaps import FLOOR, Array, relative, scales
from penteract.verify.measure import Measured, Part, Reference, Tensors, holders
from penteract.verify.tolerances import Limits

Sent = dict[str, dict[str, int]]  # axis, call: bytes


@dataclass(frozen=True)
class Fault:
    """One tensor that differs, in words."""

    tensor: str
    relative: float
    place: str  # " at [3], rank 1"
    said: str  # "2 for 1 (twice)"


@dataclass(frozen=True)
class Verdict:
    """How a layout compares. The numbers are the worst of all ranks and steps, relative."""

    loss: float = math.inf
    gradients: float = math.inf
    worst_gradient: str = ""
    norm: float = math.inf
    weights: float = math.inf
    ok: bool = False
    step: int | None = None  # the first that differs; 0: the initial weights
    sent: Sequence[Sent] = field(default_factory=list)  # of each rank, in the last step


def judge(reference: Reference, ranks: Sequence[Measured], limits: Limits) -> Verdict:
    """The verdict on what the ranks of a layout measured."""
    losses, norms = (
        [_scalar(rank, wanted, name) for rank in ranks]
        for name, wanted in (("losses", reference.losses), ("norms", reference.norms))
    )
    gradients = [list(faults(reference, ranks, "gradients", i)) for i in _steps(reference)]
    weights = [list(faults(reference, ranks, "weights", i)) for i in range(len(reference.weights))]
    worst = max((f for found in gradients for f in found), key=lambda f: f.relative, default=None)
    bad = [0] if any(f.relative > limits.weights for f in weights[0]) else []
    for i in _steps(reference):
        here = [r[i] > limits.loss for r in losses] + [r[i] > limits.norm for r in norms]
        here += [f.relative > limits.gradients for f in gradients[i]]
        here += [f.relative > limits.weights for f in weights[i + 1]]
        bad += [i + 1] if any(here) else []
    return Verdict(
        loss=max(max(r) for r in losses),
        gradients=worst.relative if worst else 0.0,
        worst_gradient=worst.tensor if worst else "",
        norm=max(max(r) for r in norms),
        weights=max(f.relative for found in weights for f in found),
        ok=not bad,
        step=bad[0] if bad else None,
        sent=[rank.sent for rank in ranks],
    )


def _steps(reference: Reference) -> range:
    return range(len(reference.losses))


def _scalar(rank: Measured, wanted: Sequence[float], name: str) -> list[float]:
    return [relative_scalar(a, b) for a, b in zip(getattr(rank, name), wanted, strict=True)]


def relative_scalar(found: float, wanted: float) -> float:
    """|found - wanted| over |wanted|."""
    size = abs(found - wanted)
    return relative(size if math.isfinite(size) else math.inf, abs(wanted))


def faults(
    reference: Reference, ranks: Sequence[Measured], kind: str, index: int
) -> Iterator[Fault]:
    """The worst of every tensor of a kind in one step, however small.

    A part that no rank holds, a tensor that the reference does not have, and copies whose bits
    differ count as infinitely far off.
    """
    wanted: Tensors = getattr(reference, kind)[index]
    held = holders([getattr(rank, kind)[index] for rank in ranks])
    sizes, scale = ranks[0].sizes, scales(wanted)
    for name, tensor in wanted.items():
        yield _fault(name, tensor, held.pop(name, []), scale[name], sizes)
    for name in held:
        yield Fault(name, math.inf, "", "the reference has no such tensor")


def _fault(
    name: str,
    tensor: Array,
    held: Sequence[tuple[int, Part]],
    scale: float,
    sizes: Mapping[str, int],
) -> Fault:
    for rank, part in held:
        if part.shape != tensor.shape:
            said = f"its shape is {part.shape} for {tensor.shape}"
            return Fault(name, math.inf, f", rank {rank}", said)
    if missing := subtract_all(whole(tensor.shape), {part.box for _, part in held}):
        return Fault(name, math.inf, f" at {missing[0]}", "no rank holds it")
    worst = Fault(name, 0.0, "", "")
    for rank, part in held:
        assert part.gap is not None
        size = relative(part.gap.size, scale)
        if size > worst.relative:
            place = f"{f' at {list(part.gap.at)}' if part.gap.at else ''}, rank {rank}"
            worst = Fault(name, size, place, f"{part.gap}{part.gap.hint(sizes)}")
    # Far from the reference says more than apart from each other.
    return worst if worst.relative > FLOOR else _unequal_copies(name, held) or worst


def _unequal_copies(name: str, held: Sequence[tuple[int, Part]]) -> Fault | None:
    first: dict[Box, tuple[int, Part]] = {}
    for rank, part in held:
        other, copy = first.setdefault(part.box, (rank, part))
        if copy.checksum != part.checksum:
            place = f" at {part.box}, ranks {other} and {rank}"
            return Fault(name, math.inf, place, "the bits of these copies differ")
    return None
