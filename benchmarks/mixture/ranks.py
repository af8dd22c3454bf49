"""Parts "ranks" and "shared": our layer on two ranks that each hold half of the experts.

"ranks": beside one process with the same tokens in all. "shared": with shared experts, which are
computed while tokens travel, beside the sum of the layer without them and of them alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from mixture.layer import TOPK, Given, Ours, Shape, given, title
from mixture.products import apart
from tensor_parallel import quartiles
from timing import kinds
from timing.turns import Call, Case, Measured, Watch
from torch import Tensor

from penteract.grid import Grid
from penteract.mesh import Mesh, create_mesh
from penteract.nn import grouped_mlp
from penteract.parallel.expert import grouped
from penteract.parallel.expert.dispatchers import Name, dispatcher_of
from penteract.pending import Pending
from penteract.testing import run_ranks, world_axis
from penteract.wire import all_reduce_

RANKS = 2
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
ONE, BOTH = "one process", "both alone at once"
DISPATCHERS: tuple[Name, ...] = ("all_to_all", "all_gather")
COLUMNS = ("products", "waiting", "rest", "for the other")
ALONE = "shared experts alone"


class Found(NamedTuple):
    measured: Measured
    sent: Tensor  # [case, 2] bytes and messages of this rank in one call
    profiles: Tensor  # [case, 1 + kinds], or none


class Watches:
    """Seconds of experts' products, and of awaiting messages."""

    def __init__(self) -> None:
        self.products = Watch((grouped_mlp, "product"), (grouped, "write_product"))
        self.waiting = Watch((Pending, "wait"))

    def read(self) -> Tensor:
        return torch.tensor([self.products.seconds, self.waiting.seconds], dtype=torch.float64)


class Half:
    """Our layer on this rank: its rows, its experts, its messages."""

    def __init__(self, shape: Shape, values: Given) -> None:
        axis = world_axis()
        self.mesh = create_mesh(Grid(RANKS, ep=RANKS), axis.rank)
        self.shape, self.values = shape, values
        self.ours = Ours(shape, values, self.mesh)
        self.shared = self.ours.layer.shared
        n = shape.tokens // RANKS
        self.rows = slice(n * axis.rank, n * (axis.rank + 1))

    def call(self, name: Name, *, shared: bool) -> Call:
        """The layer with this dispatcher, and with its shared experts or without."""
        layer, experts = self.ours.layer, self.shared if shared else None
        dispatcher = dispatcher_of(name, self.shape.experts, self.ours.places)
        call = self.ours.calling(self.values, self.rows)

        def with_these() -> list[Tensor]:
            layer.dispatcher, layer.shared = dispatcher, experts
            return call()

        return with_these

    def fresh(self, call: Call) -> list[Tensor]:
        """What `call` computes, with nothing of an earlier one."""
        self.ours.spoil()
        return call()

    def shared_alone(self) -> Call:
        return self.ours.calling(self.values, self.rows, self.shared)

    def expected(self, whole: Sequence[Tensor]) -> list[Tensor]:
        """What this rank computes of what one process does, with the router's whole gradient."""
        y, dx, router, inner, down, *shared = whole
        held = slice(self.ours.held.start, self.ours.held.stop)
        return [y[self.rows], dx[self.rows], router, inner[held], down[held], *shared]


def summed(found: Sequence[Tensor]) -> list[Tensor]:
    """With gradients of what all ranks hold, which are parts of sums, added up."""
    y, dx, router, inner, down, *shared = (x.double() for x in found)
    axis = world_axis()
    router, *shared = (all_reduce_(x.contiguous().clone(), axis) for x in (router, *shared))
    return [y, dx, router, inner, down, *shared]


def on_all_ranks(difference: float) -> float:
    return all_reduce_(torch.tensor(difference), world_axis(), "max").item()


def sent_by(calls: Sequence[Call], mesh: Mesh) -> Tensor:
    traffic, found = mesh.axis("etp-ep").traffic, []
    for call in calls:
        before = sum(traffic.bytes.values()), sum(traffic.calls.values())
        call()
        found.append([sum(traffic.bytes.values()) - before[0]])
        found[-1].append(sum(traffic.calls.values()) - before[1])
    return torch.tensor(found, dtype=torch.float64)


def profiles_of(shape: Shape, cases: Sequence[Case]) -> Tensor:
    """Of cases that all ranks call."""
    found = []
    for case in cases:
        tokens = shape.tokens // (1 if case.name in (ONE, BOTH) else RANKS)
        router = kinds.router_shapes(tokens, shape.experts, shape.hidden, TOPK)
        found.append(kinds.profiled(case.call, router))
    return torch.stack(found)


def measure(shape: Shape, rounds: int, profile: bool) -> Found:
    values, watches = given(shape), Watches()
    half, alone = Half(shape, values), Ours(shape, values)
    whole = alone.calling(values, slice(None))
    wanted = half.expected([x.double() for x in whole()])
    cases = [Case(ONE, whole), Case(BOTH, whole, work=RANKS)]
    cases += [Case(name, half.call(name, shared=False)) for name in DISPATCHERS]
    worst = max(apart(summed(half.fresh(case.call)), wanted) for case in cases[2:])
    del wanted
    sent = sent_by([case.call for case in cases], half.mesh)
    profiles = profiles_of(shape, cases) if profile else torch.empty(0)
    cases[0] = dataclasses.replace(cases[0], solo=True)
    agreement = on_all_ranks(worst), TOLERANCE[shape.dtype]
    return Found(Measured.of(cases, agreement, rounds, watches.read), sent, profiles)


def measure_shared(shape: Shape, rounds: int, profile: bool) -> Found:
    """For each dispatcher the layer with its shared experts and without; last, these alone."""
    values, watches = given(shape), Watches()
    half = Half(shape, values)
    cases, worst, alone = list[Case](), 0.0, half.shared_alone()
    for name in DISPATCHERS:
        both, plain = half.call(name, shared=True), half.call(name, shared=False)
        cases += [Case(f"{name}, shared", both), Case(name, plain)]
        y, dx, *routed = (x.double() for x in half.fresh(plain)[:5])
        y_shared, dx_shared, *rest = (x.double() for x in half.fresh(alone))
        wanted = [y + y_shared, dx + dx_shared, *routed, *rest[-2:]]
        worst = max(worst, apart(half.fresh(both), wanted))
    cases.append(Case(ALONE, alone))
    sent = sent_by([case.call for case in cases], half.mesh)
    profiles = profiles_of(shape, cases) if profile else torch.empty(0)
    agreement = on_all_ranks(worst), TOLERANCE[shape.dtype]
    return Found(Measured.of(cases, agreement, rounds, watches.read), sent, profiles)


# --- what is printed


def columns(times: Tensor, work: Tensor, one: Tensor) -> Tensor:
    """COLUMNS of times [rank, round, case, 3], in units of one process's time; [case, 4]."""
    spent, products, waiting = times.sum(0).unbind(-1)
    longest, ranks = times[..., 0].amax(0), (times[..., 0] > 0).sum(0)
    rest, idle = spent - products - waiting, ranks * longest - spent
    parts = torch.stack([products, waiting, rest, idle], -1)
    return (parts / one[..., None] / work[:, None]).median(0).values


def waiting_share(times: Tensor) -> Tensor:
    """Of the time of the rank that waits longest, [case]."""
    return (times[..., 2] / times[..., 0]).nan_to_num(0.0).amax(0).median(0).values


def share_of_busier(times: Tensor) -> Tensor:
    """How much longer the busier rank's products take than the mean, [case]."""
    products = times[..., 1]
    return (products.amax(0) / products.mean(0)).median(0).values


def measured_on_ranks(measure: Callable[..., Found], *args: object) -> list[Found]:
    return run_ranks(measure, RANKS, *args, timeout_s=7200, backend="gloo")


def report(shape: Shape, rounds: int, profile: bool) -> bool:
    """Print one case; whether two ranks compute what one process does."""
    found = measured_on_ranks(measure, shape, rounds, profile)
    first = found[0].measured
    if not first.agrees(title(f"ep = {RANKS}", shape)):
        return False
    times = torch.stack([x.measured.times for x in found])
    sent = torch.stack([x.sent for x in found]).amax(0)
    longest, work = times[..., 0].amax(0), torch.tensor(first.work)
    parts = columns(times, work, longest[:, :1])
    faster = work * longest[:, :1] / longest
    print(
        f"  {'':<20}{'ms':>30}{'speed-up':>28}  {'  '.join(COLUMNS)}"
        "  waits  uneven  MB sent  messages"
    )
    uneven, waits = share_of_busier(times), waiting_share(times)
    for i, name in enumerate(first.names):
        shares = "".join(f"{x:{len(c) + 2}.3f}" for x, c in zip(parts[i], COLUMNS, strict=True))
        busier = "" if name == ONE else f"{uneven[i]:.3f}"
        print(
            f"  {name:<20}{quartiles(1e3 * longest[:, i]):>30}{quartiles(faster[:, i]):>28}"
            f"{shares}{waits[i]:7.1%}{busier:>8}{1e-6 * sent[i, 0]:9.2f}{sent[i, 1]:10.0f}",
            flush=True,
        )
    for i, name in enumerate(first.names[2:], 2):
        ratio = quartiles(faster[:, i] / faster[:, 1])
        print(f"  {name + ' / ' + BOTH:<40} {ratio}")
    if profile:
        kinds.table(first.names, torch.stack([x.profiles for x in found]).mean(0))
    return True


def report_shared(shape: Shape, rounds: int, profile: bool) -> bool:
    """Print one case; whether the layer is the sum of its parts."""
    found = measured_on_ranks(measure_shared, shape, rounds, profile)
    first = found[0].measured
    if not first.agrees(title(f"shared experts of width {shape.shared}, ep = {RANKS}", shape)):
        return False
    times = torch.stack([x.measured.times for x in found])
    longest, waits = (
        dict(zip(first.names, (1e3 * times[..., i].amax(0)).unbind(1), strict=True)) for i in (0, 2)
    )
    for name, ms in longest.items():
        print(f"  {name:<24}{quartiles(ms)} ms   waiting {waits[name].median():.2f} ms")
    for name in DISPATCHERS:
        both, parts = longest[f"{name}, shared"], longest[name] + longest[ALONE]
        print(f"  {name}: layer / sum of its parts {quartiles(both / parts)}", end="")
        print(f"   hidden {quartiles(parts - both)} ms of {waits[name].median():.2f}", flush=True)
    if profile:
        kinds.table(first.names, torch.stack([x.profiles for x in found]).mean(0))
    return True
