"""A function over a list of tasks in processes, results in task order."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Generator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from penteract.errors import UserError

_AHEAD = 2  # tasks a worker has been given, so that it need not wait for the next one


def map_in_order(
    make: Callable[..., Callable[[Any], Any]],
    setup: tuple[Any, ...],
    tasks: Sequence[Any],
    *,
    workers: int,
) -> Generator[Any, None, None]:
    """Yields `make(*setup)(task)` for every task, in order; `make` runs once in each worker.

    With one worker everything happens in this process. Task k goes to worker k mod n, so the order
    needs no bookkeeping. A task must be small (it waits in a pipe); a result may be large. Worker
    processes are gone when the iterator is closed, and end by themselves when this process dies.
    Raises what a task raised, as far as it is a UserError; RuntimeError for any other fault or a
    worker that died.
    """
    count = min(workers, len(tasks))
    if count <= 1:
        yield from map(make(*setup), tasks)
        return
    ends: list[Connection] = []
    processes: list[BaseProcess] = []
    try:
        _start(make, setup, count, ends, processes)
        for k in range(min(_AHEAD * count, len(tasks))):
            _send(ends[k % count], tasks[k])
        for k in range(len(tasks)):
            result = _receive(ends[k % count], processes[k % count])
            if k + _AHEAD * count < len(tasks):
                _send(ends[k % count], tasks[k + _AHEAD * count])
            yield result
    finally:
        for end in ends:
            end.close()
        for process in processes:
            process.terminate()
            process.join()


def _start(
    make: Callable[..., Callable[[Any], Any]],
    setup: tuple[Any, ...],
    count: int,
    ends: list[Connection],
    processes: list[BaseProcess],
) -> None:
    # Spawned, not forked: the caller may have threads. An interrupt from the terminal reaches the
    # whole process group; it is blocked in the workers from birth, so that only this process
    # answers to it.
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # would unblock the signal if the first worker started it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for _ in range(count):
            end, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, make, setup), daemon=True)
            process.start()
            theirs.close()
            ends.append(end)
            processes.append(process)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _send(end: Connection, task: Any) -> None:
    # A worker that is gone has left its fault in the pipe, or none: receiving from it tells.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        end.send(task)


def _receive(end: Connection, process: BaseProcess) -> Any:
    try:
        fault, result = end.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        raise RuntimeError(
            f"a worker process ended with code {process.exitcode} before its task was done "
            f"(a negative code is a signal; −9 is often a lack of memory)"
        ) from None
    if isinstance(result, UserError):
        raise result
    if fault:
        raise RuntimeError(f"a worker process failed:\n{fault}")
    return result


def _work(
    end: Connection, make: Callable[..., Callable[[Any], Any]], setup: tuple[Any, ...]
) -> None:
    try:
        function = make(*setup)
        while True:
            end.send(("", function(end.recv())))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent closed its end or died: there is nobody to work for
    except UserError as error:
        end.send(("fault", error))
    except Exception:
        end.send((traceback.format_exc(), None))
