"""The words of a schedule: actions on stages and micro-batches, and one program of them a rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True)
class Action:
    """Forward F, backward B, or its halves, input gradient I and weight gradient W, of a stage."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, micro-batch {self.micro_batch}"


@dataclass(frozen=True)
class Pair:
    """A forward and a backward (B or I) that run as one, each hiding the other's messages."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"{self.forward} paired with {self.backward}"


Step = Action | Pair
Program = tuple[Step, ...]  # of one rank


def actions(program: Iterable[Step]) -> Iterator[Action]:
    """The actions in order, a pair taken apart: its forward, then its backward."""
    for step in program:
        yield from (step.forward, step.backward) if isinstance(step, Pair) else (step,)


@dataclass(frozen=True)
class Schedule:
    """One program a rank; `placement[s]` is the rank of stage s, stages in the model's order."""

    kind: str
    ranks: int
    micro_batches: int
    placement: tuple[int, ...]
    programs: tuple[Program, ...]

    def forward_only(self) -> Schedule:
        """The forwards in the same order, without backwards, for evaluation."""
        forwards = (tuple(a for a in actions(p) if a.kind == "F") for p in self.programs)
        return replace(self, programs=tuple(forwards))


def needs(action: Action, stages: int) -> tuple[Action, ...]:
    """What must be done before the action can be; "B" there stands for the stage's B or I."""
    s, i = action.stage, action.micro_batch
    if action.kind == "F":
        return (Action("F", s - 1, i),) if s > 0 else ()
    if action.kind == "W":
        return (Action("B", s, i),)
    return (Action("F", s, i), *([Action("B", s + 1, i)] if s + 1 < stages else []))


def result(action: Action) -> Action:
    """The name by which `needs` calls what the action does."""
    return Action("B", action.stage, action.micro_batch) if action.kind == "I" else action
