"""`run_ranks`: values come back, the first failure is named, and no process is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penteract.testing import run_ranks, world_axis


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


def total() -> torch.Tensor:
    x = torch.tensor([float(world_axis().rank)], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


@pytest.mark.parametrize("n", [1, 2, 4])
def test_values_come_back_in_rank_order(n: int) -> None:
    values = run_ranks(lambda: (world_axis().rank, total()), n)
    assert [rank for rank, _ in values] == list(range(n))
    assert all(x.item() == n * (n - 1) / 2 for _, x in values)


@pytest.mark.parametrize("backend", ["shared_memory", "gloo"])
def test_the_ranks_are_joined_by_the_chosen_backend(backend: str) -> None:
    def joined() -> tuple[str, torch.Tensor]:
        return dist.get_backend(), total()

    found = run_ranks(joined, 2, backend=backend)
    assert [(name, x.item()) for name, x in found] == [(backend, 1.0)] * 2
    if backend == "shared_memory":
        assert run_ranks(dist.get_backend, 2) == [backend] * 2


def test_a_large_tensor_outlives_its_rank() -> None:
    first, second = run_ranks(lambda: torch.full((500_000,), float(world_axis().rank)), 2)
    assert first.sum() == 0
    assert second.sum() == 500_000


def test_arguments_are_passed() -> None:
    assert run_ranks(lambda a, b: a + b, 2, 3, 4) == [7, 7]


def test_the_first_failing_rank_is_reported_not_its_victims(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        if world_axis().rank == 2:
            raise ValueError("the cause")
        total()  # breaks when rank 2 goes

    def late(*args: Any, **kwargs: Any) -> list[Any]:
        time.sleep(0.3)  # by then all three have failed, and rank 0 would come first
        return wait(*args, **kwargs)

    monkeypatch.setattr("penteract.testing.wait", late)
    with pytest.raises(RuntimeError, match=r"(?s)rank 2 of 3 failed.*ValueError: the cause"):
        run_ranks(fail, 3)


def test_a_failure_does_not_wait_for_the_others() -> None:
    def fail() -> None:
        if world_axis().rank == 0:
            raise ValueError("the cause")
        time.sleep(600)

    start = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 0 of 2 failed"):
        run_ranks(fail, 2)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_dies_by_a_signal_is_reported_at_once(number: signal.Signals) -> None:
    def die() -> None:
        if world_axis().rank == 1:
            os.kill(os.getpid(), number)
        total()

    start = time.monotonic()
    with pytest.raises(RuntimeError, match=f"rank 1 of 2 failed:\nended by signal {number.name}"):
        run_ranks(die, 2)
    assert time.monotonic() - start < 10


def test_a_rank_that_exits_without_an_answer_is_reported() -> None:
    with pytest.raises(RuntimeError, match="ended by exit code 5 without an answer"):
        run_ranks(lambda: os._exit(5), 1)


def test_a_dead_rank_is_seen_though_its_child_lives() -> None:
    def leave_a_child() -> None:
        if os.fork() == 0:
            time.sleep(3)
            os._exit(0)
        os._exit(5)

    start = time.monotonic()
    with pytest.raises(RuntimeError, match="ended by exit code 5"):
        run_ranks(leave_a_child, 1)
    assert time.monotonic() - start < 2.5


def test_a_value_that_cannot_be_sent_is_a_failure() -> None:
    with pytest.raises(RuntimeError, match="rank 0 of 1 failed"):
        run_ranks(lambda: lambda: None, 1)


def test_a_hang_times_out_with_its_stack(tmp_path: Path) -> None:
    def hang_here() -> None:
        (tmp_path / str(world_axis().rank)).write_text(str(os.getpid()))
        if world_axis().rank == 1:
            time.sleep(600)

    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"(?s)within 1 s from 1 of 2 ranks.*rank 1:.*hang_here"):
        run_ranks(hang_here, 2, timeout_s=1.0)
    assert time.monotonic() - start < 10
    for file in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


def test_several_torch_threads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(AssertionError, match="OMP_NUM_THREADS=1"):
        run_ranks(lambda: None, 1)
