"""Where the time of a call goes, by kinds of operations, as torch's profiler sees them.

It counts an operation's own time, without that of operations inside it, in whatever library called
it. Operations on the router's numbers are told by their shapes. What the operations lack of the
call's time is Python, autograd and allocation, and what the profiler itself takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from timing.turns import Call
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from penteract.pending import Pending
from penteract.testing import world_axis
from penteract.wire import barrier

KINDS = ("products", "router", "permuting", "activation", "sums, copies", "messages", "rest")
WAITING, CALL = "awaiting messages", "the call"
PRODUCTS = ("mm", "addmm", "bmm", "linear", "matmul", "grouped_mm", "mkldnn", "mv")
SORTING = ("sort", "argsort", "index", "masked", "nonzero", "arange")  # whatever the shapes are
COUNTING = ("gather", "scatter", "where", "bincount", "histc", "cumsum", "one_hot")
PERMUTING = (*SORTING, *COUNTING)
ACTIVATION = ("silu", "mul", "sigmoid")
COPIES = ("copy", "clone", "cat", "zero", "fill", "add", "sum", "new_zeros", "stack", "div")
MESSAGES = ("c10d", "record_param_comms", "gloo", WAITING)


def kind_of(name: str, shapes: list[list[int]], router: set[tuple[int, ...]]) -> str:
    """`router` are shapes that only the router's tensors have."""
    if name.startswith(MESSAGES):
        return "messages"
    if not name.startswith("aten::"):
        return "rest"
    name = name.removeprefix("aten::").lstrip("_")
    if not name.startswith(SORTING) and any(tuple(shape) in router for shape in shapes):
        return "router"
    for kind, starts in (
        ("products", PRODUCTS),
        ("permuting", PERMUTING),
        ("activation", ACTIVATION),
        ("sums, copies", COPIES),
    ):
        if name.startswith(starts):
            return kind
    return "rest"


def router_shapes(tokens: int, experts: int, hidden: int, topk: int) -> set[tuple[int, ...]]:
    """Of logits, weights, and the router's matrix, as given and transposed."""
    pairs = ((tokens, experts), (tokens, topk), (tokens, 1), (experts, hidden))
    return {shape for a, b in pairs for shape in ((a, b), (b, a))}


def _timed_wait(wait: Callable[[Pending], Tensor]) -> Callable[[Pending], Tensor]:
    def timed(self: Pending) -> Tensor:
        with record_function(WAITING):
            return wait(self)

    return timed


def profiled(call: Call, router: set[tuple[int, ...]]) -> Tensor:
    """Seconds of one call, and of each of KINDS in it, [1 + kinds]."""
    waits = mock.patch.object(Pending, "wait", _timed_wait(Pending.wait))
    with waits, profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        barrier(world_axis())  # which may take a while: another rank's profiler begins
        with record_function(CALL):
            call()
    events: list[Any] = list(found.events())
    (whole,) = (event for event in events if event.name == CALL)
    seconds = dict.fromkeys(KINDS, 0.0)
    for event in events:
        began = event.time_range.start
        if event.thread == whole.thread and whole.time_range.start < began < whole.time_range.end:
            kind = kind_of(event.name, event.input_shapes or [], router)
            seconds[kind] += 1e-6 * event.self_cpu_time_total
    spent = 1e-6 * whole.cpu_time_total
    seconds["rest"] += spent - sum(seconds.values())
    return torch.tensor([spent, *seconds.values()], dtype=torch.float64)


def table(names: list[str], times: Tensor) -> None:
    """Milliseconds of a call [case, 1 + kinds]."""
    print(f"  {'profile, ms':<24}{'all':>9} " + " ".join(f"{kind:>13}" for kind in KINDS))
    for name, row in zip(names, 1e3 * times, strict=True):
        parts = " ".join(f"{x:13.1f}" for x in row[1:])
        print(f"  {name:<24}{row[0]:9.1f} {parts}", flush=True)
