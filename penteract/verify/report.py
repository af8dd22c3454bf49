"""What `penteract verify` shows and writes: a table, bytes beside their formula, JSON. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from penteract.config import Config
from penteract.config_file import to_dict
from penteract.grid import Grid
from penteract.verify.compare import Sent
from penteract.verify.tolerances import Limits
from penteract.verify.verify import Result, Trained

# (configuration, grid, rank) -> what the documentation says that the rank sends in a step: axis,
# what, bytes, None where they follow from the routing.
Formula = Callable[[Config, Grid, int], Mapping[str, Mapping[str, int | None]]]
# Layout, axis, measured, formula, "=", the factor, or that the routing says it.
ByteRow = tuple[str, str, int, int | None, str]

BY_ROUTING = "by routing"
NAME_WIDTH = 34


def entry(result: Result) -> dict[str, Any]:
    """A layout's entry in the JSON."""
    verdict = result.verdict
    return {
        "layout": {
            k: list(v) if isinstance(v, tuple) else v for k, v in result.layout.values.items()
        },
        "model": to_dict(result.layout.config)["model"],
        "world": result.layout.world,
        "loss_max_rel": verdict.loss,
        "grad_max_rel": verdict.gradients,
        "grad_worst": verdict.worst_gradient,
        "norm_rel": verdict.norm,
        "weights_max_rel": verdict.weights,
        "bytes_sent": {axis: sum(calls.values()) for axis, calls in most_sent(result).items()},
        "ok": verdict.ok,
        "first_difference": result.first_difference,
    }


def reference_entry(config: Config, trained: Trained) -> dict[str, Any]:
    """What the layouts were compared with."""
    found: dict[str, Any] = {
        "model": to_dict(config)["model"],
        "data": {"seq": config.data.seq},
        "train": dataclasses.asdict(config.train),
    }
    if trained.outcome is not None:
        found |= {"loss": trained.outcome.losses, "grad_norm": trained.outcome.norms}
    return found


def most_sent(result: Result) -> Sent:
    """Bytes that a rank sends over each axis in a step, of the rank that sends most."""
    ranks = result.verdict.sent
    axes = {axis for sent in ranks for axis, calls in sent.items() if calls}
    return {
        axis: max((sent.get(axis, {}) for sent in ranks), key=lambda calls: sum(calls.values()))
        for axis in sorted(axes)
    }


def table(results: Sequence[Result], limits: Limits) -> Iterator[str]:
    """A line for each layout, under a heading."""
    width = max((len(r.layout.text) for r in results), default=0)
    width = min(max(width, len("layout")), 40)
    names = (short(r.verdict.worst_gradient) for r in results)
    worst = max((len(name) for name in names), default=0) + 9
    head = f"{'loss':>8} {'gradients, and the worst':<{worst}} {'norm':>8} {'weights':>8}"
    yield f"{'layout':<{width}} {'world':>5} {head}"
    for r in results:
        v = r.verdict
        gradients = f"{number(v.gradients):<8} {short(v.worst_gradient)}"
        yield (
            f"{r.layout.text:<{width}} {r.layout.world:>5} {number(v.loss):>8} "
            f"{gradients:<{max(worst, 24)}} {number(v.norm):>8} {number(v.weights):>8}  "
            f"{'equal' if v.ok else 'DIFFERS'}"
        )
    yield ""
    yield f"Relative differences from one process, worst of all ranks and steps; equal: {limits}."


def bytes_table(results: Sequence[Result], formula: Formula) -> Iterator[str]:
    """What a rank sends in a step over each axis, measured and by the documented formula."""
    rows = [row for r in results for row in byte_rows(r, formula)]
    if not rows:
        return
    width = max(len("layout"), *(len(row[0]) for row in rows))
    axis = max(len("axis"), *(len(row[1]) for row in rows))
    yield "Bytes that a rank sends in a step (of the rank that sends most):"
    yield f"{'layout':<{width}} {'axis':<{axis}} {'measured':>14} {'formula':>14}"
    for name, over, measured, said, verdict in rows:
        shown = "" if said is None else f"{said:,}"
        yield f"{name:<{width}} {over:<{axis}} {measured:>14,} {shown:>14} {verdict}"


def byte_rows(result: Result, formula: Formula) -> Iterator[ByteRow]:
    """What is measured and said of every axis, of a rank where they differ if there is one."""
    layout, ranks = result.layout, result.verdict.sent
    said = [formula(layout.config, layout.grid, i) for i in range(len(ranks))]
    used = {axis for sent in ranks for axis, calls in sent.items() if any(calls.values())}
    used |= {axis for sent in said for axis, what in sent.items() if _total(what) != 0}
    for axis in sorted(used):
        measured = [sum(sent.get(axis, {}).values()) for sent in ranks]
        expected = [_total(sent.get(axis, {})) for sent in said]
        known = [i for i, size in enumerate(expected) if size is not None]
        wrong = [i for i in known if expected[i] != measured[i]]
        i = wrong[0] if wrong else measured.index(max(measured))
        wanted, verdict = expected[i], "="
        if wrong:
            factor = measured[i] / wanted if wanted else math.inf
            verdict = f"{factor:.3g} times, rank {i}"
        elif len(known) < len(ranks):
            wanted, verdict = None, BY_ROUTING
        yield layout.text, axis, measured[i], wanted, verdict


def _total(what: Mapping[str, int | None]) -> int | None:
    """All that is sent, or None where some of it is not known."""
    known = [size for size in what.values() if size is not None]
    return sum(known) if len(known) == len(what) else None


def differences(results: Sequence[Result]) -> Iterator[str]:
    """Where each layout that is not equal first differs."""
    for r in results:
        if not r.verdict.ok:
            yield f"{r.layout.text}: first difference: {r.first_difference}"


def fuzz_summary(
    results: Sequence[Result], refusals: Counter[str], formula: Formula
) -> Iterator[str]:
    """How many cases differ, the worst numbers of the equal ones, and what was not tried."""
    equal = [r.verdict for r in results if r.verdict.ok]
    yield f"{len(results)} cases, {len(results) - len(equal)} differ"
    worlds = Counter(r.layout.world for r in results)
    yield f"cases on n ranks: {', '.join(f'{world}: {n}' for world, n in sorted(worlds.items()))}"
    if equal:
        kinds = ("loss", "gradients", "norm", "weights")
        worst = (f"{kind} {number(max(getattr(v, kind) for v in equal))}" for kind in kinds)
        yield f"largest relative difference of the equal: {', '.join(worst)}"
    rows = [row for r in results for row in byte_rows(r, formula)]
    found = Counter(row[-1] for row in rows)
    unlike = [row for row in rows if row[-1] not in ("=", BY_ROUTING)]
    rest = f", {found[BY_ROUTING]} {BY_ROUTING}" if found[BY_ROUTING] else ""
    yield f"bytes over an axis: {found['=']} as the formula says, {len(unlike)} not{rest}"
    for name, over, measured, said, verdict in unlike:
        yield f"  {name}, {over}: {measured:,} for {said:,}, {verdict}"
    yield f"drawn {len(results) + refusals.total()}, refused {refusals.total()}"
    for rule, n in refusals.most_common():
        yield f"  {n} by the rule: {rule}"


def number(x: float) -> str:
    return "0" if x == 0 else "inf" if math.isinf(x) else f"{x:.0e}" if x >= 1e9 else f"{x:.1e}"


def short(name: str) -> str:
    """A tensor's name without its beginning where it is long."""
    return name if len(name) <= NAME_WIDTH else "…" + name[-(NAME_WIDTH - 1) :]
