"""What training one cell leaves on each rank, put together, and how far two outcomes differ."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from reference import bridge
from reference.bridge import Fragments
from reference.plain import Weights
from torch import Tensor


@dataclass
class Part:
    """What one rank holds after its steps: pieces of logical tensors, and what it says of them."""

    losses: list[float] = field(default_factory=list)
    z_losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    initial: Fragments = field(default_factory=list)
    gradients: list[Fragments] = field(default_factory=list)  # of every step, before clipping
    weights: list[Fragments] = field(default_factory=list)  # after every step
    moments: dict[str, Fragments] = field(default_factory=dict)  # after the last one, by kind
    gradient_messages: int = 0  # all-reduces over the data ranks in the last step
    buckets: int = 0

    # From a rank to its parent a tensor would travel as a file descriptor, and there are thousands.
    def __getstate__(self) -> dict[str, Any]:
        return converted(self.__dict__, Tensor, Tensor.numpy)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(converted(state, np.ndarray, torch.from_numpy))


@dataclass
class Outcome:
    """What all ranks hold together; tensors are logical ones."""

    losses: list[float] = field(default_factory=list)
    z_losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Weights] = field(default_factory=list)
    weights: list[Weights] = field(default_factory=list)
    moments: dict[str, Weights] = field(default_factory=dict)


def joined(parts: Sequence[Part]) -> Outcome:
    """The parts put together; of copies the first counts. `unequal` says whether they differ."""

    def logical(pieces: Iterable[Fragments]) -> Weights:
        return bridge.logical([piece for held in pieces for piece in held])

    one = parts[0]
    return Outcome(
        one.losses,
        one.z_losses,
        one.norms,
        [logical(step) for step in zip(*(part.gradients for part in parts), strict=True)],
        [logical(step) for step in zip(*(part.weights for part in parts), strict=True)],
        {
            kind: logical(part.moments.get(kind, []) for part in parts)
            for kind in dict.fromkeys(kind for part in parts for kind in part.moments)
        },
    )


def initial(parts: Sequence[Part]) -> Weights:
    """The logical weights before the first step, as the seed made them."""
    return bridge.logical([piece for part in parts for piece in part.initial])


def unequal(parts: Sequence[Part]) -> list[str]:
    """What should be equal to the bit on several ranks and is not."""
    one = parts[0]
    numbers = ("losses", "z_losses", "norms")
    found = [x for x in numbers for part in parts if getattr(part, x) != getattr(one, x)]
    held = {"initial": [part.initial for part in parts]}
    for kind in ("gradients", "weights"):
        for i in range(len(getattr(one, kind))):
            held[f"{kind} of step {i}"] = [getattr(part, kind)[i] for part in parts]
    kinds = {kind for part in parts for kind in part.moments}
    held |= {kind: [part.moments.get(kind, []) for part in parts] for kind in kinds}
    for name, by_rank in held.items():
        copies: dict[Any, Tensor] = {}
        for fragment, x in (piece for pieces in by_rank for piece in pieces):
            place = fragment.tensor, fragment.box
            if not torch.equal(x.flatten(), copies.setdefault(place, x).flatten()):
                found.append(f"{name} {fragment.tensor} {fragment.box}")
    return found


def converted(value: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    """Nested dictionaries, lists and tuples with every value of one kind converted."""
    if isinstance(value, dict):
        return {name: converted(x, kind, convert) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([converted(x, kind, convert) for x in value])
    return convert(value) if isinstance(value, kind) else value


def relative(found: float, wanted: float) -> float:
    """The difference of two numbers beside the second; the difference itself where that is 0."""
    return abs(found - wanted) / (abs(wanted) or 1.0)


def difference(found: Outcome, wanted: Outcome, *, floor: float = 1e-4) -> tuple[float, str]:
    """The largest relative difference of losses, norms, gradients, weights, moments, and where."""
    if found.moments.keys() != wanted.moments.keys():
        return math.inf, f"kinds of moments {sorted(found.moments)}, not {sorted(wanted.moments)}"
    results = []
    for kind in ("losses", "z_losses", "norms"):
        pairs = zip(getattr(found, kind), getattr(wanted, kind), strict=True)
        results += [(relative(a, b), f"{kind} of step {i}") for i, (a, b) in enumerate(pairs)]
    tensors = [(kind, found.moments[kind], want) for kind, want in wanted.moments.items()]
    for kind in ("gradients", "weights"):
        steps = enumerate(zip(getattr(found, kind), getattr(wanted, kind), strict=True))
        tensors += [(f"{kind} of step {i}", *pair) for i, pair in steps]
    for kind, have, want in tensors:
        worst, name = bridge.worst_difference(have, want, floor=floor)
        results.append((worst, f"{kind} {name}"))
    return max(results)
