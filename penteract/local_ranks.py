"""Local ranks: started through torch's elastic agent, ended together, and started again.

All of them live and die together: where one fails the others are ended, and the first failure is
shown, once. With restarts they begin again from the newest checkpoint, on fewer ranks where that is
allowed and as many as before get no further. torch is imported inside the functions that need it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from penteract.launch import LAUNCHER_PID

if TYPE_CHECKING:
    from types import FrameType

    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
FINAL = (2, 4)  # exit codes after which another start would end alike: wrong input, hardware


@dataclass(frozen=True)
class Restarts:
    """When ranks that failed are started again, and how many of them."""

    most: int = 0  # in a row from the same checkpoint
    progress: Callable[[], int | None] = lambda: None  # the newest checkpoint's step
    counts: Sequence[int] = ()  # of ranks that may do, the largest first; () is as many as before


def start_local(
    nproc: int,
    argv: Sequence[str],
    *,
    command: Sequence[str] = ("-m", "penteract"),
    grace_s: float = 300.0,
    restarts: Restarts = Restarts(),
) -> int:
    """Run `nproc` local ranks of `python -m penteract ARGV`; return 0 or the last failure's code.

    The first SIGTERM, SIGINT, SIGHUP or SIGUSR1 is passed on, and the ranks have `grace_s` seconds
    to finish the step, save and exit; a second one ends everything now. A rank ended by a signal
    gives 1. `command` replaces `-m penteract`. Prints the first failing rank's report of each
    start, once. Raises SystemExit(2) where a launcher has already started this process, or `nproc`
    is below 1.
    """
    for name in ("RANK", "SLURM_PROCID"):
        if name in os.environ:
            _refuse(f"--nproc {nproc}: {name} is set, so a launcher started this process already")
    if nproc < 1:
        _refuse(f"--nproc {nproc}: at least 1 rank")
    stop, words = _Stop(grace_s), [*command, *argv]
    counts = [n for n in restarts.counts if n < nproc]
    fruitless, reached = 0, restarts.progress() if restarts.most else None
    with _handling(stop):
        while True:
            code = _run(nproc, words, stop)
            if code == 0 or code in FINAL or stop.number:
                return code
            if not restarts.most:
                return code
            before, reached = reached, restarts.progress()
            fruitless = fruitless + 1 if reached == before else 0
            if fruitless > restarts.most:
                _say(f"given up: {fruitless} failures in a row {_from(reached)}")
                return code
            if fruitless and counts:
                nproc = counts.pop(0)
            _say(f"starting {nproc} ranks again {_from(reached)}")


def _run(nproc: int, words: Sequence[str], stop: _Stop) -> int:
    """Start the ranks once; their exit code, after what they failed of is shown."""
    # The agent would stop the ranks itself at a signal, after 30 s by force: it is given none.
    variables = {LAUNCHER_PID: str(os.getpid()), "TORCHELASTIC_SIGNALS_TO_HANDLE": ""}
    variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="penteract-") as folder, _variables(variables):
        agent = stop.agent = _local_agent(nproc, words, folder)
        try:
            failures = agent.run().failures
        finally:
            stop.agent = None
            agent.get_worker_group().spec.rdzv_handler.shutdown()
        hangs = _hangs(Path(folder))
    # A rank listens for signals from its first moments on; what dies before has nothing to save.
    early = {-stop.number, -signal.SIGTERM} if stop.number else set()
    if stop.number == signal.SIGINT:
        early.add(130)  # while it imports: `cli.main` answers a KeyboardInterrupt so
    if stop.end_reason:
        _say(stop.end_reason)
        return 1
    if all(failure.exitcode in early for failure in failures.values()):
        return 0
    if hangs and any(failure.exitcode == 3 for failure in failures.values()):
        _say("\n".join(text.partition("\n")[0] for text in hangs))
        _say(f"the one that was silent first:\n{hangs[0].rstrip()}")
        return 3
    return _explain(failures, nproc)


def _hangs(folder: Path) -> list[str]:
    """What ranks have said of a hang, the one that sent nothing for longest first."""
    found = []
    for path in folder.rglob("error.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            extra = json.loads(path.read_text(encoding="utf-8"))["message"]["extraInfo"]
            found.append((extra["sent_at"], extra["py_callstack"]))
    return [text for _, text in sorted(found)]


def _from(step: int | None) -> str:
    return "from the start" if step is None else f"from step {step}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _refuse(message: str) -> NoReturn:
    _say(message)
    raise SystemExit(2)


def _local_agent(nproc: int, arguments: Sequence[str], folder: str) -> LocalElasticAgent:
    """torch's elastic agent for one node, meeting on a free port, for one start."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    meeting = RendezvousParameters(
        backend="c10d",
        endpoint="localhost:0",
        run_id=uuid.uuid4().hex,
        min_nodes=1,
        max_nodes=1,
        local_addr="localhost",
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=nproc,
        rdzv_handler=get_rendezvous_handler(meeting),
        entrypoint=sys.executable,
        args=tuple(arguments),
        max_restarts=0,
        local_addr="localhost",
    )
    return LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=folder))


class _Stop:
    """The launcher's signal handler: passes the first signal on, ends the ranks at the second."""

    def __init__(self, grace_s: float) -> None:
        self.agent: LocalElasticAgent | None = None  # while ranks run
        self.grace_s = grace_s
        self.first_at: float | None = None
        self.number = 0  # the signal that was passed on
        self.end_reason = ""
        self.timer = threading.Timer(grace_s, self.time_is_up)
        self.timer.daemon = True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.first_at is None:
            self.first_at, self.number = time.monotonic(), number
            self.pass_on(number)
            self.timer.start()
        # Some senders, `timeout` for one, signal both a process and its group: one request.
        elif time.monotonic() - self.first_at > 1.0:
            if not self.pids():
                raise SystemExit(1)
            self.end(f"ended at once by a second signal, {signal.Signals(number).name}")

    def pass_on(self, number: int) -> None:
        if not self.pids():  # still starting: a little later
            later = threading.Timer(0.1, self.pass_on, (number,))
            later.daemon = True
            later.start()
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def pids(self) -> list[int]:
        workers = self.agent.get_worker_group().workers if self.agent else []
        return [worker.id for worker in workers if worker.id is not None]

    def time_is_up(self) -> None:
        self.end(f"the ranks did not stop within {self.grace_s:g} s of a signal: ended")

    def end(self, reason: str) -> None:
        self.end_reason = reason
        for pid in self.pids():  # each rank leads a process group of its own
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


@contextmanager
def _handling(stop: _Stop) -> Iterator[None]:
    """Install `stop` for the forwarded signals and silence torch's logs, for a while."""
    before = {number: signal.signal(number, stop) for number in FORWARDED}
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        stop.timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the ranks to inherit, for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _explain(failures: Mapping[int, ProcessFailure], nproc: int) -> int:
    """Print the first failure's report and return its exit code; 1 for a rank ended by a signal."""
    rank = min(failures, key=lambda r: _failed_at(failures[r]))
    code = failures[rank].exitcode
    report = _report(failures[rank]).get("py_callstack", "").rstrip()
    if code < 0:
        headline = f"rank {rank} of {nproc} was ended by {failures[rank].signal_name()}"
    else:
        headline = f"rank {rank} of {nproc} failed with exit code {code}"
    if report:  # a user's error, code 2, is one clear message that needs no headline
        headline = report if code == 2 else f"{headline}:\n{report}"
    _say(headline)
    return code if code > 0 else 1


def _report(failure: ProcessFailure) -> dict[str, Any]:
    """What the rank handed to `report_failure`, or nothing."""
    message = failure.error_file_data.get("message")
    return message.get("extraInfo", {}) if isinstance(message, dict) else {}


def _failed_at(failure: ProcessFailure) -> float:
    """When a rank failed, seconds since the epoch.

    A rank that died without a report is noticed a little after its peers report their broken
    connections, and it is the cause: it gets a head start. Unless SIGTERM ended it, which is how
    the agent ends the peers of a failed rank.
    """
    report = _report(failure)
    if "time_ns" in report:
        return float(report["time_ns"]) / 1e9
    return failure.timestamp - (0.0 if failure.exitcode == -signal.SIGTERM else 5.0)
