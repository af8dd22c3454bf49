"""A schedule with its sends and receives, and the proof that they cannot block.

The model of a channel is what devices give: one first-in-first-out communicator without tags for
each directed pair of ranks, which activations and gradients share. So receives are posted in the
order in which the sender sends. Posting never blocks. A send blocks its rank until its receive is
posted; a receive that is waited for, until its message has been sent.

F carries a stage's output to the rank of the next stage, B the gradient of its input to the rank of
the stage before. Each is sent right after the step that makes it, and taken right before the step
that needs it; its receive is posted one step earlier at the latest.

Nothing is sent between stages of one rank. With every receive posted a step early, a message
travels while the receiver computes. Where two ranks would each block in a send to the other,
receives are posted earlier still, before both sends; a run of all ranks finds where.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Literal

from penteract.errors import UserError
from penteract.parallel.pipeline.actions import (
    Action,
    Pair,
    Schedule,
    Step,
    actions,
    needs,
    result,
)


@dataclass(frozen=True)
class Message:
    """What `stage` made of the micro-batch; source and target are pipeline ranks."""

    kind: Literal["F", "B"]
    stage: int
    micro_batch: int
    source: int
    target: int

    def __str__(self) -> str:
        what = f"{self.kind} of stage {self.stage}, micro-batch {self.micro_batch}"
        return f"the message ({what}) from rank {self.source} to rank {self.target}"


@dataclass(frozen=True)
class Lowered:
    """A step with its communication, in this order: post, take, the step, send."""

    post: tuple[Message, ...]  # receives posted before the step, some of them for later steps
    take: tuple[Message, ...]  # messages that must have come before the step begins
    step: Step
    send: tuple[Message, ...]  # sends started after it


Lowering = tuple[tuple[Lowered, ...], ...]  # programs of all ranks
Instruction = tuple[int, Literal["post", "take", "send"], Message]  # (index of the step, what, of)
Unblock = Callable[[dict[int, Instruction]], list[Message]]  # what ranks are stuck in → posted now


def lower(schedule: Schedule) -> Lowering:
    """The programs with their sends and receives, which end under blocking sends.

    UserError where the table is wrong or its dependencies form a cycle.
    """
    _check_table(schedule)
    takes = [[_takes(schedule, step) for step in program] for program in schedule.programs]
    sends = [[_sends(schedule, step) for step in program] for program in schedule.programs]
    taken = {m: k for program in takes for k, messages in enumerate(program) for m in messages}
    order = _by_channel(m for program in sends for messages in program for m in messages)
    posted: dict[Message, int] = {}  # the step of the target before which the receive is posted
    for messages in order.values():
        soonest = taken[messages[-1]]
        for m in reversed(messages):  # a receive is posted after all before it in its channel
            soonest = min(soonest, taken[m])
            posted[m] = max(soonest - 1, 0)

    def lowered() -> Lowering:
        posts: list[list[list[Message]]] = [[[] for _ in program] for program in schedule.programs]
        for m, step in posted.items():
            posts[m.target][step].append(m)
        for program in posts:
            for messages in program:
                messages.reverse()  # `posted` was filled from the back of each channel
        return tuple(
            tuple(
                Lowered(tuple(post), take, step, send)
                for post, take, step, send in zip(*columns, strict=True)
            )
            for columns in zip(posts, takes, schedule.programs, sends, strict=True)
        )

    def unblock(stuck: dict[int, Instruction]) -> list[Message]:
        # All that its channel carries before a blocked message has been sent, hence posted.
        blocked = [m for _, what, m in stuck.values() if what == "send"]
        for m in blocked:
            posted[m] = stuck[m.target][0]
        return blocked

    _run(schedule, lowered(), unblock)
    return lowered()


def check(schedule: Schedule, lowered: Lowering | None = None) -> None:
    """Prove a table, or its lowering if given; UserError names the rank, the action and the fault.

    Every (stage, micro-batch) has one forward and one backward (B, or I and W), or there are no
    backwards at all; every action is on the rank of its stage and after all it needs; every
    message is sent once and received once, receives in the sender's order, and posted before it is
    waited for; and the run under blocking sends ends, which leaves nothing in any channel.
    """
    if lowered is None:
        lowered = lower(schedule)
    _check_table(schedule)
    if len(lowered) != schedule.ranks:
        raise _fault(schedule, f"{len(lowered)} lowered programs for {schedule.ranks} ranks")
    for rank, program in enumerate(lowered):
        _check_steps(schedule, rank, program)
    sent = _by_channel(m for program in lowered for low in program for m in low.send)
    posted = _by_channel(m for program in lowered for low in program for m in low.post)
    for channel in sorted(sent.keys() | posted.keys()):
        _check_channel(schedule, sent.get(channel, []), posted.get(channel, []))
    _run(schedule, lowered, lambda stuck: [])


def channels(lowered: Lowering) -> tuple[tuple[int, int], ...]:
    """Directed pairs (source, target) in use, in the order in which communicators are created."""
    return tuple(sorted({(m.source, m.target) for p in lowered for low in p for m in low.send}))


def _message(action: Action, target: int, placement: Sequence[int]) -> Message:
    kind: Literal["F", "B"] = "F" if action.kind == "F" else "B"
    return Message(kind, action.stage, action.micro_batch, placement[action.stage], target)


def _takes(schedule: Schedule, step: Step) -> tuple[Message, ...]:
    """Messages that the step needs: what it needs of stages on other ranks."""
    placement = schedule.placement
    return tuple(
        _message(need, placement[a.stage], placement)
        for a in actions([step])
        for need in needs(a, len(placement))
        if placement[need.stage] != placement[a.stage]
    )


def _sends(schedule: Schedule, step: Step) -> tuple[Message, ...]:
    """Messages that the step makes: a forward for the next stage, a gradient for the one before."""
    placement, stages = schedule.placement, len(schedule.placement)
    found = []
    for a in actions([step]):
        to = {"F": a.stage + 1, "B": a.stage - 1, "I": a.stage - 1, "W": -1}[a.kind]
        if 0 <= to < stages and placement[to] != placement[a.stage]:
            found.append(_message(a, placement[to], placement))
    return tuple(found)


def _by_channel(messages: Iterable[Message]) -> dict[tuple[int, int], list[Message]]:
    """Messages of each directed pair of ranks, in the order given."""
    found: dict[tuple[int, int], list[Message]] = {}
    for m in messages:
        found.setdefault((m.source, m.target), []).append(m)
    return found


def _instructions(program: Sequence[Lowered]) -> Iterator[Instruction]:
    for k, low in enumerate(program):
        yield from ((k, "post", m) for m in low.post)
        yield from ((k, "take", m) for m in low.take)
        yield from ((k, "send", m) for m in low.send)


def _run(schedule: Schedule, lowered: Lowering, unblock: Unblock) -> None:
    """Run all ranks under blocking sends; where all are stuck, post what `unblock` gives.

    UserError where it gives nothing. Whichever rank goes first, the run ends in the same place:
    each waits for one thing, and nothing undoes what another waits for.
    """
    programs = [list(_instructions(program)) for program in lowered]
    at = [0] * len(programs)
    posted: set[Message] = set()
    sent: set[Message] = set()
    waiting: dict[tuple[str, Message], int] = {}  # (what it waits to do, with) → the rank
    runnable = list(range(len(programs)))
    while True:
        while runnable:
            rank = runnable.pop()
            for _, what, m in islice(programs[rank], at[rank], None):
                if what != "post" and m not in (posted if what == "send" else sent):
                    waiting[what, m] = rank
                    break
                at[rank] += 1
                if what != "take":
                    (posted if what == "post" else sent).add(m)
                    woken = waiting.pop(("send" if what == "post" else "take", m), None)
                    runnable += [] if woken is None else [woken]
        if not waiting:
            return
        stuck = {rank: programs[rank][at[rank]] for rank in sorted(waiting.values())}
        messages = unblock(stuck)
        if not messages:
            raise _fault(schedule, f"the ranks wait for each other: {_describe(stuck)}")
        posted.update(messages)
        runnable += [waiting.pop(("send", m)) for m in messages]


def _describe(stuck: dict[int, Instruction]) -> str:
    verbs = {"send": "cannot send", "take": "waits for"}
    shown = [f"rank {r} at step {k} {verbs[what]} {m}" for r, (k, what, m) in stuck.items()]
    return "; ".join(shown[:4]) + ("; …" if len(shown) > 4 else "")


def _fault(schedule: Schedule, what: str) -> UserError:
    return UserError(f"schedule {schedule.kind}: {what}")


def _check_table(schedule: Schedule) -> None:
    """All that can be said of a table without its messages."""
    ranks, placement = schedule.ranks, schedule.placement
    if len(schedule.programs) != ranks:
        raise _fault(schedule, f"{len(schedule.programs)} programs for {ranks} ranks")
    if set(placement) != set(range(ranks)):
        raise _fault(
            schedule,
            f"stages lie on ranks {sorted(set(placement))}; each rank from 0 to {ranks - 1} "
            "must hold at least one",
        )
    seen: set[Action] = set()
    for rank, program in enumerate(schedule.programs):
        index = 0
        for step in program:
            fault = _step_fault(schedule, rank, step, seen)
            if fault is not None:
                raise _fault(schedule, f"rank {rank}, action {index}: {fault}")
            seen.update(actions([step]))
            seen.update(map(result, actions([step])))
            index += 2 if isinstance(step, Pair) else 1
    every = [(s, i) for s in range(len(placement)) for i in range(schedule.micro_batches)]
    splits = {(a.stage, a.micro_batch) for a in seen if a.kind == "I"}
    _check_complete(schedule, "forward F", [x for x in every if Action("F", *x) not in seen])
    if any(a.kind != "F" for a in seen):
        missing = [x for x in every if Action("B", *x) not in seen]
        _check_complete(schedule, "backward (B, or I and W)", missing)
        missing = [x for x in sorted(splits) if Action("W", *x) not in seen]
        _check_complete(schedule, "weight gradient W after its I", missing)


def _step_fault(schedule: Schedule, rank: int, step: Step, seen: set[Action]) -> str | None:
    """What is wrong with a step of the rank, given all actions of ranks and steps before it."""
    stages, placement = len(schedule.placement), schedule.placement
    if isinstance(step, Pair) and (step.forward.kind != "F" or step.backward.kind not in "BI"):
        return f"a pair is a forward F and a backward B or I, not {step}"
    for a in actions([step]):
        if a.kind not in ("F", "B", "I", "W"):
            return f"an action is F, B, I or W, not {a.kind!r}"
        if not 0 <= a.stage < stages:
            return f"{a}: stages are 0 to {stages - 1}"
        if not 0 <= a.micro_batch < schedule.micro_batches:
            return f"{a}: micro-batches are 0 to {schedule.micro_batches - 1}"
        if placement[a.stage] != rank:
            return f"{a} belongs to rank {placement[a.stage]}"
        if result(a) in seen:
            return f"{a} is done before"
        for need in needs(a, stages):
            if placement[need.stage] == rank and need not in seen:
                return f"{a} needs {need} of this rank, which does not come before it"
        if a.kind == "W" and Action("I", a.stage, a.micro_batch) not in seen:
            return f"{a} has no I: its backward B is whole"
    return None


def _check_complete(schedule: Schedule, what: str, missing: list[tuple[int, int]]) -> None:
    if missing:
        stage = missing[0][0]
        of_stage = [i for s, i in missing if s == stage]
        numbers = ", ".join(map(str, of_stage[:8])) + (", …" if len(of_stage) > 8 else "")
        rank = schedule.placement[stage]
        raise _fault(schedule, f"rank {rank}: stage {stage} has no {what} of micro-batch {numbers}")


def _check_steps(schedule: Schedule, rank: int, lowered: Sequence[Lowered]) -> None:
    """The steps are those of the table, each with its messages, received before they are needed."""
    posted: set[Message] = set()
    for k, (step, low) in enumerate(zip_longest(schedule.programs[rank], lowered)):
        where = f"rank {rank}, step {k}"
        if low is None or low.step != step:
            does = "nothing" if low is None else low.step
            raise _fault(schedule, f"{where}: the table has {step or 'nothing'}, lowered is {does}")
        for m in low.post:
            if m.target != rank:
                raise _fault(schedule, f"{where}: it posts a receive for {m}")
            posted.add(m)
        for m in low.take:
            if m not in posted:
                raise _fault(schedule, f"{where} waits for {m} before its receive is posted")
        for verb, has, must in (
            ("wait for", low.take, _takes(schedule, step)),
            ("send", low.send, _sends(schedule, step)),
        ):
            for m in (Counter(must) - Counter(has)).elements():
                raise _fault(schedule, f"{where} ({step}) does not {verb} {m}")
            for m in (Counter(has) - Counter(must)).elements():
                raise _fault(schedule, f"{where} ({step}) must not {verb} {m}")


def _check_channel(schedule: Schedule, sent: list[Message], posted: list[Message]) -> None:
    """What one rank sends to another is what the other receives, in the same order."""
    for m in (Counter(sent) - Counter(posted)).elements():
        raise _fault(schedule, f"rank {m.target} never receives {m}")
    for m in (Counter(posted) - Counter(sent)).elements():
        raise _fault(schedule, f"rank {m.target} receives more often than it is sent {m}")
    for k, (s, r) in enumerate(zip(sent, posted, strict=True)):
        if s != r:
            raise _fault(
                schedule,
                f"rank {s.target}: receive {k} from rank {s.source} is {r}, but sent is {s}",
            )
