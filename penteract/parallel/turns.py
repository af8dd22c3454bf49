"""Two computations of a rank that take turns: where one would wait for tokens, the other goes on.

Each has a thread, and only one of the two runs at a time. They change places at the same points on
every rank, since these follow from the model alone, so all ranks of a group call the same
collectives in one order. On a GPU it is the host that takes turns: what it starts for one is queued
before the other's wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


class _PartnerFailed(BaseException):
    """The other of a pair has raised: what is left of this one is of no use."""


class Turns:
    """At most one pair at a time; `swap` is for whichever of its two is running."""

    def __init__(self) -> None:
        self._go: tuple[threading.Semaphore, threading.Semaphore] | None = None  # while both run
        self._now = 0  # which of the two it is
        self._fault: BaseException | None = None  # the first of a pair

    def both(
        self, first: Callable[[], object], second: Callable[[], object], device: torch.device
    ) -> None:
        """Run both to their ends, `first` in this thread until it swaps.

        Where one raises, the other is ended at its swap, since its peers go on with a pair, and
        what was raised first is raised.
        """
        assert self._go is None, "a pair within a pair"
        self._go, self._now, self._fault = (threading.Semaphore(0), threading.Semaphore(0)), 0, None
        go = self._go[1]

        def run() -> None:
            go.acquire()
            if device.type == "cuda":
                torch.cuda.set_device(device)
            self._run(second)

        thread = threading.Thread(target=run, name="turns")
        thread.start()
        self._run(first)
        thread.join()
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def swap(self) -> None:
        """Let the other go on until it swaps or ends; nothing where there is no other."""
        if self._go is not None:
            go, me = self._go, self._now
            self._now = 1 - me
            go[1 - me].release()
            go[me].acquire()
            if self._fault is not None:
                raise _PartnerFailed

    def _run(self, computation: Callable[[], object]) -> None:
        """One of the two, to its end; the other goes on alone then."""
        try:
            if self._fault is None:
                computation()
        except BaseException as error:
            self._fault = self._fault or error
        if self._go is not None:
            go, self._go = self._go, None
            go[1 - self._now].release()
