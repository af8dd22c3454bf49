"""A link slower than gloo's between two processes of one machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch.distributed as dist
from torch import Tensor

from penteract import wire
from penteract.mesh import Traffic
from penteract.pending import Pending

SMALL_BYTES = 1024  # such messages travel between the packets of larger ones


class Link:
    """A wire that carries one message at a time: `latency_s`, then `s_per_byte` for each byte."""

    s_per_byte = latency_s = 0.0
    free_at = 0.0  # when it will have delivered all that was given to it
    due = 0.0  # when it will have delivered the last one


def slow_down(link: Link) -> None:
    """From here on this process's messages take at least as long as over `link`."""
    add = Traffic.add

    class Slowed(Pending):
        def __init__(self, works: Iterable[dist.Work], finish: Callable[[], Tensor]) -> None:
            works = tuple(works)
            super().__init__(works, finish)
            self.due = link.due if works else 0.0

        def wait(self) -> Tensor:
            result = super().wait()
            time.sleep(max(0.0, self.due - time.perf_counter()))
            return result

    def counted(traffic: Traffic, call: str, sent_bytes: int) -> None:  # just before it is sent
        add(traffic, call, sent_bytes)
        now = time.perf_counter()
        begins = now if sent_bytes < SMALL_BYTES else max(link.free_at, now)
        link.due = begins + link.latency_s + link.s_per_byte * sent_bytes
        link.free_at = max(link.free_at, link.due)

    wire.Pending = Slowed  # type: ignore[misc]
    Traffic.add = counted  # type: ignore[assignment]
