"""Text to token files (`penteract data build`): plan tasks, tokenize in order, write once.

The plan does not depend on the number of workers, and results are written in its order, so neither
do the bytes written. Workers read their own input; only task names and token arrays travel.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import rich.console
import rich.progress
from numpy.typing import NDArray

from penteract.data.documents import Piece, list_files, plan_tasks, read_documents
from penteract.data.indexed import DataError, IndexedFile, Ints, token_dtype
from penteract.data.tokenizers import Tokenizer, load_tokenizer
from penteract.data.workers import map_in_order
from penteract.data.writer import IndexedWriter
from penteract.errors import UserError


@dataclass(frozen=True)
class Build:
    """What to build: `inputs` (files or directories) or `source="stdlib"`, written to `output`.

    A `.txt` file is one document, `.jsonl` one a line under `key`. `limit_bytes` stops after the
    document that brings the text to that many bytes.
    """

    output: str
    inputs: tuple[str, ...] = ()
    source: str | None = None
    tokenizer: str = "bytes"
    end_of_document: str | None = None
    key: str = "text"
    workers: int = 1
    limit_bytes: int | None = None


@dataclass
class Report:
    """What was built. `skipped`: reason → (how many documents, where the first is)."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    seconds: float = 0.0
    unigram_entropy: float = 0.0  # nats a token
    skipped: dict[str, tuple[int, str]] = field(default_factory=dict)

    def summary(self) -> str:
        """One line for the user."""
        rate = self.tokens / max(self.seconds, 1e-9)
        skips = "; ".join(
            f"{n} {why} (first {at})" for why, (n, at) in sorted(self.skipped.items())
        )
        return (
            f"{self.documents} documents, {self.tokens} tokens, {self.text_bytes} bytes of text, "
            f"unigram entropy {self.unigram_entropy:.4f} nats a token, "
            f"{self.seconds:.1f} s, {rate:.3g} tokens/s, skipped: {skips or 'none'}"
        )


@dataclass
class _Chunk:
    """Documents of one task: their tokens, and per document the tokens and the bytes of text."""

    tokens: NDArray[Any]
    lengths: Ints
    text_bytes: Ints
    input_bytes: int
    skipped: dict[str, tuple[int, str]]


def build(what: Build) -> Report:
    """Builds `output.bin`, `.idx` and `.json`, all or nothing. Raises UserError for bad input."""
    if what.workers < 1:
        raise UserError(f"workers must be at least 1, not {what.workers}")
    if what.limit_bytes is not None and what.limit_bytes < 1:
        raise UserError(f"the limit must be at least 1 byte, not {what.limit_bytes}")
    tokenizer = load_tokenizer(what.tokenizer, what.end_of_document)
    tasks = plan_tasks(list_files(what.inputs, what.source))
    report, counts, begin = Report(), np.zeros(tokenizer.vocab, np.int64), time.perf_counter()
    total = sum(piece.stop - piece.start for task in tasks for piece in task)
    setup = (what.tokenizer, what.end_of_document, what.key)
    with (
        IndexedWriter(what.output, tokenizer.vocab) as writer,
        Progress(total) as progress,
        closing(map_in_order(_Tokenize, setup, tasks, workers=what.workers)) as chunks,
    ):
        for chunk in chunks:
            done = _cut(chunk, report.text_bytes, what.limit_bytes)
            writer.add_documents(chunk.tokens, chunk.lengths)
            counts += np.bincount(chunk.tokens, minlength=tokenizer.vocab)
            _add(report, chunk)
            progress.advance(chunk.input_bytes, report.tokens)
            if done:
                break
        if not report.documents:
            raise DataError(f"{what.output}: no document in the input; {report.summary()}")
        report.unigram_entropy = unigram_entropy(counts)
        writer.sidecar = _sidecar(what, tokenizer, report)
    report.seconds = time.perf_counter() - begin
    return report


def _add(report: Report, chunk: _Chunk) -> None:
    report.documents += len(chunk.lengths)
    report.tokens += len(chunk.tokens)
    report.text_bytes += int(chunk.text_bytes.sum())
    for why, (number, first) in chunk.skipped.items():
        _skip(report.skipped, why, number, first)


def _cut(chunk: _Chunk, before: int, limit: int | None) -> bool:
    """Drops the documents behind the limit; returns whether it is reached."""
    if limit is None:
        return False
    reached = np.flatnonzero(before + np.cumsum(chunk.text_bytes) >= limit)
    if not len(reached):
        return False
    keep = int(reached[0]) + 1
    chunk.lengths, chunk.text_bytes = chunk.lengths[:keep], chunk.text_bytes[:keep]
    chunk.tokens = chunk.tokens[: int(chunk.lengths.sum())]
    return True


def unigram_entropy(counts: Ints) -> float:
    """Entropy of single tokens in nats: the loss of a model that knows only their frequencies."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def _sidecar(what: Build, tokenizer: Tokenizer, report: Report) -> dict[str, Any]:
    return {
        "format": 1,
        "tokenizer": tokenizer.name,
        "tokenizer_hash": tokenizer.hash,
        "vocab": tokenizer.vocab,
        "end_of_document": tokenizer.end_of_document,
        "documents": report.documents,
        "tokens": report.tokens,
        "text_bytes": report.text_bytes,
        "unigram_entropy_nats": report.unigram_entropy,
        "skipped": {why: number for why, (number, _) in sorted(report.skipped.items())},
    }


def read_sidecar(file: IndexedFile) -> dict[str, Any] | None:
    """The facts that `build` left beside a token file; None without them.

    Raises DataError where they are unreadable or describe another file.
    """
    path = f"{file.prefix}.json"
    if not os.path.exists(path):
        return None
    try:
        facts = json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from None
    if not isinstance(facts, dict) or facts.get("format") != 1:
        raise DataError(f"{path}: not the description of a token file, format 1")
    if facts.get("tokens") != file.tokens or facts.get("documents") != len(file.documents) - 1:
        raise DataError(
            f"{path}: describes {facts.get('documents')} documents, {facts.get('tokens')} tokens; "
            f"the file has {len(file.documents) - 1}, {file.tokens}: one is from another build"
        )
    return facts


class _Tokenize:
    """Turns a task into a chunk; made once in each worker."""

    def __init__(self, spec: str, end_of_document: str | None, key: str) -> None:
        self._tokenizer = load_tokenizer(spec, end_of_document)
        self._dtype = token_dtype(self._tokenizer.vocab)
        self._key = key

    def __call__(self, task: list[Piece]) -> _Chunk:
        tokens: list[NDArray[Any]] = [np.empty(0, self._dtype)]
        sizes: list[int] = []
        skipped: dict[str, tuple[int, str]] = {}
        for document in (found for piece in task for found in read_documents(piece, self._key)):
            ids = self._tokenizer.encode(document.text)
            if len(ids) == 0:
                _skip(skipped, document.fault or "empty", 1, document.where)
                continue
            # The length of a document includes the token that ends it.
            tokens.append(np.append(ids, self._tokenizer.end_of_document).astype(self._dtype))
            sizes.append(len(document.text.encode()))
        return _Chunk(
            tokens=np.concatenate(tokens),
            lengths=np.array([len(ids) for ids in tokens[1:]], np.int64),
            text_bytes=np.array(sizes, np.int64),
            input_bytes=sum(piece.stop - piece.start for piece in task),
            skipped=skipped,
        )


def _skip(skipped: dict[str, tuple[int, str]], why: str, number: int, where: str) -> None:
    before, first = skipped.get(why, (0, where))
    skipped[why] = (before + number, first)


class Progress:
    """How far a build is, on standard error: a bar on a terminal, else a line every ten seconds."""

    LINE_S = 10.0

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        self._done = 0
        self._next_line = time.monotonic() + self.LINE_S
        self._bar = rich.progress.Progress(
            *rich.progress.Progress.get_default_columns(),
            rich.progress.TextColumn("{task.fields[tokens]} tokens"),
            console=rich.console.Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )

    def __enter__(self) -> Self:
        self._bar.start()
        self._task = self._bar.add_task("tokenizing", total=self._total, tokens=0)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, input_bytes: int, tokens: int) -> None:
        """`input_bytes` more are done; `tokens` is the number of all so far."""
        self._done += input_bytes
        self._bar.update(self._task, completed=self._done, tokens=tokens)
        if self._bar.disable and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + self.LINE_S
            share = self._done / max(self._total, 1)
            print(f"tokenizing: {share:.0%}, {tokens} tokens", file=sys.stderr, flush=True)


def inspect(prefix: str, tokenizer: Tokenizer | None = None, shown: int = 64) -> list[str]:
    """Lines on a token file: counts, dtype, lengths, entropy, its first tokens as text."""
    file = IndexedFile(prefix)
    facts = read_sidecar(file) or {}
    if tokenizer is None and facts.get("tokenizer") == "bytes":
        tokenizer = load_tokenizer("bytes")
    lengths = file.document_lengths()
    low, quarter, median, most, high = np.quantile(lengths, (0, 0.25, 0.5, 0.75, 1)).tolist()
    counts = _count(file)
    lines = [
        f"prefix          {file.prefix}",
        f"documents       {len(lengths)}",
        f"sequences       {len(file.lengths)}",
        f"tokens          {file.tokens}",
        f"dtype           {file.dtype.name}, {file.bin_bytes} bytes",
        f"document length mean {lengths.mean():.1f}, least {low:.0f}, quartiles {quarter:.0f} "
        f"{median:.0f} {most:.0f}, most {high:.0f} tokens",
        f"ids             {np.flatnonzero(counts)[0]} to {len(counts) - 1}, "
        f"{np.count_nonzero(counts)} different",
        f"unigram entropy {unigram_entropy(counts):.6f} nats a token",
        f"tokenizer       {facts.get('tokenizer', 'unknown: no description beside the file')}",
    ]
    if file.mask is not None:
        counted = int(file.mask.sum(dtype=np.int64))
        template = facts.get("chat", {}).get("name", "unknown")
        lines.append(f"mask            {counted} tokens are the assistant's, template {template}")
    first = file.read(0, min(shown, file.tokens)).tolist()
    lines.append(
        f"first tokens    {' '.join(map(str, first[:16]))}{' …' if len(first) > 16 else ''}"
    )
    if tokenizer is not None:
        lines.append(f"as text         {tokenizer.decode(first)!r}")
    return lines


def _count(file: IndexedFile) -> Ints:
    counts, span = np.zeros(0, np.int64), 1 << 22
    for start in range(0, file.tokens, span):
        more = np.bincount(file.read(start, min(start + span, file.tokens)))
        wide, narrow = (counts, more) if len(counts) >= len(more) else (more, counts)
        wide[: len(narrow)] += narrow
        counts = wide
    return counts
