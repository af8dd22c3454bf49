"""Bytes and tokenizer.json: round trips, streams, ends of documents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from penteract.data.tokenizers import ByteTokenizer, JsonTokenizer, Tokenizer, load_tokenizer
from penteract.errors import UserError

END = "<|endoftext|>"


def save_bpe(path: Path, special: tuple[str, ...] = (END,)) -> Path:
    """A byte-level BPE with few merges, so that tokens split characters."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["the tree is a thesis; the end of text is the end"] * 4, trainer)
    inner.enable_truncation(8)
    inner.save(str(path))
    return path


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> JsonTokenizer:
    return JsonTokenizer(str(save_bpe(tmp_path_factory.mktemp("bpe") / "tokenizer.json")))


def stream(tokenizer: Tokenizer, ids: list[int]) -> str:
    decoder = tokenizer.stream()
    return "".join(map(decoder.push, ids)) + decoder.finish()


def test_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab, tokenizer.end_of_document) == (257, 256)
    ids = tokenizer.encode("né")
    assert ids.dtype == np.int64
    assert ids.tolist() == [110, 0xC3, 0xA9]
    assert tokenizer.decode([*ids, 256, 999, 33]) == "né!"
    assert tokenizer.decode([0xC3, 33]) == "\ufffd!"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.text(max_size=20))
def test_round_trip_and_stream(bpe: JsonTokenizer, text: str) -> None:
    for tokenizer in (ByteTokenizer(), bpe):
        ids = tokenizer.encode(text).tolist()
        assert all(0 <= i < tokenizer.vocab and i != tokenizer.end_of_document for i in ids)
        assert tokenizer.decode(ids) == text
        assert stream(tokenizer, ids) == text


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 259), max_size=20))
def test_streams_of_any_ids(bpe: JsonTokenizer, ids: list[int]) -> None:
    for tokenizer in (ByteTokenizer(), bpe):
        assert stream(tokenizer, ids) == tokenizer.decode(ids)


def test_a_stream_shows_only_whole_characters(bpe: JsonTokenizer) -> None:
    for tokenizer in (ByteTokenizer(), bpe):
        decoder = tokenizer.stream()
        shown = [decoder.push(token) for token in tokenizer.encode("é€").tolist()]
        assert shown == ["", "é", "", "", "€"]


def test_json(bpe: JsonTokenizer) -> None:
    ids = bpe.encode("the thesis is the end of the tree, the end")
    assert len(ids) > 8, "the truncation in the file must not cut documents"
    assert ids.max() < bpe.vocab
    assert bpe.name == "tokenizer.json"
    assert bpe.decode([*ids[:1], bpe.end_of_document]) == bpe.decode(ids[:1])


def test_the_end_token_in_a_text_is_text(bpe: JsonTokenizer) -> None:
    """Row 72: a document that mentions the end token is not split."""
    text = f"it is written {END}, like this"
    ids = bpe.encode(text).tolist()
    assert bpe.end_of_document not in ids
    assert bpe.decode(ids) == text


def test_hash_follows_content_and_end(tmp_path: Path) -> None:
    one = str(save_bpe(tmp_path / "one.json", (END, "</s>")))
    two = str(save_bpe(tmp_path / "two.json", (END, "</s>", "<x>")))
    hashes = {JsonTokenizer(one).hash, JsonTokenizer(one, "</s>").hash, JsonTokenizer(two).hash}
    assert len(hashes) == 3
    assert JsonTokenizer(one).hash == JsonTokenizer(one).hash


def test_the_end_token_is_found_or_asked_for(tmp_path: Path) -> None:
    path = str(save_bpe(tmp_path / "t.json", ("<stop>", "</s>")))
    assert load_tokenizer(path).end_of_document == 1
    assert load_tokenizer(path, "<stop>").end_of_document == 0
    with pytest.raises(UserError, match=r"no token '<halt>'"):
        load_tokenizer(path, "<halt>")
    with pytest.raises(UserError, match=r"data\.end_of_document .*--eod TOKEN"):
        load_tokenizer(str(save_bpe(tmp_path / "u.json", ("<stop>",))))


@pytest.mark.parametrize("kind", ["plain", "added"])
def test_an_end_token_that_the_file_does_not_call_special(tmp_path: Path, kind: str) -> None:
    """A plain entry of the vocabulary, or an added one, has its number and ends documents alone."""
    path, vocab = str(tmp_path / "t.json"), {x: i for i, x in enumerate(["a", "b", "c", "<", ">"])}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({**vocab, "<c>": 5}, []))
    if kind == "added":
        inner.add_tokens([tokenizers.AddedToken("<c>", special=False)])
    inner.save(path)
    found = load_tokenizer(path, "<c>")
    assert (found.end_of_document, found.vocab, dict(found.specials)) == (5, 6, {"<c>": 5})
    assert found.encode("a<c>").tolist() == [0, 3, 2, 4]
    ids, places = found.encode_marked("a<c>b")
    assert (ids.tolist(), places.tolist()) == ([0, 5, 1], [[0, 1], [1, 4], [4, 5]])
    assert found.decode([0, 5]) == found.decode([0])


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.json: No such file"):
        load_tokenizer(str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text('{"model": 3}')
    with pytest.raises(UserError, match=r"bad\.json: not a tokenizer\.json"):
        load_tokenizer(str(tmp_path / "bad.json"))
    with pytest.raises(UserError, match="ends documents with id 256"):
        load_tokenizer("bytes", END)
