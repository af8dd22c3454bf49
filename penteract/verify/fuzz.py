"""Random small models and layouts, and the smallest ones that fail. Pure.

A case is a function of (seed, number): a value for every configuration field that carries examples,
and dp. A new field takes part by carrying `examples` in `penteract/config_sections.py`.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tomli_w
from pydantic.fields import FieldInfo

from penteract.config import Config, ParallelConfig, resolve
from penteract.config_file import SECTIONS, from_dict
from penteract.errors import UserError
from penteract.layout_rules import SIZES, least_dp
from penteract.verify.layouts import Layout, parse_layout

Case = dict[str, Any]  # dotted keys, and "dp"

# What every case has besides what is drawn.
FIXED = {"train.steps": 2, "optim.lr": 1e-2, "optim.schedule": "constant"}
EXPERTS_SHARE = 0.4  # of the models
SINGLE_SHARE = 0.1  # of the cases on one rank that are kept
TRIES = 60  # of a shrink: each trains twice


@dataclass(frozen=True)
class Drawn:
    """A case that is possible."""

    case: Case
    config: Config
    layout: Layout


def fields_with_examples() -> Iterator[tuple[str, FieldInfo]]:
    """Dotted key and field of every configuration field that says what to try."""
    for section, kind in SECTIONS.items():
        for name, field in kind.__pydantic_fields__.items():  # type: ignore[attr-defined]
            if field.examples:
                yield f"{section}.{name}", field


def draw(seed: int, number: int, *, max_world: int, refusals: Counter[str]) -> Drawn:
    """Case `number` of `seed`; what was drawn and refused on the way is counted by its rule."""
    source = random.Random(f"{seed}/{number}")
    while True:
        case = _draw_once(source, max_world)
        try:
            drawn = possible(case)
        except UserError as error:
            refusals[_rule(str(error))] += 1
            continue
        if drawn.layout.world > max_world:
            refusals[f"more than {max_world} ranks"] += 1
        elif drawn.layout.world > 1 or max_world == 1 or source.random() < SINGLE_SHARE:
            return drawn


def _draw_once(source: random.Random, max_world: int) -> Case:
    case: Case = {}
    experts = source.random() < EXPERTS_SHARE
    for key, field in fields_with_examples():
        if not experts and (key.startswith("moe.") or key in ("parallel.ep", "parallel.etp")):
            continue
        values = field.examples or []
        if key.startswith("parallel."):  # a layout that sets everything is hard to read
            others = [x for x in values if x != field.default]
            values = [field.default] if source.random() < 0.5 else others
        case[key] = source.choice(values)
    sizes = {name: case.get(f"parallel.{name}", getattr(ParallelConfig(), name)) for name in SIZES}
    least = least_dp(sizes)
    # Small multiples more often than large ones, which cost more and show little more.
    most = min(4, max_world // least)
    case["dp"] = least * min(source.randint(1, max(1, most)) for _ in range(2))
    return case


def possible(case: Case) -> Drawn:
    """The configuration and the layout of a case. Raises UserError where a rule is broken."""
    config = resolve(from_dict(_nested(_model_of(case))))
    return Drawn(case, config, parse_layout(layout_text(case), config))


def _model_of(case: Case) -> Case:
    model = {k: v for k, v in case.items() if k != "dp" and not k.startswith("parallel.")}
    return {**model, **FIXED}


def _nested(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        if value is not None:
            sections.setdefault(section, {})[name] = value
    return sections


def layout_text(case: Case) -> str:
    """The case's layout as `--layout` takes it: what is not default, and dp where it is needed."""
    sizes = {name: case.get(f"parallel.{name}", getattr(ParallelConfig(), name)) for name in SIZES}
    parts = [
        f"{key.removeprefix('parallel.')}={_written(value)}"
        for key, value in case.items()
        if key.startswith("parallel.") and value != getattr(ParallelConfig(), key[9:])
    ]
    if case["dp"] != least_dp(sizes):
        parts.append(f"dp={case['dp']}")
    return ",".join(parts)


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        text = ",".join(map(str, value))
        return f"'{text}'" if len(value) > 1 else text
    return str(value)


def case_toml(case: Case) -> str:
    """The configuration of a case as a file for `penteract verify`, without defaults."""
    fields = dict(fields_with_examples())
    values = _model_of(case)
    kept = {k: v for k, v in values.items() if k not in fields or v != fields[k].default}
    return tomli_w.dumps(_nested(kept))


def _rule(message: str) -> str:
    """What kind of refusal a message is: its last line, without numbers, up to the advice."""
    line = message.splitlines()[-1].rpartition('": ')[2]
    line = re.split(r"[:;,]", line.removeprefix("saved configuration: "))[0]
    return re.sub(r"\d+(\.\d+)?", "n", line)


def shrink_case(case: Case, fails: Callable[[Drawn], bool]) -> Case:
    """The smallest case that still fails, found greedily in at most `TRIES` tries.

    Every key in turn goes to its default, or else to smaller examples, as long as `fails`.
    """
    tries, changed = 0, True
    while changed:
        changed = False
        for key in list(case):
            for value in _simpler(key, case[key]):
                smaller = {**case, key: value}
                try:
                    drawn = possible(smaller)
                except UserError:
                    continue
                if tries == TRIES:
                    return case
                tries += 1
                if fails(drawn):
                    case, changed = smaller, True
                    break
    return case


def _simpler(key: str, value: Any) -> list[Any]:
    """What to try in place of a value, the simplest first; never in a circle."""
    if key == "dp":
        return list(range(1, value))
    field = dict(fields_with_examples())[key]
    # A default of None that no example names would be filled in from elsewhere.
    named = not field.is_required() and (
        field.default is not None or None in (field.examples or [])
    )
    others = [field.default] if named else []
    if not _is_number(value):
        return [x for x in others if x != value]
    numbers = {x for x in [*others, *(field.examples or [])] if _is_number(x) and x < value}
    return [x for x in others if not _is_number(x)] + sorted(numbers)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
