"""The dispatcher that a configuration names."""

from __future__ import annotations

from typing import Literal

from penteract.parallel.expert.all_gather import AllGather
from penteract.parallel.expert.all_to_all import AllToAll
from penteract.parallel.expert.dispatch import Dispatcher
from penteract.parallel.expert.fused import Fused
from penteract.parallel.expert.local import Local
from penteract.parallel.expert.places import ExpertParallel

Name = Literal["all_gather", "all_to_all", "fused"]


def dispatcher_of(name: Name, experts: int, places: ExpertParallel) -> Dispatcher:
    """How tokens reach `experts` experts."""
    if places.group.size == 1:
        return Local()
    ways: dict[Name, type[AllGather | AllToAll | Fused]] = {
        "all_gather": AllGather,
        "all_to_all": AllToAll,
        "fused": Fused,
    }
    return ways[name](experts, places)
