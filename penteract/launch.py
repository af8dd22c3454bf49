"""Where a process learns which rank it is, meets the others, and says why it fails.

A rank is described by torchrun's variables, by SLURM's, or by nothing (one process). One that
`local_ranks` started calls `die_with_parent()` first thing and hands a failure to `report_failure`,
so that the launcher shows the first one, once. torch is imported inside the functions that need it:
it takes seconds, and a rank must tie itself to its launcher before that.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import penteract
from penteract.errors import UserError

if TYPE_CHECKING:
    import torch

LAUNCHER_PID = "PENTERACT_LAUNCHER_PID"  # set by start_local for its ranks
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by torch's elastic agent for its ranks
# With other values of these, ranks compute other bits, or wait for messages of another kind.
DECIDING = (
    "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS", "MKL_CBWR",
    "NCCL_ALGO", "NCCL_COLLNET_ENABLE", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS",
    "NCCL_NVLS_ENABLE", "NCCL_PROTO", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # fmt: skip


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


def surroundings() -> dict[str, dict[str, str]]:
    """What besides its configuration must be the same on all ranks: versions, our code, and the
    environment's variables that decide what is computed or sent.
    """
    import torch

    digest = hashlib.blake2b(digest_size=8)
    package = Path(__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    versions = {
        "penteract": f"{penteract.__version__} with hash {digest.hexdigest()}",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
    }
    if torch.cuda.is_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "version": versions,
        "environment": {name: os.environ[name] for name in DECIDING if name in os.environ},
    }


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


def report_failure(text: str, *, said_here: bool = True, **facts: float) -> None:
    """Say once why this rank fails: a traceback, or one line for a user's error.

    Goes to standard error, but under `start_local` to the launcher, which shows the first rank's
    and gets the `facts` too. Where another rank says the same it is not `said_here`.
    """
    path = os.environ.get(ERROR_FILE)
    if path and not facts and _is_said(path):
        return  # that it hangs; what fails since then follows from that
    if path:  # the form that torch's elastic agents, ours or torchrun's, read
        times = {"timestamp": int(time.time()), "time_ns": time.time_ns()}
        extra = {"py_callstack": text, **times, **facts}
        last_line = text.strip().rpartition("\n")[2]
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": last_line, "extraInfo": extra}}, file)
    if said_here and (not path or LAUNCHER_PID not in os.environ):
        print(text.rstrip(), file=sys.stderr, flush=True)


def _is_said(path: str) -> bool:
    """Whether the watchdog has written its report."""
    try:
        return "sent_at" in Path(path).read_text(encoding="utf-8")
    except OSError:
        return False
