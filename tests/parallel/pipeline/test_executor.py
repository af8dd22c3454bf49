"""A program is executed as it stands, and what goes wrong in it is named."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penteract.mesh import create_channels, single
from penteract.parallel.buckets import Sharding
from penteract.parallel.buffers import Buffers
from penteract.parallel.parameters import adopt
from penteract.parallel.pipeline.actions import Action, Program, Schedule, Step
from penteract.parallel.pipeline.executor import (
    UNAWAITED,
    Executor,
    Output,
    StalledError,
    Timed,
)
from penteract.parallel.pipeline.lowering import Lowered, lower
from penteract.parallel.pipeline.schedules import schedule
from penteract.parallel.tensor import linear
from penteract.shared_memory import NAME as SHARED_MEMORY
from penteract.testing import run_ranks, world_axis

CPU = torch.device("cpu")
WIDTH = 3


class Chain(nn.Module):
    """Stage s multiplies the stream by its own matrix; the last makes the loss of it."""

    def __init__(self, stages: int, held: Sequence[int]) -> None:
        super().__init__()
        self.last, self.unit_stages = stages - 1, sorted(held)
        self.units = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False).double() for _ in held)
        for s, unit in zip(self.unit_stages, self.units, strict=True):
            nn.init.constant_(unit.weight, 0.1 * (s + 1))
        self.events: list[str] = []

    def forward(self, stage: int, m: int, stream: Tensor | None) -> Output:
        self.events.append(f"F{stage}.{m}")
        if stream is None:
            stream = torch.full((2, WIDTH), float(m + 1), dtype=torch.float64)
        weight = self.units[self.unit_stages.index(stage)].weight
        stream = linear(stream, weight, None, getattr(self, "buffers", None))
        stream.register_hook(lambda _: self.events.append(f"B{stage}.{m}"))
        return Output(None, {"loss": stream.sum()}) if stage == self.last else Output(stream)


def boundary(stage: int, m: int) -> tuple[tuple[int, ...], torch.dtype]:
    return (2, WIDTH), torch.float64


def trained(
    plan: Schedule,
    rank: int = 0,
    *,
    change: Callable[[list[Lowered]], Any] = lambda program: None,
    timeout_s: float = 60.0,
    times: list[Timed] | None = None,
) -> tuple[list[str], dict[str, Tensor], dict[int, Tensor]]:
    """(what happened in order, summed terms, gradient of each stage) of one rank's program."""
    held = [s for s, r in enumerate(plan.placement) if r == rank]
    model = Chain(len(plan.placement), held)
    adopt(model)
    buffers = Buffers(model, Sharding.whole(single("dp-cp")), seed=0)
    model.__dict__["buffers"] = buffers  # its products write into them
    places = plan.placement
    pairs = {(a, b) for a, b in itertools.pairwise(places) if a != b}
    pp = world_axis() if plan.ranks > 1 else single("pp")
    timeout = timedelta(seconds=timeout_s)
    channels = create_channels(pp, pairs | {(b, a) for a, b in pairs}, timeout=timeout)
    program = list(lower(plan)[rank])
    change(program)
    buffers.begin()
    executor = Executor(rank, channels, CPU)
    terms = executor.run(program, model, boundary, buffers, times)
    buffers.finish()
    found = {slot.bucket.stage: slot.gradient.clone() for slot in buffers.slots()}
    return model.events, terms, found


def wanted(stages: int, micro_batches: int) -> tuple[float, list[Tensor]]:
    """The loss and the gradients by autograd alone."""
    matrices = [torch.full((WIDTH, WIDTH), 0.1 * (s + 1)).double() for s in range(stages)]
    for matrix in matrices:
        matrix.requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for m in range(micro_batches):
        stream = torch.full((2, WIDTH), float(m + 1), dtype=torch.float64)
        for matrix in matrices:
            stream = stream @ matrix.t()
        total = total + stream.sum()
    return float(total.detach()), list(torch.autograd.grad(total, matrices))


def test_accumulation_keeps_one_micro_batch_alive() -> None:
    plan = schedule("1f1b", ranks=1, micro_batches=3)
    times: list[Timed] = []
    events, terms, gradients = trained(plan, times=times)
    assert events == ["F0.0", "B0.0", "F0.1", "B0.1", "F0.2", "B0.2"]
    loss, matrices = wanted(1, 3)
    assert terms["loss"].item() == pytest.approx(loss)
    assert not terms["loss"].requires_grad
    assert torch.allclose(gradients[0], matrices[0])
    assert [t.action for t in times] == list(plan.programs[0])
    assert all(t.start <= t.end for t in times)


@pytest.mark.parametrize("kind", ["zb-v", "dualpipe-v", "gpipe"])
def test_two_stages_of_one_rank_hand_on_without_messages(kind: str) -> None:
    plan = schedule(kind, ranks=1, chunks=2, micro_batches=3)
    _, terms, gradients = trained(plan)
    loss, matrices = wanted(2, 3)
    assert terms["loss"].item() == pytest.approx(loss)
    assert all(torch.allclose(gradients[s], matrices[s]) for s in (0, 1))


KINDS = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("1f1b-pairs", 1),
    ("interleaved", 3),
    ("zb-h1", 1),
    ("zb-v", 2),
    ("dualpipe-v", 2),
]


def every_kind() -> list[tuple[dict[str, Tensor], dict[int, Tensor]]]:
    rank, found = world_axis().rank, []
    for kind, chunks in KINDS:
        plan = schedule(kind, ranks=2, chunks=chunks, micro_batches=5)
        found.append(trained(plan, rank)[1:])
    return found


@pytest.mark.parametrize("backend", [SHARED_MEMORY, "gloo"])
def test_every_schedule_on_two_ranks(backend: str) -> None:
    by_rank = run_ranks(every_kind, 2, backend=backend)
    for (_, chunks), *found in zip(KINDS, *by_rank, strict=True):
        loss, matrices = wanted(2 * chunks, 5)
        assert sum(float(terms.get("loss", 0)) for terms, _ in found) == pytest.approx(loss)
        gradients = found[0][1] | found[1][1]
        assert all(torch.allclose(gradients[s], matrices[s]) for s in range(2 * chunks))


# --- memory


def streams_kept() -> int:
    """How many streams of the first stage are alive when all forwards are done."""
    rank, made, alive = world_axis().rank, list[Any](), list[int]()
    forward, backward = Chain.forward, Buffers.begin_backward

    def watched(self: Chain, stage: int, m: int, stream: Tensor | None) -> Output:
        output = forward(self, stage, m, stream)
        if output.stream is not None:
            made.append(weakref.ref(output.stream.untyped_storage()))
        return output

    def count(*args: Any, **options: Any) -> None:
        alive.append(sum(ref() is not None for ref in made))
        backward(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Chain, "forward", watched)
        patch.setattr(Buffers, "begin_backward", count)
        trained(schedule("gpipe", ranks=2, micro_batches=4), rank)
    return alive[0]


@pytest.mark.parametrize("backend", [SHARED_MEMORY, "gloo"])
def test_memory_of_what_was_sent_is_free(backend: str) -> None:
    """But for the newest ones, which gloo keeps until they are waited for."""
    first, last = run_ranks(streams_kept, 2, backend=backend)
    assert first <= UNAWAITED
    assert last == 0


# --- faults


def without_a_send(program: list[Lowered]) -> None:
    at = max(i for i, one in enumerate(program) if one.send)
    program[at] = dataclasses.replace(program[at], send=())


def stalled() -> str:
    rank = world_axis().rank
    plan = schedule("1f1b", ranks=2, micro_batches=2)
    change = without_a_send if rank == 1 else (lambda program: None)
    try:
        trained(plan, rank, change=change, timeout_s=2.0)
    except (StalledError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_message_that_does_not_come_ends_the_step_with_its_name() -> None:
    first, second = run_ranks(stalled, 2)
    assert first.startswith(
        "StalledError: pipeline rank 0, B of stage 0, micro-batch 1: the gradient of stage 1, "
        "micro-batch 1, has not come from pipeline rank 1 (rank 1)"
    )
    assert "left over" in second  # what was not sent


def test_a_weight_gradient_that_is_left_in_the_queue_is_named() -> None:
    def forget(program: list[Lowered]) -> None:
        steps: list[Step] = [one.step for one in program]
        program.pop(steps.index(Action("W", 0, 1)))

    with pytest.raises(AssertionError, match=r"left over: \[\(0, 1\)\]"):
        trained(schedule("zb-h1", ranks=1, micro_batches=2), change=forget)


def test_a_program_of_one_rank_is_a_list() -> None:
    program: Program = (Action("F", 0, 0), Action("B", 0, 0))
    assert schedule("1f1b", ranks=1, micro_batches=1).programs == (program,)
