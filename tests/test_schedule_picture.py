"""The drawing of a schedule holds every action in its place, and nothing leaves its place."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from penteract.parallel.pipeline.schedules import Pair, Schedule, actions, schedule
from penteract.parallel.pipeline.timeline import timeline
from penteract.schedule_picture import svg, text

SVG = "{http://www.w3.org/2000/svg}"
SIZES = [
    ("1f1b", 1, 1, 1), ("gpipe", 4, 1, 8), ("1f1b", 4, 1, 2), ("interleaved", 3, 4, 7),
    ("1f1b-pairs", 4, 1, 9),
    ("zb-h1", 4, 1, 8), ("zb-v", 4, 2, 8), ("dualpipe-v", 4, 2, 9), ("interleaved", 20, 3, 120),
    ("dualpipe-v", 17, 2, 40), ("gpipe", 2, 1, 1200), ("1f1b", 1200, 1, 1),
]  # fmt: skip


def make(kind: str, ranks: int, chunks: int, micro_batches: int) -> Schedule:
    return schedule(kind, ranks=ranks, chunks=chunks, micro_batches=micro_batches)


def draw(plan: Schedule) -> ET.Element:
    return ET.fromstring(svg(plan, timeline(plan)))


def numbers(element: ET.Element, *names: str) -> list[float]:
    return [float(element.attrib[name]) for name in names]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_action_has_its_box_and_boxes_do_not_overlap(
    sizes: tuple[str, int, int, int],
) -> None:
    plan = make(*sizes)
    times = timeline(plan)
    root = draw(plan)
    groups = [g for g in root.iter(f"{SVG}g") if g.find(f"{SVG}rect") is not None]
    assert len(groups) == plan.ranks
    per_unit = min(40.0, 1052 / times.makespan)
    for group, spans, program in zip(groups, times.spans, plan.programs, strict=True):
        boxes = group.findall(f"{SVG}rect")
        drawn = [(box, numbers(box, "x", "y", "width", "height")) for box in boxes]
        assert [box.attrib["class"][0] for box in boxes] == [a.kind for a in actions(program)]
        free: dict[float, float] = defaultdict(lambda: 75.99)  # per height: where the last ended
        starts = [s for s in spans for _ in actions([s.step])]
        for (_, (x, y, width, _)), span in zip(drawn, starts, strict=True):
            assert x == pytest.approx(76 + span.start * per_unit, abs=0.01)
            assert width == pytest.approx((span.end - span.start) * per_unit, abs=0.01)
            assert x >= free[y] - 0.02
            free[y] = x + width


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_numbers_stay_in_their_boxes_and_all_in_the_picture(
    sizes: tuple[str, int, int, int],
) -> None:
    root = draw(make(*sizes))
    across, down = numbers(root, "width", "height")
    assert across <= 1200
    groups = list(root.iter(f"{SVG}g"))
    for boxes, words in zip(groups[::2], groups[1::2], strict=True):
        size = float(words.attrib["font-size"])
        middles = {}
        for box in boxes:
            x, y, width, height = numbers(box, "x", "y", "width", "height")
            middles[round(x + width / 2, 1), round(y // 1)] = width, height
        for word in words:
            x, y = numbers(word, "x", "y")
            fits = float(word.attrib.get("font-size", size))
            width, height = next(
                wh for (mx, top), wh in middles.items()
                if abs(mx - x) < 0.1 and top - 1 <= y - 0.8 * fits and y <= top + wh[1] + 1
            )  # fmt: skip
            assert len(word.text or "") * 0.6 * fits < width
            assert 7 <= fits < height
    for word in root.iter(f"{SVG}text"):
        x, y = numbers(word, "x", "y")
        size = float(word.attrib.get("font-size", 12))
        half = 0.5 if word.attrib.get("text-anchor") else 1
        assert 0 < x + 0.6 * size * len(word.text or "") * half < across
        assert size < y + 1 < down


def test_marks_of_the_axis_do_not_overlap() -> None:
    for sizes in SIZES:
        root = draw(make(*sizes))
        marks = [t for t in root.iter(f"{SVG}text") if t.attrib.get("text-anchor") == "middle"]
        places = [float(m.attrib["x"]) for m in marks]
        assert float(marks[-1].text or "") == timeline(make(*sizes)).makespan
        assert min(b - a for a, b in pairwise(places)) > 30


def test_a_pair_is_one_box_cut_in_two() -> None:
    plan = make("dualpipe-v", 3, 2, 8)
    pairs = sum(isinstance(step, Pair) for program in plan.programs for step in program)
    assert pairs
    root = draw(plan)
    boxes = [b for g in root.iter(f"{SVG}g") for b in g.findall(f"{SVG}rect")]
    halves = [b for b in boxes if b.attrib["height"] == "16"]
    assert len(halves) == 2 * pairs
    for above, below in zip(halves[::2], halves[1::2], strict=True):
        assert above.attrib["class"][0] == "F"
        assert below.attrib["class"][0] == "B"
        assert above.attrib["x"] == below.attrib["x"]
        assert float(below.attrib["y"]) == float(above.attrib["y"]) + 16


def test_the_figures_are_stated_and_the_drawing_is_always_the_same() -> None:
    plan = make("interleaved", 4, 2, 8)
    drawn = svg(plan, timeline(plan))
    assert "interleaved: 4 ranks, 2 chunks, 8 micro-batches" in drawn
    assert "bubble 15.8 % of 57 units; at most 11 activations alive, on rank 0" in drawn
    assert drawn == svg(make("interleaved", 4, 2, 8), timeline(plan))
    for word in ("forward", "backward", "idle", "peak", "time"):
        assert f">{word}<" in drawn
    assert "weight gradient" not in drawn


def test_any_name_of_a_table_gives_valid_xml() -> None:
    plan = replace(make("1f1b", 2, 1, 2), kind='<script>&"\x00\n' + "long " * 100)
    root = draw(plan)
    assert root.findall(f"{SVG}text")[0].text == (
        '<script>&"  long long long long long lo…: 2 ranks, 1 chunk, 2 micro-batches'
    )
    assert text(plan, timeline(plan)).splitlines()[0].startswith('<script>&"  long')


def test_the_text_picture() -> None:
    plan = make("1f1b", 2, 1, 2)
    assert text(plan, timeline(plan)) == (
        "1f1b: 2 ranks, 1 chunk, 2 micro-batches\n"
        "bubble 33.3 % of 9 units; at most 2 activations alive, on rank 0\n"
        "\n"
        "rank 0  F0F1....B0--..B1--  peak 2\n"
        "rank 1  ..F0B0--F1B1--....  peak 1\n"
        "\n"
        "F forward, B backward, with its micro-batch; - goes on, . idle; a cell is a unit"
    )


def test_the_text_picture_says_chunks_and_pairs() -> None:
    plan = make("dualpipe-v", 1, 2, 3)
    line = text(plan, timeline(plan)).splitlines()[3]
    assert re.fullmatch(r"rank 0  F0aF0b(F\da|F\db|\+|B\d[ab]-*|I\d[ab]|W\d[ab]|-)+  peak \d", line)
    assert "F2b+B1a--" in line


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_text_picture_is_not_too_wide(sizes: tuple[str, int, int, int]) -> None:
    plan = make(*sizes)
    lines = text(plan, timeline(plan)).splitlines()
    assert len(lines) == plan.ranks + 5
    assert max(map(len, lines)) <= 185
    assert len({line.index("  peak") for line in lines[3:-2]}) == 1
