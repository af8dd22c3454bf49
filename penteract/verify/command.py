"""The two forms of `penteract verify`: given layouts, and random models with random layouts."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penteract.config import Config
from penteract.errors import UserError
from penteract.grid import PRINTED_GROUPS, Grid
from penteract.train.block_traffic import Sent
from penteract.train.language_model import with_vocabulary
from penteract.train.traffic import step_bytes
from penteract.verify import report
from penteract.verify.fuzz import Case, Drawn, case_toml, draw, layout_text, possible, shrink_case
from penteract.verify.layouts import Layout, parse_layout
from penteract.verify.shrink import shrink
from penteract.verify.tolerances import tolerance
from penteract.verify.verify import (
    Dtype,
    Result,
    Trained,
    limits_of,
    prepare,
    size_warning,
    train_reference,
    verify_layout,
)

SHRINKING_S = 180.0  # how long a failing case is made smaller at most


@dataclass(frozen=True)
class Options:
    """What holds for every layout."""

    dtype: Dtype = "float64"
    steps: int = 2
    json: Path | None = None

    def formula(self, config: Config, grid: Grid, rank: int) -> Sent:
        """What the rank should send in the step that is counted, the last one."""
        return step_bytes(config, grid, rank, step=self.steps)


def verify_config(config: Config, texts: Sequence[str], options: Options, *, small: bool) -> int:
    """Compare layouts of one configuration; 0 where all are equal, else 1."""
    _check_json(options.json)
    _one_thread()
    if config.model.vocab is None:
        config, _ = with_vocabulary(config)
    config, notes = prepare(config, dtype=options.dtype, steps=options.steps)
    layouts = [parse_layout(text, config) for text in texts]
    if small:
        config, changes = shrink(config, _sizes(layouts))
        notes.append(f"--shrink: {', '.join(changes) or 'nothing to cut'}")
        layouts = [parse_layout(text, config) for text in texts]
    for note in notes:
        _say(note)
    if warning := size_warning(config, layouts):
        _say(f"warning: {warning}")
    trained = train_reference(config)
    _say(f"reference: {options.steps} steps in {options.dtype}, {trained.seconds:.1f} s")
    results = []
    for layout in layouts:
        results.append(verify_layout(layout, trained))
        _say(_progress(results[-1], f"{len(results)} of {len(layouts)}"))
    _print(report.table(results, limits_of(config)))
    _print(report.bytes_table(results, options.formula))
    _print(report.differences(results))
    _write(options.json, report.reference_entry(config, trained), results)
    return 0 if all(result.verdict.ok for result in results) else 1


def verify_random(cases: int, seed: int, max_world: int, options: Options) -> int:
    """Compare random layouts of random models; a failing case is made small and written down."""
    _check_json(options.json)
    _one_thread()
    refusals: Counter[str] = Counter()
    results, repeats = [], []
    for number in range(cases):
        drawn = draw(seed, number, max_world=max_world, refusals=refusals)
        trained, result = _check(drawn, options)
        results.append(result)
        _say(_progress(result, f"case {number}, {number + 1} of {cases}"))
        if not result.verdict.ok:
            case = _smallest(drawn, options, alone=trained.outcome is not None)
            file = Path(f"verify-failure-{seed}-{number}.toml")
            file.write_text(case_toml(case), encoding="utf-8")
            repeats.append(_repeat(file, case, options))
            _say(f"{result.first_difference}\nto repeat it: {repeats[-1]}")
    failed = [result for result in results if not result.verdict.ok]
    limits = tolerance(options.dtype, steps=options.steps)  # the models are small
    _print(report.table(failed, limits) if failed else [])
    _print(report.differences(failed))
    _print(f"to repeat: {command}" for command in repeats)
    _print(report.fuzz_summary(results, refusals, options.formula))
    _write(options.json, {"cases": cases, "seed": seed, "max_world": max_world}, results)
    return 1 if failed else 0


def _check(drawn: Drawn, options: Options) -> tuple[Trained, Result]:
    config, _ = prepare(drawn.config, dtype=options.dtype, steps=options.steps)
    trained = train_reference(config)
    return trained, verify_layout(parse_layout(drawn.layout.text, config), trained)


def _smallest(drawn: Drawn, options: Options, *, alone: bool) -> Case:
    """The smallest case that fails where its reference is trained, or not, as that of `drawn`."""
    until = time.monotonic() + SHRINKING_S

    def fails(smaller: Drawn) -> bool:
        if time.monotonic() > until:
            return False
        trained, result = _check(smaller, options)
        return not result.verdict.ok and (trained.outcome is not None) == alone

    return shrink_case(drawn.case, fails)


def _repeat(file: Path, case: Case, options: Options) -> str:
    command = f'penteract verify {file} --layout "{layout_text(case)}"'
    default = Options()
    for name in ("dtype", "steps"):
        if (value := getattr(options, name)) != getattr(default, name):
            command += f" --{name} {value}"
    possible(case)  # what is written down can be read back
    return command


def _sizes(layouts: Iterable[Layout]) -> set[int]:
    """The sizes of every axis and fusion of the layouts."""
    return {layout.grid.size(name) for layout in layouts for name in PRINTED_GROUPS}


def _progress(result: Result, place: str) -> str:
    verdict = "equal" if result.verdict.ok else "DIFFERS"
    name = result.layout.text or "one rank"
    return f"{place}: {name} on {result.layout.world}: {verdict}, {result.seconds:.1f} s"


def _one_thread() -> None:
    """Ranks are forked, which is safe as long as torch has started no threads."""
    torch.set_num_threads(1)


def _check_json(path: Path | None) -> None:
    if path is not None and not path.parent.is_dir():
        raise UserError(f"--json {path}: there is no folder {path.parent}")


def _write(path: Path | None, reference: dict[str, Any], results: Sequence[Result]) -> None:
    if path is not None:
        content = {"reference": reference, "layouts": [report.entry(r) for r in results]}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _print(lines: Iterable[str]) -> None:
    text = "\n".join(lines)
    if text:
        print(f"{text}\n")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
