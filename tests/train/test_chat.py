"""Fine-tuning on chats: from a checkpoint's weights, in any layout, to an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import curve, evaluations, newest, run, write_config

from penteract.checkpoint.io import read_manifest
from penteract.checkpoint.model import load_model
from penteract.cli import main
from penteract.config_file import load
from penteract.data import rows as rows_module
from penteract.data.chat import Chat, build_chat, encode, parse
from penteract.data.packing import costs
from penteract.data.template import find_template
from penteract.data.tokenizers import ByteTokenizer
from penteract.grid import Grid
from penteract.mesh import create_mesh
from penteract.nn.sequences import Sequences
from penteract.train.language_model import language_model, train_source, with_vocabulary

SEQ = 64
BYTES = ByteTokenizer()
KEYS = {
    "data": {"train": ["chats"], "valid_fraction": 0.2, "seq": SEQ, "packing": True},
    "train": {"steps": 3, "global_batch": 5, "micro_batch": 2, "eval_steps": 2},
}


def talks() -> list[bytes]:
    """Conversations of one to five questions; the last is longer than a row."""
    draw = np.random.default_rng(0)
    lines = []
    for i in range(40):
        messages = []
        for _ in range(int(draw.integers(1, 3)) if i < 39 else 5):
            n = int(draw.integers(1, 6))
            messages.append({"role": "user", "content": "q" * n})
            messages.append({"role": "assistant", "content": "a" * n + "!"})
        lines.append(json.dumps({"messages": messages}).encode())
    return lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pre-trained checkpoint under `run`, and `chats`, the talks' token file."""
    path = tmp_path_factory.mktemp("chat")
    (path / "talks.jsonl").write_bytes(b"\n".join(talks()))
    build_chat(Chat(str(path / "chats"), (str(path / "talks.jsonl"),)))
    run(["train", write_config(path), "--train.steps=2"])
    return path


def tune(folder: Path, name: str, *words: str, n: int = 1, code: int = 0) -> str:
    """Fine-tunes into `folder/name`; what rank 0 said."""
    (folder / "run.toml").unlink(missing_ok=True)
    config = write_config(folder, KEYS)
    where = [f"--log.dir={folder / name}", f"--checkpoint.load={folder / 'run/checkpoints'}"]
    return run(["train", config, *where, *words], n, code=code).err[0]


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[list[tuple[float, ...]], dict[int, dict[str, float]]]:
    """Losses and evaluations on one process."""
    said = tune(folder, "alone")
    assert "starting from the weights of" in said
    return curve(folder / "alone"), evaluations(folder / "alone")


def test_what_is_said_at_the_start(folder: Path, alone: object) -> None:
    said = tune(folder, "said", "--train.steps=1")
    line = next(line for line in said.splitlines() if line.startswith("chats: "))
    source = train_source(with_vocabulary(load(folder / "run.toml", []))[0])
    rows = len(source.rows[0])
    assert line.startswith(f"chats: 40 conversations in {rows} rows of 64 tokens, filled ")
    assert "1 are longer and lose " in line


@pytest.mark.parametrize(
    ("n", "words"),
    [
        (2, ()),
        (2, ("--parallel.cp=2",)),
        (2, ("--parallel.tp=2",)),
        (1, ("--data.balance=true",)),
        (2, ("--data.balance=true", "--parallel.cp=2", "--parallel.cp_comm=all_gather")),
        (2, ("--data.balance=true", "--train.micro_batch=3")),
    ],
)
def test_layouts_and_balance_give_the_same(
    folder: Path,
    alone: tuple[list[tuple[float, ...]], dict[int, dict[str, float]]],
    n: int,
    words: tuple[str, ...],
) -> None:
    """Order inside a step changes sums by rounding only, in float64 below 1e-9."""
    name = "-".join([str(n), *words]).replace("/", "")
    tune(folder, name, *words, n=n)
    wanted, valid = alone
    found = curve(folder / name)
    assert [line[0] for line in found] == [1, 2, 3]
    np.testing.assert_allclose(found, wanted, rtol=1e-9)
    assert evaluations(folder / name)[3]["chats"] == pytest.approx(valid[3]["chats"], rel=1e-9)


def test_the_loss_is_that_of_each_conversation_alone(
    folder: Path, alone: tuple[list[tuple[float, ...]], object]
) -> None:
    """Of the answers' tokens alone, whatever row they are in and whatever is beside them."""
    model, _, _ = load_model(newest(folder / "run"))
    template = find_template(None, "bytes", BYTES)
    config, _ = with_vocabulary(load(folder / "run.toml", []))
    total, count = 0.0, 0
    places = [found.place for found in train_source(config).describe(range(5))]
    for number in (int(x) for place in places for x in place.split()[1:]):
        ids, mask = encode(parse(talks()[number]), template, BYTES)
        ids, mask = ids[:SEQ], mask[:SEQ]
        for j in np.flatnonzero(mask).tolist():
            context = torch.from_numpy(ids[:j])
            caches = model.new_caches(1, j)
            with torch.no_grad():
                logits = model.logits(context, Sequences.of((j,)), caches)[0]
            total -= float(logits.log_softmax(-1)[ids[j]])
            count += 1
    assert alone[0][0][1] == pytest.approx(total / count, rel=1e-9)


def test_balance_keeps_the_samples_of_a_step(folder: Path) -> None:
    """The same rows, each once, in micro-batches whose attention costs less unevenly."""
    write_config(folder, KEYS)
    heaviest = {}
    for balance in ("false", "true"):
        words = [f"--data.balance={balance}", "--data.valid_fraction=0", "--train.global_batch=10"]
        config = load(folder / "run.toml", words)
        task, _ = language_model(config, create_mesh(Grid(1), 0), torch.device("cpu"))
        try:
            batches = task.batches(1)
        finally:
            task.close()
        rows = [row for b in batches for row in b.tokens.view(-1, SEQ).tolist()]
        spread = [int(costs(b.sequences.lengths, SEQ).sum()) for b in batches]
        heaviest[balance] = (sorted(rows), max(spread))
    assert heaviest["true"][0] == heaviest["false"][0]
    assert heaviest["true"][1] < heaviest["false"][1]


def test_a_run_continues_and_other_chats_are_refused(folder: Path, alone: object) -> None:
    said = tune(folder, "more", "--train.steps=1", "--optim.decay=3")
    assert "saved" in said
    said = tune(folder, "more", "--optim.decay=3", "--data.balance=true")
    assert "continuing" in said
    np.testing.assert_allclose(curve(folder / "more"), curve(folder / "alone"), rtol=1e-9)
    (folder / "others.jsonl").write_bytes(b"\n".join(talks()[:30]))
    build_chat(Chat(str(folder / "others"), (str(folder / "others.jsonl"),)))
    refused = tune(folder, "more", '--data.train=["others"]', code=2)
    assert "data.files: saved" in refused


def test_harmless_changes_go_on(folder: Path, alone: object) -> None:
    """The same template in a file of another name, and a key that conversations do not heed."""
    inputs = (str(folder / "talks.jsonl"),)
    kept = find_template(None, "bytes", BYTES)
    for i, name in enumerate(("one", "two")):
        (folder / f"{name}.jinja").write_text(kept.source)
        build_chat(Chat(str(folder / "named"), inputs, template=str(folder / f"{name}.jinja")))
        across = f"--data.predict_across={'true' if i else 'false'}"
        words = ['--data.train=["named"]', f"--train.steps={i + 1}", "--optim.decay=3", across]
        said = tune(folder, "renamed", *words)
    assert "continuing" in said
    np.testing.assert_allclose(curve(folder / "renamed"), curve(folder / "alone")[:2], rtol=1e-9)
    assert read_manifest(newest(folder / "renamed")).state["chat"]["name"] == "two.jinja"


def test_what_is_held_out_is_packed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training and validation share the rows of a file."""
    write_config(folder, KEYS)
    made, pack = [], rows_module.best_fit

    def counted(*arguments: Any) -> Any:
        made.append(arguments)
        return pack(*arguments)

    monkeypatch.setattr(rows_module, "best_fit", counted)
    mesh, device = create_mesh(Grid(1), 0), torch.device("cpu")
    task, _ = language_model(load(folder / "run.toml", []), mesh, device)
    assert list(task.validation["chats"]())
    task.close()
    assert len(made) == 1


def test_what_is_refused(folder: Path, alone: object) -> None:
    said = tune(folder, "none", "--data.packing=false", code=2)
    assert "holds conversations (there is a .mask): they need data.packing = true" in said
    (folder / "t.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    inputs = (str(folder / "talks.jsonl"),)
    build_chat(Chat(str(folder / "plain"), inputs, template=str(folder / "t.jinja")))
    for more in ('--data.train=["chats","plain"]', '--data.valid=["plain"]'):
        said = tune(folder, "none", more, code=2)
        assert "train and validate on chats of one template" in said
        assert "Traceback" not in said


def test_generate_answers_and_stops(
    folder: Path, alone: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that has learnt its chats says the answer and nothing more."""
    words = ["--train.steps=60", "--optim.lr=0.02"]
    tune(folder, "learnt", *words)
    checkpoints = str(folder / "learnt/checkpoints")
    kept = read_manifest(newest(folder / "learnt")).state["chat"]
    assert kept["name"] == "(default)"
    asked = ["generate", checkpoints, "--chat", "--temperature", "0", "--max-tokens", "40"]
    assert main([*asked, "--prompt", "qqq"]) == 0
    said = capsys.readouterr().out
    assert set(said.strip()) <= set("a!"), said
    assert len(said) < 20
    assert main([*asked, "--prompt", "qqq", "--ignore-end"]) == 0
    assert len(capsys.readouterr().out) > len(said)
    # Without --chat the prompt is the text's beginning, and shown.
    assert main([*asked[:2], "--prompt", "user: q", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out.startswith("user: q")
    template = folder / "other.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    assert main([*asked, "--prompt", "q", "--template", str(template)]) == 0
    capsys.readouterr()
    assert main([*asked, "--prompt", "\U00100000"]) == 2
    assert "the question: half of a surrogate pair" in capsys.readouterr().err
    assert main([*asked[:2], "--template", str(template)]) == 2
    assert "--template is for --chat" in capsys.readouterr().err
