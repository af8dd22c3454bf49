"""Which data a step takes, where a run went back before a spike and passed data over. Pure.

Steps are numbered without gaps, whatever was gone back from. The data of a step is that which step
`data_step` of an undisturbed run would take; each window that was passed over moves it on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

KEY = "passed"  # in a checkpoint's state, as lists, where there are any


@dataclass(frozen=True)
class Window:
    """From the step that follows `after` on, the data of so many steps is passed over."""

    after: int
    steps: int
    times: int = 1  # in a row that a run went back to here or farther


def data_step(step: int, windows: Iterable[Window]) -> int:
    """The step of an undisturbed run that takes the data that `step` takes."""
    return step + sum(window.steps for window in windows if window.after < step)


def passing(windows: Sequence[Window], *, back_to: int, spike: int) -> tuple[Window, ...]:
    """The windows of a run that had these and goes back from step `spike` to `back_to`: what comes
    next is the data behind the spike's.
    """
    kept = tuple(window for window in windows if window.after < back_to)
    undone = [window.times for window in windows if window.after >= back_to]
    steps = data_step(spike, windows) - data_step(back_to, kept)
    return (*kept, Window(back_to, steps, 1 + max(undone, default=0)))


def to_state(windows: Sequence[Window]) -> dict[str, Any]:
    """What a checkpoint says of them."""
    return {KEY: [list(astuple(window)) for window in windows]} if windows else {}


def from_state(state: Mapping[str, Any]) -> tuple[Window, ...]:
    """What `to_state` made."""
    return tuple(Window(*window) for window in state.get(KEY, ()))
