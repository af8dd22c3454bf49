"""What a run says about itself: lines on the terminal, metrics.jsonl, TensorBoard."""

from __future__ import annotations

import io
import json
import math
import os
import resource
import sys
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penteract.config import ConfigError

UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def short(value: float) -> str:
    """1234567.0 → `1.23M`."""
    for size, letter in UNITS:
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this rank has held: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere but there


class Metrics:
    """Writes the run's record; on ranks other than 0 (`active` false) it writes nothing.

    A resumed run appends: where a step stands twice, the later line counts.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        every: int,
        tensorboard: bool = False,
        active: bool = True,
    ) -> None:
        self.active, self.every = active, every
        self._file: Any = None
        self._board: Any = None
        self._progress: Progress | None = None
        self.console = Console(stderr=True, highlight=False, quiet=not active)
        if not active:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if tensorboard:
            self._board = _summary_writer(folder / "tensorboard")
        self._file = _appending(folder / "metrics.jsonl")
        if self.console.is_terminal:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self.console)
            self._task = self._progress.add_task("train", total=steps)
            self._progress.start()

    def say(self, text: str) -> None:
        """A line on the terminal of rank 0."""
        self.console.print(text, markup=False, soft_wrap=True)

    def step(self, line: dict[str, Any]) -> None:
        """Record one update; `line` has `step` and the numbers of `Run.update`."""
        if not self.active:
            return
        self._write(line)
        if self._progress is not None:
            self._progress.update(self._task, completed=line["step"])
        if line["step"] % self.every == 0 or line["step"] == 1:
            found = "skipped: loss or gradient not finite"
            if not line.get("skipped"):
                found = f"loss {line['loss']:.4f}  norm {line['grad_norm']:.3g}"
            scale = f"scale {line['loss_scale']:g}  " if "loss_scale" in line else ""
            self.say(
                f"step {line['step']:>6}  {found}  {scale}lr {line['lr']:.3g}  "
                f"{short(line['tokens_per_second'])} tok/s  "
                f"{short(line['flops_per_second'])}FLOP/s  {line['step_ms']:.0f} ms  "
                f"{line['memory_bytes'] / 2**30:.2f} GiB"
            )
            for rank, times in line.get("slow", {}).items():
                self.say(f"step {line['step']:>6}  slow: {rank} takes {times:.2f} times the median")

    def evaluation(self, step: int, losses: dict[str, float]) -> None:
        """Record one evaluation: {validation set: loss in nats a token}."""
        if not self.active:
            return
        self._write({"step": step, "valid": losses})
        for name, loss in losses.items():
            perplexity = math.exp(min(loss, 700.0))  # above 709 a float64 overflows
            self.say(f"step {step:>6}  valid {name}: loss {loss:.4f}  perplexity {perplexity:.2f}")

    def close(self) -> None:
        """Flush and stop the bar."""
        if self._progress is not None:
            self._progress.stop()
        for sink in (self._file, self._board):
            if sink is not None:
                sink.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._board is None:
            return
        for key, value in line.items():
            values = value if isinstance(value, dict) else {"": value}
            for name, number in values.items():
                if key != "step" and number is not None:  # a skipped step has no loss
                    self._board.add_scalar(f"{key}/{name}".rstrip("/"), number, line["step"])


def _appending(path: Path) -> TextIO:
    """`path` open for more lines; a last line that a killed run left unfinished is ended first."""
    file = path.open("a+b")
    if file.tell() > 0:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return io.TextIOWrapper(file, encoding="utf-8")


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            f"log.tensorboard = true needs tensorboard (pip install tensorboard): {error}"
        ) from None
    return SummaryWriter(str(folder))
