"""The trace has every action once, and arrows along what is sent; its file is whole or absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penteract.parallel.pipeline.schedules import schedule
from penteract.parallel.pipeline.timeline import timeline
from penteract.parallel.pipeline.trace import rows, trace_events, write_trace, write_whole


def of(events: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == phase]


def test_every_action_is_there_once_with_its_times() -> None:
    plan = schedule("zb-h1", ranks=3, micro_batches=4)
    found = list(rows(timeline(plan)))
    events = trace_events(found)
    complete = of(events, "X")
    assert len(complete) == 3 * 4 * 3 == len(found)
    first = complete[0]
    assert (first["ts"], first["dur"], first["tid"], first["name"]) == (0.0, 1000.0, 0, "F 0")
    assert first["args"] == {"stage": 0, "micro_batch": 0}
    assert {event["cat"] for event in complete} == {"forward", "input gradient", "weight gradient"}
    names = {e["args"]["name"] for e in of(events, "M") if e["name"] == "thread_name"}
    assert names == {"rank 0", "rank 1", "rank 2"}


@pytest.mark.parametrize(
    ("kind", "ranks", "chunks", "messages"),
    [("1f1b", 4, 1, 2 * 3 * 5), ("interleaved", 2, 2, 2 * 3 * 5), ("gpipe", 1, 3, 0),
     ("zb-v", 2, 2, 2 * 2 * 5), ("dualpipe-v", 2, 2, 2 * 2 * 5)],
)  # fmt: skip
def test_an_arrow_for_each_message_between_ranks(
    kind: str, ranks: int, chunks: int, messages: int
) -> None:
    plan = schedule(kind, ranks=ranks, chunks=chunks, micro_batches=5)
    events = trace_events(rows(timeline(plan)))
    starts, ends = of(events, "s"), of(events, "f")
    assert len(starts) == len(ends) == messages
    arrives = {event["id"]: event for event in ends}
    assert len(arrives) == messages
    for start in starts:
        end = arrives[start["id"]]
        assert start["ts"] < end["ts"]
        assert start["tid"] != end["tid"]


def test_measured_rows_of_two_steps_in_any_order() -> None:
    """A run hands over what it measured: rank by rank, several steps, its own kinds too."""
    step = [(0, "F", 0, 0, 1.0, 1.5), (1, "F", 1, 0, 1.75, 2.0), (1, "B", 1, 0, 2.0, 2.5),
            (0, "B", 0, 0, 2.75, 3.5), (0, "reduce", 0, 0, 3.5, 4.0)]  # fmt: skip
    again = [(*row[:4], row[4] + 10, row[5] + 10) for row in step]
    events = trace_events(reversed([*step, *again]))
    assert [e["ts"] for e in of(events, "f")] == [1.75e6, 2.75e6, 11.75e6, 12.75e6]
    assert of(events, "X")[4]["cat"] == "reduce"
    assert trace_events([*step, *again]) == events


def test_the_file_is_json_and_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")
    write_trace(path, rows(timeline(schedule("1f1b", ranks=2, micro_batches=2))))
    assert len(of(json.loads(path.read_text())["traceEvents"], "X")) == 8
    with pytest.raises(TypeError):
        write_trace(path, [(0, "F", 0, object(), 0.0, 1.0)])  # type: ignore[list-item]
    assert json.loads(path.read_text())
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


def test_a_file_that_cannot_be_written_is_named_and_devices_stay(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "no" / "such", tmp_path, tmp_path / "file" / "below"):
        with pytest.raises(OSError) as caught:
            write_whole(path, "text")
        assert caught.value.filename == str(path)
    write_whole("/dev/null", "text")
    assert not Path("/dev/null").is_file()
    (tmp_path / "link").symlink_to("file")
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link"]
