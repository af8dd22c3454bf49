"""A rank that gets no further says where it is, and ends with exit code 3.

It gets further with every phase or action that begins and every message that it starts. A thread
looks; where nothing has happened for the limit it writes down what was last and the stacks of all
threads. Ranks that wait for a peer which hangs find out at the same time, so the one that sent
nothing for longest is where to look.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from penteract.mesh import Traffic

EXIT_CODE = 3
REPORT_S = 10.0  # so long at most
TOGETHER_S = 5.0  # peers that hang with this rank have so long to say so too


class Activity:
    """What a rank did last, and when; written by whoever does it."""

    def __init__(self) -> None:
        self.step = 0
        self.what: object = "starting"
        self.at = time.monotonic()
        self.patient = False  # ranks may wait long for the one that has most to do

    def now(self, what: object, *, patient: bool = False) -> None:
        """`what` begins; it is shown as text where that is needed."""
        self.what, self.at, self.patient = what, time.monotonic(), patient

    def told(self, what: object) -> Callable[[int], None]:
        """For what goes on part by part, such as reading: hears of each part's bytes. A rank that
        has done its own waits for the others, whose own watchdogs look after them.
        """
        self.now(what, patient=True)
        return lambda more_bytes: self.now(what, patient=True)


class Watchdog(AbstractContextManager["Watchdog"]):
    """Watches this rank for the length of a `with`, unless `limit_s` is 0."""

    def __init__(
        self,
        activity: Activity,
        axes: Callable[[], Iterable[tuple[str, Traffic]]],
        *,
        rank: int,
        world: int,
        limit_s: float,
        report: Callable[..., Any],
    ) -> None:
        """`report(text, **facts)` hands the report on; `axes` are all that messages go over."""
        self.activity, self.axes, self.limit_s, self.report = activity, axes, limit_s, report
        self.place = f"rank {rank} of {world} on {socket.gethostname()}"
        self._over = threading.Event()
        self._found = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self.limit_s:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        # Where it has found a hang, what fails since then follows from that. Otherwise it is ended
        # now: a thread that wakes while the interpreter ends can take the process with it.
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self.limit_s / 4)):
            axis, traffic = self._last_message()
            if self.activity.patient and traffic.at > self.activity.at:
                continue
            silent_s = time.monotonic() - max(self.activity.at, traffic.at)
            if silent_s > self.limit_s:
                self._found.set()
                # A full disk or a pipe that nobody reads must not hold the end up.
                what = functools.partial(self._report, silent_s, axis, traffic)
                reporter = threading.Thread(target=what, daemon=True)
                reporter.start()
                reporter.join(REPORT_S)
                time.sleep(TOGETHER_S)
                os._exit(EXIT_CODE)

    def _report(self, silent_s: float, axis: str, traffic: Traffic) -> None:
        self.report(self._text(silent_s, axis, traffic), sent_at=traffic.at)

    def _last_message(self) -> tuple[str, Traffic]:
        return max(self.axes(), key=lambda entry: entry[1].at, default=("", Traffic()))

    def _text(self, silent_s: float, axis: str, traffic: Traffic) -> str:
        message = "no message yet"
        if traffic.at:
            ago_s = time.monotonic() - traffic.at
            message = f"its last message, {traffic.last} over {axis}, {ago_s:.0f} s ago"
        head = (
            f"{self.place}: no progress for {silent_s:.0f} s in step {self.activity.step}, "
            f"{self.activity.what}; {message}"
        )
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return f"{head}\n{file.read()}"
