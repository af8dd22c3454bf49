"""The group over shared memory against gloo, and when ranks differ, leave or are late."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penteract import compat, mailbox, shared_memory
from penteract.collectives import all_reduce_
from penteract.testing import run_ranks, world_axis

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16,
    torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip
SIZES = (0, 1, 7, 3001, 70_001)  # in the message, in the message, …, one block, more than one
Group = dist.ProcessGroup
Step = Callable[[Group], tuple[Tensor, Any]]


def values(n: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Values whose sum in floats depends on the order."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    if dtype.is_floating_point:
        spread = torch.randint(-6, 6, (n,), generator=generator)
        return (torch.randn(n, generator=generator) * 2.0**spread).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, (n,), generator=generator).to(dtype)


def gathered(x: Tensor, gloo: Group) -> list[Tensor]:
    """Every rank's `x`, by gloo."""
    n = dist.get_world_size()
    if x.numel() == 0:
        return [x] * n
    out = x.new_empty(n * x.numel())
    compat.all_gather_into(out, x, gloo).wait()
    return list(out.chunk(n))


def reduced(parts: list[Tensor], op: dist.ReduceOp.RedOpType) -> Tensor:
    """In rank order, 16-bit floats in float32."""
    wide = [part.float() if part.element_size() == 2 else part for part in parts]
    call = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum}
    total = wide[0]
    for part in wide[1:]:
        total = call.get(op, torch.minimum)(total, part)
    return total.to(parts[0].dtype)


def differences(group: Group, gloo: Group, dtype: torch.dtype, size: int) -> list[str]:
    """The operations whose result is not what gloo's gathering of all contributions gives."""
    n, rank = dist.get_world_size(), dist.get_rank()
    x, seen = values(size, dtype, 1), dict[str, tuple[Tensor, Tensor]]()
    all_x = gathered(x, gloo)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        y = x.clone()
        dist.all_reduce(y, op, group=group)
        seen[f"all_reduce {op}"] = y, reduced(all_x, op)
    out = x.new_empty(n * size)
    compat.all_gather_into(out, x, group).wait()
    seen["all_gather"] = out, torch.cat(all_x)
    outs = [torch.empty_like(x) for _ in range(n)]
    dist.all_gather(outs, x, group=group)
    seen["all_gather list"] = torch.cat(outs), torch.cat(all_x)
    whole, part = values(n * size, dtype, 2), x.clone()
    all_whole = [one.chunk(n) if size else [one] * n for one in gathered(whole, gloo)]
    compat.reduce_scatter_into(part, whole, group).wait()
    seen["reduce_scatter"] = part, reduced([c[rank] for c in all_whole], dist.ReduceOp.SUM)
    exchanged = torch.empty_like(whole)
    dist.all_to_all_single(exchanged, whole, group=group)
    seen["all_to_all"] = exchanged, torch.cat([chunks[rank] for chunks in all_whole])
    for root in range(n):
        y = x.clone()
        dist.broadcast(y, root, group=group)
        seen[f"broadcast from {root}"] = y, all_x[root]
    y = torch.empty_like(x)
    ring = [
        dist.P2POp(dist.isend, x, (rank + 1) % n, group),
        dist.P2POp(dist.irecv, y, (rank - 1) % n, group),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    seen["ring"] = y, all_x[rank - 1]
    dist.barrier(group=group)
    return [
        f"{name} of {size} {dtype} on rank {rank} of {n}"
        for name, (found, wanted) in seen.items()
        if not torch.equal(found, wanted)
    ]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_operation_gives_what_gloo_gathers(n: int) -> None:
    def compare() -> list[str]:
        gloo = dist.new_group(backend="gloo")
        world = dist.group.WORLD
        return [
            wrong
            for dtype in DTYPES
            for size in SIZES
            for wrong in differences(world, gloo, dtype, size)
        ]

    assert run_ranks(compare, n) == [[]] * n


def test_eight_ranks_on_few_cores() -> None:
    def compare() -> list[str]:
        gloo = dist.new_group(backend="gloo")
        return differences(dist.group.WORLD, gloo, torch.float32, 3001)

    assert run_ranks(compare, 8) == [[]] * 8


def test_a_sum_that_begins_with_the_own_part_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: with each rank's own order the bits differ."""

    def own_first(op: Any, by_rank: dict[int, Tensor], out: Tensor) -> None:
        total = by_rank[dist.get_rank()]
        for rank in by_rank.keys() - {dist.get_rank()}:
            total = op(total, by_rank[rank])
        out.copy_(total)

    def compare() -> list[str]:
        gloo = dist.new_group(backend="gloo")
        return differences(dist.group.WORLD, gloo, torch.float32, 3001)

    monkeypatch.setattr(shared_memory, "_reduce_in_order", own_first)
    assert any(run_ranks(compare, 3))


def test_close_to_the_sums_of_gloo_itself() -> None:
    def sums() -> list[bool]:
        gloo = dist.new_group(backend="gloo")
        found = []
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            ours = values(3001, dtype, 3)
            theirs = ours.clone()
            dist.all_reduce(ours)
            dist.all_reduce(theirs, group=gloo)
            # gloo rounds to 16 bits at every addition of values up to 200.
            absolute = 4.0 if dtype is torch.bfloat16 else 1e-4
            found.append(torch.allclose(ours, theirs, rtol=0.01, atol=absolute))
        return found

    assert run_ranks(sums, 3) == [[True] * 3] * 3


@pytest.mark.parametrize("big", [1, 2000])
def test_uneven_and_empty_rows_go_all_to_all(big: int) -> None:
    """Rank r sends rank p (r + 2 p) mod 4 times `big` rows: also none."""

    def exchange() -> bool:
        me = dist.get_rank()
        sent = [(me + 2 * p) % 4 * big for p in range(3)]
        received = [(p + 2 * me) % 4 * big for p in range(3)]
        x = torch.cat([torch.full((n, 5), 10.0 * me + p) for p, n in enumerate(sent)])
        out = torch.empty(sum(received), 5)
        compat.all_to_all_into(out, x, received, sent, dist.group.WORLD).wait()
        wanted = [torch.full((n, 5), 10.0 * p + me) for p, n in enumerate(received)]
        return torch.equal(out, torch.cat(wanted))

    assert run_ranks(exchange, 3) == [True] * 3


def program(groups: list[tuple[Group, tuple[int, ...]]], seed: int) -> list[Tensor]:
    """Operations on several groups, all started before any is awaited, in an order of this rank's
    own; only within a group do all ranks have one order. Whole numbers, so that any sum is exact.
    """
    shared, own, me = random.Random(seed), random.Random(100 * seed + dist.get_rank()), []
    queues: dict[int, list[Step]] = {}
    for _ in range(24):
        which, kind = shared.randrange(len(groups)), shared.choice("arbgs")
        size, root = shared.choice([1, 5, 900, 20_000]), shared.random()
        ranks = groups[which][1]
        if dist.get_rank() in ranks:
            me.append(size)
            step = begun(kind, size * 12, ranks, int(root * len(ranks)), len(me))
            queues.setdefault(which, []).append(step)
    results, works = dict[tuple[int, int], Tensor](), list[Any]()
    turns = [which for which, steps in queues.items() for _ in steps]
    own.shuffle(turns)
    for turn in turns:
        place = (turn, len(queues[turn]))
        results[place], started = queues[turn].pop(0)(groups[turn][0])
        works += started
    own.shuffle(works)
    for work in works:
        work.wait()
    return [results[place] for place in sorted(results)]


def begun(kind: str, size: int, ranks: tuple[int, ...], root: int, number: int) -> Step:
    n, me = len(ranks), ranks.index(dist.get_rank())
    x = torch.arange(size, dtype=torch.float32) % 97 + 1000 * dist.get_rank() + number

    def start(group: Group) -> tuple[Tensor, list[Any]]:
        if kind == "a":
            return x, [dist.all_reduce(x, group=group, async_op=True)]
        if kind == "b":
            return x, [dist.broadcast(x, ranks[root], group=group, async_op=True)]
        if kind == "g":
            out = x.new_empty(n * size)
            return out, [compat.all_gather_into(out, x, group)]
        if kind == "r":
            out = torch.empty_like(x)
            return out, [compat.all_to_all_into(out, x, [size // n] * n, [size // n] * n, group)]
        out = torch.empty_like(x)
        ring = [
            dist.P2POp(dist.isend, x, ranks[(me + 1) % n], group),
            dist.P2POp(dist.irecv, out, ranks[me - 1], group),
        ]
        return out, dist.batch_isend_irecv(ring)

    return start


def test_random_programs_on_overlapping_groups_equal_gloo() -> None:
    rows = [(0, 1, 2, 3), (0, 1), (1, 2, 3), (0, 2), (1, 3)]

    def run() -> list[list[Tensor]]:
        groups = [(dist.new_group(list(row)), row) for row in rows]
        return [program(groups, seed) for seed in range(12)]

    ours, theirs = run_ranks(run, 4), run_ranks(run, 4, backend="gloo")
    for found, wanted in zip(ours, theirs, strict=True):
        assert all(map(len, wanted))
        for a, b in zip(found, wanted, strict=True):
            assert len(a) == len(b)
            assert all(map(torch.equal, a, b))


def test_many_large_operations_at_once_awaited_crosswise() -> None:
    """Four of 17 MiB in flight on two groups; each rank waits for another group first."""

    def run() -> bool:
        other = dist.new_group()
        xs = [torch.full((17 << 18,), float(i + dist.get_rank())) for i in range(4)]
        works = [
            dist.all_reduce(x, group=group, async_op=True)
            for x, group in zip(xs, [None, None, other, other], strict=True)
        ]
        for work in works if dist.get_rank() else reversed(works):
            work.wait()
        return all((x == 2 * i + 1).all() for i, x in enumerate(xs))

    assert run_ranks(run, 2) == [True, True]


def test_more_in_flight_than_a_pipe_holds() -> None:
    """Rank 0 has more to say than fits, and waits for another group; rank 1 needs it all before it
    begins there.
    """

    def run() -> float:
        other, me = dist.new_group(), dist.get_rank()
        xs = [torch.full((100,), i) for i in range(1500)]
        last = torch.ones(1)
        works = [dist.all_reduce(x, async_op=True) for x in xs]
        if me == 1:
            for work in works:
                work.wait()
        dist.all_reduce(last, group=other)
        for work in works:
            work.wait()
        return sum(x.sum().item() for x in xs) + last.item()

    assert run_ranks(run, 2, timeout_s=60.0) == [100 * 1500 * 1499 + 2] * 2


def test_memory_is_used_again_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that runs ahead is held back; nothing grows with the number of operations."""
    monkeypatch.setattr(shared_memory, "_UNREAD_BYTES", 4 << 20)

    def run() -> list[int]:
        group, x = dist.group.WORLD, torch.zeros(1 << 18)
        most, sizes = 0, []
        for i in range(60):
            if dist.get_rank() == 1 and i == 0:
                time.sleep(0.2)
            dist.broadcast(x, 0)
            most = max(most, group.mail.unread_bytes)
            all_reduce_(torch.zeros(3000), world_axis())
            dist.all_reduce(torch.zeros(70_000))
            sizes.append(os.fstat(group.mail._outbox.file).st_size)
        for _ in range(20):
            dist.broadcast(x, 0)
            most = max(most, group.mail.unread_bytes)
        return [most, sizes[10], sizes[-1], len(group._waiting), len(group._early)]

    for most, early, late, waiting, unclaimed in run_ranks(run, 2):
        assert most <= 5 << 20
        assert early == late
        assert waiting <= 20  # words of the other rank that a source does not wait for
        assert unclaimed == 0


def test_a_block_is_not_used_again_while_a_slow_rank_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_order = shared_memory._reduce_in_order

    def slowly(op: Any, by_rank: dict[int, Tensor], out: Tensor) -> None:
        time.sleep(0.3 * (dist.get_rank() == 0))
        in_order(op, by_rank, out)

    def run() -> list[list[float]]:
        xs = [torch.full((1 << 19,), value) for value in (1.0, 5.0)]
        for x in xs:
            dist.all_reduce(x)
        return [x.unique().tolist() for x in xs]

    monkeypatch.setattr(shared_memory, "_reduce_in_order", slowly)
    assert run_ranks(run, 2) == [[[2.0], [10.0]]] * 2


def test_waiting_takes_no_processor_time() -> None:
    def run() -> float:
        if dist.get_rank() == 1:
            time.sleep(1.0)
        began = time.process_time()
        dist.barrier()
        return time.process_time() - began

    assert max(run_ranks(run, 2)) < 0.1


def test_tags_and_both_directions_between_a_pair() -> None:
    def run() -> list[float]:
        peer, outs = 1 - dist.get_rank(), [torch.zeros(n) for n in (2, 3000, 2)]
        sent = [torch.full_like(out, 10.0 * dist.get_rank() + i) for i, out in enumerate(outs)]
        works = [dist.isend(x, peer, tag=i % 2) for i, x in enumerate(sent)]
        works += [dist.irecv(outs[i], peer, tag=i % 2) for i in (1, 0, 2)]
        for work in reversed(works):
            work.wait()
        return [out.unique().item() for out in outs]

    assert run_ranks(run, 2) == [[10.0, 11.0, 12.0], [0.0, 1.0, 2.0]]


def test_a_work_completes_without_a_wait_once_its_peers_have_come() -> None:
    def run() -> bool:
        x = torch.ones(2)
        if dist.get_rank() == 1:
            time.sleep(0.3)
        work = dist.all_reduce(x, async_op=True)
        at_once = work.is_completed()
        while not work.is_completed():
            time.sleep(0.01)
        return (dist.get_rank() == 1 or not at_once) and x[0].item() == 2

    assert run_ranks(run, 2) == [True, True]


def test_a_group_of_one_rank() -> None:
    def run() -> bool:
        shared_memory.register()
        shared_memory.register()
        store = dist.HashStore()
        dist.init_process_group(shared_memory.NAME, store=store, rank=0, world_size=1)
        x, out = torch.arange(4.0), torch.empty(4)
        dist.all_reduce(x)
        compat.reduce_scatter_into(out, x, None).wait()
        return torch.equal(x, torch.arange(4.0)) and torch.equal(out, x)

    assert run_ranks(run, 1) == [True]


def one(group: Group | None = None) -> Tensor:
    x = torch.ones(4)
    dist.all_reduce(x, group=group)
    return x


def message_of(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "no error"


def broadcast_from_me() -> None:
    dist.broadcast(torch.ones(4), dist.get_rank())
    one()


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (
            (one, lambda: compat.all_gather_into(torch.ones(8), torch.ones(4), None).wait()),
            ("all_reduce sum of torch.float32", "all_gather of torch.float32"),
        ),
        ((one, lambda: dist.all_reduce(torch.ones(5))), ("16 bytes", "20 bytes")),
        ((one, lambda: dist.all_reduce(torch.ones(4).int())), ("torch.float32", "torch.int32")),
        ((one, lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX)), ("sum", "max")),
        ((one, dist.barrier), ("all_reduce", "barrier")),
        ((broadcast_from_me, broadcast_from_me), ("from 0", "from 1")),
        (
            (
                lambda: dist.recv(torch.ones(4), 1),
                lambda: (dist.send(torch.ones(5), 0), time.sleep(0.5)),
            ),
            ("sends 20 bytes", "takes 16 bytes"),
        ),
    ],
)
def test_ranks_that_differ_are_told_both(
    calls: tuple[Callable[[], object], ...], words: tuple[str, str]
) -> None:
    found = run_ranks(lambda: message_of(calls[dist.get_rank()]), 2)
    assert "the ranks do different things" in found[0]
    for word in ("operation ", "rank 0", "rank 1", *words):
        assert word in found[0]


def test_a_peer_that_leaves_is_named_at_once_and_its_last_words_count() -> None:
    def run() -> tuple[Tensor, str, float]:
        pair = dist.new_group([0, 2], use_local_synchronization=True, group_desc="pair")
        if dist.get_rank() == 1:
            return torch.empty(0), "", 0.0
        x = torch.ones(4)
        work = dist.all_reduce(x, group=pair, async_op=True)
        if dist.get_rank() == 2:
            dist.destroy_process_group(pair)
            return torch.empty(0), "", 0.0
        time.sleep(0.5)
        work.wait()
        began = time.monotonic()
        return x, message_of(lambda: one(pair)), time.monotonic() - began

    x, message, seconds = run_ranks(run, 3)[0]
    assert x.tolist() == [2.0] * 4
    assert "group pair of ranks [0, 2]" in message
    assert "operation 2 (all_reduce sum of torch.float32): rank 2 ended or left" in message
    assert seconds < 5


def test_words_that_come_just_before_a_peer_leaves_count() -> None:
    def run() -> Tensor:
        pair, x = dist.new_group(), torch.ones(4)
        if dist.get_rank() == 1:
            time.sleep(0.5)  # until then rank 0 has found nothing
            dist.all_reduce(x, group=pair, async_op=True)
            dist.destroy_process_group(pair)
            return x
        has_left = pair.mail.has_left

        def look(peer: int) -> bool:
            time.sleep(1.0)  # until then it has come and left
            return has_left(peer)

        pair.mail.has_left = look
        return one(pair)

    assert run_ranks(run, 2)[0].tolist() == [2.0] * 4


def test_a_send_to_a_peer_that_left_fails() -> None:
    def run() -> str:
        pair = dist.new_group()
        if dist.get_rank() == 1:
            dist.destroy_process_group(pair)
            return ""
        time.sleep(0.5)
        return message_of(lambda: dist.send(torch.ones(4), 1, group=pair))

    assert "rank 1 ended or left" in run_ranks(run, 2)[0]


def test_a_late_peer_is_named_and_may_still_come() -> None:
    def run() -> tuple[str, float]:
        group = dist.new_group(timeout=timedelta(seconds=0.6), group_desc="slow")
        began = time.monotonic()
        if dist.get_rank() == 1:
            time.sleep(1.2)
        return message_of(lambda: one(group)), time.monotonic() - began

    (message, seconds), (later, _) = run_ranks(run, 2)
    assert "group slow of" in message
    assert "no word of rank 1 within 0.6 s" in message
    assert 0.5 < seconds < 1.1
    assert later == "no error"


def test_a_peer_that_does_not_come_to_the_meeting_is_named(folder: Path) -> None:
    def run() -> str:
        if dist.get_rank() == 1:
            time.sleep(1.0)
            return ""
        return message_of(lambda: dist.new_group(timeout=timedelta(seconds=0.5)))

    assert "rank 1 is not there" in run_ranks(run, 2)[0]
    assert os.listdir(folder) == []


def test_what_it_does_not_do_is_refused() -> None:
    def run() -> None:
        with pytest.raises(ValueError, match=r"by SUM, MAX or MIN, not by .*PRODUCT"):
            dist.all_reduce(torch.ones(2), dist.ReduceOp.PRODUCT)
        with pytest.raises(ValueError, match="contiguous"):
            dist.all_reduce(torch.ones(2, 3).t())
        with pytest.raises(ValueError, match="5 elements are not 2 parts of 2; they need to be 4"):
            dist.group.WORLD._allgather_base(torch.ones(5), torch.ones(2))
        with pytest.raises(ValueError, match=r"\[1, 1\] need to be 2 numbers with sum 3"):
            dist.group.WORLD.alltoall_base(torch.ones(3), torch.ones(3), [1, 1], [1, 2])

    run_ranks(run, 2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the files lie, which is no one else's."""
    monkeypatch.setattr(mailbox, "_memory", lambda: str(tmp_path))
    return tmp_path


def test_nothing_is_left_while_it_runs_or_once_it_is_closed(folder: Path) -> None:
    def run() -> tuple[list[str], int]:
        open_files = len(os.listdir("/dev/fd"))
        for _ in range(3):
            group = dist.new_group()
            dist.all_reduce(torch.ones(70_000), group=group)
            dist.destroy_process_group(group)
        dist.barrier()
        return os.listdir(folder), len(os.listdir("/dev/fd")) - open_files

    assert run_ranks(run, 2) == [([], 0)] * 2


def test_nothing_is_left_by_ranks_that_are_killed(folder: Path) -> None:
    def run() -> None:
        dist.all_reduce(torch.ones(70_000))
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RuntimeError, match="SIGKILL"):
        run_ranks(run, 2)
    assert os.listdir(folder) == []


def test_a_killed_rank_is_named_by_its_peer(tmp_path: Path) -> None:
    """Without `run_ranks`, which ends the peers of a rank that died."""

    def rank(number: int, says: Connection) -> None:
        shared_memory.register()
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group(shared_memory.NAME, store=store, rank=number, world_size=2)
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        says.send(message_of(one))

    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    both = [context.Process(target=rank, args=(i, there)) for i in range(2)]
    for process in both:
        process.start()
    assert here.poll(20)
    assert "rank 1 ended or left the group" in here.recv()
    for process in both:
        process.join()
