"""A loss that spikes: back to a saved step before it, and on with the data that follows.

A spike is what `train.outlier` says (`rerun`), of the loss or of the gradient norm, in a step that
is finite. The data of the steps from the saved one to the spike is passed over (`passed`), the rest
comes in its order, so a run that went back is one whose data lacks that window. It is a function of
the configuration and the data, in every layout and after any kill: only steps that
`checkpoint.every` divides are gone back to, and what outliers are measured by is saved.

What a later resume must know is written before anything else: the manifest of the step that was
gone back to is replaced, with the windows in its state. Then newer steps are removed. A run killed
between the two begins at one of those, meets the same spike, and does the same once more.

Going back `MOST` times in a row to the same step, or farther, is no progress: then the run ends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from penteract.checkpoint.agreement import together
from penteract.checkpoint.examine import read_manifest, verify
from penteract.checkpoint.format import MANIFEST, CheckpointError, SaveError
from penteract.checkpoint.remote import Place
from penteract.checkpoint.steps import go_back, step_name, steps
from penteract.train.passed import Window, from_state, passing, to_state

if TYPE_CHECKING:
    from penteract.train.run import Run
    from penteract.train.saving import Saver

MOST = 3


class SpikeError(RuntimeError):
    """The loss spikes wherever the data goes on: going back does not help."""


class Rewinds:
    """Goes back before spikes, where `train.on_spike` says so; all ranks together."""

    def __init__(
        self, run: Run, saver: Saver, directory: Place, say: Callable[[str], None]
    ) -> None:
        self.run, self.saver, self.directory, self.say = run, saver, directory, say
        self.on = run.config.train.on_spike == "rewind"
        self._target: int | None = None

    def look(self) -> dict[str, dict[str, int | None]]:
        """What the line of the last step says of it; decides whether to `go_back`."""
        run, self._target = self.run, None
        if not (self.on and run.spiked):
            return {}
        run.activity.now("looking for a saved step")
        self.saver.land()
        self._target = self._saved()
        return {"spike": {"back_to": self._target}}

    def _saved(self) -> int | None:
        """The newest good step that is old enough. Of a damaged one a line says so."""
        train, options, world = self.run.config.train, self.run.config.checkpoint, self._world
        newest, every = self.run.step - train.rewind_steps, options.every

        def listed() -> list[int]:
            here = steps(self.directory) if world.rank == 0 else []
            return [n for n, _ in reversed(here) if 0 < n <= newest and n % every == 0]

        for number in together(world, listed)[0]:
            path, deal = self.directory / step_name(number), (world.rank, world.size)
            hashes = options.verify == "hashes"
            told = self.run.activity.told(f"checking {path}")
            answers = together(world, partial(verify, path, hashes=hashes, deal=deal, told=told))
            faults = dict.fromkeys(fault for answer in answers for fault in answer)
            if not faults:
                return int(number)
            self.say(f"step {number} is damaged: " + "; ".join(faults))
        return None

    def go_back(self) -> bool:
        """Whether the run is at an earlier step now. Raises SpikeError, SaveError."""
        run, spike, target = self.run, self.run.step, self._target
        if not (self.on and run.spiked):
            return False
        head = f"step {spike:>6}  a spike"
        if target is None:
            ago = run.config.train.rewind_steps
            self.say(f"{head}: kept, no saved step is {ago} steps (train.rewind_steps) older")
            return False
        windows = passing(run.passed, back_to=target, spike=spike)
        if windows[-1].times > MOST:
            raise SpikeError(
                f"step {spike} is a spike of the loss or the gradient norm, and the run went back "
                f"to step {target} or before {MOST} times in a row, with other data each time: it "
                "is not the data. A lower optim.lr, or an older checkpoint, may help"
            )
        run.activity.now("going back")
        path = self.directory / step_name(target)
        run.resume(path, check_hashes=False)  # they were, when it was chosen
        run.passed = windows
        aside = self._write(path, windows)
        self.saver.saved = target
        self.say(
            f"{head}: back to step {target}, past the data of {windows[-1].steps} steps, "
            f"which a resume passes over too"
        )
        for name in aside:
            self.say(f"{name}: set aside, since it is pinned or being read")
        return True

    def _write(self, path: Place, windows: tuple[Window, ...]) -> list[str]:
        """Record it on the disk; what newer steps were renamed to."""

        def write() -> list[str]:
            if self._world.rank:
                return []
            state: dict[str, Any] = read_manifest(path).state
            return [str(p) for p in go_back(path, state | to_state(windows))]

        try:
            return list(together(self._world, write)[0])
        except CheckpointError as error:
            raise SaveError(str(error)) from error

    @property
    def _world(self) -> Any:
        return self.run.mesh.axis("world")


def passed_in(directory: Place | str) -> tuple[Window, ...]:
    """The windows that the newest step in `directory` passed over; () where there is none."""
    found = [path for _, path in steps(directory) if (path / MANIFEST).exists()]
    return from_state(read_manifest(found[-1]).state) if found else ()
