"""Pipeline actions with their times, as a trace that Perfetto and chrome://tracing open.

The format is Chrome's "Trace Event Format" (JSON object with "traceEvents"). A simulated timeline
and the measured times of a run are written the same way.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from penteract.parallel.pipeline.schedules import actions
from penteract.parallel.pipeline.timeline import Timeline

Row = tuple[int, str, int, int, float, float]  # rank, kind, stage, micro-batch, start, end
KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_COLOURS = {  # names that chrome://tracing reserves
    "F": "thread_state_running", "B": "thread_state_iowait", "I": "rail_animation", "W": "rail_idle"
}  # fmt: skip


def rows(timeline: Timeline, unit_seconds: float = 1e-3) -> Iterator[Row]:
    """A row for each action; both actions of a pair last as long as the pair."""
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            start, end = span.start * unit_seconds, span.end * unit_seconds
            for action in actions([span.step]):
                yield rank, action.kind, action.stage, action.micro_batch, start, end


def _one_pipeline(rank: int) -> int:
    return 0


def trace_events(
    spans_per_rank: Iterable[Row], pipeline_of: Callable[[int], int] = _one_pipeline
) -> list[dict[str, Any]]:
    """Events of rows `(rank, kind, stage, micro_batch, start_seconds, end_seconds)`.

    Each rank is a thread with a complete event ("X", microseconds) per row. An arrow leads from
    what a stage sends to the rank of the same pipeline that uses it. The rows may be in any order
    and of several steps.
    """
    found = sorted(spans_per_rank, key=lambda row: (row[4], row[5], row))
    events: list[dict[str, Any]] = [_name("process_name", 0, "pipeline")]
    for rank in sorted({row[0] for row in found}):
        events.append(_name("thread_name", rank, f"rank {rank}"))
        events.append(_name("thread_sort_index", rank, rank, key="sort_index"))
    sent: dict[tuple[int, bool, int, int], Row] = {}  # (pipeline, forward?, stage, micro-batch)
    for row in found:
        rank, kind, stage, micro_batch, start, end = row
        events.append(
            {
                **_at(rank, start, "X"),
                "dur": _us(end - start),
                "name": f"{kind} {micro_batch}",
                "cat": KINDS.get(kind, kind),
                "args": {"stage": stage, "micro_batch": micro_batch},
                **({"cname": _COLOURS[kind]} if kind in _COLOURS else {}),
            }
        )
        if kind == "W" or kind not in KINDS:
            continue
        forward = kind == "F"
        pipeline = pipeline_of(rank)
        source = sent.pop((pipeline, forward, stage, micro_batch), None)
        sent[pipeline, forward, stage + (1 if forward else -1), micro_batch] = row
        if source is not None and source[0] != rank:
            events += _arrow(source, row, number=len(events))
    return events


def _arrow(source: Row, target: Row, *, number: int) -> list[dict[str, Any]]:
    """A flow from just before the end of the source to the start of the target."""
    leaves = source[5] - 0.01 * (source[5] - source[4])  # at the end itself, the next step begins
    flow = {"name": "send", "cat": "send", "id": number}
    return [
        {**_at(source[0], leaves, "s"), **flow},
        {**_at(target[0], target[4], "f"), **flow, "bp": "e"},
    ]


def _at(rank: int, seconds: float, phase: str) -> dict[str, Any]:
    return {"ph": phase, "pid": 0, "tid": rank, "ts": _us(seconds)}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _name(what: str, rank: int, value: str | int, key: str = "name") -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": rank, "name": what, "args": {key: value}}


def write_trace(
    path: str | Path,
    spans_per_rank: Iterable[Row],
    pipeline_of: Callable[[int], int] = _one_pipeline,
) -> None:
    """Write the events of such rows to a file, whole or not at all. OSError names `path`."""
    trace = {"traceEvents": trace_events(spans_per_rank, pipeline_of), "displayTimeUnit": "ms"}
    write_whole(path, json.dumps(trace, separators=(",", ":")) + "\n")


def write_whole(path: str | Path, text: str) -> None:
    """Write a text file whole or not at all: beside it, then renamed. OSError names `path`."""
    path = Path(path)
    target = Path(os.path.realpath(path))  # a link stays one
    part = target.parent / f".{target.name}.{os.getpid()}.part"
    try:
        if path.exists() and not path.is_file():  # a pipe or a device is never replaced
            path.write_text(text, encoding="utf-8")
            return
        part.write_text(text, encoding="utf-8")
        part.replace(target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with suppress(OSError):  # is there only where the renaming failed
            part.unlink()
