"""The rows of `seq` tokens in a token file: cut from its stream, or packed with conversations.

A file with a mask holds conversations, which are never cut at a row's end: rows take whole ones,
and what stays free at the end is padding, a piece of its own in which nothing counts. The loss
counts labels that are the assistant's, each predicted inside its own conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from penteract.config import ConfigError
from penteract.data.indexed import DataError, IndexedFile, Ints
from penteract.data.order import count_samples
from penteract.data.packing import best_fit
from penteract.data.samples import Samples, lengths_of


class Rows(Protocol):
    """The rows of a file, counted from 0."""

    file: IndexedFile

    def __len__(self) -> int: ...

    def samples(self, numbers: Sequence[int]) -> Samples:
        """Rows `numbers` [n]."""

    def lengths(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """The lengths of what is in them, as in `samples`; reads no token."""

    def place(self, number: int) -> str:
        """Where in the file a row's tokens stand, for people."""

    def note(self) -> str:
        """What the file holds, for people."""


def rows_of(file: IndexedFile, seq: int, *, packing: bool, predict_across: bool) -> Rows:
    """The rows of a file. Raises DataError without one, ConfigError for chats without packing."""
    if file.mask is None:
        return StreamRows(file, seq, packing=packing, predict_across=predict_across)
    if not packing:
        raise ConfigError(
            f"{file.prefix} holds conversations (there is a .mask): they need data.packing = true"
        )
    return ConversationRows(file, seq)


class StreamRows:
    """Row i is tokens `[i·seq, i·seq + seq]` of the stream; with packing, cut into documents."""

    def __init__(self, file: IndexedFile, seq: int, *, packing: bool, predict_across: bool) -> None:
        self.file, self.seq, self.packing = file, seq, packing
        self.predict_across = predict_across
        self._count = count_samples(file.tokens, seq, file.prefix)

    def __len__(self) -> int:
        return self._count

    def samples(self, numbers: Sequence[int]) -> Samples:
        rows = np.empty((len(numbers), self.seq + 1), np.int64)
        for row, number in zip(rows, numbers, strict=True):
            row[:] = self.file.read(number * self.seq, (number + 1) * self.seq + 1)
        tokens, labels = rows[:, :-1], rows[:, 1:]  # label[j] is the token after j
        if not self.packing:
            return Samples.whole(tokens, labels)
        starts = self._starts(numbers)
        return Samples.packed(tokens, labels, starts, predict_across=self.predict_across)

    def lengths(self, numbers: Sequence[int]) -> tuple[int, ...]:
        if not self.packing:
            return (self.seq,) * len(numbers)
        return lengths_of(self._starts(numbers), self.seq)

    def _starts(self, numbers: Sequence[int]) -> list[Ints]:
        """Where in (0, seq] of each row a document starts."""
        firsts = [number * self.seq for number in numbers]
        return [self.file.boundaries(x + 1, x + self.seq + 1) - x for x in firsts]

    def place(self, number: int) -> str:
        first, last = number * self.seq, (number + 1) * self.seq
        documents = [self.file.document_of(x) for x in (first, last)]
        return f"tokens {first} to {last}  documents {documents[0]} to {documents[1]}"

    def note(self) -> str:
        return f"{self.file.tokens} tokens"


class ConversationRows:
    """Rows of whole conversations, packed best-fit; a longer one is cut to its first `seq` tokens.

    Raises DataError for a damaged mask, or one in which nothing counts.
    """

    def __init__(self, file: IndexedFile, seq: int) -> None:
        assert file.mask is not None
        self.file, self.seq, self._mask = file, seq, file.mask
        lengths = file.document_lengths()
        self._starts = np.cumsum(lengths) - lengths
        self._sizes = np.minimum(lengths, seq)
        self._lost = lengths - self._sizes
        rows = best_fit(self._sizes, seq)
        self._members = np.argsort(rows, kind="stable")  # conversations, row after row
        self._bounds = np.cumsum(np.bincount(rows))
        self._counted = self._count()
        if not self._counted:
            raise DataError(
                f"{file.prefix}.mask: no conversation has an answer in its first {seq} tokens: "
                f"give a longer data.seq"
            )

    def _count(self) -> int:
        """Labels that count: a conversation's first token is none's label."""
        if self._mask.max() > 1:
            raise DataError(f"{self.file.prefix}.mask: holds other bytes than 0 and 1: damaged")
        total = int(self._mask.sum(dtype=np.int64)) - int(self._mask[self._starts].sum())
        for i in np.flatnonzero(self._lost).tolist():
            cut = int(self._starts[i] + self._sizes[i])
            total -= int(self._mask[cut : cut + int(self._lost[i])].sum(dtype=np.int64))
        return total

    def __len__(self) -> int:
        return len(self._bounds)

    def _in(self, number: int) -> list[int]:
        """The conversations of a row, by number."""
        first = int(self._bounds[number - 1]) if number else 0
        found: list[int] = self._members[first : self._bounds[number]].tolist()
        return found

    def samples(self, numbers: Sequence[int]) -> Samples:
        tokens, labels = np.zeros((2, len(numbers), self.seq), np.int64)
        weights = np.zeros((len(numbers), self.seq), np.float32)
        for i, number in enumerate(numbers):
            at = 0
            for conversation in self._in(number):
                start, size = int(self._starts[conversation]), int(self._sizes[conversation])
                ids = self.file.read(start, start + size)
                tokens[i, at : at + size] = ids
                # The last token has no label: what comes next is of another conversation.
                labels[i, at : at + size - 1] = ids[1:]
                weights[i, at : at + size - 1] = self._mask[start + 1 : start + size]
                at += size
        return Samples(tokens, labels, self.lengths(numbers), weights)

    def lengths(self, numbers: Sequence[int]) -> tuple[int, ...]:
        found: list[int] = []
        for number in numbers:
            sizes = self._sizes[self._in(number)].tolist()
            padding = self.seq - sum(sizes)
            found += [*sizes, padding] if padding else sizes
        return tuple(found)

    def place(self, number: int) -> str:
        return f"conversations {' '.join(map(str, self._in(number)))}"

    def note(self) -> str:
        tokens = int(self._sizes.sum())
        said = (
            f"{len(self._sizes)} conversations in {len(self)} rows of {self.seq} tokens, filled "
            f"{100 * tokens / (len(self) * self.seq):.1f} %, {100 * self._counted / tokens:.1f} % "
            f"of their tokens are the assistant's"
        )
        if cut := int(np.count_nonzero(self._lost)):
            said += f"; {cut} are longer and lose {self._lost.sum()} tokens"
        return said
