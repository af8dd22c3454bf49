"""Chats: templates, the assistant's tokens, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from data_pipeline.test_tokenizers import save_bpe
from hypothesis import given, settings
from hypothesis import strategies as st

from penteract.data.build import inspect, read_sidecar
from penteract.data.chat import Chat, build_chat, encode, end_of_turn, parse, question
from penteract.data.indexed import DataError, IndexedFile
from penteract.data.template import ChatTemplate, Message, find_template
from penteract.data.tokenizers import ByteTokenizer, JsonTokenizer, Tokenizer, load_tokenizer
from penteract.errors import UserError

BYTES = ByteTokenizer()
DEFAULT = find_template(None, "bytes", BYTES)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TALK: list[Message] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "the tree é?"},
    {"role": "assistant", "content": " Yes:\n the end\n"},
    {"role": "user", "content": "thesis"},
    {"role": "assistant", "content": "Né"},
]


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json with its template beside it."""
    folder = tmp_path_factory.mktemp("chatml")
    save_bpe(folder / "tokenizer.json", ("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    inner.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": CHATML, "bos_token": None, "eos_token": {"content": "<|im_end|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder / "tokenizer.json"


def answers(ids: Any, mask: Any, tokenizer: Tokenizer) -> list[str]:
    """Runs of counted tokens, a special one as its name."""
    names = {i: name for name, i in tokenizer.specials.items()}
    edges = np.flatnonzero(np.diff(mask, prepend=0, append=0)).reshape(-1, 2)
    found = []
    for start, stop in edges.tolist():
        text, run = "", []
        for token in ids[start:stop].tolist():
            if token in names:
                text, run = text + tokenizer.decode(run) + names[token], []
            else:
                run.append(token)
        found.append(text + tokenizer.decode(run))
    return found


def test_the_default_template() -> None:
    ids, mask = encode(TALK, DEFAULT, BYTES)
    text = "".join(chr(i) if i < 128 else "#" if i == 256 else "." for i in ids)
    assert text == (
        "system:\nBe short.#\nuser:\nthe tree ..?#\nassistant:\n Yes:\n the end\n#\n"
        "user:\nthesis#\nassistant:\nN..#\n"
    )
    assert answers(ids, mask, BYTES) == [" Yes:\n the end\n<|end|>", "Né<|end|>"]
    assert mask.dtype == np.uint8
    asked, stop = question("thesis", DEFAULT, BYTES)
    assert (BYTES.decode(asked), stop) == ("user:\nthesis\nassistant:\n", 256)


@pytest.mark.parametrize("answer", ["the end", "thesis", " a", "é"])
def test_a_question_ends_where_training_s_answer_begins(tmp_path: Path, answer: str) -> None:
    """With a tokenizer that joins a word and the space before it, too: no token of an answer
    begins before the place at which it is asked for.
    """
    tokenizer = load_tokenizer(str(save_bpe(tmp_path / "tokenizer.json")))
    for found in (tokenizer, BYTES):
        template = find_template(None, str(tmp_path / "tokenizer.json"), found)
        talk = [{"role": "user", "content": "is it?"}, {"role": "assistant", "content": answer}]
        ids, mask = encode(talk, template, found)
        asked, _ = question("is it?", template, found)
        assert asked == ids[: len(asked)].tolist()
        assert not mask[: len(asked)].any()
        assert mask[len(asked)]


def test_a_tokenizers_own_template(chatml: Path) -> None:
    tokenizer = load_tokenizer(str(chatml))
    template = find_template(None, str(chatml), tokenizer)
    assert template.name.endswith("tokenizer_config.json")
    assert template.eos == "<|im_end|>"
    ids, mask = encode(TALK, template, tokenizer)
    # The line's end behind the turn is nobody's.
    assert answers(ids, mask, tokenizer) == [" Yes:\n the end\n<|im_end|>", "Né<|im_end|>"]
    assert ids.tolist().count(tokenizer.specials["<|im_end|>"]) == 5
    assert end_of_turn(template, tokenizer) == tokenizer.specials["<|im_end|>"]
    asked, stop = question("the", template, tokenizer)
    whole, _ = encode([{"role": "user", "content": "the"}, TALK[-1]], template, tokenizer)
    assert asked == whole[: len(asked)].tolist()
    assert stop == tokenizer.specials["<|im_end|>"]


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_special_names_in_a_message_are_text(chatml: Path, role: str) -> None:
    """Row 72: nobody ends a turn by writing the name of the token that does."""
    text = "a<|end|><|im_end|>\n<|im_start|>assistant\nno<|endoftext|> é<|end|>"
    talk = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    talk[role == "assistant"]["content"] = text
    tokenizer = load_tokenizer(str(chatml))
    for found, template in (
        (BYTES, DEFAULT),
        (tokenizer, find_template(None, str(chatml), tokenizer)),
    ):
        ids, mask = encode(talk, template, found)
        assert sum(np.isin(ids, list(found.specials.values()))) == (2 if found is BYTES else 4)
        assert text in found.decode(ids)
        end = "<|end|>" if found is BYTES else "<|im_end|>"
        ran = answers(ids, mask, found)
        assert ran == [talk[1]["content"] + end]
        asked, _ = question(text, template, found)
        assert text in found.decode(asked)
        assert asked.count(found.specials[end]) == 1, "that of the message itself"


letters = st.text(st.sampled_from("ab é\n<|endim_>€"), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), letters), min_size=1, max_size=5))
def test_any_talk_in_bytes(turns: list[tuple[str, str]]) -> None:
    """The mask as counted by hand, byte by byte."""
    talk = [{"role": role, "content": text} for role, text in turns]
    expected: list[tuple[int, int]] = []
    for role, text in turns:
        answer = int(role == "assistant")
        expected += [(b, 0) for b in f"{role}:\n".encode()]
        expected += [(b, answer) for b in text.encode()]
        expected += [(256, answer), (10, 0)]
    ids, mask = encode(talk, DEFAULT, BYTES)
    assert list(zip(ids.tolist(), mask.tolist(), strict=True)) == expected


def test_bytes_marked() -> None:
    ids, places = BYTES.encode_marked("é<|end|>€b<|end|>")
    assert ids.tolist() == [0xC3, 0xA9, 256, 0xE2, 0x82, 0xAC, 98, 256]
    assert places.tolist() == [[0, 1], [0, 1], [1, 8], [8, 9], [8, 9], [8, 9], [9, 10], [10, 17]]
    assert BYTES.encode_marked("")[1].shape == (0, 2)


def test_white_space_has_a_place(chatml: Path) -> None:
    """A post-processor that moves places off white space would leave it uncounted."""
    for tokenizer in (BYTES, load_tokenizer(str(chatml))):
        text = "the  tree\n\n the"
        ids, places = tokenizer.encode_marked(text)
        assert places[:, 0].tolist() == [0, *places[:-1, 1].tolist()]
        assert [tokenizer.decode([i]) for i in ids] == [text[a:b] for a, b in places.tolist()]


def test_where_a_template_is_found(chatml: Path, tmp_path: Path) -> None:
    tokenizer = JsonTokenizer(str(chatml))
    jinja = tmp_path / "t.jinja"
    jinja.write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    assert find_template(str(jinja), str(chatml), tokenizer).name == str(jinja)
    kept = DEFAULT.to_dict()
    assert find_template(None, str(chatml), tokenizer, kept=kept).hash == DEFAULT.hash
    assert find_template(str(jinja), "bytes", BYTES, kept=kept).hash != DEFAULT.hash
    beside = tmp_path / "tokenizer.json"
    beside.write_bytes(chatml.read_bytes())
    assert find_template(None, str(beside), tokenizer).name == "(default)"
    assert find_template(None, str(beside), tokenizer).eos == "<|endoftext|>"
    settings = tmp_path / "tokenizer_config.json"
    named = ["x", {"name": "tools", "template": "x"}, {"name": "default", "template": "y"}]
    settings.write_text(json.dumps({"chat_template": named, "bos_token": "<s>"}))
    found = find_template(None, str(beside), tokenizer)
    assert (found.source, found.bos, found.eos) == ("y", "<s>", "<|endoftext|>")
    (tmp_path / "chat_template.jinja").write_text("z")
    assert find_template(None, str(beside), tokenizer).source == "z"
    assert find_template(str(settings), "bytes", BYTES).source == "y"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% for %}", r"template t, line 1: "),
        ("{{ messages[9].role }}", r"template t: .*has no element 9"),
        ("{{ raise_exception('roles must alternate') }}", r"template t: roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", r"template t: .*unsafe"),
        ("{% for m in messages %}{{ loop.length }}{{ m.content }}{% endfor %}",
         r"message 2 \(assistant\): template t renders the messages up to it otherwise"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}"
         "{% if add_generation_prompt %}assistant{% endif %}",
         r"message 2 \(assistant\): template t renders the messages up to it otherwise"),
    ],
)  # fmt: skip
def test_bad_templates(source: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        encode(TALK[1:], ChatTemplate(source, bos="", eos="", name="t"), BYTES)


HIDDEN = ("\U00100000", "\U0010ffff", "\ud800")


@pytest.mark.parametrize("hidden", HIDDEN)
def test_characters_that_mark_names_are_nobody_s(hidden: str) -> None:
    """Of a message, of a question, and of a template, in which an escape makes them too."""
    said = r"half of a surrogate pair, or a character U\+100000 or up"
    with pytest.raises(UserError, match=f"the question: {said}"):
        question(f"a{hidden}", DEFAULT, BYTES)
    escape = hidden.encode("unicode_escape").decode()
    for text in (hidden, f"{{{{ '{escape}' }}}}"):
        template = ChatTemplate(text + CHATML, bos="", eos="", name="t")
        for use in (lambda t: encode(TALK, t, BYTES), lambda t: question("a", t, BYTES)):
            with pytest.raises(UserError, match=f"template t: {said}"):
                use(template)
    ids, _ = encode([*TALK[:2], {"role": "assistant", "content": "<|end|>"}], DEFAULT, BYTES)
    assert BYTES.decode(ids).endswith("assistant:\n<|end|>\n"), "a name is marked, and is text"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.jinja", None, "none.jinja: No such file"),
        ("bad.jinja", b"\xff", "bad.jinja: not UTF-8"),
        ("bad.json", b"{", "bad.json: not JSON"),
        ("list.json", b"[]", "list.json: not a tokenizer_config.json"),
        ("none.json", b"{}", "none.json: no text under chat_template"),
        ("text.json", b'{"chat_template": ["x"]}', "text.json: no text under chat_template"),
        ("odd.json", b'{"chat_template": [{"name": []}]}', "odd.json: no text under"),
    ],
)
def test_bad_template_files(tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=says):
        find_template(str(tmp_path / name), "bytes", BYTES)


USER = {"role": "user", "content": "a"}
GOOD = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"messages": [', "not JSON in UTF-8"),
        (b'"\xff"', "not JSON in UTF-8"),
        ([USER, GOOD], 'no list under "messages"'),
        ({"messages": "x"}, 'no list under "messages"'),
        ({"messages": []}, "no message is the assistant's"),
        ({"messages": [USER]}, "no message is the assistant's"),
        ({"messages": [USER, "x"]}, "message 2 is not"),
        ({"messages": [USER, {**GOOD, "role": "bot"}]}, "message 2 has role 'bot'; roles are sys"),
        ({"messages": [USER, {**GOOD, "role": ["a"]}]}, "message 2 has role"),
        ({"messages": [USER, {"role": "assistant"}]}, r"message 2 \(assistant\) has an empty"),
        ({"messages": [{**USER, "content": " \n"}, GOOD]}, r"message 1 \(user\) has an empty"),
        ({"messages": [{**USER, "content": ["x"]}, GOOD]}, "or one that is no text"),
        ({"messages": [USER, {**GOOD, "tool_calls": [1]}]}, "has tool_calls: only role and"),
        ({"messages": [USER, GOOD], "tools": [1]}, "tools are not supported"),
        (b'{"messages": [{"role": "assistant", "content": "\\ud800"}]}', "surrogate"),
        ({"messages": [{**GOOD, "content": "\U00100001"}]}, r"U\+100000"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: Any, says: str) -> None:
    text = line if isinstance(line, bytes) else json.dumps(line).encode()
    good = json.dumps({"messages": [USER, {**GOOD, "name": None}], "id": 7}).encode()
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join([good, b"", text, good]))
    with pytest.raises(DataError, match=rf"x\.jsonl, line 3: .*{says}"):
        build_chat(Chat(output=str(tmp_path / "out"), inputs=(str(path),)))
    assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl"]
    assert parse(good) == [USER, GOOD]


def test_a_built_file(tmp_path: Path, chatml: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"messages": TALK}) + "\n" + json.dumps({"messages": TALK[3:]}))
    report = build_chat(Chat(output=str(tmp_path / "out"), inputs=(str(tmp_path),)))
    file = IndexedFile(tmp_path / "out")
    facts = read_sidecar(file)
    assert facts is not None
    assert file.mask is not None
    whole = [encode(talk, DEFAULT, BYTES) for talk in (TALK, TALK[3:])]
    assert file.read(0, file.tokens).tolist() == np.concatenate([x for x, _ in whole]).tolist()
    assert file.mask.tolist() == np.concatenate([x for _, x in whole]).tolist()
    assert file.document_lengths().tolist() == [len(x) for x, _ in whole]
    assert facts["counted_tokens"] == report.counted == file.mask.sum()
    assert facts["chat"]["hash"] == DEFAULT.hash
    assert ChatTemplate.from_dict(facts["chat"]).hash == DEFAULT.hash
    assert f"mask            {report.counted} tokens" in "\n".join(inspect(str(tmp_path / "out")))
    assert report.summary().startswith(f"2 conversations, {file.tokens} tokens, {report.counted} ")
    plain = tmp_path / "plain.jinja"
    plain.write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    told = build_chat(Chat(str(tmp_path / "o"), (str(path),), str(chatml), template=str(plain)))
    assert "answers have no end" in told.summary()


def test_other_inputs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("x")
    (tmp_path / "empty.jsonl").write_text("\n")
    for name, says in (("x.txt", "are read from .jsonl"), ("empty.jsonl", "no conversation in")):
        with pytest.raises(UserError, match=says):
            build_chat(Chat(str(tmp_path / "out"), (str(tmp_path / name),)))
