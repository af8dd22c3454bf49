"""The picture of loads says what the metrics say: colours, figures, and which lines count."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penteract.cli import main
from penteract.load_command import read
from penteract.load_picture import COLOURS, Columns, Layer, level, svg, text
from penteract.train.loads import _described

SVG = "{http://www.w3.org/2000/svg}"
DEAD, EVEN = COLOURS[0], COLOURS[5]


def layer(tokens: Sequence[Sequence[float]], name: str = "layers.0.moe", **given: Any) -> Layer:
    """Steps 1, 2, … unless given."""
    n = len(tokens)
    steps = np.array(given.get("steps", range(1, n + 1)))
    dropped, entropy = np.full(n, given.get("dropped", 0.0)), np.full(n, 0.5)
    return Layer(name, steps, np.array(tokens, dtype=np.float64), dropped, entropy)


def noise(layers: int, experts: int, steps: int) -> list[Layer]:
    draw = np.random.default_rng(0)
    sizes = (layers, steps, experts)
    tokens = np.floor(np.exp(draw.normal(2, 2, sizes))) * draw.integers(0, 2, sizes)
    return [layer(rows, f"layers.{i}.moe", dropped=0.1) for i, rows in enumerate(tokens)]


def panels(picture: str) -> list[ET.Element]:
    return ET.fromstring(picture).findall(f"{SVG}g")


def colours(panel: ET.Element, experts: int) -> np.ndarray[Any, Any]:
    """[experts, pixels]: the colour there is; each pixel is painted once at most."""
    ground = panel.findall(f"{SVG}rect")[0].attrib
    row, odd = divmod(int(ground["height"]), experts)
    group = panel.find(f"{SVG}g")
    assert group is not None
    assert (odd, group.attrib["stroke-width"]) == (0, str(row))
    assert float(group.attrib["transform"].split()[1][:-1]) == int(ground["y"]) + row / 2
    found = np.full((experts, int(ground["width"])), -1)
    for path in group.findall(f"{SVG}path"):
        x = y = 0
        for dx, dy, wide in re.findall(r"m(-?\d+) (-?\d+)h(\d+)", path.attrib["d"]):
            x, y = x + int(dx), y + int(dy)
            part = found[y // row, x : x + int(wide)]
            assert (part == -1).all()
            part[:] = int(path.attrib["class"][1:])
            x += int(wide)
    return np.array(COLOURS)[np.where(found == -1, COLOURS.index(EVEN), found)]


def words(element: ET.Element) -> list[str]:
    return [x.text or "" for x in element.iter(f"{SVG}text")]


def strip(panel: ET.Element) -> list[float]:
    """By column, where the upper line below a panel is, from 0 to 1."""
    line = next(p for p in panel.findall(f"{SVG}path") if p.attrib.get("fill") == "none")
    frame = panel.findall(f"{SVG}rect")[1].attrib
    top, deep = float(frame["y"]), float(frame["height"])
    heights = re.findall(r"[ML]\d+ ([\d.]+)H", line.attrib["d"])
    return [1 - (float(height) - top) / deep for height in heights]


def test_a_colour_follows_from_a_load() -> None:
    found = level(np.array([0, 1e-9, 0.24, 0.25, 0.6, 0.8, 0.9, 1, 1.09, 1.1, 1.5, 2, 3, 4, 99.0]))
    assert found.tolist() == [0, 1, 1, 2, 3, 4, 5, 5, 5, 6, 7, 8, 9, 10, 10]
    assert len(set(COLOURS)) == len(COLOURS) == 11


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 4, 5), (3, 7, 1), (5, 64, 30), (10, 3, 200)])
def test_every_cell_has_the_colour_of_its_load(sizes: tuple[int, int, int]) -> None:
    layers = noise(*sizes)
    drawn = panels(svg(layers, "run"))
    assert len(drawn) == len(layers)
    for panel, each in zip(drawn, layers, strict=True):
        assert words(panel)[0] == each.name
        painted = colours(panel, each.experts)
        n, wide = len(each.steps), painted.shape[1]
        for i, tokens in enumerate(each.tokens):
            mean = tokens.sum() / each.experts
            expected = [COLOURS[int(level(t / mean if mean else t))] for t in tokens]
            here = painted[:, round(i * wide / n) : round((i + 1) * wide / n)]
            assert here.size
            assert (here == np.array(expected)[:, None]).all()


def test_steps_of_a_column_are_added_up() -> None:
    tokens = [[10, 0], [1, 3], [0, 4], [0, 4]] * 200
    each = layer(tokens, steps=range(10, 8010, 10))
    assert Columns.of([each], 200) == Columns(10, 40, 200, 10)
    picture = svg([each], "run")
    assert "steps 10 to 8000; a column is 40 steps" in picture
    (panel,) = panels(picture)
    assert set(colours(panel, 2).flat) == {EVEN}
    assert "balance (log): last 2.00, mean 1.88" in words(panel)
    assert strip(panel) == pytest.approx([(3 + np.log2(1.5)) / 4] * 200, abs=1e-3)


def test_columns_of_steps_that_were_not_logged_look_like_those_before() -> None:
    each = layer([[1, 1], [2, 0], [1, 1]], steps=[10, 20, 60])
    assert Columns.of([each], 200) == Columns(10, 10, 6, 10)
    (panel,) = panels(svg([each], "run"))
    painted = colours(panel, 2)
    sixth = painted.shape[1] / 6
    seen = [painted[1, int((i + 0.5) * sixth)] for i in range(6)]
    assert seen == [EVEN, DEAD, DEAD, DEAD, DEAD, EVEN]
    assert "        1  ▄xxxx▄" in text([each]).splitlines()


def test_marks_stand_below_the_middle_of_their_column() -> None:
    (panel,) = panels(svg([layer([[1, 1]] * 5, steps=range(30, 80, 10))], "run"))
    wide = colours(panel, 2).shape[1]
    middle = [t for t in panel.findall(f"{SVG}text") if t.attrib.get("text-anchor") == "middle"]
    marks = {t.text: float(t.attrib["x"]) for t in middle if "transform" not in t.attrib}
    assert marks == {str(30 + 10 * i): (i + 0.5) * wide / 5 for i in range(5)}


def test_a_dead_expert_is_seen_and_counted() -> None:
    each = layer([[2, 2, 2], [3, 3, 0], [4, 2, 0]])
    (panel,) = panels(svg([each], "run"))
    assert "1 dead at the end" in words(panel)
    assert set(colours(panel, 3)[2, -100:]) == {DEAD}
    assert "dead at the end" not in svg([layer([[3, 0], [2, 1]])], "run")


def test_lines_below_a_panel() -> None:
    """Of balance over log(1) to log(4), and of what was dropped where anything was."""
    each = layer([[1, 1, 1, 1], [2, 2, 0, 0], [4, 0, 0, 0]])
    assert "dropped" not in svg([each], "run")
    layers = [each, layer([[1, 1, 1, 1]] * 3, "layers.1.moe", dropped=0.05)]
    first, second = panels(svg(layers, "run"))
    assert strip(first) == [0, 0.5, 1]
    assert strip(second) == [0, 0, 0]
    assert "dropped: last 0 %, mean 0 %" in words(first)
    assert "dropped: last 5 %, mean 5 %" in words(second)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 4, 5), (1, 256, 3), (7, 16, 90), (20, 40, 7)])
def test_words_stay_in_the_picture_and_off_each_other(sizes: tuple[int, int, int]) -> None:
    root = ET.fromstring(svg(noise(*sizes), "a run"))
    across, down = int(root.attrib["width"]), int(root.attrib["height"])
    assert across <= 1200
    taken: list[tuple[float, float, float]] = []
    for group in [root, *root.findall(f"{SVG}g")]:
        moved = re.findall(r"\d+", group.attrib.get("transform", "0 0"))
        for word in group.findall(f"{SVG}text"):
            if "transform" in word.attrib:
                continue
            wide = 0.6 * float(word.attrib["font-size"]) * len(word.text or "")
            back = {"middle": 0.5, "end": 1.0}.get(word.attrib.get("text-anchor", ""), 0.0)
            x = int(moved[0]) + float(word.attrib["x"]) - back * wide
            y = int(moved[1]) + float(word.attrib["y"])
            assert 0 < x < x + wide < across
            assert 10 < y < down
            assert not [t for t in taken if abs(t[2] - y) < 9 and x < t[1] and t[0] < x + wide]
            taken.append((x, x + wide, y))


def test_a_large_picture_stays_small() -> None:
    picture = svg(noise(32, 256, 300), "run")
    assert len(picture) < 4_000_000
    assert "a column is 5 steps" in picture
    assert picture == svg(noise(32, 256, 300), "run")


def test_any_name_gives_valid_xml() -> None:
    picture = svg([layer([[1, 2]], '<b>&"\x00' + "x" * 100)], "<run>&\n" + "y" * 100)
    title = ET.fromstring(picture).findall(f"{SVG}text")[0].text
    assert title is not None
    assert title.startswith("Load of experts: <run>& yyy")
    assert words(panels(picture)[0])[0].startswith('<b>&" xxx')


def test_the_text_picture() -> None:
    each = layer([[3, 1, 0], [2, 2, 2], [1, 4, 1]], dropped=0.0125)
    assert text([each]) == (
        "layers.0.moe: 3 experts, steps 1 to 3\n"
        "  balance  last 2.00, mean 1.75, largest 2.25 at step 1\n"
        "  dropped  last 1.25 %, mean 1.25 %\n"
        "  entropy  last 0.50, mean 0.50, at most 1.10 nats\n"
        "  most     last expert 1 (2.00), expert 0 (0.50), expert 2 (0.50)\n"
        "  least    last expert 0 (0.50), expert 2 (0.50), expert 1 (2.00)\n"
        "        0  █▄▂\n"
        "        1  ▃▄█\n"
        "        2  x▄▂\n"
        "\n"
        "▄ the mean load, █ twice the mean or more, x no token; a column is a step"
    )


def test_of_many_experts_the_text_shows_both_ends() -> None:
    lines = text([layer([[*range(100)]] * 500)]).splitlines()
    rows = [line.split() for line in lines[6:-2]]
    assert [row[0] for row in rows] == [
        *map(str, range(99, 91, -1)), "…", *map(str, range(7, -1, -1))
    ]  # fmt: skip
    assert rows[8][1] == "84"
    assert rows[0][1] == "█" * 63
    assert rows[-1][1] == "x" * 63


# --- the command ---


def line(step: int, tokens: Sequence[int], name: str = "layers.1.moe") -> str:
    row = {"tokens": tokens, "dropped": 0.0, "balance": 1.0, "entropy": 0.5}
    return json.dumps({"step": step, "loss": 1.0, "experts": {name: row}})


def write(folder: Path, *lines: str) -> Path:
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def test_which_lines_count(tmp_path: Path) -> None:
    run = write(
        tmp_path,
        line(2, [9, 9]),
        line(4, [1, 7]),
        line(6, [5, 5])[:-20],  # cut by a kill
        json.dumps({"step": 6, "valid": {"experts": 1.0}}),
        json.dumps({"step": 3, "loss": 1.0}),
        line(4, [2, 6]),  # done again
        line(8, [0, 8])[:40],
    )
    (found,) = read(run)
    assert found.name == "layers.1.moe"
    assert found.steps.tolist() == [2, 4]
    assert found.tokens.tolist() == [[9, 9], [2, 6]]
    assert read(run / "metrics.jsonl")[0].steps.tolist() == [2, 4]


def test_what_a_run_writes_is_read(tmp_path: Path) -> None:
    row = _described([3.0, 9.0, 0.0, 6.0, 18.0, 1.0, 2.0, 3.0, 9.0])
    write(tmp_path, json.dumps({"step": 1, "experts": {"layers.0.moe": row}}))
    (found,) = read(tmp_path)
    assert found.tokens.tolist() == [row["tokens"]]
    assert found.balance().tolist() == [row["balance"]]
    assert (found.dropped[0], found.entropy[0]) == (row["dropped"], row["entropy"])


def test_the_command_prints_or_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path, line(1, [1, 3]), line(1, [2, 2], "layers.3.moe"))
    assert main(["loads", str(run)]) == 0
    said = capsys.readouterr()
    assert "layers.1.moe: 2 experts, step 1\n" in said.out
    assert "layers.3.moe: 2 experts, step 1\n" in said.out
    assert said.err == ""
    picture = tmp_path / "a.svg"
    assert main(["loads", str(run), "--svg", str(picture), "--layer", "layers.3.moe"]) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"{picture}: written\n")
    drawn = picture.read_text()
    assert words(panels(drawn)[0])[0] == "layers.3.moe"
    assert "layers.1.moe" not in drawn


@pytest.mark.parametrize(
    ("lines", "argv", "says"),
    [
        ([], [], "no line with experts: the model has none, or no step that log.every divides"),
        (['{"step": 1, "loss": 2.0}', "{"], [], "no line with experts"),
        ([line(1, [1])], ["--layer", "x"], "has no layer x; those with experts: layers.1.moe"),
        ([line(1, [1])], ["--svg", "no/such/x.svg"], "no/such/x.svg: No such file"),
        ([line(1, [1])], ["--svg", "/"], "/: Is a directory"),
        ([line(1, [1, 2]), line(2, [1])], [], "1 experts in some steps, 2 in others"),
        ([line(1, [])], [], "line 1: its experts are not as a run writes them"),
        ([line(1, [-1])], [], "line 1: its experts"),
        ([line(10**30, [1])], [], "line 1: its experts"),
        ([line(1, [1]), '{"step": 2, "experts": {"a": {}}}'], [], "line 2: its experts"),
        (['["experts"]'], [], "line 1: its experts"),
    ],
)
def test_wrong_input_gives_2_and_one_message(
    lines: list[str],
    argv: list[str],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["loads", str(write(tmp_path, *lines)), *argv]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err
    assert said.err.count("\n") == 1


def test_a_run_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path, tmp_path / "none"):
        assert main(["loads", str(path)]) == 2
        assert "No such file" in capsys.readouterr().err
