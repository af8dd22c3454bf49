"""A job in a thread of its own, beside a rank's one thread that computes and sends messages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Generic, TypeVar

T = TypeVar("T")

STOP_S = 30.0  # how long a job that was told to stop is waited for


class State(IntEnum):
    """Of a job; of several ranks' jobs the largest counts."""

    DONE = 0
    RUNNING = 1
    FAULT = 2


class Stopped(Exception):
    """The job was told to stop."""


class Background(Generic[T]):
    """`job(go_on)` while other things happen. It calls `go_on` now and then, which may raise
    Stopped, and sends no messages: process groups are their rank's first thread's alone.
    """

    def __init__(self, job: Callable[[Callable[[], None]], T]) -> None:
        self._job = job
        self._stop = threading.Event()
        self._value: T | None = None
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._job(self._go_on)
        except Stopped:
            pass
        except BaseException as fault:  # whatever it is, it is raised where the result is asked for
            self._fault = fault

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise Stopped

    @property
    def state(self) -> State:
        if self._thread.is_alive():
            return State.RUNNING
        return State.FAULT if self._fault else State.DONE

    def wait(self, within_s: float) -> None:
        self._thread.join(within_s)

    def stop(self) -> None:
        """Tell the job to stop, and wait until it has, but for `STOP_S` seconds at most."""
        self._stop.set()
        self._thread.join(STOP_S)

    def result(self) -> T | None:
        """What the job returned, or raises what it raised; None where it was stopped."""
        self.stop()
        if self._fault is not None:
            raise self._fault
        return self._value
