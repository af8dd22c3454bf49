"""How parameters lie in contiguous buffers: kinds, buckets, and each rank's slice of a bucket.

Parameters of one kind (same type, decay, and axes) lie one behind the other in the order in which
backward reaches them, cut into buckets. Every bucket is cut into equal slices, one for each rank of
`Sharding.shard`: what a rank owns of gradients, masters and moments are its slices. Experts lie on
another factorisation of the same ranks: their kinds have a sharding of their own, over edp.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from penteract.mesh import Axis, single, split_axis
from penteract.parallel.parameters import Declared
from penteract.pending import Pending
from penteract.placement import Fragment, flat_view

ALIGNMENT = 64  # elements; a parameter and a slice start on a cache line whatever the type
BUCKET_BYTES = 25 << 20  # at least so much gradient goes in one message …
SLICE_BYTES = 1 << 20  # … and so much to each owner, or latency would show


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The type in which masters, moments and sums of `dtype` are kept."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class Sharding:
    """Who owns what: each bucket is cut over `shard`; ranks of `replicate` own the same slices."""

    shard: Axis
    replicate: Axis
    stage: int = 0
    overlap: bool = True  # reductions start as buckets fill; else at the end of a backward
    offload: bool = False  # masters and moments in host memory (`optim.offload`)

    @classmethod
    def whole(cls, axis: Axis, *, overlap: bool = True) -> Sharding:
        """Stage 0: every rank owns everything."""
        return cls(single(axis.name), axis, overlap=overlap)

    @classmethod
    def over(cls, axis: Axis, stage: int, replicas: int, overlap: bool, offload: bool) -> Sharding:
        """ZeRO's `stage`, so many owners of a slice. All ranks of the world call it together."""
        shard, replicate = split_axis(axis, replicas) if stage else (single(axis.name), axis)
        return cls(shard, replicate, stage, overlap, offload)


class Units:
    """The parts of a model that run at once, in the order of forward, and their pipeline stages."""

    def __init__(self, model: nn.Module) -> None:
        self.modules: list[nn.Module] = list(getattr(model, "units", [model]))
        self.stages: list[int] = list(getattr(model, "unit_stages", [0] * len(self.modules)))
        self._number = {id(m): i for i, unit in enumerate(self.modules) for m in unit.modules()}

    def of(self, entry: Declared) -> list[int]:
        """The numbers of the units that use a parameter."""
        return sorted({self._number[id(module)] for module, _ in entry.holders})


@dataclass(frozen=True)
class Group:
    """How an optimizer treats some parameters unlike the others."""

    lr: float = 1.0  # factor of the learning rate
    weight_decay: float | None = None  # instead of the common one
    frozen: bool = False  # no gradient, no state


@dataclass(eq=False)
class Bucket:
    """A range of a kind's flat order that is reduced in one message, and the rank's slice of it."""

    kind: Kind
    start: int  # in the kind's flat order, elements
    numel: int  # a multiple of the number of slices
    unit: int = 0  # the part of the model that it belongs to, in stage 3
    stage: int = 0  # of the pipeline
    late: bool = False  # complete after the backwards of several stages, reduced at a step's end
    slots: list[Slot] = field(default_factory=list)
    pending: int = 0  # slots still to become ready
    kept: bool = True  # parameters stay whole between uses
    parameters: Tensor | None = None  # [numel]; None where they are not kept and not gathered
    gradient: Tensor | None = None  # [numel]; None between micro-batches from stage 2 on
    own_parameters: Tensor = field(default_factory=lambda: torch.empty(0))  # [numel/n]
    own_gradient: Tensor = field(default_factory=lambda: torch.empty(0))  # [numel/n]
    master: Tensor = field(default_factory=lambda: torch.empty(0))  # [numel/n]
    summed: bool = False  # own_gradient holds an earlier micro-batch of this step
    gathering: Pending | None = None

    @property
    def own(self) -> slice:
        """This rank's slice, within the bucket."""
        n = self.numel // self.kind.sharding.shard.size
        return slice(n * self.kind.sharding.shard.rank, n * (self.kind.sharding.shard.rank + 1))

    def state(self, dtype: torch.dtype) -> Tensor:
        """Zeros for the slice, [numel/n], where its updates are made."""
        n, device = len(self.own_parameters), self.own_parameters.device
        if not self.kind.sharding.offload:
            return torch.zeros(n, dtype=dtype, device=device)
        return torch.zeros(n, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")

    def round_master(self) -> None:
        """Own parameters become what the master is, rounded."""
        values, own = self.master, self.own_parameters
        if values is own:
            return
        if own.is_cuda and not values.is_cuda:  # rounded first, so that less travels
            values = torch.empty(len(own), dtype=own.dtype, pin_memory=True).copy_(values)
        own.copy_(values, non_blocking=True)

    def allocate(self, device: torch.device) -> None:
        """Memory for what the stage keeps, zeros."""
        kind = self.kind
        own = self.own.stop - self.own.start
        if kind.group.frozen:
            self.own_gradient = torch.zeros(0, dtype=kind.wide, device=device)
        elif kind.sharding.stage < 2:
            self.gradient = torch.zeros(self.numel, dtype=kind.wide, device=device)
            self.own_gradient = self.gradient[self.own]
        else:
            self.own_gradient = torch.zeros(own, dtype=kind.wide, device=device)
        if self.kept:
            self.parameters = torch.zeros(self.numel, dtype=kind.dtype, device=device)
            self.own_parameters = self.parameters[self.own]
        else:
            self.own_parameters = torch.zeros(own, dtype=kind.dtype, device=device)
        apart = kind.narrow or (kind.sharding.offload and not kind.group.frozen)
        self.master = self.state(kind.wide) if apart else self.own_parameters

    def wait(self) -> None:
        """Return once the parameters are those of the last step."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def owned(self, flat: Tensor) -> Iterator[tuple[Slot, Fragment, Tensor]]:
        """What of each parameter a flat tensor of the slice's length holds, with its values."""
        first, last = self.start + self.own.start, self.start + self.own.stop
        for slot in self.slots:
            start, stop = max(first, slot.start), min(last, slot.start + slot.numel)
            if start >= stop:
                continue
            shape, at = slot.entry.placement.shape, start - slot.start
            part = flat[start - first : stop - first]
            for fragment in slot.entry.placement.fragments(at, stop - slot.start):
                view = flat_view(part, shape, fragment.local, at)
                yield slot, fragment, view.view(fragment.box.size)


@dataclass(eq=False)
class Slot:
    """One parameter's place in its bucket."""

    entry: Declared
    start: int  # in the kind's flat order, elements
    bucket: Bucket
    uses: int  # how often a backward completes it: 2 for a tied weight
    fresh: bool = True  # nothing of this step, or from stage 2 of this micro-batch, is written yet
    touched: bool = False  # it had a gradient in this step
    pending: int = 0  # completions still to come in this backward

    @property
    def numel(self) -> int:
        return self.entry.placement.numel

    def view(self, flat: Tensor) -> Tensor:
        """The parameter's part of a flat tensor of the bucket's length, in its shape."""
        at = self.start - self.bucket.start
        return flat[at : at + self.numel].view(self.entry.placement.shape)

    @property
    def gradient(self) -> Tensor:
        """The gradient where the stage keeps it whole, 0 and 1."""
        assert self.bucket.gradient is not None
        return self.view(self.bucket.gradient)

    @property
    def master(self) -> Tensor:
        """The master where every rank owns it whole, in stage 0."""
        return self.view(self.bucket.master)


@dataclass(eq=False)
class Kind:
    """What parameters of one buffer have in common."""

    dtype: torch.dtype
    decay: bool
    matrix: bool
    group: Group
    split_axes: tuple[str, ...]
    more_axes: tuple[str, ...]  # where gradients are partial besides the ranks of the sharding
    sharding: Sharding
    buckets: list[Bucket] = field(default_factory=list)

    @property
    def wide(self) -> torch.dtype:
        """Of gradients, masters and moments."""
        return at_least_float32(self.dtype)

    @property
    def narrow(self) -> bool:
        """Masters hold more than the parameters do."""
        return self.wide != self.dtype and not self.group.frozen


_Key = tuple[torch.dtype, bool, bool, Group, tuple[str, ...], tuple[str, ...], Sharding]


def lay_out(
    order: Sequence[Declared],
    units: Units,
    sharding: Sharding,
    *,
    experts: Sharding | None = None,
    group_of: Callable[[Declared], Group],
    bucket_bytes: int | None,
) -> list[Kind]:
    """Kinds with their buckets and slots, without memory.

    `order` is that in which backward completes the parameters. A bucket is of one pipeline stage,
    in ZeRO's stage 3 of one unit. `experts` is the sharding of what lies on the experts' grid.
    """
    members: dict[_Key, list[tuple[Declared, int]]] = {}
    for entry in order:
        p = entry.placement
        mine = experts if "edp" in p.axes else sharding
        assert mine is not None, f"{entry.name}: its axes are those of experts: no sharding of them"
        reduced = mine.shard.name.split("-")  # the axes whose sum the sharding makes
        more = tuple(axis for axis in sorted(p.partial_axes) if axis not in reduced)
        group = group_of(entry)
        if not entry.parameter.requires_grad:
            group = Group(frozen=True)
        key = (entry.parameter.dtype, p.decay, p.matrix, group, p.split_axes, more, mine)
        members.setdefault(key, []).append((entry, units.of(entry)[0]))
    kinds = []
    for key, entries in members.items():
        kind = Kind(*key)
        limit_bytes = bucket_bytes or max(BUCKET_BYTES, SLICE_BYTES * kind.sharding.shard.size)
        start = 0
        limit = limit_bytes // kind.wide.itemsize
        for together, unit in _groups(entries, units.stages, kind.sharding, limit):
            bucket = _bucket(kind, together, start, unit)
            bucket.stage = units.stages[unit]
            used = {units.stages[i] for entry in together for i in units.of(entry)}
            bucket.late = len(used) > 1
            kind.buckets.append(bucket)
            start += bucket.numel
        kinds.append(kind)
    return kinds


def _groups(
    entries: Sequence[tuple[Declared, int]], stages: Sequence[int], sharding: Sharding, limit: int
) -> Iterator[tuple[list[Declared], int]]:
    """Entries of a bucket and their unit: closed by what fills it, in ZeRO's stage 3 by a unit's
    end, and by the end of a pipeline stage.
    """
    group: list[Declared] = []
    size = 0
    for (entry, unit), after in itertools.zip_longest(entries, entries[1:]):
        group.append(entry)
        size += _aligned(entry.placement.numel)
        unit_ends = after is None or after[1] != unit
        stage_ends = after is None or stages[after[1]] != stages[unit]
        if stage_ends or (unit_ends if sharding.stage == 3 else size >= limit):
            yield group, unit
            group, size = [], 0


def _bucket(kind: Kind, entries: Sequence[Declared], start: int, unit: int) -> Bucket:
    bucket, at = Bucket(kind, start, 0, unit), start
    for entry in entries:
        bucket.slots.append(Slot(entry, at, bucket, len(entry.holders)))
        at += _aligned(entry.placement.numel)
    slices = ALIGNMENT * kind.sharding.shard.size
    bucket.numel = -(-(at - start) // slices) * slices
    # Vectors are small, and a tied weight is used at both ends of the model.
    tied = "tied" in kind.more_axes or any(slot.uses > 1 for slot in bucket.slots)
    bucket.kept = kind.sharding.stage < 3 or not kind.decay or tied
    return bucket


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT
