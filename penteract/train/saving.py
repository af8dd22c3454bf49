"""When a run is saved: at once, or in the background while the next steps are made."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from penteract.checkpoint.format import SaveError
from penteract.checkpoint.saving import Saving
from penteract.checkpoint.steps import retain
from penteract.checkpoint.writing import Staging
from penteract.train.nonfinite import NonFiniteError
from penteract.train.rerun import HardwareError
from penteract.train.run import Run
from penteract.train.spikes import SpikeError

log = logging.getLogger(__name__)


class Saver:
    """Saves a run under `directory` as its configuration says, for the length of a `with`.

    All ranks call it together. At most one save is in flight. Any call raises SaveError on all
    ranks where that one, or the one that it makes itself, failed on any.
    """

    def __init__(
        self, run: Run, directory: Path, say: Callable[[str], None], *, saved: int | None
    ) -> None:
        self.run, self.directory, self.say = run, directory, say
        self.saved = saved  # the newest step that is saved, or in flight
        self._options = run.config.checkpoint
        self._staging = Staging()
        self._flight: Saving | None = None
        self._paused_s = 0.0

    def save(self) -> None:
        """Save the run as it stands between two steps, or begin to."""
        self.run.activity.now("saving")
        began, step = time.perf_counter(), self.run.step
        busy = self._flight is not None
        if busy and self._options.when_busy == "skip":
            self.say(f"step {step:>6}  not saved: step {self.saved} is still being written")
            return
        if busy:
            self.say(f"step {step:>6}  waits: step {self.saved} is still being written")
            self.land()
        if self._options.asynchronous:
            self._flight = self.run.start_save(self.directory, self._staging, self._retain)
            self.saved = step
        else:
            self._save_now()
        self._paused_s += time.perf_counter() - began

    def look(self) -> None:
        """Once a step: whether the save in flight is done."""
        if self._flight is not None and self._flight.finished():
            self._landed(self._flight)

    def finish(self) -> None:
        """Return once the run as it stands is on the disk."""
        self.run.activity.now("saving")
        self.land()
        if self.saved != self.run.step:
            self._save_now()

    def pause(self) -> dict[str, float]:
        """What a step's line says of the saving before it: how long it kept the run waiting."""
        paused_s, self._paused_s = self._paused_s, 0.0
        return {"save_ms": round(1e3 * paused_s, 3)} if paused_s else {}

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, NonFiniteError | HardwareError | SpikeError):  # on all ranks alike
            try:
                self.land()
            except SaveError as fault:
                self.say(f"cannot save: {fault}")
        elif self._flight is not None:
            self._flight.abandon()

    def land(self) -> None:
        """Return once no save is in flight."""
        if self._flight is not None:
            self._flight.wait(self._options.flush_s)
            self._landed(self._flight)

    def _landed(self, flight: Saving) -> None:
        self.say(f"step {self.saved:>6}  saved {flight.path}")
        self._flight = None

    def _save_now(self) -> None:
        path = self.run.save(self.directory)
        if self.run.mesh.rank == 0:
            self._retain()
        self.saved = self.run.step
        self.say(f"step {self.saved:>6}  saved {path}")

    def _retain(self) -> None:
        options = self._options
        try:
            retain(self.directory, options.keep, keep_every=options.keep_every)
        except OSError as error:  # the step is saved all the same
            log.warning("%s: older steps stay (%s)", self.directory, error.strerror)
