"""The one way tests start processes: `run_ranks(fn, n)`."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penteract import shared_memory
from penteract.mesh import world_axis as world_axis

_FIRST_FAILURE_WAIT_S = 0.3  # how long to collect failures before naming the first
_LOOK_S = 0.2  # how often to look whether a silent rank is alive


def run_ranks(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    timeout_s: float = 120.0,
    backend: str = shared_memory.NAME,
) -> list[Any]:
    """Run `fn(*args)` on `n` forked ranks and return their values in rank order.

    The ranks are joined over shared memory, or by a `backend` of torch's own such as "gloo".
    Raises RuntimeError with the first failing rank's traceback (a rank that dies without one is
    named with its signal or exit code), or TimeoutError after `timeout_s` seconds with the stacks
    of the ranks that have not answered. No rank is left in any case.
    """
    threads = torch.get_num_threads()
    assert threads == 1, (
        f"torch has {threads} threads and forking is safe with 1: set OMP_NUM_THREADS=1"
    )
    deadline = time.monotonic() + timeout_s
    all_ranks = (n, backend, timeout_s)
    with tempfile.TemporaryDirectory() as folder, _ranks(fn, args, all_ranks, folder) as ranks:
        results: dict[int, Any] = {}
        while len(results) < n:
            waiting = [rank for rank in ranks if rank.number not in results]
            answers = _answers(waiting, deadline - time.monotonic())
            if not answers:
                raise TimeoutError(_stacks(waiting, n, timeout_s))
            failures = [answer for answer in answers if not answer.ok]
            if failures:
                answered = {answer.rank.number for answer in answers}
                others = [rank for rank in waiting if rank.number not in answered]
                raise RuntimeError(_first_failure(failures, others, n))
            results.update({answer.rank.number: answer.value for answer in answers})
        for rank in ranks:  # only now: a rank that leaves early breaks peers that still connect
            rank.pipe.send("all answered")
    return [results[rank] for rank in range(n)]


class _Rank:
    """A forked rank, its end of the pipe, and the file that its stacks go to."""

    def __init__(self, number: int, process: Any, pipe: Connection, stacks: Path) -> None:
        self.number, self.process, self.pipe, self.stacks = number, process, pipe, stacks


class _Answer:
    """A rank's value, or why it has none; `at` orders failures."""

    def __init__(self, rank: _Rank, ok: bool, value: Any, at: float) -> None:
        self.rank, self.ok, self.value, self.at = rank, ok, value, at


@contextmanager
def _ranks(
    fn: Callable[..., Any], args: tuple[Any, ...], all_ranks: tuple[int, str, float], folder: str
) -> Iterator[list[_Rank]]:
    """Fork the ranks; end and reap them all on the way out."""
    context = multiprocessing.get_context("fork")
    ranks: list[_Rank] = []
    try:
        for number in range(all_ranks[0]):
            ours, theirs = context.Pipe()
            own = (fn, args, all_ranks, folder, number, theirs)
            process = context.Process(target=_rank_main, args=own, daemon=False)
            process.start()
            theirs.close()
            ranks.append(_Rank(number, process, ours, _stack_file(folder, number)))
        yield ranks
    except BaseException:
        for rank in ranks:
            rank.process.kill()
        raise
    finally:
        for rank in ranks:
            rank.pipe.close()
            rank.process.join(10)
            rank.process.kill()
            rank.process.join()
            rank.process.close()


def _rank_main(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    all_ranks: tuple[int, str, float],
    folder: str,
    number: int,
    pipe: Connection,
) -> None:
    """A rank's whole life; it never returns into the parent's code."""
    n, backend, timeout_s = all_ranks
    try:
        with open(_stack_file(folder, number), "w") as stack_file:
            faulthandler.enable(stack_file)  # SIGABRT writes where the rank stands
            if n > 1:
                timeout = timedelta(seconds=timeout_s)
                meeting = dist.FileStore(os.path.join(folder, "store"), n)  # type: ignore[attr-defined]
                shared_memory.register()
                dist.init_process_group(
                    backend, store=meeting, rank=number, world_size=n, timeout=timeout
                )
            pipe.send((True, fn(*args), 0.0))
            # Stay until all have answered: over gloo a peer may still be connecting to this rank,
            # and an answer's tensors lie in memory that their sender must keep until then.
            pipe.poll(timeout_s)
            if dist.is_initialized():
                dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc(), time.monotonic()))
    finally:
        os._exit(0)


def _stack_file(folder: str, number: int) -> Path:
    return Path(folder, f"stacks{number}")


def _answers(ranks: list[_Rank], within_s: float) -> list[_Answer]:
    """What the ranks have said, or their deaths; empty where nothing came within the time."""
    until = time.monotonic() + within_s
    while True:
        left_s = max(0.0, until - time.monotonic())
        ready = wait([rank.pipe for rank in ranks], timeout=min(_LOOK_S, left_s))
        # The pipe of a dead rank stays silent where a child of its own holds it open.
        alive = [rank.number for rank in ranks if rank.process.is_alive() or rank.pipe.poll()]
        if ready or len(alive) < len(ranks) or left_s == 0.0:
            break
    return [_answer(rank) for rank in ranks if rank.pipe in ready or rank.number not in alive]


def _answer(rank: _Rank) -> _Answer:
    try:
        if rank.pipe.poll():
            ok, value, at = rank.pipe.recv()
            return _Answer(rank, ok, value, at)
    except (EOFError, ConnectionError):
        pass  # it died; the rest says how
    # Its peers fail because of it, so a death without an answer comes before any report.
    return _Answer(rank, False, _death(rank), 0.0)


def _death(rank: _Rank) -> str:
    rank.process.join(10)
    code = rank.process.exitcode
    how = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
    return f"ended by {how} without an answer\n{rank.stacks.read_text()}"


def _first_failure(failures: list[_Answer], others: list[_Rank], n: int) -> str:
    """The earliest failure: a rank that breaks makes its peers fail moments later or earlier."""
    until = time.monotonic() + _FIRST_FAILURE_WAIT_S
    while others and (more := _answers(others, until - time.monotonic())):
        failures = failures + [answer for answer in more if not answer.ok]
        answered = {answer.rank.number for answer in more}
        others = [rank for rank in others if rank.number not in answered]
    first = min(failures, key=lambda answer: answer.at)
    return f"rank {first.rank.number} of {n} failed:\n{first.value}"


def _stacks(ranks: list[_Rank], n: int, timeout_s: float) -> str:
    """End the silent ranks and say where each stood."""
    text = [f"no answer within {timeout_s:g} s from {len(ranks)} of {n} ranks"]
    for rank in ranks:
        os.kill(rank.process.pid, signal.SIGABRT)
        rank.process.join(2)
        text.append(f"rank {rank.number}:\n{rank.stacks.read_text()}")
    return "\n".join(text)
