"""The task of `penteract train`: its tokenizer, its notes, its batches."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import tokenizers
import torch
from runs import run, write_config

from penteract.cli import main
from penteract.config_file import load
from penteract.data.build import Build, build
from penteract.grid import Grid
from penteract.mesh import create_mesh
from penteract.nn.sequences import MicroBatch
from penteract.train.language_model import language_model
from penteract.train.task import Task


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer whose token <stop> ends documents, and a token file `text` made with it."""
    vocab = {letter: i for i, letter in enumerate("abcdefgh ")}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({**vocab, "<stop>": 9}, []))
    inner.save(str(tmp_path / "letters.json"))
    (tmp_path / "a.txt").write_text("abcd efgh " * 100)
    output, inputs, spec = (str(tmp_path / x) for x in ("text", "a.txt", "letters.json"))
    build(Build(output, (inputs,), tokenizer=spec, end_of_document="<stop>"))
    return tmp_path


def task_of(path: Path, *words: str) -> Task:
    task, _ = language_model(load(path, words), create_mesh(Grid(1), 0), torch.device("cpu"))
    return task


LETTERS = {"tokenizer": "letters.json", "end_of_document": "<stop>"}


def test_the_token_that_ends_a_document_goes_from_training_to_generating(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(folder, {"data": LETTERS})
    run(["train", config])
    assert main(["generate", str(folder / "run/checkpoints"), "--max-tokens", "5"]) == 0
    assert set(capsys.readouterr().out) <= set("abcdefgh \n")
    ranks = run(["train", config, "--data.end_of_document=<halt>"], code=2)
    assert "no token '<halt>'" in ranks.err[0]


def test_a_file_made_with_another_tokenizer_is_refused(folder: Path) -> None:
    config = write_config(folder)  # bytes
    ranks = run(["train", config], code=2)
    assert (
        "text was made with another tokenizer: letters.json, end of document 9, hash "
        in ranks.err[0]
    )
    assert "data.tokenizer is bytes, end of document 256, hash " in ranks.err[0]
    (folder / "text.json").unlink()  # nothing says how it was made
    run(["train", config])


def test_a_run_says_what_its_files_hold(folder: Path) -> None:
    config = write_config(folder, {"data": LETTERS})
    ranks = run(["train", config, '--data.valid=["text"]'])
    counts = [100] * 8 + [200, 1]  # letters, spaces, <stop>
    entropy = -sum(n / 1001 * math.log(n / 1001) for n in counts)
    note = f"text: 1001 tokens, unigram entropy {entropy:.4f} nats a token\n"
    assert ranks.err[0].count(note) == 1
    (folder / "text.json").unlink()
    assert task_of(config).notes == ["text: 1001 tokens"]


def test_batches_are_the_samples_of_the_source(folder: Path) -> None:
    task = task_of(write_config(folder, {"data": LETTERS, "train": {"micro_batch": 3}}))
    batches = task.batches(1)
    task.close()
    assert all(isinstance(batch, MicroBatch) for batch in batches)
    assert [len(batch.tokens) for batch in batches] == [36, 12]
    (first, *_) = task.validation["text"]()
    for batch in (*batches, first):
        assert batch.tokens.dtype == batch.labels.dtype == torch.int64
        assert torch.equal(batch.tokens.view(-1, 12)[:, 1:], batch.labels.view(-1, 12)[:, :-1])
