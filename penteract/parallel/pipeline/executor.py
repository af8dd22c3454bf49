"""Executes a rank's program: its steps in their order, with the messages that `lowering` gave them.

It knows no schedule by name and reorders nothing. A forward hands its stream to the next stage and
keeps the autograd graph alone: the stream's own memory is free once it is sent. The stream and all
loss terms of a forward are roots of its backward. Where a backward is split, I computes the input
gradient and every linear layer's weight gradient waits in a queue for its W.

| what                     | axis | bytes a rank              | when         | hidden behind       |
|--------------------------|------|---------------------------|--------------|---------------------|
| stream to the next stage | pp   | t·h numbers, t/tp with sp | after F      | steps of both ranks |
| its gradient, back       | pp   | the same                  | after B or I | steps of both ranks |

Receives are posted before the step that precedes their use; a send is waited for when two newer
ones have begun, and its memory let go. Shapes are functions of the data, which every stage reads,
so none are exchanged. What must hold: a channel, that is a directed pair of ranks, is a
communicator of its own, and both its ends do the same messages in one order (`lowering.check`
proves it). Sources: Narayanan et al., arXiv:2104.04473, section 2; Qi et al., arXiv:2401.10241, for
the split backward.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penteract import compat
from penteract.collectives import Pending, start_receive, start_send
from penteract.mesh import Axis
from penteract.parallel.buffers import Held
from penteract.parallel.pipeline.actions import Action, actions
from penteract.parallel.pipeline.lowering import Lowered, Message
from penteract.parallel.turns import Turns

Shape = tuple[tuple[int, ...], torch.dtype]
Key = tuple[str, int, int]  # F or B, the stage that made it, micro-batch
UNAWAITED = 2  # of the newest sends; those of earlier steps have had their time


@dataclass(frozen=True)
class Output:
    """What a stage hands on: the stream, and the scaled loss terms that it computes."""

    stream: Tensor | None
    terms: Mapping[str, Tensor] = field(default_factory=dict)


Forward = Callable[[int, int, Tensor | None], Output]  # stage, micro-batch, stream so far
Boundary = Callable[[int, int], Shape | None]  # stage, micro-batch: of the stream after it


class Gradients(Protocol):
    """Who takes what backwards complete: see `Buffers`."""

    def begin_backward(self, stage: int = 0, *, last: bool, held: Held | None = None) -> None: ...

    def end_backward(self) -> None: ...

    def complete(self, stage: int, held: Held, *, last: bool) -> None: ...


class StalledError(RuntimeError):
    """A message between two stages has not come in time, or its other end is gone."""


@dataclass(frozen=True)
class Timed:
    """When an action ran, in seconds of the machine's clock, which ranks have in common."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Executor:
    """One pipeline rank: its place, and the channels that it talks over, by (source, target)."""

    rank: int
    channels: Mapping[tuple[int, int], Axis]
    device: torch.device
    turns: Turns | None = None  # that the two actions of a pair take; None: one after the other
    note: Callable[[Action], None] = lambda action: None  # called when an action begins

    def run(
        self,
        program: Sequence[Lowered],
        forward: Forward,
        boundary: Boundary,
        gradients: Gradients | None,
        times: list[Timed] | None = None,
    ) -> dict[str, Tensor]:
        """Execute `program`; each loss term's sum over this rank's forwards.

        `gradients` is None where there are no backwards, as in evaluation. `times` gets those of
        all actions, which then take no turns, and on a GPU do not overlap. Raises StalledError.
        """
        run = _Run(self, forward, boundary, gradients)
        # After its last completion a stage's gradients are whole on this rank.
        every = list(actions(lowered.step for lowered in program))
        run.last = {action.stage: action for action in every if action.kind in "BW"}
        for lowered in program:
            run.step(lowered, times)
        run.finish()
        return run.totals


@dataclass(frozen=True)
class _Alive:
    """A forward whose backward is still to come."""

    given: Tensor | None  # the leaf that stands for the stream so far
    stream: GradientEdge | None
    terms: list[GradientEdge]


class _Run:
    """A program that is being executed."""

    def __init__(
        self,
        executor: Executor,
        forward: Forward,
        boundary: Boundary,
        gradients: Gradients | None,
    ) -> None:
        self.rank, self.channels, self.device = executor.rank, executor.channels, executor.device
        self.turns, self.note = executor.turns, executor.note
        self.forward, self.boundary, self.gradients = forward, boundary, gradients
        self.last: dict[int, Action] = {}
        self.totals: dict[str, Tensor] = {}
        self.alive: dict[tuple[int, int], _Alive] = {}
        self.held: dict[tuple[int, int], Held] = {}
        self.coming: dict[Key, tuple[Tensor, Pending]] = {}
        self.here: dict[Key, Tensor] = {}  # has come, or was made on this rank
        self.sends: dict[Key, Message] = {}  # of the present step
        self.sent: list[tuple[Message, Pending]] = []

    def step(self, lowered: Lowered, times: list[Timed] | None) -> None:
        for message in lowered.post:
            self._post(message)
        present = list(actions([lowered.step]))
        for message in lowered.take:
            self._take(message, present)
        self.sends = {(m.kind, m.stage, m.micro_batch): m for m in lowered.send}
        # What modes of torch say is said to a thread.
        if self.turns is not None and times is None and not compat.has_modes():
            self._take_turns(present, self.turns)
        else:
            for action in present:
                start = self._now(times)
                self._hand_on(action, self._do(action))
                if times is not None:
                    times.append(Timed(action, start, self._now(times)))
        self.sent = [(message, pending) for message, pending in self.sent if not pending.is_over()]
        # With some backends a send is over, and its memory free, only when it is waited for.
        while len(self.sent) > UNAWAITED:
            self._wait(*self.sent.pop(0), "sent")

    def finish(self) -> None:
        """Nothing may be on its way, or left over."""
        for message, pending in self.sent:
            self._wait(message, pending, "sent")
        left = [*self.alive, *self.held, *self.coming, *self.here]
        assert self.gradients is None or not left, f"left over: {left}"

    def _now(self, times: list[Timed] | None) -> float:
        if times is not None and self.device.type == "cuda":
            # Not the whole device: receives that are posted ahead may wait for what comes after.
            torch.cuda.current_stream(self.device).synchronize()
        return time.time()

    # --- messages

    def _post(self, message: Message) -> None:
        before = message.stage if message.kind == "F" else message.stage - 1
        shape = self.boundary(before, message.micro_batch)
        if shape is not None:
            out = torch.empty(shape[0], dtype=shape[1], device=self.device)
            pending = start_receive(out, self.channels[message.source, message.target])
            self.coming[message.kind, message.stage, message.micro_batch] = out, pending

    def _take(self, message: Message, present: Iterable[Action]) -> None:
        key = message.kind, message.stage, message.micro_batch
        if key in self.coming:  # else the stage hands on nothing
            self.here[key], pending = self.coming.pop(key)
            self._wait(message, pending, " and ".join(map(str, present)))

    def _hand_on(self, action: Action, x: Tensor | None) -> None:
        kind = "F" if action.kind == "F" else "B"
        key = kind, action.stage, action.micro_batch
        if x is None:
            return
        if key not in self.sends:
            self.here[key] = x
            return
        message = self.sends[key]
        channel = self.channels[message.source, message.target]
        self.sent.append((message, start_send(x.contiguous(), channel)))

    def _wait(self, message: Message, pending: Pending, what: str) -> None:
        try:
            pending.wait()
        except RuntimeError as error:
            end = 0 if message.target == self.rank else 1
            peer = (message.source, message.target)[end]
            rank = self.channels[message.source, message.target].ranks[end]
            made = "stream" if message.kind == "F" else "gradient"
            raise StalledError(
                f"pipeline rank {self.rank}, {what}: the {made} of stage {message.stage}, "
                f"micro-batch {message.micro_batch}, has not come "
                f"{'to' if end else 'from'} pipeline rank {peer} (rank {rank}): "
                f"{str(error).splitlines()[0]}"
            ) from error

    # --- actions

    def _take_turns(self, present: Sequence[Action], turns: Turns) -> None:
        """Do the actions of a step; what they make is handed on in their order."""
        made: dict[Action, Tensor | None] = {}

        def do(action: Action) -> None:
            made[action] = self._do(action)

        each = [functools.partial(do, action) for action in present]
        if len(each) == 2:
            turns.both(each[0], each[1], self.device)
        else:
            each[0]()
        for action in present:
            self._hand_on(action, made[action])

    def _do(self, action: Action) -> Tensor | None:
        """What the next stage, or the one before, is to get."""
        self.note(action)
        if action.kind == "F":
            return self._forward(action)
        if action.kind == "W":
            return self._weights(action)
        return self._backward(action)

    def _forward(self, action: Action) -> Tensor | None:
        key = action.stage, action.micro_batch
        given = self.here.pop(("F", action.stage - 1, action.micro_batch), None)
        learns = self.gradients is not None
        if given is not None and learns:
            given.requires_grad_()
        output = self.forward(*key, given)
        for name, term in output.terms.items():
            self.totals[name] = self.totals.get(name, 0) + term.detach()
        if learns:
            # An edge keeps what backward needs and not the output itself.
            stream, *terms = (
                get_gradient_edge(x) if x is not None and x.requires_grad else None
                for x in (output.stream, *output.terms.values())
            )
            roots = [term for term in terms if term is not None]
            self.alive[key] = _Alive(given, stream, roots)
        return None if output.stream is None else output.stream.detach()

    def _backward(self, action: Action) -> Tensor | None:
        key, m = (action.stage, action.micro_batch), action.micro_batch
        alive = self.alive.pop(key)
        gradient = self.here.pop(("B", action.stage + 1, m), None)
        roots: list[GradientEdge] = [*alive.terms]
        start: list[Tensor | None] = [None] * len(roots)  # a term's own gradient is 1
        if alive.stream is not None and gradient is not None:
            roots.append(alive.stream)
            start.append(gradient)
        assert self.gradients is not None
        held = self.held.setdefault(key, []) if action.kind == "I" else None
        last = self.last[action.stage] == action
        self.gradients.begin_backward(action.stage, last=last, held=held)
        if roots:
            torch.autograd.backward(roots, start)
        self.gradients.end_backward()
        if alive.given is None:
            return None
        # Without a gradient no loss depends on this stream.
        return torch.zeros_like(alive.given) if alive.given.grad is None else alive.given.grad

    @torch.no_grad()
    def _weights(self, action: Action) -> None:
        assert self.gradients is not None
        held = self.held.pop((action.stage, action.micro_batch))
        self.gradients.complete(action.stage, held, last=self.last[action.stage] == action)
