"""Offload: masters and moments lie in host memory, and the host updates them.

A device then holds parameters and gradients only. A bucket's own gradient comes to the host while
the bucket before it is updated, and own parameters go back rounded (`Buffers.publish`). Rules do
not know of it: they work where a bucket's master lies, on the flat that `on_host` gives them.

| what                              | bytes a parameter    | when   | hidden behind           |
|-----------------------------------|----------------------|--------|-------------------------|
| own gradients, to the host        | 4 (8 in float64)     | a step | the bucket before       |
| own parameters, to the device     | their type's         | a step | rounding the next ones  |
| Muon: a matrix, to its device ... | 4 (8 in float64)     | a step | nothing                 |
| ... and orthogonalised, back      | 4 (8 in float64)     | a step | the bucket before       |
| clip coefficient, skip or not     | 16 bytes altogether  | a step | nothing: the host waits |

What must hold: the numbers are those without offload, to the bit where both update on one kind of
processor. Scratch on the host is two buckets' slices. Source: Ren et al., ZeRO-Offload,
arXiv:2101.06840. What it costs: `benchmarks/optimizer_state.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from penteract.parallel.buckets import Bucket


def on_host(flats: Iterable[tuple[Bucket, Tensor]]) -> Iterator[tuple[Bucket, Tensor]]:
    """Each flat of a bucket's own slice, to read or overwrite, where the bucket's master lies.

    It is the flat itself but under offload, where it is a copy and the next one is on its way.
    """
    ahead: deque[tuple[Bucket, Tensor, torch.cuda.Event | None]] = deque()
    for bucket, flat in flats:
        if not bucket.kind.sharding.offload:
            yield bucket, flat
            continue
        ahead.append((bucket, *_start(flat)))
        if len(ahead) > 1:
            yield _arrived(*ahead.popleft())
    while ahead:
        yield _arrived(*ahead.popleft())


def _start(flat: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    # Only from pinned memory does a copy return at once; torch keeps such memory for the next one.
    copy = torch.empty(len(flat), dtype=flat.dtype, device="cpu", pin_memory=flat.is_cuda)
    copy.copy_(flat, non_blocking=True)
    if not flat.is_cuda:
        return copy, None
    event = torch.cuda.Event()
    event.record()
    return copy, event


def _arrived(bucket: Bucket, flat: Tensor, event: torch.cuda.Event | None) -> tuple[Bucket, Tensor]:
    if event is not None:
        event.synchronize()
    return bucket, flat
