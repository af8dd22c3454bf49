"""The environment, where ranks meet, and what a launcher refuses."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from penteract.errors import UserError
from penteract.launch import (
    LAUNCHER_PID,
    Launch,
    connect,
    die_with_parent,
    environment,
    first_host,
    report_failure,
)
from penteract.local_ranks import start_local
from penteract.testing import run_ranks

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[007-008,12],login1",
    "SLURM_JOB_ID": "123456",
}


@pytest.fixture(autouse=True)
def no_launcher_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, *SLURM, LAUNCHER_PID):
        monkeypatch.delenv(name, raising=False)


def test_no_variable_is_a_single_process() -> None:
    assert environment({}) == Launch()
    assert environment() == Launch()


def test_torchrun_variables() -> None:
    launch = environment(TORCHRUN)
    assert launch == Launch(3, 8, 1, "head", 29500, "torchrun")
    assert environment({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}).hosted
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert environment(one) == Launch(source="torchrun")


def test_slurm_variables() -> None:
    launch = environment(SLURM)
    assert launch == Launch(5, 8, 1, "gpu007", 15000 + 123456 % 16384, "slurm")
    step = {**SLURM, "SLURM_STEP_NODELIST": "gpu008", "MASTER_PORT": "4000"}
    assert (environment(step).address, environment(step).port) == ("gpu008", 4000)
    assert environment({**SLURM, "MASTER_ADDR": "10.0.0.1"}).address == "10.0.0.1"
    assert environment({**SLURM, **TORCHRUN}).source == "torchrun"


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[03-10,12]", "n03"),
        ("rack[2,4]-n[0-7],x", "rack2-n0"),
        ("a-b.example.org", "a-b.example.org"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize("nodes", ["[", ",a", "n[1-2", "a b"])
def test_a_malformed_node_list_is_refused(nodes: str) -> None:
    with pytest.raises(UserError, match="SLURM node list"):
        first_host(nodes)


@pytest.mark.parametrize("variables", [TORCHRUN, SLURM], ids=["torchrun", "slurm"])
def test_a_missing_variable_is_named(variables: dict[str, str]) -> None:
    first = next(iter(variables))
    for name in variables:
        if name == first == "SLURM_PROCID":
            continue  # without it, it is no SLURM task
        rest = {other: value for other, value in variables.items() if other != name}
        with pytest.raises(UserError, match=f"{name} is missing or empty"):
            environment(rest)
        with pytest.raises(UserError, match=name if name != first else "missing or empty"):
            environment({**variables, name: ""})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": "two"}, "RANK = 'two' is not a whole number"),
        ({"RANK": "-1"}, "RANK = '-1'"),
        ({"RANK": "8"}, "RANK = 8, WORLD_SIZE = 8"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE = 0"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT = 99999 is not a port"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT = 0 is not a port"),
        ({"LOCAL_RANK": "9"}, "LOCAL_RANK = 9"),
    ],
)
def test_a_malformed_variable_is_named(change: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        environment({**TORCHRUN, **change})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def test_connect_joins_the_ranks() -> None:
    port = free_port()

    def meet() -> tuple[str, float]:
        rank = dist.get_rank()
        dist.destroy_process_group()  # run_ranks has joined them already
        place = connect(Launch(rank, 2, rank, "localhost", port), device="cpu", timeout_s=20)
        x = torch.tensor([float(rank + 1)])
        dist.all_reduce(x)
        return str(place), x.item()

    assert run_ranks(meet, 2) == [("cpu", 3.0), ("cpu", 3.0)]


def refusal(launch: Launch, timeout_s: float) -> Exception:
    """What `connect` raises. In a process of its own: a store leaves threads, and tests fork."""

    def attempt() -> Exception:
        with pytest.raises((UserError, TimeoutError)) as caught:
            connect(launch, device="cpu", timeout_s=timeout_s)
        return type(caught.value)(str(caught.value))

    error: Exception = run_ranks(attempt, 1)[0]
    return error


def test_connect_alone_makes_no_process_group() -> None:
    assert connect(Launch(), device="cpu") == torch.device("cpu")
    assert not dist.is_initialized()


def test_an_unknown_address_is_named() -> None:
    error = refusal(Launch(0, 2, 0, "no-such-host.invalid", 29500), timeout_s=5)
    assert isinstance(error, UserError)
    assert "MASTER_ADDR = no-such-host.invalid" in str(error)


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = refusal(Launch(0, 2, 0, "localhost", port), timeout_s=5)
    assert isinstance(error, UserError)
    assert f"MASTER_PORT = {port}: the port is in use" in str(error)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_timeout_is_honoured(rank: int) -> None:
    start = time.monotonic()
    error = refusal(Launch(rank, 2, rank, "localhost", free_port()), timeout_s=1)
    assert time.monotonic() - start < 8
    assert isinstance(error, TimeoutError)
    assert f"rank {rank} of 2 did not meet the others within 1 s" in str(error)


def test_a_device_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("has cuda devices")
    with pytest.raises(UserError, match="local rank 0 has no device: 0 cuda devices"):
        connect(Launch(), device="cuda")


@pytest.mark.parametrize(
    ("local_rank", "found", "hosted", "number"),
    [(0, 1, False, 0), (3, 4, True, 3), (3, 1, False, 0), (1, 1, True, None), (2, 2, False, None)],
)
def test_which_device_is_a_ranks(
    local_rank: int,
    found: int,
    hosted: bool,
    number: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A single visible device is the rank's own, as under --gpus-per-task=1, or shared by all."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    launch = Launch(local_rank=local_rank, hosted=hosted)
    if number is None:
        with pytest.raises(UserError, match=f"local rank {local_rank} has no device: {found} cuda"):
            connect(launch, device="cuda")
    else:
        assert connect(launch, device="cuda") == torch.device("cuda", number)


def test_a_report_without_a_launcher_goes_to_standard_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    report_failure("what happened")
    assert capsys.readouterr().err == "what happened\n"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    report_failure("under torchrun")
    assert capsys.readouterr().err == "under torchrun\n"
    assert "under torchrun" in (tmp_path / "error.json").read_text()


@pytest.mark.parametrize("name", ["RANK", "SLURM_PROCID"])
def test_a_launcher_inside_a_launcher_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "0")
    with pytest.raises(SystemExit) as caught:
        start_local(2, [])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_fewer_than_one_rank_is_refused() -> None:
    with pytest.raises(SystemExit) as caught:
        start_local(0, [])
    assert caught.value.code == 2


def test_a_rank_whose_launcher_is_gone_already_ends() -> None:
    code = "from penteract.launch import die_with_parent; die_with_parent(); print('lives')"
    gone = {**os.environ, LAUNCHER_PID: "1"}  # not the parent
    done = subprocess.run(
        [sys.executable, "-c", code], env=gone, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    die_with_parent()  # without a launcher it does nothing


def test_the_launcher_is_imported_without_torch() -> None:
    code = "import sys, penteract.launch; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
