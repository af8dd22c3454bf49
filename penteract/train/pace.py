"""Which ranks are slow: each rank's own time, that is without waiting for messages, is compared.

In a step all ranks take as long as the slowest, so times of steps show nothing; what differs is how
long a rank waits for others. On a CPU the host waits, and a clock around each wait measures it, for
every step. On a GPU the host only queues a wait: the time between two events around it, on the
stream that computes, is how long that stream stood still. It is measured in one step of a window,
as events cost some microseconds each. What remains is reading, computing, launching kernels and
what of messages the host itself must do. Ranks of one pipeline stage do the same work, but for
uneven heads, lengths and loads of experts: they are measured by their median, of an even number the
lower of the two in the middle, so that of two ranks the faster one counts.

| what            | axis  | bytes a rank  | when               |
|-----------------|-------|---------------|--------------------|
| own time        | world | 8, n-1 times  | steps of log.every |
| names of hosts  | world | 20, n-1 times | where one is slow  |
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Sequence

import torch

from penteract.collectives import exchange, start_all_gather
from penteract.config import LogConfig
from penteract.mesh import Mesh


class Pace:
    """A rank's own time in the steps since the last line of the log."""

    def __init__(self, mesh: Mesh, device: torch.device, log: LogConfig) -> None:
        self.mesh, self.device = mesh, device
        self.limit, self.every = log.slow, log.every
        self.steps, self.own_s = 0, 0.0  # of this window
        # Parts of an axis, and channels, count for the axis.
        self._traffics = list({id(a.traffic): a.traffic for a in mesh.axes.values()}.values())
        self._began = self._waited_s = 0.0
        self._on_gpu = device.type == "cuda"

    def begin(self, step: int) -> None:
        """A step begins; the device has nothing to do."""
        if self._on_gpu and self.limit and step % self.every == 0:
            for traffic in self._traffics:
                traffic.stalls = []
        self._waited_s = self._waited()
        self._began = time.perf_counter()

    def end(self, step: int) -> None:
        """It has ended, and its numbers are read: the device has nothing to do again."""
        if self._on_gpu and step % self.every:
            return
        elapsed_s = time.perf_counter() - self._began
        self.own_s += elapsed_s - (self._waited() - self._waited_s)
        self.steps += 1
        for traffic in self._traffics:
            traffic.stalls = None

    def _waited(self) -> float:
        stalls = (pair for traffic in self._traffics for pair in traffic.stalls or ())
        stood_still_ms = sum(began.elapsed_time(ended) for began, ended in stalls)
        return sum(traffic.waited_s for traffic in self._traffics) + stood_still_ms / 1e3

    def line(self, step: int) -> dict[str, dict[str, float]]:
        """What a step's line says of slow ranks, {"slow": {"rank 3 (node7)": how many times the
        median}}; {} where there are none, and between two lines of the log. All ranks together.
        """
        if not self.limit or step % self.every:
            return {}
        world = self.mesh.axis("world")
        mean_s = self.own_s / max(1, self.steps)
        self.steps, self.own_s = 0, 0.0
        own = torch.tensor([mean_s], dtype=torch.float64, device=self.device)
        every = start_all_gather(own, world).wait().tolist()
        slow = slow_ranks(every, self.mesh.grid.groups("tp-dp-cp").tolist(), self.limit)
        if not slow:
            return {}
        hosts = [host.decode() for host in exchange(socket.gethostname().encode(), world)]
        return {"slow": {f"rank {r} ({hosts[r]})": round(by, 2) for r, by in slow.items()}}


def slow_ranks(
    own_s: Sequence[float], groups: Sequence[Sequence[int]], limit: float
) -> dict[int, float]:
    """Ranks whose own time is more than `limit` times the median of their group, and how many times
    it is; the slowest first.
    """
    found: dict[int, float] = {}
    for group in groups:
        median_s = statistics.median_low([own_s[rank] for rank in group])
        found |= {rank: own_s[rank] / median_s for rank in group if own_s[rank] > limit * median_s}
    return dict(sorted(found.items(), key=lambda item: -item[1]))
