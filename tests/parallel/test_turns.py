"""Two computations of which one goes on where the other would wait."""

from collections.abc import Callable

import pytest
import torch

from penteract.parallel.turns import Turns

CPU = torch.device("cpu")


def counting(turns: Turns, name: str, swaps: int, log: list[str]) -> Callable[[], None]:
    def run() -> None:
        for i in range(swaps):
            log.append(f"{name}{i}")
            turns.swap()
        log.append(f"{name}{swaps}")

    return run


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (2, 2, "a0 b0 a1 b1 a2 b2"),
        (1, 3, "a0 b0 a1 b1 b2 b3"),
        (3, 1, "a0 b0 a1 b1 a2 a3"),
        (0, 2, "a0 b0 b1 b2"),
        (2, 0, "a0 b0 a1 a2"),
        (0, 0, "a0 b0"),
    ],
)
def test_the_order_follows_from_where_they_swap(first: int, second: int, expected: str) -> None:
    turns = Turns()
    for _ in range(3):
        log: list[str] = []
        turns.both(counting(turns, "a", first, log), counting(turns, "b", second, log), CPU)
        assert log == expected.split()


def test_alone_nothing_is_swapped() -> None:
    turns, log = Turns(), list[str]()
    counting(turns, "a", 2, log)()
    assert log == ["a0", "a1", "a2"]


@pytest.mark.parametrize(("failing", "expected"), [(0, ["a0"]), (1, ["a0", "a1"])])
def test_where_one_fails_the_other_ends_at_its_swap(failing: int, expected: list[str]) -> None:
    turns, log = Turns(), list[str]()

    def fail() -> None:
        turns.swap()
        raise ValueError("here")

    pair = [counting(turns, "a", 3, log)] * 2
    pair[failing] = fail
    with pytest.raises(ValueError, match="here"):
        turns.both(*pair, CPU)
    assert log == expected
    turns.both(counting(turns, "a", 1, log), counting(turns, "b", 1, log), CPU)
    assert log[len(expected) :] == ["a0", "b0", "a1", "b1"]


def test_where_the_first_fails_at_once_the_second_never_runs() -> None:
    turns, log = Turns(), list[str]()

    def fail() -> None:
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        turns.both(fail, counting(turns, "b", 1, log), CPU)
    assert log == []
