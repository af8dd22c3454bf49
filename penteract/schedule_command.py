"""`penteract schedule`: a pipeline schedule as JSON, as a picture and as a trace."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from penteract.errors import UserError
from penteract.parallel.pipeline.schedules import (
    SCHEDULES,
    Schedule,
    from_json,
    schedule,
    to_json,
)
from penteract.parallel.pipeline.timeline import timeline, warning
from penteract.parallel.pipeline.trace import rows, write_trace, write_whole
from penteract.schedule_picture import svg, text

MAX_FORWARDS = 1_000_000  # of all ranks together; the picture of as many takes minutes


def make(kind: str, ranks: int, chunks: int | None, micro_batches: int) -> Schedule:
    """The schedule of this kind; without `chunks`, with as many as it must have, or 1."""
    if chunks is None:
        chunks = (SCHEDULES[kind].chunks if kind in SCHEDULES else None) or 1
    if ranks * chunks * micro_batches > MAX_FORWARDS:
        raise UserError(
            f"ranks x chunks x micro-batches = {ranks * chunks * micro_batches} forwards; "
            f"at most {MAX_FORWARDS} can be shown"
        )
    return schedule(kind, ranks=ranks, chunks=chunks, micro_batches=micro_batches)


def load(path: Path) -> Schedule:
    """A table in a JSON file, as `--json` prints it; UserError where it cannot run to its end."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    return from_json(value, name=str(path))


def show(plan: Schedule, *, as_json: bool, picture: Path | None, trace: Path | None) -> None:
    """Write what is asked for; a text picture to standard output where nothing is."""
    times = timeline(plan)
    if told := warning(plan):
        print(told, file=sys.stderr)
    if picture is not None:
        write_whole(picture, svg(plan, times))
    if trace is not None:
        write_trace(trace, rows(times))
    for path in filter(None, (picture, trace)):
        print(f"{path}: written", file=sys.stderr)
    if as_json:
        table = to_json(plan)
        figures = {
            "kind": table.pop("kind"),
            "ranks": table.pop("ranks"),
            "bubble_fraction": times.bubble_fraction,
            "peak_activations": times.peak_activations,
        }
        print(json.dumps({**figures, **table}, separators=(",", ":")))
    elif picture is None and trace is None:
        print(text(plan, times))
