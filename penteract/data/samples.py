"""What a source gives for some samples: tokens, labels, documents and loss weights.

A row of `seq` tokens is cut where a document starts: at each of its `starts`, places in [1, seq],
rising. Place seq is the row's last label: it cuts nothing, but the row's last token then ends its
document. The piece of a document that a row begins or ends with is a piece of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penteract.data.indexed import Ints


@dataclass(frozen=True, eq=False)
class Samples:
    """Rows of `seq` tokens; the loss of a token is of predicting its label.

    `lengths` are those of what attends only to itself, row after row: they add up to n · seq, and
    none reaches from one row into the next. Weights are 0 where a label does not count.
    """

    tokens: Ints  # [n, seq]
    labels: Ints  # [n, seq]
    lengths: tuple[int, ...]
    weights: NDArray[Any]  # [n, seq] float32

    @classmethod
    def whole(cls, tokens: Ints, labels: Ints) -> Samples:
        """Each row one sequence, every token counted."""
        n, seq = tokens.shape
        return cls(tokens, labels, (seq,) * n, np.ones((n, seq), np.float32))

    @classmethod
    def packed(
        cls, tokens: Ints, labels: Ints, starts: Sequence[Ints], *, predict_across: bool = False
    ) -> Samples:
        """Each row cut at its `starts`; a document's last token counts only to `predict_across`."""
        n, seq = tokens.shape
        weights = np.ones((n, seq), np.float32)
        if not predict_across:
            for row, places in zip(weights, starts, strict=True):
                row[places - 1] = 0  # their labels are the first tokens of other documents
        return cls(tokens, labels, lengths_of(starts, seq), weights)

    @classmethod
    def joined(cls, parts: Sequence[Samples]) -> Samples:
        """The rows of several, one behind the other; at least one part."""
        arrays = [
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("tokens", "labels", "weights")
        ]
        lengths = tuple(n for part in parts for n in part.lengths)
        return cls(arrays[0], arrays[1], lengths, arrays[2])


def lengths_of(starts: Sequence[Ints], seq: int) -> tuple[int, ...]:
    """Lengths of the pieces of rows of `seq` tokens that are cut at their `starts`."""
    pieces = [np.diff(places[places < seq], prepend=0, append=seq) for places in starts]
    return tuple(np.concatenate(pieces).tolist()) if pieces else ()
