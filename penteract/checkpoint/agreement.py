"""One answer for all ranks: a fault on any rank is raised on every one, so that none waits."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from penteract.checkpoint.format import CheckpointError, StoreError
from penteract.collectives import exchange
from penteract.mesh import Axis

T = TypeVar("T")


def together(axis: Axis, stage: Callable[[], Any]) -> list[Any]:
    """Run `stage` on every rank; its JSON on each. A fault on any rank is raised on all."""
    fault: Exception | None = None
    answer: dict[str, Any]
    try:
        answer = {"value": stage()}
    except Exception as error:  # whatever it is: the other ranks wait for an answer
        fault = error
        answer = {"fault": str(error) or type(error).__name__, "kind": _kind(error)}
    answers = [json.loads(text) for text in exchange(json.dumps(answer).encode(), axis)]
    faults = [(rank, a["fault"]) for rank, a in enumerate(answers) if "fault" in a]
    if fault is not None and _kind(fault) == "bug":
        raise fault
    if faults:
        # Ranks that met the same fault say it once.
        first = {text: rank for rank, text in reversed(faults)}
        said = "; ".join(f"rank {rank}: {text}" for text, rank in reversed(first.items()))
        worst = next(kind for kind in KINDS if any(a.get("kind") == kind for a in answers))
        raise KINDS[worst](said if axis.size > 1 else faults[0][1]) from fault
    return [a["value"] for a in answers]


class PeerError(RuntimeError):
    """Another rank met a fault that nobody expected; it shows the traceback."""


# What all ranks raise of a fault on any, the worst first.
KINDS = {"bug": PeerError, "store": StoreError, "fault": CheckpointError}


def _kind(error: Exception) -> str:
    if isinstance(error, StoreError | ConnectionError):
        return "store"
    return "fault" if isinstance(error, CheckpointError | OSError) else "bug"


def agreed(axis: Axis, stage: Callable[[], T]) -> T:
    """Run `stage` on every rank and wait for all; a fault on any rank is raised on all."""
    kept: list[T] = []

    def run() -> None:
        kept.append(stage())

    together(axis, run)
    return kept[0]
