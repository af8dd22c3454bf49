"""Ranks that were started unlike each other are told so before anything is built.

Another learning rate on one node, another release, another NCCL algorithm: such ranks would train
something that nobody asked for, or wait for each other for ever. A hash of what must be the same is
compared; only where it differs do the facts themselves travel, one copy of each.

| what                             | axis  | bytes a rank        | when             |
|----------------------------------|-------|---------------------|------------------|
| a hash                           | world | 24 to n-1 ranks     | twice at a start |
| its facts as JSON, and its host  | world | a few KB to them    | before an end    |
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penteract.collectives import exchange
from penteract.config import Config
from penteract.config_file import to_dict
from penteract.errors import UserError
from penteract.mesh import Axis

MOST = 4  # so many ranks and values are named, the others counted


class UnlikeError(UserError):
    """Ranks that must be alike are not. All raise it, and rank 0 says it."""

    def __init__(self, message: str, *, said_here: bool) -> None:
        super().__init__(message)
        self.said_here = said_here


def facts_of(config: Config) -> dict[str, Any]:
    """What of a configuration must be the same on all ranks, by section and key.

    Folders of what a run only reads may differ from node to node; contents are compared later.
    """
    facts = to_dict(config)
    data, parallel = facts["data"], facts["parallel"]
    for source in (*data["train"], *data["valid"]):
        source["prefix"] = Path(source["prefix"]).name
    data["tokenizer"] = Path(data["tokenizer"]).name
    if (table := parallel.get("schedule", "")).endswith(".json"):
        content = hashlib.blake2b(Path(table).read_bytes(), digest_size=8).hexdigest()
        parallel["schedule"] = f"{Path(table).name} with hash {content}"
    return facts


def check_alike(facts: Mapping[str, Any], world: Axis) -> None:
    """Raise UnlikeError on every rank where not all have the same `facts`, plain JSON by section.

    All ranks call it together. The message has every key that differs, its values, and their ranks,
    the most common value first.
    """
    text = json.dumps(facts, sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    digests = exchange(digest, world)
    if len(set(digests)) == 1:
        return
    first = {d: rank for rank, d in reversed(list(enumerate(digests)))}
    mine = json.dumps([socket.gethostname(), facts if first[digest] == world.rank else None])
    told = [json.loads(answer) for answer in exchange(mine.encode(), world)]
    names = [f"rank {rank} ({host})" for rank, (host, _) in enumerate(told)]
    flat = {d: _flat(told[rank][1]) for d, rank in first.items()}
    lines = []
    for key in sorted({key for values in flat.values() for key in values}):
        ranks: dict[str, list[str]] = {}
        for d, name in zip(digests, names, strict=True):
            ranks.setdefault(flat[d].get(key, "not given"), []).append(name)
        if len(ranks) > 1:
            lines.append(f"\n  {key}: {_told(ranks)}")
    raise UnlikeError(
        f"ranks were not started alike:{''.join(lines)}\n"
        "Give all of them the same configuration, code and environment",
        said_here=world.rank == 0,
    )


def _flat(facts: Any, key: str = "") -> dict[str, str]:
    """Dotted keys with their values as text."""
    if not isinstance(facts, dict):
        return {key: facts if isinstance(facts, str) else json.dumps(facts)}
    parts = (_flat(value, f"{key}.{name}".lstrip(".")) for name, value in facts.items())
    return {name: value for part in parts for name, value in part.items()}


def _told(ranks: Mapping[str, Sequence[str]]) -> str:
    """The values of a key with the ranks that have them."""
    common = sorted(ranks.items(), key=lambda item: -len(item[1]))
    parts = [f"{value} on {_listed(names)}" for value, names in common[:MOST]]
    others = len(common) - MOST
    return "; ".join([*parts, f"{others} more values"] if others > 0 else parts)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST
    return ", ".join([*names[:MOST], f"{more} more"] if more > 0 else names)
