"""What an exchange of context parallelism sends, to the byte: the table of `exchange`, as a sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from penteract.parallel.context.all_to_all import halves
from penteract.parallel.context.exchanges import Comm, group_size


@dataclass(frozen=True)
class Sizes:
    """Of what a rank gives to `attend`: `t_local` rows, those of padding too, of q [t/cp, a, d] and
    of k and v [t/cp, g, d].
    """

    t_local: int
    a: int
    g: int
    d: int
    dtype: torch.dtype


class Sent(NamedTuple):
    """Bytes that leave one rank for one layer and micro-batch."""

    forward: int
    backward: int


def attention_bytes(
    comm: Comm, sizes: Sizes, *, cp: int, rank: int, inner: int | None = None
) -> Sent:
    """What this rank of `cp` sends. `inner` is that of `exchange_of`.

    Where recomputation runs forward again, that is sent again.
    """
    n = group_size(comm, cp, inner)
    if n == 1:
        return _around(cp, sizes.t_local, sizes.g, sizes)
    me, row = rank % n, sizes.t_local * sizes.d * sizes.dtype.itemsize
    forward = backward = 0
    for half in halves(sizes.a, sizes.g, n):
        queries, keys = ([len(heads) for heads in held] for held in half)
        others = [r for r in range(n) if r != me]
        # Heads for others of the own rows, and the own heads of the rows of others.
        to_others, to_rows = sum(queries[r] for r in others), (n - 1) * queries[me]
        keys_to_others, keys_to_rows = sum(keys[r] for r in others), (n - 1) * keys[me]
        around = _around(cp // n, n * sizes.t_local, keys[me], sizes)
        forward += row * (to_others + 2 * keys_to_others + to_rows) + around.forward
        backward += row * (to_others + to_rows + 2 * keys_to_rows) + around.backward
    return Sent(forward, backward)


def _around(n: int, rows: int, g: int, sizes: Sizes) -> Sent:
    """Keys and values of so many rows to n − 1 ranks, and their gradients back."""
    elements = (n - 1) * rows * 2 * g * sizes.d
    wide = torch.promote_types(sizes.dtype, torch.float32).itemsize
    return Sent(elements * sizes.dtype.itemsize, elements * (sizes.dtype.itemsize + wide))
