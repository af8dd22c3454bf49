"""`penteract schedule`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penteract.cli import main

PICTURES = Path(__file__).parents[1] / "docs" / "schedules"
KINDS = {
    "gpipe": 1, "1f1b": 1, "1f1b-pairs": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2, "dualpipe-v": 2
}  # fmt: skip


def words(
    kind: str, ranks: int = 4, micro_batches: int = 8, chunks: int | None = None
) -> list[str]:
    sizes = ["--ranks", str(ranks), "--microbatches", str(micro_batches)]
    sizes += [] if chunks is None else ["--chunks", str(chunks)]
    return ["schedule", "--kind", kind, *sizes]


def exit_code(argv: list[str]) -> int:
    try:
        return main(argv)
    except SystemExit as ended:
        return int(ended.code or 0)


def printed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    value: dict[str, Any] = json.loads(out)
    return value


def test_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(words("interleaved", chunks=2), capsys)
    assert list(found) == ["kind", "ranks", "bubble_fraction", "peak_activations", "actions"]
    assert found["kind"] == "interleaved"
    assert found["ranks"] == 4
    assert found["bubble_fraction"] == pytest.approx(3 / 19)
    assert found["peak_activations"] == [11, 9, 7, 5]
    assert len(found["actions"]) == 4
    assert found["actions"][0][:5] == [["F", 0, i] for i in range(4)] + [["F", 4, 0]]
    assert sorted(tuple(action) for program in found["actions"] for action in program) == sorted(
        (kind, stage, i) for kind in "FB" for stage in range(8) for i in range(8)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_that_was_printed_is_taken_back(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = printed(words(kind, 3, 7, KINDS[kind]), capsys)
    assert ("pairs" in found) == (kind in ("1f1b-pairs", "dualpipe-v"))
    table = tmp_path / "table.json"
    table.write_text(json.dumps(found))
    assert printed(["schedule", "--table", str(table)], capsys) == found


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_default_to_what_the_kind_must_have(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(kind)) == 0
    said = capsys.readouterr()
    chunks = "2 chunks" if kind.endswith("-v") else "1 chunk"
    assert said.out.startswith(f"{kind}: 4 ranks, {chunks}, 8 micro-batches\n")
    assert said.err == ""


def test_too_few_micro_batches_are_named_on_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*words("1f1b", 4, 2), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["bubble_fraction"] == pytest.approx(3 / 5)
    assert said.err.startswith("2 micro-batches for 4 pipeline ranks: 60% idle, against 27% with 8")


def test_several_outputs_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, trace = tmp_path / "a.svg", tmp_path / "a.json"
    assert main([*words("zb-v"), "--svg", str(picture), "--trace", str(trace), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["kind"] == "zb-v"
    assert said.err == f"{picture}: written\n{trace}: written\n"
    assert picture.read_text().startswith("<svg ")
    spans = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == 4 * 2 * 8 * 3
    assert main([*words("zb-v"), "--svg", str(picture)]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (words("1f1p"), "1f1b"),
        (words("zb-v", chunks=1), "not 1; with 1: gpipe, 1f1b"),
        (words("1f1b", chunks=2), "interleaved"),
        (words("1f1b", ranks=0), "--ranks"),
        (words("1f1b", micro_batches=-1), "--microbatches"),
        (words("gpipe", ranks=10**6, micro_batches=10**6), "at most 1000000"),
        (["schedule"], "--kind --table"),
        (["schedule", "--kind", "1f1b", "--ranks", "2"], "--kind needs --microbatches"),
        (["schedule", "--table", "x.json", "--ranks", "2"], "no --ranks beside it"),
        (["schedule", "--table", "no/such.json"], "no/such.json: No such file"),
        ([*words("1f1b"), "--table", "x.json"], "not allowed with"),
        ([*words("1f1b"), "--svg", "no/such/x.svg"], "no/such/x.svg: No such file"),
        ([*words("1f1b"), "--trace", "/"], "/: Is a directory"),
    ],
)
def test_wrong_words_give_2_and_one_message(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(argv) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err.splitlines()[-1]
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda t: t["actions"][1].pop(), "rank 1"),
        (lambda t: t["actions"][0].reverse(), "rank 0"),
        (lambda t: t["actions"][0].append(["F", 0, 0]), "action 6: F of stage 0, micro-batch 0"),
        (lambda t: t["actions"][0].append(["X", 0, 0]), "X"),
        (lambda t: t["actions"][0].append(["F", -1, 0]), "-1"),
        (lambda t: t["actions"][0].append([]), "rank 0"),
        (lambda t: t["actions"].pop(), "ranks"),
        (lambda t: t.pop("actions"), "actions"),
        (lambda t: t["actions"][0].insert(0, t["actions"][1].pop(0)), "stage 1"),
    ],
)
def test_a_damaged_table_gives_2_and_one_message(
    damage: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = printed(words("1f1b", 2, 3), capsys)
    damage(table)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    assert main(["schedule", "--table", str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err
    assert str(path) in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b"[]", b"3"])
def test_a_file_that_is_no_table_gives_2(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(content)
    assert main(["schedule", "--table", str(path)]) == 2
    said = capsys.readouterr().err
    assert str(path) in said
    assert "Traceback" not in said


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["schedule", "--help"]) == 0
    said = capsys.readouterr().out
    assert "example:\n  penteract schedule --kind interleaved" in said


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_formulas_of_the_docs(
    kind: str, ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    p, m, v = ranks, 3 * ranks, KINDS[kind]
    idle, work, peaks = {
        "gpipe": (p - 1, m * v, [m * v] * p),
        "1f1b": (p - 1, m, [p - r for r in range(p)]),
        "1f1b-pairs": (p - 1, m, [2 * (p - r) for r in range(p)]),
        "interleaved": (p - 1, m * v, [v * p + p - 1 - 2 * r for r in range(p)]),
        "zb-h1": (p - 1, 3 * m, [p] * p),
        "zb-v": (p - 1, 6 * m, [2 * p] * p),
        "dualpipe-v": (2 * (p - 1), 6 * m, [2 * p + 1] * p),
    }[kind]
    found = printed(words(kind, p, m, v), capsys)
    assert found["bubble_fraction"] == pytest.approx(idle / (work + idle))
    assert found["peak_activations"] == peaks


@pytest.mark.parametrize("kind", KINDS)
def test_the_pictures_of_the_docs_are_what_the_command_draws(kind: str, tmp_path: Path) -> None:
    drawn = tmp_path / "now.svg"
    assert main([*words(kind, chunks=KINDS[kind]), "--svg", str(drawn)]) == 0
    assert drawn.read_text() == (PICTURES / f"{kind}.svg").read_text()
