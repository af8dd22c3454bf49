"""Where a process learns which rank it is, and where local ranks are started.

With `cli.py` this is the only file that reads the environment. A rank is described by torchrun's
variables, by SLURM's, or by nothing (one process). `start_local` starts ranks through torch's
elastic agent; a rank that it started calls `die_with_parent()` first thing and hands a failure to
`report_failure`, so that the launcher shows the first one, once. torch is imported inside the
functions that need it: it takes seconds, and a rank must tie itself to its launcher before that.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from penteract.errors import UserError

if TYPE_CHECKING:
    from types import FrameType

    import torch
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

LAUNCHER_PID = "PENTERACT_LAUNCHER_PID"  # set by start_local for its ranks
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by torch's elastic agent for its ranks
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class Launch:
    """Which rank this process is, and where the ranks meet."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    address: str = "localhost"
    port: int = 0
    source: str = "single"  # or "torchrun", "slurm"
    hosted: bool = False  # an elastic agent already listens at address:port


def environment(variables: Mapping[str, str] | None = None) -> Launch:
    """This process's place, from torchrun's variables, else SLURM's, else a single process.

    `variables` is `os.environ` unless given. Raises UserError naming the variable that is missing
    or malformed.
    """
    env = os.environ if variables is None else variables
    if "RANK" in env or "WORLD_SIZE" in env:
        names, source = ("RANK", "WORLD_SIZE", "LOCAL_RANK"), "torchrun"
    elif "SLURM_PROCID" in env:
        names, source = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"), "slurm"
    else:
        return Launch()
    rank, world, local_rank = (_whole(env, name) for name in names)
    if world < 1 or rank >= world or local_rank > rank:
        raise UserError(
            f"{names[0]} = {rank}, {names[1]} = {world}, {names[2]} = {local_rank}: "
            "they must satisfy 0 <= local rank <= rank < world"
        )
    if world == 1:
        return Launch(local_rank=local_rank, source=source)
    address, port = _master(env, source)
    hosted = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Launch(rank, world, local_rank, address, port, source, hosted)


def _master(env: Mapping[str, str], source: str) -> tuple[str, int]:
    """Where rank 0 listens: MASTER_ADDR and MASTER_PORT, or derived from a SLURM job."""
    if "MASTER_ADDR" in env or source == "torchrun":
        address = _text(env, "MASTER_ADDR")
    else:
        lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        name = next((name for name in lists if name in env), lists[1])
        address = first_host(_text(env, name))
    if "MASTER_PORT" in env or source == "torchrun":
        port = _whole(env, "MASTER_PORT")
    else:
        # Below the range that systems hand out to outgoing connections (from 32768).
        port = 15000 + _whole(env, "SLURM_JOB_ID") % 16384
    if not 1 <= port <= 65535:
        raise UserError(f"MASTER_PORT = {port} is not a port: 1 .. 65535")
    return address, port


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list: `"gpu[007-009,12],login1"` gives `"gpu007"`."""
    first = re.match(r"((?:[^,\[\]]|\[[^\[\]]*\])+)(?:,|$)", nodes)
    host = re.sub(r"\[(\w+)[^\[\]]*\]", r"\1", first[1]) if first else ""
    if not re.fullmatch(r"[\w.-]+", host):
        raise UserError(f"cannot find the first host in the SLURM node list {nodes!r}")
    return host


def _text(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        known = ", ".join(n for n in ("RANK", "WORLD_SIZE", "SLURM_PROCID") if n in env)
        raise UserError(f"environment variable {name} is missing or empty, although {known} is set")
    return env[name]


def _whole(env: Mapping[str, str], name: str) -> int:
    text = _text(env, name)
    if not re.fullmatch(r"\d{1,9}", text):
        raise UserError(f"environment variable {name} = {text!r} is not a whole number >= 0")
    return int(text)


def connect(launch: Launch, *, device: str = "auto", timeout_s: float = 600.0) -> torch.device:
    """Join the process group of `launch` (none for a world of 1) and return this rank's device.

    `device` is auto, cpu or cuda; gloo carries a cpu's messages and nccl a cuda device's. Waits at
    most `timeout_s` seconds for the other ranks, and each collective later waits as long. Raises
    UserError where the address cannot be used or the device is not there, TimeoutError where the
    other ranks do not come.
    """
    import torch
    import torch.distributed as dist

    from penteract import compat

    place = torch.device("cpu")
    on_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if on_cuda:
        place = torch.device("cuda", _device_number(launch, torch.cuda.device_count()))
        torch.cuda.set_device(place)
    if launch.world == 1:
        return place
    at = f"MASTER_ADDR = {launch.address}, MASTER_PORT = {launch.port}"
    try:
        socket.getaddrinfo(launch.address, launch.port)
    except OSError as error:
        raise UserError(f"{at}: the address is not known ({error})") from error
    timeout = timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            launch.address,
            launch.port,
            launch.world,
            is_master=launch.rank == 0 and not launch.hosted,
            timeout=timeout,
        )
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            store=store,
            rank=launch.rank,
            world_size=launch.world,
            timeout=timeout,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        # torch appends a C++ backtrace; the first line says what happened.
        reason = str(error).splitlines()[0]
        if "EADDRINUSE" in str(error):
            raise UserError(f"{at}: the port is in use; choose another ({reason})") from error
        raise TimeoutError(
            f"{at}: rank {launch.rank} of {launch.world} did not meet the others within "
            f"{timeout_s:g} s ({reason})"
        ) from error
    atexit.register(compat.leave_group)
    return place


def _device_number(launch: Launch, found: int) -> int:
    if launch.local_rank < found:
        return launch.local_rank
    # SLURM's --gpus-per-task=1 shows a rank its own device only; an agent's ranks would share it.
    if found == 1 and not launch.hosted:
        return 0
    raise UserError(f"local rank {launch.local_rank} has no device: {found} cuda devices")


def die_with_parent() -> None:
    """Tie this rank's life to the `start_local` that started it; without one, do nothing.

    On Linux the kernel kills it with its parent, even one ended by SIGKILL; elsewhere a thread
    looks each second.
    """
    parent = int(os.environ.get(LAUNCHER_PID, "0"))
    if not parent:
        return
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def report_failure(text: str) -> None:
    """Say once why this rank fails: a traceback, or one line for a user's error.

    Goes to standard error, but under `start_local` to the launcher, which shows the first rank's.
    """
    path = os.environ.get(ERROR_FILE)
    if path:  # the form that torch's elastic agents, ours or torchrun's, read
        extra = {"py_callstack": text, "timestamp": int(time.time()), "time_ns": time.time_ns()}
        last_line = text.strip().rpartition("\n")[2]
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": last_line, "extraInfo": extra}}, file)
    if not path or LAUNCHER_PID not in os.environ:
        print(text.rstrip(), file=sys.stderr, flush=True)


def start_local(
    nproc: int,
    argv: Sequence[str],
    *,
    command: Sequence[str] = ("-m", "penteract"),
    grace_s: float = 300.0,
) -> int:
    """Run `nproc` local ranks of `python -m penteract ARGV`; return 0 or the first failure's code.

    The first SIGTERM, SIGINT, SIGHUP or SIGUSR1 is passed on, and the ranks have `grace_s` seconds
    to finish the step, save and exit; a second one ends everything now. A rank ended by a signal
    gives 1. `command` replaces `-m penteract`. Prints the first failing rank's report, once. Raises
    SystemExit(2) where a launcher has already started this process, or `nproc` is below 1.
    """
    for name in ("RANK", "SLURM_PROCID"):
        if name in os.environ:
            _refuse(f"--nproc {nproc}: {name} is set, so a launcher started this process already")
    if nproc < 1:
        _refuse(f"--nproc {nproc}: at least 1 rank")
    # The agent would stop the ranks itself at a signal, after 30 s by force: it is given none.
    variables = {LAUNCHER_PID: str(os.getpid()), "TORCHELASTIC_SIGNALS_TO_HANDLE": ""}
    variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="penteract-") as folder, _variables(variables):
        agent = _local_agent(nproc, [*command, *argv], folder)
        stop = _Stop(agent, grace_s)
        with _handling(stop):
            failures = agent.run().failures
    # A rank listens for signals from its first moments on; what dies before has nothing to save.
    early = {-stop.number, -signal.SIGTERM} if stop.number else set()
    if all(failure.exitcode in early for failure in failures.values()):
        return 0
    if stop.end_reason:
        print(stop.end_reason, file=sys.stderr, flush=True)
        return 1
    return _explain(failures, nproc)


def _refuse(message: str) -> NoReturn:
    print(message, file=sys.stderr, flush=True)
    raise SystemExit(2)


def _local_agent(nproc: int, arguments: Sequence[str], folder: str) -> LocalElasticAgent:
    """torch's elastic agent for one node, meeting on a free port, without restarts."""
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

    def __init__(self, agent: LocalElasticAgent, grace_s: float) -> None:
        self.agent = agent
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
        workers = self.agent.get_worker_group().workers
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
        stop.agent.get_worker_group().spec.rdzv_handler.shutdown()


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
    print(headline, file=sys.stderr, flush=True)
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
