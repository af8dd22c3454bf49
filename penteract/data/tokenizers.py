"""Text to token ids and back: bytes, or a Hugging Face `tokenizer.json`."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penteract.errors import UserError

Ints = NDArray[np.int64]

# Names under which published tokenizers end a document, most specific first.
_END_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "[SEP]",
)


class StreamDecoder(Protocol):
    """Turns ids into text one at a time; text appears once its characters are whole."""

    def push(self, token: int) -> str:
        """The text that `token` completes, often empty."""

    def finish(self) -> str:
        """What is left; unfinished characters become U+FFFD."""


class Tokenizer(Protocol):
    """What the rest of the package knows of a tokenizer. Ids are in [0, vocab)."""

    name: str
    vocab: int
    end_of_document: int
    specials: Mapping[str, int]  # name of each special token, that which ends a document included
    hash: str  # of everything that decides ids, to be compared on resume

    def encode(self, text: str) -> Ints:
        """Ids of `text` [n], nothing added; a special token's name in it is plain text."""

    def encode_marked(self, text: str) -> tuple[Ints, Ints]:
        """Ids [n] of `text`, in which the names of special tokens mean these tokens, and the
        characters [n, 2] from which and up to which each token is made.
        """

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; special tokens and ids beyond the vocabulary give none."""

    def stream(self) -> StreamDecoder:
        """A fresh incremental decoder."""


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8; 256 ends a document, and a turn of a chat."""

    name = "bytes"
    vocab = 257
    end_of_document = 256
    specials: Mapping[str, int] = MappingProxyType({"<|end|>": 256})
    hash = hashlib.sha256(b"bytes 0-255, end of document 256").hexdigest()

    def encode(self, text: str) -> Ints:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)

    def encode_marked(self, text: str) -> tuple[Ints, Ints]:
        ids, places, at = [np.empty(0, np.int64)], [np.empty((0, 2), np.int64)], 0
        ((name, special),) = self.specials.items()
        for piece in text.split(name):
            plain = self.encode(piece)
            # A byte that goes on with a character has 10 as its first bits.
            first = at + np.cumsum((plain & 0xC0) != 0x80) - 1
            at += len(piece)
            ids += [plain, np.array([special])]
            places += [np.stack([first, first + 1], 1), np.array([[at, at + len(name)]])]
            at += len(name)
        return np.concatenate(ids[:-1]), np.concatenate(places[:-1])  # no name after the last piece

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")

    def stream(self) -> StreamDecoder:
        return _ByteStream()


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token]) if 0 <= token < 256 else b"")

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class JsonTokenizer:
    """A `tokenizer.json` of the Hugging Face `tokenizers` library.

    `end_of_document` names the token that ends a document; without it the well-known names are
    tried. Raises UserError for an unreadable file or where no such token is found.
    """

    def __init__(self, path: str, end_of_document: str | None = None) -> None:
        import tokenizers  # here, because a run on bytes has no use for it

        try:
            content = Path(path).read_bytes()
            self._inner = tokenizers.Tokenizer.from_buffer(content)
        except OSError as error:
            raise UserError(f"tokenizer {path}: {error.strerror}") from None
        except Exception as error:  # the library raises bare Exception for a file it cannot parse
            raise UserError(f"tokenizer {path}: not a tokenizer.json: {error}") from None
        # A corpus may mention "</s>": that is text, not the end of a document.
        self._inner.encode_special_tokens = True
        self._inner.no_truncation()
        self._inner.no_padding()
        # It adds tokens that are not asked for, and moves the places of tokens off white space.
        self._inner.post_processor = None
        ids = self._inner.get_vocab(with_added_tokens=True)
        self.name = Path(path).name
        self.vocab = max(ids.values()) + 1
        end = _end_name(path, ids, end_of_document)
        self.end_of_document = ids[end]
        self._inner.add_special_tokens([end])  # which keeps its number; it may be a plain entry
        added = self._inner.get_added_tokens_decoder()
        self.specials: Mapping[str, int] = {
            token.content: i for i, token in sorted(added.items()) if token.special
        }
        self.hash = hashlib.sha256(content + b"%d" % self.end_of_document).hexdigest()

    def encode(self, text: str) -> Ints:
        return np.array(self._inner.encode(text, add_special_tokens=False).ids, np.int64)

    def encode_marked(self, text: str) -> tuple[Ints, Ints]:
        self._inner.encode_special_tokens = False
        try:
            found = self._inner.encode(text, add_special_tokens=False)
        finally:
            self._inner.encode_special_tokens = True
        return np.array(found.ids, np.int64), np.array(found.offsets, np.int64).reshape(-1, 2)

    def decode(self, ids: Iterable[int]) -> str:
        return self._inner.decode([int(i) for i in ids if 0 <= i < self.vocab])

    def stream(self) -> StreamDecoder:
        return _JsonStream(self)


def _end_name(path: str, ids: dict[str, int], wanted: str | None) -> str:
    if wanted is not None and wanted not in ids:
        raise UserError(f"tokenizer {path}: no token {wanted!r} among its {len(ids)}")
    for name in (wanted,) if wanted is not None else _END_NAMES:
        if name in ids:
            return name
    raise UserError(
        f"tokenizer {path}: which token ends a document? none of {', '.join(_END_NAMES)} is in its "
        f"vocabulary; name it with data.end_of_document (in `data build`: --eod TOKEN)"
    )


class _JsonStream:
    """Decodes a window of recent ids, because a tokenizer may join tokens and split characters."""

    LONGEST = 32  # held ids after which broken text is let go

    def __init__(self, tokenizer: JsonTokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []  # ids whose text is out, kept as context
        self._held: list[int] = []

    def push(self, token: int) -> str:
        self._held.append(token)
        text = self._new_text()
        # A character that is not whole yet decodes to U+FFFD at the end.
        if (not text or text.endswith("\ufffd")) and len(self._held) < self.LONGEST:
            return ""
        self._shown, self._held = self._held, []
        return text

    def finish(self) -> str:
        text = self._new_text()
        self._shown, self._held = [], []
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._shown)
        return self._tokenizer.decode(self._shown + self._held)[len(before) :]


def load_tokenizer(spec: str, end_of_document: str | None = None) -> Tokenizer:
    """`"bytes"`, or the path of a tokenizer.json. Raises UserError."""
    if spec != "bytes":
        return JsonTokenizer(spec, end_of_document)
    if end_of_document is not None:
        raise UserError(
            f"the bytes tokenizer ends documents with id 256; data.end_of_document (or --eod) "
            f"{end_of_document} is for a tokenizer.json"
        )
    return ByteTokenizer()
