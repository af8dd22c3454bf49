"""Moments of the optimizer: in the type of masters, or in bfloat16 between two updates.

Rounded to the nearest, a moment would not move: bfloat16 has 8 binary digits, so an average whose
factor is 0.999 never falls (a half of its last digit is 0.002 to 0.004 of it). So an element goes
up or down at random, to either neighbour as often as it is near to it, and its mean is right.

The random numbers are those of an element of a logical tensor at an update (`random`): every layout
rounds alike, and so does a run that was resumed. A skipped update changes nothing, since what is a
bfloat16 already stays. A bucket's moments are widened for its own update only.

Layouts add gradients in another order. In float64 that is far below what turns the choice; in
float32 an element now and then takes the other neighbour, 2^-8 of it away. `verify` would call that
a difference, so `--fuzz` does not draw it.

Source: Gupta et al., arXiv:1502.02551, for rounding at random; docs/data.md for what it changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from penteract import compat
from penteract.config import OptimConfig
from penteract.parallel.buckets import Bucket, Kind
from penteract.random import bits_box

NARROW = torch.bfloat16
MOST_ELEMENTS = 1 << 38  # of a logical tensor: an update's part of the stream; 2^25 updates fit


def rounded(x: Tensor, noise: Tensor) -> Tensor:
    """bfloat16 of `x`, away from 0 where the digits it loses and `noise`, int32 < 2^16, carry."""
    word = x.float().view(torch.int32)  # a bfloat16 is the upper half of a float32
    return (word + noise).bitwise_and_(-(1 << 16)).view(torch.float32).to(NARROW)


class Moments:
    """The moments of some buckets, at most two of each; they start at zero."""

    def __init__(
        self, names: Sequence[str], kinds: Sequence[Kind], optim: OptimConfig, *, seed: int
    ) -> None:
        assert len(names) <= 2, "a random word has bits for two"
        self.names, self.seed = names, seed
        self.kept: dict[Bucket, list[Tensor]] = {}
        for kind in kinds:
            dtype = NARROW if optim.moments == "bfloat16" else kind.wide
            for bucket in kind.buckets:
                self.kept[bucket] = [bucket.state(dtype) for _ in names]

    @property
    def buckets(self) -> list[Bucket]:
        return list(self.kept)

    @contextmanager
    def widened(self, bucket: Bucket, updates: Tensor) -> Iterator[list[Tensor]]:
        """The bucket's moments in its wide type, to change in place; they are kept at the end.

        `updates` is the number of updates so far, an int64 scalar where the moments are.
        """
        kept = self.kept[bucket]
        wide = [moment.to(bucket.kind.wide) for moment in kept]
        yield wide
        if kept and kept[0] is not wide[0] and compat.has_values(kept[0]):
            self._round(bucket, kept, wide, updates)

    def _round(
        self, bucket: Bucket, kept: Sequence[Tensor], wide: Sequence[Tensor], updates: Tensor
    ) -> None:
        shift = updates * MOST_ELEMENTS
        for parts in zip(*(bucket.owned(flat) for flat in [*kept, *wide]), strict=True):
            fragment, views = parts[0][1], [view for _, _, view in parts]
            stream = f"moments of {fragment.tensor}"
            of = {"shape": fragment.shape, "box": fragment.box, "shift": shift}
            for tile, words in bits_box(self.seed, stream, **of):
                at, low, high = tile.slices(), words.int() & 0xFFFF, (words >> 16).int()
                for narrow, x, noise in zip(views, views[len(kept) :], (low, high), strict=False):
                    narrow[at] = rounded(x[at], noise)

    def state(self) -> Iterator[tuple[str, Bucket, Tensor]]:
        """(moment name, bucket, that moment of the bucket's own slice)."""
        for bucket, kept in self.kept.items():
            for name, moment in zip(self.names, kept, strict=True):
                yield name, bucket, moment
