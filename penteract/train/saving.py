"""When a run is saved: at once, or in the background while the next steps are made."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from penteract.checkpoint.agreement import together
from penteract.checkpoint.format import LateSaveError, SaveError
from penteract.checkpoint.remote import Place
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

    All ranks call it together. At most one save is in flight. Where a save fails on any rank, all
    raise SaveError or, with `checkpoint.on_error = "go_on"`, say so. The last must succeed.
    """

    def __init__(
        self,
        run: Run,
        directory: Place,
        say: Callable[[str], None],
        *,
        saved: int | None,
        held: Callable[[], bool] | None = None,
    ) -> None:
        """`held` says on the rank that has the lock whether the directory is still there."""
        self.run, self.directory, self.say = run, directory, say
        self.saved = saved  # the newest step that is on the disk
        self._held = held
        self._options = run.config.checkpoint
        self._staging = Staging()
        self._flight: Saving | None = None
        self._flying = 0  # its step
        self._paused_s = 0.0

    def save(self) -> None:
        """Save the run as it stands between two steps, or begin to."""
        self.run.activity.now("saving")
        began = time.perf_counter()
        if self._flight is not None and self._options.when_busy == "skip":
            self._tell(f"not saved: step {self._flying} is still being written")
            return
        if self._flight is not None:
            self._tell(f"waits: step {self._flying} is still being written")
            with self._faults():
                self._settle(wait=True)
        with self._faults():
            self._begin() if self._options.asynchronous else self._save_now()
        self._paused_s += time.perf_counter() - began

    def look(self) -> None:
        """Once a step: whether the save in flight is done."""
        with self._faults():
            self._settle(wait=False)

    def finish(self) -> None:
        """Return once the run as it stands is on the disk."""
        self.run.activity.now("saving")
        try:
            self._settle(wait=True)
        except LateSaveError:
            raise
        except SaveError as error:
            self._tell(f"{error}; tried once more")
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
                self._settle(wait=True)
                if self.run.unequal:
                    self._save_now()
            except SaveError as fault:
                self.say(f"cannot save: {fault}")
        elif self._flight is not None:
            self._flight.abandon()

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """A save that fails ends the run, or it goes on: as is wanted."""
        try:
            yield
        except SaveError as error:
            # What hangs may still be written later: nothing else is to be written beside it.
            if self._options.on_error == "stop" or isinstance(error, LateSaveError):
                raise
            newest = "none" if self.saved is None else f"step {self.saved}"
            self._tell(f"{error}; going on, the newest on the disk is {newest}")

    def land(self) -> None:
        """Return once no save is in flight."""
        with self._faults():
            self._settle(wait=True)

    def _begin(self) -> None:
        self._check_directory()
        self._flight = self.run.start_save(self.directory, self._staging, self._retain)
        self._flying = self.run.step

    def _save_now(self) -> None:
        self._check_directory()
        path = self.run.save(self.directory)
        if self.run.mesh.rank == 0:
            self._retain()
        self.saved = self.run.step
        self._tell(f"saved {path}")

    def _check_directory(self) -> None:
        """Raise SaveError on all ranks where the directory is another than at the start: a disk
        that went away leaves an empty one, on a disk that is not meant.
        """
        here = self._held is None or self._held()
        if not all(together(self.run.mesh.axis("world"), lambda: here)):
            raise SaveError(f"{self.directory}: cannot save: the directory that was here is gone")

    def _settle(self, *, wait: bool) -> None:
        """See how the save in flight ended, if it has, or wait until then."""
        flight = self._flight
        if flight is None:
            return
        try:
            if wait:
                flight.wait(self._options.flush_s)
            elif not flight.finished():
                return
        except SaveError:
            self._flight = None
            raise
        self._flight, self.saved = None, self._flying
        self.say(f"step {self.saved:>6}  saved {flight.path}")

    def _tell(self, what: str) -> None:
        self.say(f"step {self.run.step:>6}  {what}")

    def _retain(self) -> None:
        options = self._options
        try:
            retain(self.directory, options.keep, keep_every=options.keep_every)
        except OSError as error:  # the step is saved all the same
            log.warning("%s: older steps stay (%s)", self.directory, error.strerror)
