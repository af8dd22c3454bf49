"""Part "block": our layer of experts beside that of transformers' Mixtral, on one process.

The same weights and tokens, so that every token goes to the same experts. Ours is measured twice:
as training runs it, weight gradients in float32 in the buffers; and with those of each weight in
its own type, as theirs are.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from mixture.layer import TOPK, Given, Ours, Shape, calling, given, title
from mixture.products import apart
from peers import mixtral
from tensor_parallel import quartiles
from timing import kinds
from timing.turns import Call, Case, Measured
from torch import Tensor

from penteract.testing import run_ranks

TOLERANCE = 2e-5  # of the largest value, in float32; in bfloat16 twice what the best of theirs has
SLOW = 5.0  # so many times the fastest of theirs, another takes no turns
OURS, PLAIN = "penteract", "penteract, plain"


class Found(NamedTuple):
    measured: Measured
    seen: dict[str, tuple[float, float]]  # of each case: difference from theirs in float32, seconds
    profiles: Tensor  # [case, 1 + kinds], or none


def their_calls(shape: Shape, values: Given) -> dict[str, Call]:
    made = mixtral.layer(values.router, values.inner, values.down, TOPK)

    def of(way: str) -> Call:
        forward = mixtral.forward(made, way)
        return calling(
            forward, values.x, values.dy, made.zero_grad, lambda: mixtral.gradients(made)
        )

    return {way: of(way) for way in mixtral.WAYS}


def reference(shape: Shape, values: Given) -> list[Tensor]:
    """Theirs, one expert after another, in float32, of the rounded values."""
    wide = Given(*(x.float() if x.is_floating_point() else x for x in values))
    return [x.double() for x in their_calls(shape, wide)["eager"]()]


def measure(shape: Shape, rounds: int, profile: bool) -> Found:
    values, whole = given(shape), slice(None)
    wanted = reference(shape, values)
    ours = Ours(shape, values)
    ours.spoil()
    cases = [
        Case(OURS, ours.calling(values, whole)),
        Case(PLAIN, Ours(shape, values, plain=True).calling(values, whole)),
    ]
    cases += [Case(f"transformers, {way}", x) for way, x in their_calls(shape, values).items()]
    seen = dict[str, tuple[float, float]]()
    for case in cases:
        difference, began = apart(case.call(), wanted), time.perf_counter()
        case.call()
        seen[case.name] = difference, time.perf_counter() - began
    del wanted
    mine = (OURS, PLAIN)
    theirs = [x for name, x in seen.items() if name not in mine]
    best, fastest = (min(x) for x in zip(*theirs, strict=True))
    allowed = TOLERANCE if shape.dtype == torch.float32 else 2 * best
    cases = [x for x in cases if x.name in mine or seen[x.name][1] <= SLOW * fastest]
    agreement = max(difference for difference, _ in seen.values()), allowed
    found = Measured.of(cases, agreement, rounds, lambda: torch.empty(0))
    router = kinds.router_shapes(shape.tokens, shape.experts, shape.hidden, TOPK)
    profiles = [kinds.profiled(x.call, router) for x in cases] if profile else []
    return Found(found, seen, torch.stack(profiles) if profile else torch.empty(0))


def report(shape: Shape, rounds: int, profile: bool) -> bool:
    """Print one case; whether ours and theirs compute the same."""
    ((found, seen, profiles),) = run_ranks(measure, 1, shape, rounds, profile, timeout_s=7200)
    agree = found.agrees(title("block", shape))
    times = dict(zip(found.names, found.times[..., 0].unbind(1), strict=True)) if agree else {}
    for name, (difference, seconds) in seen.items():
        once = f"{1e3 * seconds:8.2f}  (once)"
        time_ms = quartiles(1e3 * times[name]) if name in times else once
        print(f"  {name:<26} {time_ms:>32} ms   difference {difference:.1e}")
    if not agree:
        return False
    theirs = [name for name in times if name not in (OURS, PLAIN)]
    best = min(theirs, key=lambda name: times[name].median().item())
    for mine in (OURS, PLAIN):
        print(f"  {f'their best / {mine}':<36} {quartiles(times[best] / times[mine])}   ({best})")
    if profile:
        kinds.table(found.names, profiles)
    return True
