"""The sections of a configuration that say what a run writes: its checkpoints and its record.

As in `penteract.config_sections`, the docstring below a key is its help text.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from penteract.config_sections import STRICT
from penteract.config_values import Count, Natural, Patterns, Positive, Real


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointConfig:
    """Where and when the run is saved."""

    dir: str | None = None
    """Folder of checkpoints, relative to the current directory, or a URL such as
    s3://bucket/run; else log.dir/checkpoints."""
    every: Natural = 0
    """Steps between checkpoints; the last step is always saved."""
    keep: Count | None = None
    """Keep the newest N; all unless given. The newest good one and pinned ones always stay."""
    keep_every: Count | None = None
    """With checkpoint.keep: keep the steps that this divides, too."""
    verify: Literal["hashes", "sizes"] = "hashes"
    """What is looked at before a checkpoint is loaded: every byte, or lengths and headers alone."""
    fall_back: bool = True
    """Continue from an older step where newer ones are damaged; false: stop, and name it."""
    asynchronous: bool = False
    """Only copy what is to be saved to host memory, and write it while training goes on."""
    when_busy: Literal["wait", "skip"] = "wait"
    """At a checkpoint while the one before is being written: wait for that, or make none."""
    on_error: Literal["stop", "go_on"] = "stop"
    """Where a checkpoint cannot be written: end the run, or say so and try the next one. The last
    must succeed."""
    flush_s: Positive = 600.0
    """How long a checkpoint that is being written is waited for; later it has failed."""
    load: str | None = None
    """Start a fresh run from this checkpoint's weights; a path or URL, as checkpoint.dir."""
    load_only: Patterns = ()
    """With checkpoint.load: only tensors that match one of these shell patterns, as for
    [[optim.rules]]; all others keep their initial values."""
    load_missing: Patterns = ()
    """With checkpoint.load: tensors that match may be missing there; they keep initial values."""
    load_state: bool = False
    """With checkpoint.load: its moments, step and data cursor too."""
    upcycle: bool = False
    """With checkpoint.load: experts start as copies of its dense feed-forward layers."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LogConfig:
    """What a run writes about itself."""

    dir: str = "runs/default"
    """Folder of the run's files, relative to the current directory."""
    every: Count = 10
    """Steps between lines on the terminal."""
    slow: Annotated[Real, Field(ge=0)] = 1.5
    """Name ranks, with their hosts, whose own time since the last line on the terminal, without
    waiting for messages, is more than so many times the median of their pipeline stage; 0 is off.
    """
    tensorboard: bool = False
    """Write TensorBoard event files as well."""
    zeros: bool = False
    """Count the elements of all gradients that are exactly 0, as zero_gradients."""
    trace: tuple[Count, ...] = ()
    """Steps whose pipeline actions are timed, in trace-step-N.json for Perfetto."""
