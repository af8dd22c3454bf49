"""A wish to stop: a signal or the time limit on any rank makes all ranks stop at the same step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from penteract.mesh import Axis

SAME_REQUEST_S = 1.0  # some senders, `timeout` for one, signal both a process and its group


class StopRequest:
    """Installed for the length of a run (`with StopRequest(...) as stop`).

    The first SIGTERM, SIGINT, SIGHUP or SIGUSR1 asks the run to save and stop; a second one, more
    than a second later, ends the process at once with the signal's usual exit code.
    """

    def __init__(self, max_minutes: float | None = None) -> None:
        self.deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self.signal: signal.Signals | None = None
        self._received_at = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as `nohup` sets it
            numbers.append(signal.SIGHUP)
        for number in numbers:
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._received_at = signal.Signals(number), now
        elif now - self._received_at > SAME_REQUEST_S:
            os._exit(128 + number)

    @contextmanager
    def released(self) -> Iterator[None]:
        """For a wait that no handler could interrupt: a signal ends the process, as is usual."""
        mine = {number: signal.signal(number, signal.SIG_DFL) for number in self._previous}
        try:
            yield
        finally:
            for number, handler in mine.items():
                signal.signal(number, handler)

    @property
    def reason(self) -> str | None:
        """Why this rank wants to stop, if it does."""
        if self.signal is not None:
            return self.signal.name
        if self.deadline is not None and time.monotonic() > self.deadline:
            return "train.max_minutes"
        return None

    def agreed(self, world: Axis, device: torch.device) -> bool:
        """True on every rank where any rank wants to stop. Every rank must call this together."""
        import torch  # here, so that a run can listen for signals while it imports torch

        from penteract.collectives import all_reduce_

        wish = torch.tensor(float(self.reason is not None), device=device)
        return bool(all_reduce_(wish, world, "max").item())
