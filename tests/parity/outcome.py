"""What training one cell leaves on each rank, put together, and how far two outcomes differ."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from reference import bridge
from reference.bridge import Fragments
from reference.plain import Weights
from torch import Tensor

Routed = dict[str, tuple[list[int], float]]  # by layer: choices of every expert, share dropped
LOSSES = ("losses", "z_losses", "balance_losses", "router_z_losses")


@dataclass
class Part:
    """What one rank holds after its steps: pieces of logical tensors, and what it says of them."""

    losses: list[float] = field(default_factory=list)
    z_losses: list[float] = field(default_factory=list)
    balance_losses: list[float] = field(default_factory=list)
    router_z_losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    routed: list[Routed] = field(default_factory=list)  # in every step
    kept: list[Weights] = field(default_factory=list)  # by the routers, after every step
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
    balance_losses: list[float] = field(default_factory=list)
    router_z_losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    routed: list[Routed] = field(default_factory=list)
    kept: list[Weights] = field(default_factory=list)
    gradients: list[Weights] = field(default_factory=list)
    weights: list[Weights] = field(default_factory=list)
    moments: dict[str, Weights] = field(default_factory=dict)


def joined(parts: Sequence[Part]) -> Outcome:
    """The parts put together; of copies the first counts. `unequal` says whether they differ."""

    def logical(pieces: Iterable[Fragments]) -> Weights:
        return bridge.logical([piece for held in pieces for piece in held])

    one = parts[0]
    return Outcome(
        *(getattr(one, kind) for kind in (*LOSSES, "norms", "routed")),
        [merged(step) for step in zip(*(part.kept for part in parts), strict=True)],
        [logical(step) for step in zip(*(part.gradients for part in parts), strict=True)],
        [logical(step) for step in zip(*(part.weights for part in parts), strict=True)],
        {
            kind: logical(part.moments.get(kind, []) for part in parts)
            for kind in dict.fromkeys(kind for part in parts for kind in part.moments)
        },
    )


def merged(held: Iterable[Weights]) -> Weights:
    """What the routers of all pipeline ranks keep."""
    return {name: x for mine in held for name, x in mine.items()}


def initial(parts: Sequence[Part]) -> Weights:
    """The logical weights before the first step, as the seed made them."""
    return bridge.logical([piece for part in parts for piece in part.initial])


def unequal(parts: Sequence[Part]) -> list[str]:
    """What should be equal to the bit on several ranks and is not."""
    one = parts[0]
    numbers = (*LOSSES, "norms", "routed")
    found = [x for x in numbers for part in parts if getattr(part, x) != getattr(one, x)]
    held = {"initial": [part.initial for part in parts]}
    for kind in ("gradients", "weights"):
        for i in range(len(getattr(one, kind))):
            held[f"{kind} of step {i}"] = [getattr(part, kind)[i] for part in parts]
    kinds = {kind for part in parts for kind in part.moments}
    held |= {kind: [part.moments.get(kind, []) for part in parts] for kind in kinds}
    for i, held_here in enumerate(zip(*(part.kept for part in parts), strict=True)):
        wanted = merged(held_here)
        for name, x in (pair for mine in held_here for pair in mine.items()):
            found += [] if torch.equal(x, wanted[name]) else [f"{name} of step {i}"]
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


def same(found: Weights, wanted: Weights) -> bool:
    """Whether they are equal to the bit."""
    return found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)


def exact(found: Outcome, wanted: Outcome) -> Iterator[tuple[str, bool]]:
    """What must be equal to the bit, and whether it is."""
    for i, (have, want) in enumerate(zip(found.routed, wanted.routed, strict=True)):
        yield f"routed of step {i}", have == want
    for i, (have, want) in enumerate(zip(found.kept, wanted.kept, strict=True)):
        yield f"kept of step {i}", same(have, want)


def difference(found: Outcome, wanted: Outcome, *, floor: float = 1e-4) -> tuple[float, str]:
    """The largest relative difference of losses, norms, gradients, weights, moments, and where."""
    if found.moments.keys() != wanted.moments.keys():
        return math.inf, f"kinds of moments {sorted(found.moments)}, not {sorted(wanted.moments)}"
    results = [(0.0 if equal else math.inf, what) for what, equal in exact(found, wanted)]
    for kind in (*LOSSES, "norms"):
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
