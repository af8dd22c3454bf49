"""A schedule as JSON, as `penteract schedule --json` prints it and users write their own."""

from __future__ import annotations

from collections.abc import Mapping

from penteract.errors import UserError
from penteract.parallel.pipeline.actions import Action, Pair, Program, Schedule, Step, actions
from penteract.parallel.pipeline.lowering import check


def to_json(schedule: Schedule) -> dict[str, object]:
    """{"kind", "ranks", "actions": [[[kind, stage, micro-batch], …] per rank]}, and "pairs".

    Pairs are only there if the schedule has any: for each rank, the indexes of the forwards that
    run together with the action after them.
    """
    listed = [[[a.kind, a.stage, a.micro_batch] for a in actions(p)] for p in schedule.programs]
    pairs = []
    for program in schedule.programs:
        ends = [0]
        for step in program:
            ends.append(ends[-1] + (2 if isinstance(step, Pair) else 1))
        pairs.append([k for k, step in zip(ends, program, strict=False) if isinstance(step, Pair)])
    table = {"kind": schedule.kind, "ranks": schedule.ranks, "actions": listed}
    return {**table, "pairs": pairs} if any(pairs) else table


def from_json(value: object, *, name: str) -> Schedule:
    """The checked schedule of such a table; other keys than the four are not read.

    The placement is read off the actions. `name` says in errors which table it is. UserError
    names the rank, the index of the action and what is wrong.
    """
    if not isinstance(value, Mapping):
        raise UserError(f'{name}: a table is an object with "actions", not {_short(value)}')
    kind, ranks = value.get("kind", name), value.get("ranks")
    if not isinstance(kind, str):
        raise UserError(f'{name}: "kind" is a name, not {_short(kind)}')
    listed = value.get("actions")
    if not isinstance(listed, list) or not listed:
        raise UserError(f'{name}: "actions" is a list with one list a rank, not {_short(listed)}')
    if ranks is not None and (not _is_index(ranks) or ranks != len(listed)):
        raise UserError(f'{name}: "ranks" is {_short(ranks)}, "actions" has {len(listed)} lists')
    rows = [_row(row, f"{name}: rank {rank}") for rank, row in enumerate(listed)]
    pairs = value.get("pairs", [[] for _ in rows])
    if not isinstance(pairs, list) or len(pairs) != len(rows):
        raise UserError(f'{name}: "pairs" is a list with one list a rank, not {_short(pairs)}')
    programs = tuple(
        _paired(row, pairs[rank], f"{name}: rank {rank}") for rank, row in enumerate(rows)
    )
    found = Schedule(
        kind=kind,
        ranks=len(rows),
        micro_batches=_micro_batches(rows, name),
        placement=_placement(rows, name),
        programs=programs,
    )
    try:
        check(found)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    return found


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "…"


def _row(row: object, where: str) -> list[Action]:
    """The actions of one rank."""
    if not isinstance(row, list):
        raise UserError(f"{where}: a list of actions is needed, not {_short(row)}")
    found = []
    for index, item in enumerate(row):
        match item:
            case ["F" | "B" | "I" | "W" as kind, stage, micro_batch] if _is_index(
                stage
            ) and _is_index(micro_batch):
                found.append(Action(kind, stage, micro_batch))
            case _:
                raise UserError(
                    f'{where}, action {index}: {_short(item)} is not ["F", "B", "I" or "W", '
                    "stage, micro-batch] with whole numbers from 0"
                )
    return found


def _paired(row: list[Action], indexes: object, where: str) -> Program:
    """The actions with those at each of the indexes and after it made one step."""
    if not isinstance(indexes, list):
        raise UserError(f"{where}: a list of indexes is needed in pairs, not {_short(indexes)}")
    starts: set[int] = set()
    for index in indexes:
        if not _is_index(index) or index + 1 >= len(row) or {index - 1, index, index + 1} & starts:
            raise UserError(
                f"{where}: pairs has {_short(index)}; each is the index of an action of its own "
                f"that has another after it, of {len(row)}"
            )
        starts.add(index)
    program: list[Step] = []
    for index, action in enumerate(row):
        if index in starts:
            program.append(Pair(action, row[index + 1]))
        elif index - 1 not in starts:
            program.append(action)
    return tuple(program)


def _micro_batches(rows: list[list[Action]], name: str) -> int:
    seen = {a.micro_batch for row in rows for a in row}
    missing = next((i for i in range(len(seen)) if i not in seen), None)
    if missing is not None or not seen:
        raise UserError(f"{name}: no action is of micro-batch {missing or 0}")
    return len(seen)


def _placement(rows: list[list[Action]], name: str) -> tuple[int, ...]:
    """The rank of each stage: where its actions are."""
    ranks: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for index, a in enumerate(row):
            if ranks.setdefault(a.stage, rank) != rank:
                raise UserError(
                    f"{name}: rank {rank}, action {index}: stage {a.stage} is on rank "
                    f"{ranks[a.stage]} already"
                )
    missing = next((s for s in range(len(ranks)) if s not in ranks), None)
    if missing is not None:
        raise UserError(f"{name}: no rank has an action of stage {missing}")
    return tuple(ranks[s] for s in range(len(ranks)))
