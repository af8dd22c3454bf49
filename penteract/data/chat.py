"""Chats to token files (`penteract data chat`): a conversation is a document, its answers counted.

Each line of the input is `{"messages": [{"role": …, "content": …}, …]}`. The whole conversation is
rendered and tokenized once. A token is an answer's where it has a character between the text of the
messages before it, with the beginning of an answer, and the text of those up to it; both have to
be beginnings of the whole. What a template writes behind the token that ends a turn is nobody's.

The names of special tokens in a message are plain text: they are rendered as characters of their
own, each of which is tokenized as text afterwards.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penteract.data.build import Progress
from penteract.data.documents import list_files
from penteract.data.indexed import DataError, Ints
from penteract.data.template import ChatTemplate, Message, find_template
from penteract.data.tokenizers import Tokenizer, load_tokenizer
from penteract.data.writer import IndexedWriter
from penteract.errors import UserError

ROLES = ("system", "user", "assistant", "tool")
_SHIELD = 0x100000  # the last plane of private characters, of which no text makes use
_SHIELDED = re.compile(f"([{chr(_SHIELD)}-{chr(0x10FFFF)}])")
_TOGETHER = 1024  # conversations that are written at a time
Mask = NDArray[np.uint8]


@dataclass(frozen=True)
class Chat:
    """What to build: the `.jsonl` files or folders `inputs`, written to `output`."""

    output: str
    inputs: tuple[str, ...]
    tokenizer: str = "bytes"
    end_of_document: str | None = None
    template: str | None = None


@dataclass
class ChatReport:
    """What was built."""

    template: str
    conversations: int = 0
    tokens: int = 0
    counted: int = 0
    seconds: float = 0.0
    end_of_turn: int | None = None

    def summary(self) -> str:
        """One line for the user, and one more where an answer's end is not marked."""
        said = (
            f"{self.conversations} conversations, {self.tokens} tokens, {self.counted} of them the "
            f"assistant's, template {self.template}, {self.seconds:.1f} s"
        )
        if self.end_of_turn is None:
            said += "\nwarning: the template ends no turn with a special token: answers have no end"
        return said


def build_chat(what: Chat) -> ChatReport:
    """Builds `output.bin`, `.idx`, `.mask` and `.json`, all or nothing. Raises UserError."""
    files = list_files(what.inputs, None)
    if other := [path for path in files if path.suffix != ".jsonl"]:
        raise UserError(f"input {other[0]}: chats are read from .jsonl files")
    tokenizer = load_tokenizer(what.tokenizer, what.end_of_document)
    template = find_template(what.template, what.tokenizer, tokenizer)
    begin = time.perf_counter()
    report = ChatReport(template.name, end_of_turn=end_of_turn(template, tokenizer))
    total = sum(path.stat().st_size for path in files)
    with (
        IndexedWriter(what.output, tokenizer.vocab, masked=True) as writer,
        Progress(total) as progress,
    ):
        held: list[tuple[Ints, Mask]] = []
        for where, line in (found for path in files for found in _lines(str(path))):
            try:
                held.append(encode(parse(line), template, tokenizer))
            except UserError as error:
                raise DataError(f"{where}: {error}") from None
            if len(held) == _TOGETHER:
                _write(writer, held, report)
            progress.advance(len(line), report.tokens)
        _write(writer, held, report)
        if not report.conversations:
            raise DataError(f"{what.output}: no conversation in the input")
        writer.sidecar = _sidecar(template, tokenizer, report)
    report.seconds = time.perf_counter() - begin
    return report


def _lines(path: str) -> Iterator[tuple[str, bytes]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}, line {number}", line


def _write(writer: IndexedWriter, held: list[tuple[Ints, Mask]], report: ChatReport) -> None:
    """Writes what is held, and lets it go."""
    if not held:
        return
    tokens, mask = (np.concatenate(arrays) for arrays in zip(*held, strict=True))
    writer.add_documents(tokens, np.array([len(ids) for ids, _ in held], np.int64), mask)
    report.conversations += len(held)
    report.tokens += len(tokens)
    report.counted += int(mask.sum())
    held.clear()


def _sidecar(template: ChatTemplate, tokenizer: Tokenizer, report: ChatReport) -> dict[str, Any]:
    return {
        "format": 1,
        "tokenizer": tokenizer.name,
        "tokenizer_hash": tokenizer.hash,
        "vocab": tokenizer.vocab,
        "end_of_document": tokenizer.end_of_document,
        "documents": report.conversations,
        "tokens": report.tokens,
        "counted_tokens": report.counted,
        "chat": {**template.to_dict(), "hash": template.hash},
    }


def parse(line: bytes) -> list[Message]:
    """The messages of a line; UserError says what is wrong with it."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not JSON in UTF-8: {error}") from None
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list):
        raise UserError('not {"messages": [ … ]}: there is no list under "messages"')
    if record.get("tools"):
        raise UserError("descriptions of tools are not supported")
    found = [_message(number, message) for number, message in enumerate(messages, 1)]
    if not any(message["role"] == "assistant" for message in found):
        raise UserError("no message is the assistant's: there is nothing to learn")
    return found


def _message(number: int, message: object) -> Message:
    if not isinstance(message, dict):
        raise UserError(f'message {number} is not {{"role": …, "content": …}}')
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise UserError(f"message {number} has role {role!r}; roles are {', '.join(ROLES)}")
    if not isinstance(content, str) or not content.strip():
        raise UserError(f"message {number} ({role}) has an empty content, or one that is no text")
    if more := [key for key, value in message.items() if key not in ("role", "content") and value]:
        raise UserError(f"message {number} ({role}) has {', '.join(more)}: only role and content")
    _check_text(content, f"message {number} ({role})")
    return {"role": role, "content": content}


def _check_text(text: str, what: str, *, shields: Collection[str] = ()) -> None:
    """UserError where `text` is not Unicode, or marks names by others than `shields`."""
    if not _is_unicode(text) or set(_SHIELDED.findall(text)) - set(shields):
        raise UserError(f"{what}: half of a surrogate pair, or a character U+100000 or up")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encode(
    messages: Sequence[Message], template: ChatTemplate, tokenizer: Tokenizer
) -> tuple[Ints, Mask]:
    """Tokens of a conversation [n], and 1 for each that is the assistant's [n]."""
    names = list(tokenizer.specials)
    shielded = [{**m, "content": _shield(m["content"], names)} for m in messages]
    whole = _rendered(shielded, template)
    ids, places = _tokenize(whole, names, tokenizer)
    special = np.isin(ids, list(tokenizer.specials.values()))
    mask = np.zeros(len(ids), np.uint8)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = (
            template.render(shielded[:i], answer=True),
            template.render(shielded[: i + 1]),
        )
        if not (whole.startswith(after) and after.startswith(before)):
            raise UserError(
                f"message {i + 1} (assistant): template {template.name} renders the messages up to "
                f"it otherwise than as a part of the whole conversation, so that its tokens are "
                f"not known"
            )
        low = int(np.searchsorted(places[:, 1], len(before), side="right"))
        high = int(np.searchsorted(places[:, 0], len(after), side="left"))
        ends = low + np.flatnonzero(special[low:high])
        if len(ends) and not whole[places[ends[-1], 1] : len(after)].strip():
            high = int(ends[-1]) + 1  # what follows the end of the turn is nobody's
        mask[low:high] = 1
    return ids, mask


def question(text: str, template: ChatTemplate, tokenizer: Tokenizer) -> tuple[list[int], int]:
    """A user's message as the beginning of an answer, and the token that ends the answer."""
    _check_text(text, "the question")
    names = list(tokenizer.specials)
    asked = [{"role": "user", "content": _shield(text, names)}]
    ids, _ = _tokenize(_rendered(asked, template, answer=True), names, tokenizer)
    end = end_of_turn(template, tokenizer)
    return ids.tolist(), tokenizer.end_of_document if end is None else end


def end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """The special token that ends an answer; None where the template writes none."""
    ids, mask = encode(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        template,
        tokenizer,
    )
    answer = ids[mask == 1].tolist()
    return answer[-1] if answer and answer[-1] in tokenizer.specials.values() else None


def _rendered(messages: Sequence[Message], template: ChatTemplate, *, answer: bool = False) -> str:
    """The text of messages; UserError where the template adds characters that mark names."""
    text = template.render(messages, answer=answer)
    shields = [c for message in messages for c in _SHIELDED.findall(message["content"])]
    _check_text(text, f"template {template.name}", shields=shields)
    return text


def _shield(text: str, names: Sequence[str]) -> str:
    """`text` with a private character for each name of a special token."""
    for i, name in enumerate(names):
        text = text.replace(name, chr(_SHIELD + i))
    return text


def _tokenize(text: str, names: Sequence[str], tokenizer: Tokenizer) -> tuple[Ints, Ints]:
    """Ids [n] and places [n, 2] of a rendered text; names that messages have are plain text."""
    pieces = _SHIELDED.split(text)
    if len(pieces) == 1:
        return tokenizer.encode_marked(text)
    ids, places, at = [], [], 0
    for i, piece in enumerate(pieces):
        if i % 2:  # a private character
            found = tokenizer.encode(names[ord(piece) - _SHIELD])
            where = np.tile(np.array([at, at + 1]), (len(found), 1))
        else:
            found, where = tokenizer.encode_marked(piece)
            where = where + at
        ids.append(found)
        places.append(where)
        at += len(piece)
    return np.concatenate(ids), np.concatenate(places)
