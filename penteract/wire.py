"""One operation over an axis, begun and awaited: no autograd, what is sent, how sums are taken.

`start_…` begins an operation and returns a `Pending`, whose `wait()` gives the result. They are for
the forward and backward of autograd functions, which must stay outside a torch.compile graph
(`compat.outside_graph`). Names that end in `_` work in place. Over an axis of size 1 all of them
are the identity.

What leaves a rank is counted in `axis.traffic` under the operation's name, for n ranks, in x's
dtype (an all-reduce and a broadcast as a ring sends them):

| counted as       | bytes                                                  |
|------------------|--------------------------------------------------------|
| `all_reduce`     | 2·(n−1)/n of x, rounded down                           |
| `all_gather`     | (n−1) × the local part                                 |
| `reduce_scatter` | x without the own part, (n−1)/n of it where even       |
| `all_to_all`     | the rows that go to other ranks                        |
| `shift`          | all of x                                               |
| `broadcast`      | all of x; nothing on the rank that the ring ends with  |
| `exchange`       | (n−1) × (8 + the payload)                              |
| `send`           | all of x                                               |

On a CPU a reduce-scatter, and from 3 ranks on a small all-reduce (all copies together up to 1 MiB),
are an all-to-all and a sum in rank order, which every rank takes alike, so that they agree to the
bit; a reduce-scatter in place sends the same parts from pair to pair. The backend's own serves
other all-reduces and agrees to the bit as well. 16-bit floats are summed in float32 there. On two
cores gloo's own reduce-scatter takes 1.5 to 2.5 times as long (16 KiB to 16 MiB, 2 and 4 ranks);
its small all-reduce 1.6 to 2.1 times on 4 ranks, on 2 half of it: `benchmarks/collectives.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from penteract import compat
from penteract.mesh import Axis
from penteract.pending import Pending, done
from penteract.placement import even_sizes

Sizes = Sequence[int] | None

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# Up to here one exchange of whole copies beats gloo's ring on 4 ranks; its cost grows with them. On
# 2 ranks gloo's own is the faster one at every size.
_ONE_EXCHANGE_BYTES = 1 << 20  # of all copies together
_ONE_EXCHANGE_RANKS = 16


def start_all_reduce(x: Tensor, axis: Axis) -> Pending:
    """Begin the sum of `x` over `axis`, into new memory."""
    if axis.size == 1:
        return done(x)
    return start_all_reduce_(x.detach().clone(memory_format=torch.contiguous_format), axis)


def start_all_reduce_(x: Tensor, axis: Axis, op: str = "sum") -> Pending:
    """Begin reducing `x` in place over `axis`; op is "sum", "max" or "min". Until `wait()` has
    returned `x` may be neither read nor written.
    """
    if op not in _REDUCE_OPS:
        raise ValueError(f"all_reduce_ has no op {op!r}: choose from {', '.join(_REDUCE_OPS)}")
    if axis.size == 1 or x.numel() == 0:
        return done(x)
    size_bytes = _bytes(x)
    axis.traffic.add("all_reduce", 2 * (axis.size - 1) * size_bytes // axis.size)
    target = x.detach()
    few = 2 < axis.size <= _ONE_EXCHANGE_RANKS
    small = few and size_bytes * axis.size <= _ONE_EXCHANGE_BYTES
    if op == "sum" and small and compat.sums_are_ours(x):
        copies = target.reshape(-1).repeat(axis.size)
        work, total = _start_sum_of_parts(copies, axis, [x.numel()] * axis.size)
        return Pending([work], lambda: _into(x, total().view(x.shape)), axis.traffic)
    dtype = _sum_dtype(x) if compat.sums_are_ours(x) else x.dtype
    buffer = target.to(dtype).contiguous()  # the same memory where nothing has to change
    work = dist.all_reduce(buffer, _REDUCE_OPS[op], group=axis.group, async_op=True)
    return Pending([work], lambda: x if buffer is target else _into(x, buffer), axis.traffic)


def start_all_gather(x: Tensor, axis: Axis, dim: int = 0, *, sizes: Sizes = None) -> Pending:
    """Begin joining the parts of all ranks along `dim`; sizes as in `all_gather`."""
    if axis.size == 1:
        return done(x)
    dim %= x.ndim
    sizes = part_sizes("all_gather", x, axis, dim, sizes)
    axis.traffic.add("all_gather", (axis.size - 1) * _bytes(x))
    longest = max(sizes)
    # Backends gather equal parts only: shorter ones travel padded.
    sent = _padded(x.detach(), dim, longest)
    out = sent.new_empty((axis.size, *sent.shape))
    # Nothing to gather is nothing on every rank, and needs no message.
    works = [compat.all_gather_into(out.flatten(0, 1), sent, axis.group)] if out.numel() else []

    def finish() -> Tensor:
        if min(sizes) == longest:
            return out.movedim(0, dim).flatten(dim, dim + 1).contiguous()
        parts = (part.narrow(dim, 0, n) for part, n in zip(out, sizes, strict=True))
        return torch.cat(list(parts), dim)

    return Pending(works, finish, axis.traffic)


def start_all_gather_into(out: Tensor, x: Tensor, axis: Axis) -> Pending:
    """Begin joining equal flat parts into the contiguous `out`. Touch neither until `wait()`."""
    if axis.size == 1:
        return done(out.copy_(x))
    axis.traffic.add("all_gather", (axis.size - 1) * _bytes(x))
    work = compat.all_gather_into(out, x.detach(), axis.group)
    return Pending([work], lambda: out, axis.traffic)


def start_reduce_scatter_(x: Tensor, axis: Axis) -> Pending:
    """Begin summing this rank's of the equal parts of the flat `x` over `axis`, in place.

    The result is that part; the others hold nothing of use then. Touch none until `wait()`.
    """
    n, rank = axis.size, axis.rank
    if n == 1:
        return done(x)
    parts = x.detach().view(n, -1).unbind(0)
    own = parts[rank]
    axis.traffic.add("reduce_scatter", (n - 1) * _bytes(own))
    if not compat.sums_are_ours(x):
        return Pending([compat.reduce_scatter_into(own, x, axis.group)], lambda: own, axis.traffic)
    # An all-to-all would copy the own part too, and a sum into new memory fault its pages in.
    came = list(torch.empty_like(x).view(n, -1).unbind(0))
    messages: list[dist.P2POp] = []
    for r in (r for r in range(n) if r != rank):
        messages.append(dist.P2POp(dist.isend, parts[r], axis.ranks[r], axis.group))
        messages.append(dist.P2POp(dist.irecv, came[r], axis.ranks[r], axis.group))
    works = dist.batch_isend_irecv(messages)

    def total() -> Tensor:
        came[rank] = own  # in rank order
        if n == 2 and _sum_dtype(x) == x.dtype:
            return torch.add(came[0], came[1], out=own)
        result = came[0].to(_sum_dtype(x)) + came[1]
        for part in came[2:]:
            result += part
        return own.copy_(result)

    return Pending(works, total, axis.traffic)


def start_reduce_scatter(x: Tensor, axis: Axis, dim: int = 0, *, sizes: Sizes = None) -> Pending:
    """Begin summing `x` over `axis` for this rank's part along `dim`; sizes as in
    `reduce_scatter`.
    """
    if axis.size == 1:
        return done(x)
    dim %= x.ndim
    x = x.detach()
    sizes = whole_sizes("reduce_scatter", x, axis, dim, sizes)
    row = x.select(dim, 0).numel() if x.shape[dim] else 0
    own = [*x.shape[:dim], sizes[axis.rank], *x.shape[dim + 1 :]]
    axis.traffic.add("reduce_scatter", (x.shape[dim] - own[dim]) * row * x.element_size())
    if compat.sums_are_ours(x):
        lengths = [row * n for n in sizes]
        work, total = _start_sum_of_parts(_flat_parts(x, dim, sizes), axis, lengths)
        return Pending([work], lambda: total().view(own), axis.traffic)
    # Other backends scatter equal parts only: shorter ones travel padded.
    longest = max(sizes)
    out = x.new_empty([*x.shape[:dim], longest, *x.shape[dim + 1 :]])
    flat = _flat_parts(x, dim, sizes, longest)
    work = compat.reduce_scatter_into(out.view(-1), flat, axis.group)
    return Pending([work], lambda: out.narrow(dim, 0, own[dim]).contiguous(), axis.traffic)


def start_all_to_all(
    x: Tensor, axis: Axis, send_sizes: Sizes = None, receive_sizes: Sizes = None
) -> Pending:
    """Begin an `all_to_all`; sizes as there."""
    if axis.size == 1:
        return done(x)
    sent, received = exchange_sizes(x, axis, send_sizes, receive_sizes)
    row_bytes = x[:1].numel() * x.element_size()
    axis.traffic.add("all_to_all", (sum(sent) - sent[axis.rank]) * row_bytes)
    x = x.detach().contiguous()
    out = x.new_empty((sum(received), *x.shape[1:]))
    work = compat.all_to_all_into(out, x, received, sent, axis.group)
    return Pending([work], lambda: out, axis.traffic)


def start_shift(x: Tensor, axis: Axis, k: int = 1) -> Pending:
    """Begin a `shift`: sending and receiving are posted together, so that no order of ranks and no
    pair that is each other's next and previous can block.
    """
    n, k = axis.size, k % axis.size
    if k == 0 or x.numel() == 0:
        return done(x)
    axis.traffic.add("shift", _bytes(x))
    sent = x.detach().contiguous()
    out = torch.empty_like(sent)
    to, source = axis.ranks[(axis.rank + k) % n], axis.ranks[(axis.rank - k) % n]
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, compat.as_wire(sent), to, axis.group),
            dist.P2POp(dist.irecv, compat.as_wire(out), source, axis.group),
        ]
    )
    return Pending(works, lambda: out, axis.traffic)


def start_send(x: Tensor, channel: Axis) -> Pending:
    """Begin sending the contiguous `x` over a channel: an axis from its first rank to its second.

    Do not write to `x` until `wait()` has returned.
    """
    if x.numel() == 0:
        return done(x)
    channel.traffic.add("send", _bytes(x))
    work = dist.isend(compat.as_wire(x.detach()), channel.ranks[1], group=channel.group)
    return Pending([work] if work else [], lambda: x, channel.traffic)


def start_receive(out: Tensor, channel: Axis) -> Pending:
    """Begin receiving into the contiguous `out` what the first rank of the channel sends."""
    if out.numel() == 0:
        return done(out)
    work = dist.irecv(compat.as_wire(out), channel.ranks[0], group=channel.group)
    return Pending([work] if work else [], lambda: out, channel.traffic)


def meet(channel: Axis, device: torch.device) -> None:
    """Return once both ends of a channel are there. Some backends connect at the first message
    only, and would wait for each other there if their ends met theirs in different orders.
    """
    x = torch.zeros(1, device=device)
    move = (dist.isend, dist.irecv)[channel.rank]
    work = move(x, channel.ranks[1 - channel.rank], group=channel.group)
    if work is not None:
        work.wait()


def all_reduce_(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Reduce `x` in place over `axis` and return it; op is "sum", "max" or "min"."""
    return start_all_reduce_(x, axis, op).wait()


def broadcast_(x: Tensor, axis: Axis, source: int = 0) -> Tensor:
    """Overwrite `x` with that of rank `source` of the axis and return it."""
    if axis.size == 1 or x.numel() == 0:
        return x
    is_last = (axis.rank + 1) % axis.size == source
    axis.traffic.add("broadcast", 0 if is_last else _bytes(x))
    buffer = x.detach().contiguous()
    dist.broadcast(compat.as_wire(buffer), axis.ranks[source], group=axis.group)
    return _into(x, buffer) if not x.is_contiguous() else x


def exchange(payload: bytes, axis: Axis) -> list[bytes]:
    """Every rank's `payload`, of any lengths, in rank order. Waits on the host."""
    if axis.size == 1:
        return [payload]
    axis.traffic.add("exchange", (axis.size - 1) * (8 + len(payload)))
    device = compat.host_device(axis.group)
    lengths = torch.empty(axis.size, dtype=torch.int64, device=device)
    own_length = torch.tensor([len(payload)], device=device)
    with axis.traffic.waiting():
        compat.all_gather_into(lengths, own_length, axis.group).wait()
    counts = lengths.tolist()
    longest = max(counts)
    if longest == 0:
        return [b""] * axis.size
    padded = bytearray(payload.ljust(longest, b"\0"))
    own = torch.frombuffer(padded, dtype=torch.uint8).to(device)
    out = torch.empty((axis.size, longest), dtype=torch.uint8, device=device)
    with axis.traffic.waiting():
        compat.all_gather_into(out.flatten(), own, axis.group).wait()
    rows = out.cpu().numpy()
    return [row[:n].tobytes() for row, n in zip(rows, counts, strict=True)]


def barrier(axis: Axis) -> None:
    """Return once every rank of `axis` has called it."""
    exchange(b"", axis)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _into(x: Tensor, values: Tensor) -> Tensor:
    x.detach().copy_(values)
    return x


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


def own_part(x: Tensor, axis: Axis, dim: int, sizes: Sizes = None) -> Tensor:
    """A copy of this rank's part of `x` along `dim`, which does not keep the whole alive."""
    sizes = whole_sizes("split", x, axis, dim, sizes)
    part = x.narrow(dim, sum(sizes[: axis.rank]), sizes[axis.rank])
    return part.clone(memory_format=torch.contiguous_format)


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    """`x` contiguous with zeros behind it up to `length` along `dim`."""
    missing = length - x.shape[dim]
    if missing == 0:
        return x.contiguous()
    return torch.cat([x, x.new_zeros([*x.shape[:dim], missing, *x.shape[dim + 1 :]])], dim)


def _flat_parts(x: Tensor, dim: int, sizes: Sequence[int], length: int | None = None) -> Tensor:
    """The parts of `x` along `dim` one after another, flat; each padded to `length` if given."""
    if min(sizes) == max(sizes):
        parts = x.unflatten(dim, (len(sizes), sizes[0])).movedim(dim, 0)
        return parts.reshape(-1).contiguous()
    padded = (_padded(part, dim, length or part.shape[dim]) for part in x.split(sizes, dim))
    return torch.cat([part.reshape(-1) for part in padded])


def _start_sum_of_parts(
    flat: Tensor, axis: Axis, lengths: Sequence[int]
) -> tuple[dist.Work, Callable[[], Tensor]]:
    """Begin sending part r of `flat` to rank r; the function sums what came, in rank order."""
    own = lengths[axis.rank]
    received = flat.new_empty(axis.size * own)
    work = compat.all_to_all_into(received, flat, [own] * axis.size, lengths, axis.group)

    def total() -> Tensor:
        first, second, *others = received.view(axis.size, own).unbind(0)
        result = first.to(_sum_dtype(flat)) + second
        for part in others:
            result += part
        return result.to(flat.dtype)

    return work, total


def part_sizes(call: str, x: Tensor, axis: Axis, dim: int, sizes: Sizes) -> Sequence[int]:
    """The parts' lengths for a gather of `x`, checked against this rank's."""
    own = x.shape[dim]
    if sizes is None:
        return [own] * axis.size
    if len(sizes) != axis.size or sizes[axis.rank] != own:
        raise ValueError(
            f"{call} over {axis.name!r}: rank {axis.rank} of {axis.size} holds {own} along dim "
            f"{dim}, but sizes is {list(sizes)}: it needs {axis.size} numbers, and {own} at "
            f"place {axis.rank}"
        )
    return sizes


def whole_sizes(call: str, x: Tensor, axis: Axis, dim: int, sizes: Sizes) -> Sequence[int]:
    """The parts' lengths for a scatter of `x`, checked against its length."""
    length = x.shape[dim]
    even = even_sizes(length, axis.size)
    if sizes is None:
        return even
    if len(sizes) != axis.size or sum(sizes) != length:
        raise ValueError(
            f"{call} over {axis.name!r}: x has {length} along dim {dim}, but sizes {list(sizes)} "
            f"are {len(sizes)} numbers with sum {sum(sizes)}: they need to be {axis.size} numbers "
            f"with sum {length}, such as {even}"
        )
    return sizes


def exchange_sizes(
    x: Tensor, axis: Axis, send_sizes: Sizes, receive_sizes: Sizes
) -> tuple[Sequence[int], Sequence[int]]:
    """The rows to send to and receive from every rank, checked against x's rows."""
    rows, n = x.shape[0], axis.size
    if send_sizes is None and receive_sizes is None:
        if rows % n:
            raise ValueError(
                f"all_to_all over {axis.name!r}: {rows} rows are not {n} equal blocks: without "
                f"sizes x needs {rows - rows % n} or {rows - rows % n + n} rows"
            )
        return [rows // n] * n, [rows // n] * n
    if send_sizes is None or receive_sizes is None:
        raise ValueError(
            f"all_to_all over {axis.name!r} needs both send and receive sizes, or none"
        )
    if len(send_sizes) != n or len(receive_sizes) != n or sum(send_sizes) != rows:
        raise ValueError(
            f"all_to_all over {axis.name!r}: send sizes {list(send_sizes)} and receive sizes "
            f"{list(receive_sizes)} need to be {n} numbers each, the former with sum {rows}, the "
            f"rows of x; it is {sum(send_sizes)}"
        )
    return send_sizes, receive_sizes
