"""Parameters and gradients in contiguous buffers; gradients are summed over the ranks once a step.

Parameters of one kind (same type, decay, and axes) lie one behind the other in one flat tensor and
are views of it; their gradients lie the same way in a second one, their float32 masters in a third
where the type is narrower. The optimizer, the norm and the checkpoint work on the flat tensors.

Whatever completes a gradient calls `ready(parameter)`: our linear layers through `accumulate`, and
one hook for parameters that autograd accumulates. Parameters are laid out in the order in which
backward reaches them, in buckets; when the last micro-batch has made the last parameter of a bucket
ready, the bucket's all-reduce starts while backward goes on.

| what              | axis  | bytes a rank       | when                            | hidden behind |
|-------------------|-------|--------------------|---------------------------------|---------------|
| a gradient bucket | dp-cp | 2 (n-1)/n · bucket | last micro-batch, when complete | backward      |
| those partial over tp | tp  | 2 (n-1)/n · them | at the end, one message | nothing |
| parameters that came with values | dp-cp | them | once, at the start | nothing |

What must hold: sums, never averages (the loss carries the global count); at least float32; every
rank starts the same buckets in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penteract import compat
from penteract.collectives import all_reduce_, broadcast_, start_all_reduce_
from penteract.mesh import Axis
from penteract.parallel.parameters import Declared, Layer, Write, declared_parameters
from penteract.random import initialise

ALIGNMENT = 64  # elements; a parameter starts on a cache line whatever its type
BUCKET_BYTES = 25 << 20


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The type in which masters, moments and sums of `dtype` are kept."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(eq=False)
class Bucket:
    """A range of a buffer that is reduced in one message."""

    gradient: Tensor  # flat view
    slots: list[Slot] = field(default_factory=list)
    pending: int = 0  # slots still to become ready


@dataclass(eq=False)
class Slot:
    """One parameter's place in its buffer."""

    entry: Declared
    start: int  # offset in the flat tensors, elements
    gradient: Tensor  # view of the flat gradient, of the parameter's shape
    master: Tensor  # view of the flat master, of the parameter's shape
    uses: int  # how often a backward completes it: 2 for a tied weight
    bucket: Bucket
    fresh: bool = True  # nothing written yet in this step
    pending: int = 0  # completions still to come in the last micro-batch


@dataclass(eq=False)
class Buffer:
    """Flat storage of all parameters of one kind."""

    dtype: torch.dtype
    decay: bool
    split_axes: tuple[str, ...]
    data: Tensor  # parameters
    gradient: Tensor  # at least float32
    master: Tensor  # the same tensor as data unless that is narrower than float32
    slots: list[Slot] = field(default_factory=list)
    buckets: list[Bucket] = field(default_factory=list)
    more_axes: tuple[str, ...] = ()  # where gradients are partial besides the reduction axis


class Buffers:
    """All parameters of a model in flat buffers, with their gradients' reduction.

    A step is `begin`, backward passes with `last_micro_batch` before the last of them, `finish`.
    `more_axes` are axes over which some gradients are partial too, such as those of a norm over
    local heads, or on rows of a split stream, over tp; these few are summed in `finish`.
    """

    def __init__(
        self,
        model: nn.Module,
        reduce_axis: Axis,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        bucket_bytes: int = BUCKET_BYTES,
        more_axes: Sequence[Axis] = (),
    ) -> None:
        self.axis = reduce_axis
        self.more_axes = {axis.name: axis for axis in more_axes}
        self.buffers: list[Buffer] = []
        self._work: list[Any] = []
        self._started = 0  # buckets whose reduction has begun
        self._last = False
        order = declared_parameters(model)[::-1]  # the order in which backward completes them
        kinds: dict[tuple[Any, ...], list[Declared]] = {}
        for entry in order:
            p = entry.placement
            more = tuple(sorted(set(p.partial_axes) - set(reduce_axis.name.split("-"))))
            assert set(more) <= self.more_axes.keys(), f"{entry.name}: {p.partial_axes}"
            kind = (entry.parameter.dtype, p.decay, p.split_axes, more)
            kinds.setdefault(kind, []).append(entry)
        for kind, entries in kinds.items():
            values = [entry.parameter.detach() for entry in entries]
            buffer = _allocate(entries, torch.device(device), bucket_bytes)
            _fill(buffer, dict(zip(map(id, entries), values, strict=True)), seed, reduce_axis)
            self.buffers.append(buffer)
            self.buffers[-1].more_axes = kind[-1]
        self._slots = {id(slot.entry.parameter): slot for slot in self.slots()}
        rank_of = {id(entry.parameter): i for i, entry in enumerate(order)}
        self._buckets = sorted(
            (bucket for buffer in self.buffers for bucket in buffer.buckets),
            key=lambda b: max(rank_of[id(slot.entry.parameter)] for slot in b.slots),
        )
        for slot in self.slots():
            slot.entry.parameter.register_post_accumulate_grad_hook(self._autograd_hook)
        for module in model.modules():
            if isinstance(module, Layer):
                module.gradients = self

    def slots(self) -> Iterable[Slot]:
        """Every parameter's slot, buffer after buffer."""
        return (slot for buffer in self.buffers for slot in buffer.slots)

    # --- one step

    def begin(self) -> None:
        """Forget the last step's gradients. Nothing is zeroed: a step's first write overwrites."""
        self._last, self._started = False, 0
        for slot in self.slots():
            slot.fresh = True

    def last_micro_batch(self) -> None:
        """From here on a complete gradient is final: buckets are reduced as they fill."""
        self._last = True
        for slot in self.slots():
            slot.pending = slot.uses
        for bucket in self._buckets:
            bucket.pending = len(bucket.slots)

    def accumulate(self, parameter: nn.Parameter, write: Write) -> None:
        """Add the gradient of one use of `parameter`, computed by `write` into the buffer."""
        slot = self._slots[id(parameter)]
        write(slot.gradient, slot.fresh)
        slot.fresh = False
        self.ready(parameter)

    def ready(self, parameter: Tensor) -> None:
        """One use of `parameter` has its gradient in the buffer."""
        slot = self._slots[id(parameter)]
        if not self._last:
            return
        slot.pending -= 1
        assert slot.pending >= 0, f"{slot.entry.name}: complete more than {slot.uses} times"
        if slot.pending == 0:
            slot.bucket.pending -= 1
            self._start_complete()

    def _start_complete(self) -> None:
        # In one order on every rank, whatever a rank's own backward completes first.
        while self._started < len(self._buckets) and not self._buckets[self._started].pending:
            self._work.append(start_all_reduce_(self._buckets[self._started].gradient, self.axis))
            self._started += 1

    def finish(self) -> list[str]:
        """Wait until every gradient is the sum over the ranks; return names of those without one.

        A parameter that no micro-batch of this rank reached counts as zero; its bucket, and those
        after it, are reduced here.
        """
        unused = [slot for slot in self.slots() if slot.fresh]
        for slot in unused:
            slot.gradient.zero_()
        for bucket in self._buckets[self._started :]:
            bucket.pending = 0
        self._start_complete()
        for work in self._work:
            work.wait()
        self._work.clear()
        for name, axis in self.more_axes.items():
            _sum_together([b.gradient for b in self.buffers if name in b.more_axes], axis)
        return [slot.entry.name for slot in unused]

    def publish(self) -> None:
        """After an optimizer step: round the masters into the parameters, where they differ."""
        for buffer in self.buffers:
            if buffer.master is not buffer.data:
                buffer.data.copy_(buffer.master)

    def _autograd_hook(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:  # a linear layer has written it into the buffer
            return
        parameter.grad = None
        slot = self._slots[id(parameter)]
        slot.gradient.copy_(gradient) if slot.fresh else slot.gradient.add_(gradient)
        slot.fresh = False
        self.ready(parameter)


def _sum_together(flats: Sequence[Tensor], axis: Axis) -> None:
    """Sum flat tensors over `axis` in place, those of one type in one message."""
    for dtype in dict.fromkeys(flat.dtype for flat in flats):
        alike = [flat for flat in flats if flat.dtype == dtype]
        if len(alike) == 1 or axis.size == 1:
            all_reduce_(alike[0], axis)
            continue
        joined = all_reduce_(torch.cat(alike), axis)
        for flat, part in zip(alike, joined.split([len(x) for x in alike]), strict=True):
            flat.copy_(part)


def _allocate(entries: Sequence[Declared], device: torch.device, bucket_bytes: int) -> Buffer:
    """Lay out parameters of one kind as views of flat storage."""
    first = entries[0]
    dtype, wide = first.parameter.dtype, at_least_float32(first.parameter.dtype)
    starts, total = [], 0
    for entry in entries:
        starts.append(total)
        total += -(-entry.placement.numel // ALIGNMENT) * ALIGNMENT
    data = torch.zeros(total, dtype=dtype, device=device)
    gradient = torch.zeros(total, dtype=wide, device=device)
    master = data if wide == dtype else torch.zeros(total, dtype=wide, device=device)
    buffer = Buffer(
        dtype, first.placement.decay, first.placement.split_axes, data, gradient, master
    )
    for stop, group in _bucketed(entries, starts, total, bucket_bytes // wide.itemsize):
        start = starts[group[0]]
        bucket = Bucket(gradient[start:stop])
        for i in group:
            bucket.slots.append(_place(entries[i], starts[i], buffer, bucket))
        buffer.buckets.append(bucket)
        buffer.slots += bucket.slots
    return buffer


@torch.no_grad()
def _fill(buffer: Buffer, values: Mapping[int, Tensor], seed: int, axis: Axis) -> None:
    """Give parameters their start values: those they had, if they had memory, else the seed's."""
    for slot in buffer.slots:
        given = values[id(slot.entry)]
        if given.numel() == slot.master.numel() > 0:
            # Modules of other makers draw from a generator of their own: rank 0's values count.
            broadcast_(slot.master.copy_(given), axis)
        elif compat.has_values(slot.master):
            initialise(slot.master, slot.entry.placement, seed)
    if buffer.master is not buffer.data:
        buffer.data.copy_(buffer.master)


def _bucketed(
    entries: Sequence[Declared], starts: Sequence[int], total: int, bucket_elements: int
) -> list[tuple[int, list[int]]]:
    """(end of the range, entries in it) per bucket: closed by the entry that fills it."""
    buckets: list[tuple[int, list[int]]] = []
    group: list[int] = []
    for i in range(len(entries)):
        group.append(i)
        stop = starts[i + 1] if i + 1 < len(entries) else total
        if stop - starts[group[0]] >= bucket_elements or stop == total:
            buckets.append((stop, group))
            group = []
    return buckets


def _place(entry: Declared, start: int, buffer: Buffer, bucket: Bucket) -> Slot:
    shape, numel = entry.placement.shape, entry.placement.numel
    data, gradient, master = (
        flat[start : start + numel].view(shape)
        for flat in (buffer.data, buffer.gradient, buffer.master)
    )
    entry.replace(data)
    return Slot(entry, start, gradient, master, len(entry.holders), bucket)
