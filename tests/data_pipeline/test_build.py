"""Building token files: what becomes a document, workers, limits, interrupts, the description."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penteract.data import documents
from penteract.data.build import Build, Progress, build, inspect, read_sidecar, unigram_entropy
from penteract.data.indexed import DataError, IndexedFile
from penteract.data.tokenizers import ByteTokenizer
from penteract.data.workers import map_in_order
from penteract.data.writer import IndexedWriter
from penteract.errors import UserError

DOCUMENTS = ["alpha", "zwölf €", "x", '"quoted"\nlines\n']


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two texts and two lines as good documents; an empty one and four broken ones."""
    folder = tmp_path / "corpus"
    (folder / "b").mkdir(parents=True)
    (folder / "a.txt").write_text("alpha")
    (folder / "b" / "c.txt").write_text("zwölf €")
    (folder / "b" / "bad.txt").write_bytes(b"ab\xff")
    (folder / "b" / "empty.txt").write_bytes(b"")
    (folder / "b" / "ignored.md").write_text("not this")
    lines = [
        json.dumps({"text": DOCUMENTS[2]}),
        "{not json",
        "",
        json.dumps({"body": "other key"}),
        json.dumps({"text": "\ud800"}),
        json.dumps({"text": DOCUMENTS[3]}),  # and no line end after it
    ]
    (folder / "d.jsonl").write_text("\n".join(lines))
    return folder


def texts(prefix: Path) -> list[str]:
    """Documents as text, each checked to end with the end-of-document token and hold no other."""
    file, found, start = IndexedFile(prefix, vocab=257), [], 0
    for length in file.document_lengths().tolist():
        tokens = file.read(start, start + length).tolist()
        assert tokens.index(256) == length - 1
        found.append(ByteTokenizer().decode(tokens))
        start += length
    assert start == file.tokens
    return found


def test_documents_and_skips(corpus: Path, tmp_path: Path) -> None:
    report = build(Build(str(tmp_path / "new" / "x"), inputs=(str(corpus),)))
    assert texts(tmp_path / "new" / "x") == DOCUMENTS
    size = sum(len(text.encode()) for text in DOCUMENTS)
    assert (report.documents, report.tokens, report.text_bytes) == (4, size + 4, size)
    counts = {why: number for why, (number, _) in report.skipped.items()}
    assert counts == {
        "empty": 1,
        "not UTF-8": 1,
        "not JSON in UTF-8": 1,
        "without a text under 'text'": 1,
        "not Unicode (half of a surrogate pair)": 1,
    }
    line_two = len(json.dumps({"text": "x"})) + 1
    assert report.skipped["not JSON in UTF-8"][1].endswith(f"d.jsonl at byte {line_two}")
    assert report.skipped["not UTF-8"][1].endswith("bad.txt at byte 2")
    assert f"4 documents, {size + 4} tokens, {size} bytes of text" in report.summary()
    assert f"unigram entropy {report.unigram_entropy:.4f} nats a token" in report.summary()
    assert "1 not UTF-8 (first " in report.summary()
    assert sorted(os.listdir(tmp_path / "new")) == ["x.bin", "x.idx", "x.json"]


def test_lengths_sum_to_the_tokens_written(corpus: Path, tmp_path: Path) -> None:
    """Row 164: the index counts the end-of-document token."""
    build(Build(str(tmp_path / "x"), inputs=(str(corpus),)))
    file = IndexedFile(tmp_path / "x")
    assert int(file.lengths.sum()) * 2 == (tmp_path / "x.bin").stat().st_size
    assert file.lengths.tolist() == [len(text.encode()) + 1 for text in DOCUMENTS]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A `.jsonl` of 400 lines of very different length, and its texts."""
    rng = np.random.default_rng(0)
    found = [f"{i} " + "é" * int(rng.integers(0, 60) ** 2) for i in range(400)]
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in found) + "\n")
    return path, found


@pytest.mark.parametrize("task_bytes", [3, 20, 100, 5000])
def test_spans_of_lines_lose_and_repeat_nothing(
    task_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 165, for any cut: every line is read once, whichever span it straddles."""
    monkeypatch.setattr(documents, "_TASK_BYTES", task_bytes)
    found = [f"{i}" * (i % 7 + 1) for i in range(60)]
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in found))
    pieces = [piece for task in documents.plan_tasks([path]) for piece in task]
    assert len(pieces) == -(-path.stat().st_size // task_bytes)
    got = [
        document.text for piece in pieces for document in documents.read_documents(piece, "text")
    ]
    assert got == found


def test_any_number_of_workers_writes_the_same_bytes(
    lines: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 165, for workers: all of the input, in order, from one, two and three processes."""
    path, found = lines
    monkeypatch.setattr(documents, "_TASK_BYTES", 100_000)
    assert len(documents.plan_tasks([path])) > 6
    for workers in (1, 2, 3):
        build(Build(str(tmp_path / str(workers)), inputs=(str(path),), workers=workers))
    assert texts(tmp_path / "1") == found
    for ending in (".bin", ".idx", ".json"):
        contents = {(tmp_path / f"{workers}{ending}").read_bytes() for workers in (1, 2, 3)}
        assert len(contents) == 1


def test_limit(lines: tuple[Path, list[str]], tmp_path: Path) -> None:
    path, found = lines
    sizes = np.cumsum([len(text.encode()) for text in found])
    what = Build(str(tmp_path / "x"), inputs=(str(path),))
    for limit, keep in ((1, 1), (int(sizes[4]), 5), (int(sizes[4]) + 1, 6), (10**9, 400)):
        build(replace(what, limit_bytes=limit))
        assert texts(tmp_path / "x") == found[:keep]


def test_standard_library(tmp_path: Path) -> None:
    build(Build(str(tmp_path / "x"), source="stdlib", limit_bytes=300_000))
    build(Build(str(tmp_path / "y"), source="stdlib", limit_bytes=300_000))
    assert (tmp_path / "x.bin").read_bytes() == (tmp_path / "y.bin").read_bytes()
    assert texts(tmp_path / "x")[0] == (Path(os.__file__).parent / "__future__.py").read_text()
    names = [path.as_posix() for path in documents.list_files((), "stdlib")]
    assert names == sorted(names)
    assert not [name for name in names if "site-packages" in name or "/test/" in name]


def test_description(corpus: Path, tmp_path: Path) -> None:
    report = build(Build(str(tmp_path / "x"), inputs=(str(corpus),)))
    facts = read_sidecar(IndexedFile(tmp_path / "x"))
    assert facts is not None
    assert facts["tokenizer"] == "bytes"
    assert facts["tokenizer_hash"] == ByteTokenizer().hash
    assert (facts["vocab"], facts["end_of_document"]) == (257, 256)
    tokens = [t for text in DOCUMENTS for t in (*text.encode(), 256)]
    share = np.bincount(tokens)[np.unique(tokens)] / len(tokens)
    assert facts["unigram_entropy_nats"] == pytest.approx(-(share * np.log(share)).sum())
    assert facts["unigram_entropy_nats"] == report.unigram_entropy
    assert unigram_entropy(np.array([3, 3, 0, 3, 3])) == pytest.approx(np.log(4))

    with IndexedWriter(tmp_path / "y", 257) as writer:
        writer.add(np.array([1, 2]))
    assert read_sidecar(IndexedFile(tmp_path / "y")) is None
    (tmp_path / "x.json").rename(tmp_path / "y.json")
    with pytest.raises(DataError, match=r"describes 4 documents.*another build"):
        read_sidecar(IndexedFile(tmp_path / "y"))
    (tmp_path / "y.json").write_text("{")
    with pytest.raises(DataError, match=r"y\.json: not JSON"):
        read_sidecar(IndexedFile(tmp_path / "y"))


def test_inspect(corpus: Path, tmp_path: Path) -> None:
    report = build(Build(str(tmp_path / "x"), inputs=(str(corpus),)))
    text = "\n".join(inspect(str(tmp_path / "x")))
    for wanted in ("documents       4", "uint16", "alphazwölf €x", "bytes"):
        assert wanted in text
    assert f"tokens          {report.tokens}" in text
    assert f"{report.unigram_entropy:.6f} nats a token" in text


def test_progress_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Progress, "LINE_S", 0.0)
    with Progress(200) as progress:
        progress.advance(50, 40)
        progress.advance(150, 190)
    captured = capsys.readouterr()
    assert captured.err.split("\n") == [
        "tokenizing: 25%, 40 tokens",
        "tokenizing: 100%, 190 tokens",
        "",
    ]
    assert captured.out == ""


def test_bad_input(corpus: Path, tmp_path: Path) -> None:
    what = Build(str(tmp_path / "x"))
    (tmp_path / "none").mkdir()
    (tmp_path / "only-empty.txt").write_text("")
    for change, message in (
        ({}, "either input files or --source"),
        ({"inputs": (str(corpus),), "source": "stdlib"}, "either input files or --source"),
        ({"source": "web"}, "'web' is unknown"),
        ({"inputs": (str(tmp_path / "missing"),)}, "missing: no such file"),
        ({"inputs": (str(corpus / "b" / "ignored.md"),)}, r"one of \.txt, \.jsonl"),
        ({"inputs": (str(tmp_path / "none"),)}, r"none: no file below it ends in \.txt or"),
        ({"inputs": (str(tmp_path / "only-empty.txt"),)}, "no document in the input.*1 empty"),
        ({"inputs": (str(corpus),), "workers": 0}, "workers must be at least 1, not 0"),
        ({"inputs": (str(corpus),), "limit_bytes": 0}, "at least 1 byte, not 0"),
    ):
        with pytest.raises(UserError, match=message):
            build(replace(what, **change))
        assert not list(tmp_path.glob("x.*"))


class Task:
    """A worker's function whose task says what to do."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, task: int | str) -> int:
        if task == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if task == "refuse":
            raise DataError("no such text")
        return self.factor * int(task)


def test_faults_of_workers_surface() -> None:
    with closing(map_in_order(Task, (2,), [1, 2, 3, 4, 5], workers=2)) as results:
        assert list(results) == [2, 4, 6, 8, 10]
    for task, error, message in (
        ("die", RuntimeError, "ended with code -9"),
        ("refuse", DataError, "no such text"),
        ("nonsense", RuntimeError, "(?s)Traceback.*invalid literal"),
        (None, RuntimeError, "(?s)Traceback.*TypeError"),
    ):
        with (
            closing(map_in_order(Task, (2,), [1, 2, task, 4, 5], workers=2)) as results,
            pytest.raises(error, match=message),
        ):
            list(results)


def test_a_worker_that_died_before_its_next_task_was_sent() -> None:
    with closing(map_in_order(Task, (2,), [1, 2, 3, "die", 5, 6], workers=2)) as results:
        assert next(results) == 2
        deadline = time.monotonic() + 30
        while len(multiprocessing.active_children()) > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [next(results), next(results)] == [4, 6]
        with pytest.raises(RuntimeError, match="ended with code -9"):
            next(results)


SCRIPT = """
import sys
from penteract.data import documents
from penteract.data.build import Build, build
if __name__ == "__main__":
    documents._TASK_BYTES = 20_000
    build(Build(sys.argv[2], inputs=(sys.argv[1],), workers=2))
"""


def alive(group: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


@pytest.mark.parametrize("how", ["interrupt", "kill"])
def test_a_stopped_build_leaves_no_output_and_no_process(tmp_path: Path, how: str) -> None:
    """An interrupt from the terminal goes to all processes at once; a kill only to the first."""
    source = tmp_path / "x.jsonl"
    source.write_text((json.dumps({"text": "word " * 1000}) + "\n") * 8000)
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments = [sys.executable, str(tmp_path / "script.py"), str(source), str(tmp_path / "out")]
    process = subprocess.Popen(arguments, start_new_session=True, stderr=subprocess.PIPE, text=True)
    part = tmp_path / "out.bin.part"
    deadline = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size) and time.monotonic() < deadline:
        assert process.poll() is None, "the build ended before it could be stopped"
        time.sleep(0.005)
    if how == "interrupt":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.kill()
    _, errors = process.communicate(timeout=30)
    assert process.returncode != 0
    while alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(process.pid)
    left = sorted(path.name for path in tmp_path.glob("out*"))
    assert left == ([] if how == "interrupt" else ["out.bin.part"])
    if how == "interrupt":
        assert errors.count("KeyboardInterrupt") == 1, errors
    build(Build(str(tmp_path / "out"), inputs=(str(source),), limit_bytes=1))
