"""A process group over shared memory, for ranks of one machine with their tensors on the CPU.

To start an operation a rank sends each peer what that peer needs (`mailbox`: one copy into shared
memory). Once the messages of its peers have come, whatever operation this rank then waits for, it
takes their parts from where they lie. A sum is taken in rank order by everyone who needs it, so
that all ranks have the same bits; 16-bit floats are added in float32 and rounded once.

| operation      | copied to shared memory, per rank | taken from it                       |
|----------------|-----------------------------------|-------------------------------------|
| all_reduce     | x                                 | (n−1) × x: everyone sums everything |
| all_gather     | the local part                    | (n−1) × the local part              |
| reduce_scatter | x                                 | (n−1)/n of x                        |
| all_to_all     | x                                 | what the others send                |
| broadcast      | x at the source                   | x elsewhere                         |
| send, receive  | x                                 | x                                   |

Starting never waits, and needs nothing of the peers, so operations may be awaited in any order,
also those of several groups. A wait for a send, or for a broadcast at its source, returns once
this rank has less than `_UNREAD_BYTES` unread, so that nobody runs ahead without end.

Messages say what their sender does. Where it is not what the receiver does, or a peer has ended or
is late, `wait` raises RuntimeError with what and who, and the group is of no more use.

    register()
    dist.init_process_group(NAME, store=…, rank=…, world_size=…)
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penteract.mailbox import Loop, Mailbox, Message, Part

NAME = "shared_memory"

_COLLECTIVE = -1  # the channel; those from 0 on are the tags of send and receive
_LOOK_S = 0.2  # how often a silent wait looks whether its peers are alive
_UNREAD_BYTES = 256 << 20
_SUM_BLOCK = 1 << 16  # elements, so that a partial sum stays in the cache
_REDUCTIONS = (
    (dist.ReduceOp.SUM, "sum", torch.add),
    (dist.ReduceOp.MAX, "max", torch.maximum),
    (dist.ReduceOp.MIN, "min", torch.minimum),
)

Parts = Mapping[int, Tensor]  # flat, by rank of the group


def register() -> None:
    """Make `NAME` known to torch.distributed; again does nothing."""
    if NAME not in dist.Backend.backend_list:
        create = functools.partial(_create, Loop())
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])


def _create(loop: Loop, place: Any, options: object) -> SharedMemoryGroup:
    ranks = tuple(place.global_ranks_in_group) or tuple(range(place.group_size))
    group = SharedMemoryGroup(loop, place.group_rank, ranks, place.timeout)
    group.meet(place.store)
    return group


class _Work(dist.Work):
    """An operation in flight: from every rank in `outs` comes as much as that tensor holds, and
    `finish` gets it once all has come. Without `finish` it is compared only, and not awaited.
    """

    def __init__(
        self,
        group: SharedMemoryGroup,
        own: Message,
        to: Iterable[int],
        outs: Parts,
        finish: Callable[[Parts], None] | None,
    ) -> None:
        super().__init__()
        self._group, self._own, self._to = group, own, set(to)
        self._outs, self._finish = outs, finish
        self._missing = set(outs) if finish else set()
        self._messages: list[Message] = []

    def take(self, message: Message) -> None:
        """A peer has come."""
        group, peer = self._group, message.source
        expected = _bytes(self._outs[peer])
        if (message.what, message.length) != (self._own.what, expected):
            group.fault = group.fault or (
                f"{self.name()}: the ranks do different things: rank {group.ranks[peer]} does "
                f"{message.what.decode()} and sends {message.length} bytes to rank "
                f"{group.ranks[self._own.source]}, which does {self._own.what.decode()} and "
                f"takes {expected} bytes from there"
            )
        elif self._finish:
            self._messages.append(message)
            self._missing.remove(peer)
            if not self._missing:
                mail = group.mail
                came = {m.source: mail.payload(m, self._outs[m.source]) for m in self._messages}
                self._finish(came)
                mail.acknowledge(self._messages)

    def name(self) -> str:
        return f"{self._group.label()}, operation {self._own.number} ({self._own.what.decode()})"

    def lacking(self) -> set[int]:
        """The ranks that keep this from being over."""
        return self._missing or self._to

    def is_over(self) -> bool:
        mail = self._group.mail
        if self._group.fault:
            return True
        if self._missing or self._to & mail.full:
            return False
        return bool(self._finish) or not (mail.unread_bytes > _UNREAD_BYTES or self._to & mail.gone)

    def is_completed(self) -> bool:
        self._group.loop.step(0)
        return self.is_over()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return once the result is there; RuntimeError where a peer differs, has left, is late."""
        self._group.wait(self, timeout or self._group.timeout)
        return True


class SharedMemoryGroup(dist.ProcessGroup):
    """See the module. Tensors must be contiguous. `ranks` are the global ones, for messages.

    Missing on purpose: gather, scatter and reduce to one rank, coalesced operations, reductions
    other than sum, max and min, receiving from any source.
    """

    def __init__(self, loop: Loop, rank: int, ranks: tuple[int, ...], timeout: timedelta) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self.loop, self.ranks, self.timeout = loop, ranks, timeout
        self.mail = Mailbox(loop, rank, self._deliver)
        self.fault = ""  # why this group is of no more use
        self._name = self._desc = ""
        self._rank, self._peers = rank, [peer for peer in range(len(ranks)) if peer != rank]
        self._begun: Counter[tuple[object, ...]] = Counter()  # operations, by channel
        self._waiting: dict[tuple[int, int, int], _Work] = {}  # by source, channel, number
        self._early: dict[tuple[int, int, int], Message] = {}

    def meet(self, store: Any) -> None:
        """Find the peers through `store`; returns once all have found this rank."""
        try:
            store.set(str(self._rank), self.mail.folder)
            for peer in self._peers:
                self._find(store, peer)
            self.barrier().wait()  # who comes here has opened this rank's files
        except BaseException:
            self.mail.close()
            raise
        finally:
            self.mail.unlink()

    def _find(self, store: Any, peer: int) -> None:
        try:
            store.wait([str(peer)], self.timeout)
            self.mail.connect(peer, store.get(str(peer)).decode())
        except (RuntimeError, OSError) as error:
            raise RuntimeError(f"{self.label()}: {self._named([peer])} is not there") from error

    def _set_group_name(self, name: str) -> None:
        self._name = name  # torch would keep it with a backend inside the group

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    group_name: Any = property(lambda self: self._name)
    group_desc: Any = property(lambda self: self._desc)

    def label(self) -> str:
        return f"group {self._desc or self._name} of ranks {list(self.ranks)} over shared memory"

    def getBackendName(self) -> str:
        return NAME

    def shutdown(self) -> None:
        self.mail.close()

    def wait(self, work: _Work, timeout: timedelta) -> None:
        """Return once `work` is over."""
        until = time.monotonic() + timeout.total_seconds()
        while not work.is_over():
            left_s = until - time.monotonic()
            if not self.loop.step(min(_LOOK_S, max(0.0, left_s))):
                self._look_for_the_dead(work)
            if left_s < 0 and not work.is_over():
                raise RuntimeError(
                    f"{work.name()}: no word of {self._named(work.lacking())} within "
                    f"{timeout.total_seconds():g} s"
                )
        if self.fault:
            raise RuntimeError(self.fault)

    def _look_for_the_dead(self, work: _Work) -> None:
        left = {peer for peer in work.lacking() if self.mail.has_left(peer)}
        while left and self.loop.step(0):
            pass  # takes in what they sent before they left
        left &= work.lacking()
        if left and not work.is_over():
            raise RuntimeError(f"{work.name()}: {self._named(left)} ended or left the group")

    def _named(self, peers: Iterable[int]) -> str:
        return "rank " + ", ".join(str(self.ranks[peer]) for peer in sorted(peers))

    def _deliver(self, message: Message) -> None:
        key = message[:3]
        if key in self._waiting:
            self._waiting.pop(key).take(message)
        else:
            self._early[key] = message

    def _begin(
        self,
        what: str,
        x: Tensor,
        to: Mapping[int, Part],
        outs: Parts,
        finish: Callable[[Parts], None] | None = None,
        *,
        channel: int = _COLLECTIVE,
    ) -> _Work:
        """Send every rank in `to` its part of the bytes of `x`; the rest is as in `_Work`."""
        pair = (tuple(to), tuple(outs)) if channel != _COLLECTIVE else ()
        number = self._begun[channel, pair]
        self._begun[channel, pair] += 1
        own = Message(self._rank, channel, number, what=what.encode())
        work = _Work(self, own, to, outs, finish)
        self.mail.send(own, x.view(torch.uint8), to)
        for peer in outs:
            key = (peer, channel, number)
            self._waiting[key] = work
            if key in self._early:
                self._deliver(self._early.pop(key))
        return work

    # The operations, under the names that torch.distributed calls them by.

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> _Work:  # type: ignore[override]
        x = _flat(tensors[0])
        return self._reduce("all_reduce", x, dict.fromkeys(self._peers, (0, _bytes(x))), x, x, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> _Work:
        out, x = _flat(output), _flat(input)
        own = self._even(x, out)[self._rank]
        one = _bytes(out)
        to = {peer: (peer * one, (peer + 1) * one) for peer in self._peers}
        return self._reduce("reduce_scatter", x, to, own, out, opts)

    def _reduce(
        self, call: str, x: Tensor, to: Mapping[int, Part], own: Tensor, out: Tensor, opts: Any
    ) -> _Work:
        """Send parts of `x`, and reduce what comes and this rank's `own` into `out`."""
        name, op = _reduction(opts.reduceOp)
        if not self._peers:
            out.copy_(own)

        def finish(came: Parts) -> None:
            _reduce_in_order(op, {**came, self._rank: own}, out)

        outs = dict.fromkeys(self._peers, out)
        return self._begin(f"{call} {name} of {x.dtype}", x, to, outs, finish)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> _Work:
        x = _flat(input)
        return self._gather(x, self._even(_flat(output), x))

    def allgather(  # type: ignore[override]
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> _Work:
        return self._gather(_flat(inputs[0]), [_flat(out) for out in outputs[0]])

    def _gather(self, x: Tensor, outs: Sequence[Tensor]) -> _Work:
        return self._exchange("all_gather", x, [(0, _bytes(x))] * self.size(), outs)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> _Work:
        x, sent = _flat(input), self._rows(input, input_sizes)
        ends = itertools.accumulate((n * x.element_size() for n in sent), initial=0)
        outs = _flat(output).split(self._rows(output, output_sizes))
        return self._exchange("all_to_all", x, list(itertools.pairwise(ends)), outs)

    def _exchange(
        self, call: str, x: Tensor, parts: Sequence[Part], outs: Sequence[Tensor]
    ) -> _Work:
        """Send part r of the bytes of `x` to rank r, and take into `outs[r]` what rank r sends."""
        start, stop = parts[self._rank]
        outs[self._rank].view(torch.uint8).copy_(x.view(torch.uint8)[start:stop])
        to = {peer: parts[peer] for peer in self._peers}
        from_peers = {peer: outs[peer] for peer in self._peers}
        return self._begin(f"{call} of {x.dtype}", x, to, from_peers, _copier(from_peers))

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> _Work:  # type: ignore[override]
        x, root = _flat(tensors[0]), opts.rootRank
        what = f"broadcast of {x.dtype} from {self.ranks[root]}"
        if root != self._rank:
            return self._begin(what, x, {root: (0, 0)}, {root: x}, _copier({root: x}))
        # The others say what they do too, but the source need not wait for it.
        to = dict.fromkeys(self._peers, (0, _bytes(x)))
        return self._begin(what, x, to, dict.fromkeys(self._peers, x.new_empty(0)))

    def barrier(self, opts: Any = None) -> _Work:
        empty = torch.empty(0)
        to, outs = dict.fromkeys(self._peers, (0, 0)), dict.fromkeys(self._peers, empty)
        return self._begin("barrier", empty, to, outs, _copier(outs))

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> _Work:
        x = _flat(tensors[0])
        return self._begin(f"sending {x.dtype}", x, {to: (0, _bytes(x))}, {}, channel=tag)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> _Work:
        x = _flat(tensors[0])
        outs = {source: x}
        return self._begin(f"sending {x.dtype}", x, {}, outs, _copier(outs), channel=tag)

    # Three of them are named otherwise in torch 2.11.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def _even(self, whole: Tensor, part: Tensor) -> Sequence[Tensor]:
        """A flat `whole` as a part for each rank."""
        n = self.size()
        if whole.numel() != n * part.numel():
            raise ValueError(
                f"{self.label()}: {whole.numel()} elements are not {n} parts of {part.numel()}; "
                f"they need to be {n * part.numel()}"
            )
        return whole.view(n, part.numel()).unbind(0)

    def _rows(self, x: Tensor, sizes: Sequence[int]) -> list[int]:
        """Elements for each rank, for `sizes` in rows of dim 0; no sizes are even ones."""
        n, rows = self.size(), x.shape[0]
        sizes = list(sizes) or [rows // n] * n
        if len(sizes) != n or sum(sizes) != rows:
            raise ValueError(
                f"{self.label()}: sizes {sizes} need to be {n} numbers with sum {rows}, x's rows"
            )
        return [size * x[:1].numel() for size in sizes]


def _reduction(op: Any) -> tuple[str, Callable[..., Tensor]]:
    for known, name, reduce in _REDUCTIONS:
        if op == known:
            return name, reduce
    raise ValueError(f"a group over shared memory reduces by SUM, MAX or MIN, not by {op.op}")


def _reduce_in_order(op: Callable[..., Tensor], by_rank: Parts, out: Tensor) -> None:
    """Reduce into `out`, which may be one of the parts."""
    parts = [by_rank[rank] for rank in range(len(by_rank))]
    narrow = out.dtype in (torch.bfloat16, torch.float16)
    for at in range(0, out.numel(), _SUM_BLOCK):
        first, *middle, last = (part[at : at + _SUM_BLOCK] for part in parts)
        total = first.to(torch.float32) if narrow else first
        for i, part in enumerate(middle):
            total = op(total, part, out=total) if i else op(total, part)
        op(total, last, out=out[at : at + _SUM_BLOCK])


def _copier(outs: Parts) -> Callable[[Parts], None]:
    def copy(came: Parts) -> None:
        for rank, part in came.items():
            outs[rank].copy_(part)

    return copy


def _flat(x: Tensor) -> Tensor:
    if not x.is_contiguous():
        raise ValueError(f"shared memory carries contiguous tensors, not strides {x.stride()}")
    return x.detach().view(-1)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
