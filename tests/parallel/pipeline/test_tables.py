"""A schedule as JSON and back, and what a user's table can have wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penteract.errors import UserError
from penteract.parallel.pipeline.schedules import SCHEDULES, from_json, schedule, to_json


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("m", [1, 5, 9])
def test_there_and_back(kind: str, m: int) -> None:
    planned = schedule(kind, ranks=3, chunks=SCHEDULES[kind].chunks or 2, micro_batches=m)
    text = json.dumps({**to_json(planned), "bubble_fraction": 0.1, "peak_activations": [1, 1, 1]})
    assert from_json(json.loads(text), name="table.json") == planned
    assert ("pairs" in to_json(planned)) == (kind in ("1f1b-pairs", "dualpipe-v") and m > 1)


def test_the_contract() -> None:
    assert to_json(schedule("1f1b", ranks=2, micro_batches=1)) == {
        "kind": "1f1b",
        "ranks": 2,
        "actions": [[["F", 0, 0], ["B", 0, 0]], [["F", 1, 0], ["B", 1, 0]]],
    }


def damaged(**changes: Any) -> object:
    good = [[["F", 0, 0], ["F", 0, 1], ["B", 0, 0], ["B", 0, 1]]]
    return {"kind": "mine", "ranks": 1, "actions": good, **changes}


def test_the_undamaged_table_is_accepted() -> None:
    assert from_json(damaged(), name="t").placement == (0,)
    assert from_json(damaged(pairs=[[1]]), name="t").programs[0][1:2] != ()
    assert from_json({"actions": [[["F", 0, 0]]]}, name="t").kind == "t"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], 'a table is an object with "actions", not'),
        ({}, '"actions" is a list with one list a rank, not None'),
        (damaged(kind=3), '"kind" is a name, not 3'),
        (damaged(ranks=2), '"ranks" is 2, "actions" has 1 lists'),
        (damaged(ranks=True), '"ranks" is True'),
        (damaged(actions="F"), '"actions" is a list'),
        (damaged(actions=[]), '"actions" is a list'),
        (damaged(actions=[3]), "rank 0: a list of actions is needed, not 3"),
        (damaged(actions=[[["F", 0, 0], ["X", 0, 0]]]), r"rank 0, action 1: \['X', 0, 0\] is not"),
        (damaged(actions=[[["F", 0]]]), r"rank 0, action 0: \['F', 0\] is not"),
        (damaged(actions=[[["F", -1, 0]]]), r"rank 0, action 0: \['F', -1, 0\] is not"),
        (damaged(actions=[[["F", 0, 1.0]]]), "whole numbers from 0"),
        (damaged(actions=[[["F", True, 0]]]), "whole numbers from 0"),
        (damaged(actions=[[[["F"], 0, 0]]]), "rank 0, action 0"),
        (damaged(actions=[["F", 0, 0]]), "rank 0, action 0: 'F' is not"),
        (damaged(actions=[[]]), "no action is of micro-batch 0"),
        (damaged(actions=[[["F", 0, 0], ["F", 0, 2]]]), "no action is of micro-batch 1"),
        (damaged(actions=[[["F", 0, 10**15]]]), "no action is of micro-batch 0"),
        (damaged(actions=[[["F", 10**15, 0]]]), "no rank has an action of stage 0"),
        (
            damaged(ranks=2, actions=[[["F", 0, 0]], [["F", 1, 0], ["F", 0, 1]]]),
            "rank 1, action 1: stage 0 is on rank 0 already",
        ),
        (damaged(ranks=2, actions=[[["F", 0, 0]], []]), r"on ranks \[0\]; each rank"),
        (damaged(actions=[[["F", 0, 0], ["F", 0, 1], ["B", 0, 1]]]), "no backward .*micro-batch 0"),
        (damaged(pairs=3), '"pairs" is a list with one list a rank, not 3'),
        (damaged(pairs=[[], []]), '"pairs" is a list with one list a rank'),
        (damaged(pairs=[3]), "rank 0: a list of indexes is needed in pairs, not 3"),
        (damaged(pairs=[[3]]), "rank 0: pairs has 3"),
        (damaged(pairs=[[-1]]), "rank 0: pairs has -1"),
        (damaged(pairs=[[1, 2]]), "rank 0: pairs has 2"),
        (damaged(pairs=[["1"]]), "rank 0: pairs has '1'"),
        (damaged(pairs=[[0]]), "rank 0, action 0: a pair is a forward F and a backward"),
    ],
)
def test_damage_is_named(value: object, message: str) -> None:
    with pytest.raises(UserError, match=f"^own.json: .*{message}"):
        from_json(value, name="own.json")
