"""The order of samples is a function of (seed, source, ordinal): nothing is stored (pure).

A source of `tokens` tokens holds `(tokens - 1) // seq` samples. Sample i is the seq + 1 tokens
`[i·seq, i·seq + seq]` of the stream, document ends included: inputs are the first seq of them,
labels the last seq, so `label[j] = token[j + 1]`, and neighbouring samples share one token. The
n-th sample that a run takes from a source (its ordinal) belongs to epoch `n // samples`; every
epoch, the last one too, is an independent permutation of all samples: a Feistel network on the
smallest even number of bits that holds them, walked until it lands inside (Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penteract.data.indexed import DataError, Ints
from penteract.errors import UserError

Words = NDArray[np.uint64]

_ROUNDS = 8
_LEAST_HALF_BITS = 4  # a round function on fewer bits mixes too little


def _mix(x: Words) -> Words:
    """One step of splitmix64: a bijection of 64-bit words in which every bit reaches every bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permutation_keys(seed: int, source: int, epochs: Ints) -> Words:
    """One key [n] for each epoch of a source."""
    words = np.full(epochs.shape, seed % 2**64, np.uint64)
    words = _mix(_mix(words) ^ np.uint64(source))
    return _mix(words ^ epochs.astype(np.uint64))


def permute_many(indices: Ints, n: int, keys: Words) -> Ints:
    """Where each index [m] of [0, n) goes under the permutation of its key [m]."""
    assert n >= 1, n
    assert len(indices) == 0 or (indices.min() >= 0 and indices.max() < n), (indices, n)
    half = max((max(n - 1, 1).bit_length() + 1) // 2, _LEAST_HALF_BITS)
    out = _feistel(indices.astype(np.uint64), half, keys)
    # The network permutes a domain of at most four times n (256 for a small n). Following its cycle
    # until it comes back below n gives a permutation of [0, n).
    while (outside := np.flatnonzero(out >= np.uint64(n))).size:
        out[outside] = _feistel(out[outside], half, keys[outside])
    return out.astype(np.int64)


def _feistel(x: Words, half: int, keys: Words) -> Words:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = x >> shift, x & mask
    for step in range(_ROUNDS):
        # The high bits of the mix are used: they depend on all of its input.
        spread = _mix(right ^ _mix(keys + np.uint64(step))) >> np.uint64(64 - half)
        left, right = right, left ^ spread
    return (left << shift) | right


def permute(index: int, n: int, seed: int) -> int:
    """Where `index` of [0, n) goes under the permutation that `seed` names."""
    keys = permutation_keys(seed, 0, np.zeros(1, np.int64))
    return int(permute_many(np.array([index], np.int64), n, keys)[0])


def count_samples(tokens: int, seq: int, name: str) -> int:
    """Samples of a source; DataError with the arithmetic where there is not one."""
    if seq < 1:
        raise UserError(f"data.seq must be at least 1, not {seq}")
    if tokens <= seq:
        raise DataError(
            f"{name}: {tokens} tokens hold no sample of seq + 1 = {seq + 1} tokens; data.seq can "
            f"be at most {tokens - 1}"
        )
    return (tokens - 1) // seq


def split_samples(samples: int, valid_fraction: float, name: str) -> tuple[range, range]:
    """Sample numbers for training and, from the end, for validation.

    The two share no label: only the last training label is also the first validation input.
    """
    if not 0 <= valid_fraction < 1:
        raise UserError(f"valid_fraction must be in [0, 1), not {valid_fraction}")
    held = round(samples * valid_fraction)
    if valid_fraction > 0 and not 1 <= held < samples:
        raise DataError(
            f"{name}: {samples} samples × valid_fraction {valid_fraction} = {held} for validation "
            f"and {samples - held} for training; both need at least one"
        )
    return range(samples - held), range(samples - held, samples)


@dataclass(frozen=True)
class SourceOrder:
    """The order in which a run takes the `samples` samples of source number `source`."""

    samples: int
    seed: int
    source: int = 0

    def epochs(self, ordinals: Ints) -> Ints:
        """The epoch of each ordinal, from 0."""
        return ordinals // self.samples

    def sample(self, ordinals: Ints) -> Ints:
        """The sample number of each ordinal (any int64 from 0 on)."""
        keys = permutation_keys(self.seed, self.source, self.epochs(ordinals))
        return permute_many(ordinals % self.samples, self.samples, keys)
