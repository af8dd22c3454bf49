"""Local ranks: their exit codes, reports, signals and deaths; no process is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penteract import local_ranks
from penteract.launch import LAUNCHER_PID
from penteract.local_ranks import Restarts, start_local

# The scripts import nothing of torch's, unless they need it, so that they start in no time.

RANK_SCRIPT = """
import os, pathlib, signal, sys, time
here = pathlib.Path(sys.argv[1]); rank = int(os.environ["RANK"])
signals = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda n, frame: signals.append(n))
(here / f"pid{rank}").write_text(str(os.getpid()))
def wait_for_signal():
    while not signals:
        time.sleep(0.02)
"""


def steps_of(folder: Path) -> int | None:
    """What stands for the newest checkpoint."""
    path = folder / "step"
    return int(path.read_text()) if path.exists() else None


def start(
    folder: Path, command: list[str], grace_s: float, nproc: int, most: int, counts: list[int]
) -> None:
    """The launcher's process: leads a process group and exits with `start_local`'s code."""
    os.setpgid(0, 0)
    with open(folder / "stderr", "wb") as file:
        os.dup2(file.fileno(), 2)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMP_NUM_THREADS", LAUNCHER_PID):
        os.environ.pop(name, None)
    before = (dict(os.environ), signal.getsignal(signal.SIGTERM))
    restarts = Restarts(most, lambda: steps_of(folder), counts)
    words = [str(folder), "a b"]
    code = start_local(nproc, words, command=command, grace_s=grace_s, restarts=restarts)
    assert before == (dict(os.environ), signal.getsignal(signal.SIGTERM))
    os._exit(code)


class Launcher:
    """A process that runs ranks of a script with `start_local`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # The server is a clean process, whatever threads the tests have, with torch in memory.
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(
            ["penteract.local_ranks", "torch.distributed.elastic.agent.server.local_elastic_agent"]
        )

    def start(
        self,
        body: str,
        grace_s: float = 60.0,
        *,
        nproc: int = 2,
        most: int = 0,
        counts: tuple[int, ...] = (),
    ) -> None:
        script = self.folder / "rank.py"
        script.write_text(RANK_SCRIPT + body)
        self.process = self.context.Process(
            target=start, args=(self.folder, [str(script)], grace_s, nproc, most, [*counts])
        )
        self.process.start()
        wait_until(lambda: len(pids_in(self.folder)) == nproc)
        assert self.process.pid is not None
        self.pid = self.process.pid

    def code(self) -> int | None:
        self.process.join(30)
        return self.process.exitcode

    def run(self, body: str, **options: Any) -> int | None:
        self.start(body, **options)
        return self.code()

    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    left = [pid for pid in pids_in(tmp_path) if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    launcher.process.kill()
    launcher.process.join()
    assert not left


def pids_in(folder: Path) -> list[int]:
    return [int(text) for text in (file.read_text() for file in folder.glob("pid*")) if text]


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], Any], within_s: float = 15.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_ranks_that_finish_give_0(launcher: Launcher, tmp_path: Path) -> None:
    body = """
names = "WORLD_SIZE LOCAL_RANK MASTER_ADDR OMP_NUM_THREADS".split()
(here / f"out{rank}").write_text(" ".join([*sys.argv[2:], *(os.environ[n] for n in names)]))
"""
    assert launcher.run(body) == 0
    assert (tmp_path / "out1").read_text() == "a b 2 1 localhost 1"
    assert launcher.stderr() == ""


def test_the_first_failing_ranks_code_is_returned(launcher: Launcher) -> None:
    assert launcher.run("if rank == 1: os._exit(3)\nwait_for_signal(); sys.exit(1)") == 3
    assert launcher.stderr() == "rank 1 of 2 failed with exit code 3\n"


REPORTING = """
from penteract.launch import report_failure
if rank == 0:
    while not (here / "failed").exists(): time.sleep(0.01)
    report_failure("peer closed the connection"); os._exit(1)
report_failure("the cause"); (here / "failed").touch(); os._exit(CODE)
"""


def test_the_first_report_is_shown_once(launcher: Launcher) -> None:
    assert launcher.run(REPORTING.replace("CODE", "4")) == 4
    assert launcher.stderr() == "rank 1 of 2 failed with exit code 4:\nthe cause\n"


def test_a_users_error_is_one_message(launcher: Launcher) -> None:
    assert launcher.run(REPORTING.replace("CODE", "2")) == 2
    assert launcher.stderr() == "the cause\n"


def test_a_rank_ended_by_a_signal_is_the_cause_of_its_peers_errors(launcher: Launcher) -> None:
    body = REPORTING.replace('report_failure("the cause"); ', "").replace(
        "os._exit(CODE)", "time.sleep(1.2); os.kill(os.getpid(), signal.SIGSEGV)"
    )
    assert launcher.run(body) == 1
    assert launcher.stderr() == "rank 1 of 2 was ended by SIGSEGV\n"


SAVING = 'wait_for_signal(); time.sleep(0.3); (here / f"saved{rank}").write_text(str(signals))'


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
    ],
)
def test_the_first_signal_lets_the_ranks_save(
    launcher: Launcher, tmp_path: Path, number: signal.Signals
) -> None:
    launcher.start(SAVING)
    os.kill(launcher.pid, number)
    assert launcher.code() == 0
    assert [(tmp_path / f"saved{r}").read_text() for r in (0, 1)] == [str([int(number)])] * 2


def test_a_signal_to_the_whole_process_group_counts_once(
    launcher: Launcher, tmp_path: Path
) -> None:
    launcher.start(SAVING)
    os.kill(launcher.pid, signal.SIGINT)
    time.sleep(0.1)
    os.killpg(launcher.pid, signal.SIGINT)
    assert launcher.code() == 0
    assert (tmp_path / "saved0").read_text() == str([int(signal.SIGINT)])


NEVER = "while True: time.sleep(0.1)"


def test_a_second_signal_ends_everything_now(launcher: Launcher) -> None:
    launcher.start(NEVER)
    os.kill(launcher.pid, signal.SIGTERM)
    time.sleep(1.1)
    os.kill(launcher.pid, signal.SIGTERM)
    start = time.monotonic()
    assert launcher.code() == 1
    assert time.monotonic() - start < 5


def test_a_rank_that_a_second_signal_ended_has_saved_nothing(launcher: Launcher) -> None:
    """It may have reached the ranks past the launcher: 128 + its number is no success."""
    launcher.start("wait_for_signal(); os._exit(128 + signals[0])")
    os.kill(launcher.pid, signal.SIGTERM)
    assert launcher.code() == 128 + signal.SIGTERM


def test_ranks_that_do_not_stop_in_time_are_ended(launcher: Launcher) -> None:
    launcher.start(NEVER, grace_s=0.3)
    os.kill(launcher.pid, signal.SIGTERM)
    assert launcher.code() == 1
    assert launcher.stderr() == "the ranks did not stop within 0.3 s of a signal: ended\n"


def test_ranks_die_with_a_killed_launcher(launcher: Launcher, tmp_path: Path) -> None:
    launcher.start(f"""
from penteract.launch import die_with_parent
die_with_parent()
(here / f"tied{{rank}}").touch()
{NEVER}
""")
    wait_until(lambda: len(list(tmp_path.glob("tied*"))) == 2)
    assert all(alive(pid) for pid in pids_in(tmp_path))
    os.kill(launcher.pid, signal.SIGKILL)
    assert launcher.code() == -signal.SIGKILL
    wait_until(lambda: not any(alive(pid) for pid in pids_in(tmp_path)), within_s=5)


JOINING = """
import torch, torch.distributed as dist
from penteract.launch import connect, environment
launch = environment()
assert launch.hosted
connect(launch, device="cpu", timeout_s=60)
x = torch.tensor([float(rank + 1)])
dist.all_reduce(x)
(here / f"sum{rank}").write_text(str(x.item()))
"""


def test_local_ranks_meet_at_the_agents_port(launcher: Launcher, tmp_path: Path) -> None:
    assert launcher.run(JOINING) == 0
    assert [(tmp_path / f"sum{r}").read_text() for r in (0, 1)] == ["3.0", "3.0"]
    assert "failed to bind" not in launcher.stderr()  # no rank tries to listen there


ENDING = (
    """
import atexit
from pathlib import Path
def threads():
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return " ".join(name for name in names if "gloo" in name)
atexit.register(lambda: (here / f"end{rank}").write_text(threads()))
"""
    + JOINING
    + """
class Holder: pass
holder = Holder()
holder.itself, holder.group = holder, dist.new_group([0, 1])
dist.all_reduce(x, group=holder.group)
assert "gloo" in threads()
del holder
"""
)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_thread_of_the_group_outlives_the_interpreter(
    launcher: Launcher, tmp_path: Path
) -> None:
    """One that lets go of a tensor later aborts the process, now and then, after all is saved."""
    assert launcher.run(ENDING) == 0
    assert [(tmp_path / f"end{r}").read_text() for r in (0, 1)] == ["", ""]


# Rank 1 fails in each of the first FAILURES starts; each start but those at FROZEN gets a step on.
RESTARTED = """
tries = here / f"tries{rank}"; n = int(tries.read_text()) + 1 if tries.exists() else 1
tries.write_text(str(n)); world = os.environ["WORLD_SIZE"]
(here / f"worlds{rank}").open("a").write(world)
if rank == 1 and n not in FROZEN: (here / "step").write_text(str(n))
if rank == 1 and n <= FAILURES: os._exit(3)
if n <= FAILURES: wait_for_signal(); sys.exit(1)
"""


def body(failures: int, frozen: tuple[int, ...] = ()) -> str:
    return RESTARTED.replace("FAILURES", str(failures)).replace("FROZEN", str(frozen))


def test_ranks_that_fail_are_started_again(launcher: Launcher) -> None:
    """Each start got further, so none counts."""
    assert launcher.run(body(3), most=1) == 0
    lines = launcher.stderr().splitlines()
    assert lines == [
        line
        for n in (1, 2, 3)
        for line in ("rank 1 of 2 failed with exit code 3", f"starting 2 ranks again from step {n}")
    ]


def test_a_loop_that_gets_no_further_ends(launcher: Launcher) -> None:
    assert launcher.run(body(9, (1, 3, 4, 5, 6, 7, 8, 9)), most=2) == 3
    said = launcher.stderr().splitlines()[1::2]
    assert said == [
        "starting 2 ranks again from the start", "starting 2 ranks again from step 2",
        "starting 2 ranks again from step 2", "starting 2 ranks again from step 2",
        "given up: 3 failures in a row from step 2",
    ]  # fmt: skip


def test_fewer_ranks_are_started_where_as_many_get_no_further(
    launcher: Launcher, tmp_path: Path
) -> None:
    """The first failure has a new step behind it and changes nothing."""
    assert launcher.run(body(4, (2, 4)), nproc=5, most=2, counts=(4, 2)) == 0
    assert (tmp_path / "worlds1").read_text() == "55442"


@pytest.mark.parametrize("code", [2, 4])
def test_what_would_fail_alike_is_not_started_again(launcher: Launcher, code: int) -> None:
    script = f"if rank == 1: os._exit({code})\nwait_for_signal()"
    assert launcher.run(script, most=3) == code
    assert "again" not in launcher.stderr()


def test_a_signal_ends_the_restarts_too(launcher: Launcher, tmp_path: Path) -> None:
    script = "(here / 'ready').touch()\nwait_for_signal(); os._exit(1)"
    launcher.start(script, most=9)
    wait_until((tmp_path / "ready").exists)
    os.kill(launcher.pid, signal.SIGTERM)
    assert launcher.code() == 1
    assert "again" not in launcher.stderr()


def test_progress_is_asked_for_only_where_a_restart_may_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store that cannot be asked just then must not end the launcher otherwise."""

    def refuse() -> int | None:
        raise AssertionError("nobody needs it")

    monkeypatch.setattr(local_ranks, "_run", lambda *_: 1)
    assert start_local(1, [], restarts=Restarts(0, refuse)) == 1
