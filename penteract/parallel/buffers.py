"""Parameters and gradients in contiguous buffers, reduced while backward goes on: ZeRO 0 to 3.

The parameters of a model are laid out in buckets (`buckets`); each rank owns a slice of every
bucket. ZeRO's stages are this one buffer with other owners and other lifetimes:

| stage | a slice is | gradient of a bucket                  | parameters of a bucket           |
|-------|------------|---------------------------------------|----------------------------------|
| 0     | all of it  | kept, summed once a step              | kept                             |
| 1     | an n-th    | kept, summed to its owners once       | kept, gathered after a step      |
| 2     | an n-th    | of one micro-batch, summed to owners  | kept, gathered after a step      |
| 3     | an n-th    | of one micro-batch, summed to owners  | gathered where used (`zero`)     |

Whatever completes a gradient calls `ready(parameter)`: our linear layers through `accumulate`, and
one hook for parameters that autograd accumulates. When a bucket's last parameter is ready, its
reduction starts. With replicas the slices have r owners each: sums go over the n ranks that share
them out, then over the r that own the same.

Copies of an expert lie on other ranks than those of a dense parameter. Experts have buckets of
their own, which a second sharding cuts over edp as the first one does the others over dp-cp.

| what                          | axis      | bytes a rank     | when              | hidden behind |
|-------------------------------|-----------|------------------|-------------------|---------------|
| a bucket's gradient, stage 1  | shard     | (n-1)/n · it     | last micro-batch  | backward      |
| and in stages 2 and 3         | shard     | (n-1)/n · it     | every micro-batch | backward      |
| its slice, and all in stage 0 | replicate | 2 (r-1)/r · it   | last micro-batch  | backward      |
| its parameters, stages 1, 2   | shard     | (n-1)/n · it     | after a step      | next forward  |
| own gradients partial over tp | tp        | 2 (tp-1)/tp · it | at the end, once  | nothing       |
| of experts, partial over etp  | etp       | as over tp       | at the end, once  | nothing       |
| those of tied weights         | tied      | it               | at the end, once  | nothing       |
| parameters that had values    | both      | them             | at the start      | nothing       |

What must hold: sums, never averages (the loss carries the global count); at least float32; every
rank starts the same buckets in the same order and waits for them in it, so that messages over dp-cp
and over edp cannot block each other. Source: Rajbhandari et al., arXiv:1910.02054.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from penteract import compat
from penteract.collectives import (
    Pending,
    all_reduce_,
    broadcast_,
    start_all_gather_into,
    start_all_reduce_,
    start_reduce_scatter_,
)
from penteract.mesh import Axis
from penteract.parallel.buckets import Bucket, Group, Sharding, Slot, Units, lay_out
from penteract.parallel.parameters import Declared, Layer, Write, declared_parameters
from penteract.parallel.zero import Gathering, absent
from penteract.placement import Fragment
from penteract.random import fill

# From stage 2 on so many buckets' gradients may be on their way: the sum of one hides behind the
# computation of the next ones.
IN_FLIGHT = 2

Held = list[tuple[nn.Parameter, Write]]  # weight gradients that are still to be computed


class Buffers:
    """All parameters of a model in flat buffers, with their gradients' reduction.

    A step is `begin`; for every micro-batch and pipeline stage `begin_backward`, a backward pass,
    `end_backward`; then `finish`, an optimizer's update of the masters, and `publish`. `more_axes`
    are axes over which some gradients are partial too, such as those of a norm over local heads, or
    on rows of a split stream, over tp, and those of a weight that two stages hold; these few are
    summed in `finish`. `experts` is the sharding of parameters of experts, for a model with some;
    its stage and overlap are those of `sharding`.
    """

    def __init__(
        self,
        model: nn.Module,
        sharding: Sharding,
        *,
        experts: Sharding | None = None,
        seed: int,
        device: torch.device | str = "cpu",
        bucket_bytes: int | None = None,
        more_axes: Sequence[Axis] = (),
        group_of: Callable[[Declared], Group] = lambda entry: Group(),
    ) -> None:
        how = (sharding.stage, sharding.overlap)
        assert experts is None or (experts.stage, experts.overlap) == how, "one stage for all"
        self.sharding, self.device = sharding, torch.device(device)
        self.more_axes = {axis.name: axis for axis in more_axes}
        self._in_flight: deque[tuple[Bucket, Pending, bool]] = deque()  # and whether it is the last
        self._replicas: list[Pending] = []
        self._present: list[Bucket] = []  # of the stage whose backward runs
        self._started = 0  # buckets whose reduction has begun in this backward
        self._reducing = self._last = False
        self._held: Held | None = None  # where weight gradients wait
        self.on_own: Callable[[Tensor], None] = _ignore  # gets gradients before they are reduced
        order = declared_parameters(model)[::-1]  # the order in which backward completes them
        units = Units(model)
        kinds = lay_out(
            order, units, sharding, experts=experts, group_of=group_of, bucket_bytes=bucket_bytes
        )
        for kind in kinds:
            # Without an axis for them, both users of a tied weight are on this rank.
            unknown = set(kind.more_axes) - {*self.more_axes, "tied"}
            names = [slot.entry.name for bucket in kind.buckets for slot in bucket.slots]
            assert not unknown, f"{names[0]}: its gradient is partial over {unknown}"
        place = {id(entry): i for i, entry in enumerate(order)}
        self.all_buckets = sorted(
            (bucket for kind in kinds for bucket in kind.buckets),
            key=lambda b: max(place[id(slot.entry)] for slot in b.slots),
        )
        self.kinds = [kind for kind in kinds if not kind.group.frozen]
        self.buckets = [b for b in self.all_buckets if not b.kind.group.frozen]  # to be trained
        for bucket in self.all_buckets:
            bucket.allocate(self.device)
            _fill(bucket, seed)
        slots = [slot for bucket in self.all_buckets for slot in bucket.slots]
        slots.sort(key=lambda slot: place[id(slot.entry)])
        self._slots = {id(slot.entry.parameter): slot for slot in slots}
        self._install(model)
        self.gathering = (
            Gathering(units, self.all_buckets, close=self._close) if sharding.stage == 3 else None
        )
        self.publish(frozen=True)

    def _install(self, model: nn.Module) -> None:
        hook = _weak(self._autograd_hook)
        for slot in self.slots():
            slot.entry.parameter.register_post_accumulate_grad_hook(hook)
        for module in model.modules():
            if isinstance(module, Layer):
                module.gradients = self
            mine = [self._slots[id(p)].bucket for p in module.parameters(recurse=False)]
            gathered = [bucket for bucket in mine if bucket.kind.sharding.shard.size > 1]
            if gathered:
                module.register_forward_pre_hook(_waiting(gathered))

    def slots(self) -> Iterable[Slot]:
        """The slot of every parameter that is trained, in the order of backward."""
        return (s for s in self._slots.values() if not s.bucket.kind.group.frozen)

    def owned(self, name: str) -> Iterator[tuple[Slot, Fragment, Tensor]]:
        """This rank's slices of "master", "own_gradient" or "own_parameters", by parameters."""
        buckets = self.all_buckets if name == "own_parameters" else self.buckets
        for bucket in buckets:
            yield from bucket.owned(getattr(bucket, name))

    def held_bytes(self) -> tuple[int, int, int]:
        """Bytes that this rank keeps for parameters, for gradients, and for masters besides.

        Under offload masters are in the host's memory.
        """
        parameters = gradients = masters = 0
        for bucket in self.all_buckets:
            whole = bucket.parameters if bucket.kept else None
            parameters += (bucket.own_parameters if whole is None else whole).nbytes
            kept = bucket.gradient if self.sharding.stage < 2 else None
            gradients += (bucket.own_gradient if kept is None else kept).nbytes
            masters += 0 if bucket.master is bucket.own_parameters else bucket.master.nbytes
        return parameters, gradients, masters

    # --- one step

    def begin(self) -> None:
        """Forget the last step's gradients. Nothing is zeroed: a step's first write overwrites."""
        for bucket in self.buckets:
            bucket.summed = False
        for slot in self.slots():
            slot.fresh, slot.touched = True, False

    def begin_backward(self, stage: int = 0, *, last: bool, held: Held | None = None) -> None:
        """A backward of a pipeline stage follows; after its `last` one gradients are complete.

        With `held` weight gradients are not computed but put there, for `complete`; nothing is
        reduced before that.
        """
        self._held, self._last, self._started = held, last, 0
        self._reducing = held is None and (last or self.sharding.stage >= 2)
        self._present = [b for b in self.buckets if b.stage == stage and not b.late]
        for bucket in self._present:
            bucket.pending = len(bucket.slots)
            for slot in bucket.slots:
                slot.pending = slot.uses

    def complete(self, stage: int, held: Held, *, last: bool) -> None:
        """The weight gradients that a backward of `stage` has left in `held`."""
        self.begin_backward(stage, last=last)
        left = Counter(id(parameter) for parameter, _ in held)
        for bucket in self._present:  # the rest is there since that backward
            for slot in bucket.slots:
                slot.pending = left[id(slot.entry.parameter)]
            bucket.pending = sum(slot.pending > 0 for slot in bucket.slots)
        if self._reducing and self.sharding.overlap:
            self._start_complete()
        for parameter, write in held:
            self.accumulate(parameter, write)
        self.end_backward()

    def accumulate(self, parameter: nn.Parameter, write: Write) -> None:
        """Add the gradient of one use of `parameter`, computed by `write` into the buffer."""
        if self._held is not None:
            self._held.append((parameter, write))
            return
        slot = self._slots[id(parameter)]
        write(self._target(slot), slot.fresh)
        slot.fresh, slot.touched = False, True
        self.ready(parameter)

    def ready(self, parameter: Tensor) -> None:
        """One use of `parameter` has its gradient in the buffer."""
        slot = self._slots[id(parameter)]
        if not self._reducing or slot.bucket.late:
            return
        slot.pending -= 1
        assert slot.pending >= 0, f"{slot.entry.name}: complete more than {slot.uses} times"
        if slot.pending == 0:
            assert slot.bucket.pending > 0, f"{slot.entry.name}: complete after its reduction began"
            slot.bucket.pending -= 1
            if self.sharding.overlap:
                self._start_complete()

    def end_backward(self) -> None:
        """The backward is over: what no micro-batch reached counts as zero and is reduced too."""
        if not self._reducing:
            return
        self._complete(self._present)

    def finish(self) -> list[str]:
        """Wait until own gradients are the sums over the ranks; names of parameters without one."""
        self._present, self._started, self._last = [b for b in self.buckets if b.late], 0, True
        self._complete(self._present)
        self._settle(0)
        for work in self._replicas:
            work.wait()
        self._replicas.clear()
        for name, axis in self.more_axes.items():
            partial = [bucket for bucket in self.buckets if name in bucket.kind.more_axes]
            _sum_together([bucket.own_gradient for bucket in partial], axis)
        return [slot.entry.name for slot in self.slots() if not slot.touched]

    def publish(self, *, frozen: bool = False) -> None:
        """Give every rank the parameters that the masters are now, rounded; wait where used.

        With `frozen` those that no step changes too, as after loading.
        """
        if self.gathering is not None:
            self.gathering.drop()
        changed = self.all_buckets if frozen else self.buckets
        for bucket in reversed(changed):  # the order of the next forward
            bucket.round_master()
            shard = bucket.kind.sharding.shard
            if bucket.parameters is not None and shard.size > 1:
                bucket.gathering = start_all_gather_into(
                    bucket.parameters, bucket.own_parameters, shard
                )
                if not self.sharding.overlap:
                    bucket.wait()

    def wait(self) -> None:
        """Return once all parameters are those of the last step: before anyone else reads them."""
        for bucket in self.all_buckets:
            bucket.wait()

    # --- reduction

    def _complete(self, buckets: Sequence[Bucket]) -> None:
        """What these still lack is zero."""
        for bucket in buckets:
            bucket.pending = 0
        self._start_complete()

    def _start_complete(self) -> None:
        # In one order on every rank, whatever a rank's own backward completes first.
        while self._started < len(self._present) and not self._present[self._started].pending:
            bucket = self._present[self._started]
            for slot in bucket.slots:
                if slot.fresh:
                    self._target(slot).zero_()
                    slot.fresh = False
            assert bucket.gradient is not None
            self.on_own(bucket.gradient)
            sharding = bucket.kind.sharding
            pending = start_reduce_scatter_(bucket.gradient, sharding.shard)
            if sharding.stage >= 2:
                bucket.gradient = None  # freed when its sum is there
                for slot in bucket.slots:
                    slot.fresh = True
            if sharding.shard.size == 1:  # nothing is on its way, nor need others' sums be here
                self._take(bucket, pending, last=self._last)
            else:
                self._in_flight.append((bucket, pending, self._last))
                self._settle(IN_FLIGHT if sharding.overlap else 0)
            self._started += 1

    def _close(self, unit: int) -> None:
        """Backward enters `unit`: what later ones did not complete counts as zero, as at the end.

        Gathers and reductions share a communicator, so their order must be one on every rank.
        """
        if self._reducing and self.sharding.overlap:
            self._complete([b for b in self._present[self._started :] if b.unit > unit])

    def _settle(self, left: int) -> None:
        """Take in sums until only so many are on their way."""
        while len(self._in_flight) > left:
            bucket, pending, last = self._in_flight.popleft()
            self._take(bucket, pending, last=last)

    def _take(self, bucket: Bucket, pending: Pending, *, last: bool) -> None:
        """Take in the sum over a bucket's owners; after the last, the replicas' is begun."""
        part = pending.wait()
        if bucket.summed:
            bucket.own_gradient.add_(part)
        elif bucket.kind.sharding.stage >= 2:
            bucket.own_gradient.copy_(part)  # else it is the gradient's own part
        bucket.summed = True
        if last:
            work = start_all_reduce_(bucket.own_gradient, bucket.kind.sharding.replicate)
            self._replicas.append(work)

    def _target(self, slot: Slot) -> Tensor:
        """Where the gradient of a parameter is to be written."""
        bucket = slot.bucket
        if bucket.gradient is None:
            bucket.gradient = torch.zeros(bucket.numel, dtype=bucket.kind.wide, device=self.device)
        return slot.view(bucket.gradient)

    def _autograd_hook(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:  # a linear layer has written it into the buffer
            return
        parameter.grad = None
        slot = self._slots[id(parameter)]
        target = self._target(slot)
        target.copy_(gradient) if slot.fresh else target.add_(gradient)
        slot.fresh, slot.touched = False, True
        self.ready(parameter)


def _ignore(gradient: Tensor) -> None:
    """Whoever wants to see them sets `on_own`."""


def _weak(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """`method` without its object: through a parameter's hooks the collector sees no cycle."""
    found = weakref.WeakMethod(method)

    def call(parameter: Tensor) -> None:
        if (alive := found()) is not None:
            alive(parameter)

    return call


def _waiting(buckets: Sequence[Bucket]) -> Callable[..., None]:
    def wait(*_: object) -> None:
        for bucket in buckets:
            bucket.wait()

    return wait


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


@torch.no_grad()
def _fill(bucket: Bucket, seed: int) -> None:
    """Give masters their start values, those that parameters had, else the seed's."""
    sharding = bucket.kind.sharding
    given: dict[int, Tensor] = {}
    for slot in bucket.slots:
        value = slot.entry.parameter.detach()
        if value.numel() == slot.numel > 0:
            # Modules of other makers draw from a generator of their own: rank 0's values count.
            value = value.to(bucket.own_gradient.device, bucket.kind.wide, copy=True).contiguous()
            for axis in (sharding.shard, sharding.replicate):
                broadcast_(value, axis)
            given[id(slot)] = value
        if bucket.parameters is not None:
            slot.entry.replace(slot.view(bucket.parameters))
        else:
            slot.entry.replace(absent(slot, bucket.own_parameters))
        slot.entry.parameter.requires_grad_(not bucket.kind.group.frozen)
    if not compat.has_values(bucket.master):
        return
    for slot, fragment, view in bucket.owned(bucket.master):
        if id(slot) in given:
            view.copy_(given[id(slot)][fragment.local.slices()].view(view.shape))
        else:
            fill(view, fragment, slot.entry.placement.init, seed)
