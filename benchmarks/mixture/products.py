"""Part "grouped": ways to multiply the rows of each expert by its matrix, forward and backward.

Rows [m, i], those of one expert after those of another, and matrices [e, o, i]: torch's kernel,
products one by one, a batched product over padded rows, and ours, which takes the batched product
where all experts have equally many rows and else what `compat.has_grouped_product` says.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from mixture.layer import TOPK, Load, Shape, chosen_experts
from tensor_parallel import quartiles
from timing.turns import Case, Measured
from torch import Tensor, nn
from torch.nn import functional as F

from penteract.parallel.expert.grouped import Groups, product, weight_gradient
from penteract.testing import run_ranks

LOADS: tuple[Load, ...] = ("equal", "uniform", "skewed")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
PARTS = ("forward", "d rows", "d weights")
BY_MM, BY_KERNEL, BATCHED, OURS = "one by one", "grouped_mm", "padded bmm", "penteract"
# What `grouped.product` chooses instead of products one by one, or might.
CHOICES: dict[Load, str] = {"equal": BATCHED, "uniform": BY_KERNEL, "skewed": BY_KERNEL}


class Form(Protocol):
    """One way; x [m, i], dy [m, o], weights [e, o, i]. Called in this order."""

    def forward(self, x: Tensor, weights: Tensor) -> Tensor: ...

    def d_rows(self, dy: Tensor, weights: Tensor) -> Tensor: ...

    def d_weights(self, dy: Tensor, x: Tensor) -> Tensor: ...


class OneByOne:
    def __init__(self, groups: Groups) -> None:
        self.groups = groups

    def product(self, x: Tensor, weights: Tensor) -> Tensor:
        out = x.new_empty(len(x), weights.shape[2])
        each = zip(self.groups.split(out), self.groups.split(x), weights.unbind(0), strict=True)
        for part, rows, matrix in each:
            torch.mm(rows, matrix, out=part)
        return out

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return self.product(x, weights.mT)

    d_rows = product

    def d_weights(self, dy: Tensor, x: Tensor) -> Tensor:
        out = x.new_empty(len(self.groups.rows), dy.shape[1], x.shape[1])
        each = zip(out.unbind(0), self.groups.split(dy), self.groups.split(x), strict=True)
        for own, d_part, rows in each:
            torch.mm(d_part.t(), rows, out=own)
        return out


class Kernel:
    """torch's `grouped_mm`."""

    def __init__(self, groups: Groups) -> None:
        self.ends = groups.ends

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return F.grouped_mm(x, weights.mT, offs=self.ends)

    def d_rows(self, dy: Tensor, weights: Tensor) -> Tensor:
        return F.grouped_mm(dy, weights, offs=self.ends)

    def d_weights(self, dy: Tensor, x: Tensor) -> Tensor:
        return F.grouped_mm(dy.t(), x, offs=self.ends)


class Padded:
    """As many rows for every expert as the longest has; what was padded is kept for `d_weights`."""

    def __init__(self, groups: Groups) -> None:
        self.most, self.experts = max(groups.rows), len(groups.rows)
        starts = [i * self.most for i in range(self.experts)]
        each = zip(starts, groups.rows, strict=True)
        self.at = torch.cat([torch.arange(start, start + n) for start, n in each])

    def pad(self, x: Tensor) -> Tensor:
        out = x.new_zeros(self.experts * self.most, x.shape[1]).index_copy_(0, self.at, x)
        return out.unflatten(0, (self.experts, self.most))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        self.x = self.pad(x)
        return torch.bmm(self.x, weights.mT).flatten(0, 1)[self.at]

    def d_rows(self, dy: Tensor, weights: Tensor) -> Tensor:
        self.dy = self.pad(dy)
        return torch.bmm(self.dy, weights).flatten(0, 1)[self.at]

    def d_weights(self, dy: Tensor, x: Tensor) -> Tensor:
        return torch.bmm(self.dy.mT, self.x)


class Ours:
    """What `nn.grouped_mlp` calls."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return product(x, weights.mT, self.groups)

    def d_rows(self, dy: Tensor, weights: Tensor) -> Tensor:
        return product(dy, weights, self.groups)

    def d_weights(self, dy: Tensor, x: Tensor) -> Tensor:
        matrices = nn.Parameter(x.new_empty(len(self.groups.rows), dy.shape[1], x.shape[1]))
        dw = weight_gradient(dy, x, matrices, self.groups, None)
        assert dw is not None
        return dw


FORMS: dict[str, Callable[[Groups], Form]] = {
    BY_MM: OneByOne,
    BY_KERNEL: Kernel,
    BATCHED: Padded,
    OURS: Ours,
}


def groups_of(shape: Shape) -> Groups:
    counts = torch.bincount(chosen_experts(shape).flatten(), minlength=shape.experts)
    return Groups(counts.tolist(), counts.cumsum(0).to(torch.int32))


def tensors(shape: Shape) -> list[Tensor]:
    """x [m, h], dy [m, f], weights [e, f, h]."""
    m, h, f = TOPK * shape.tokens, shape.hidden, shape.ffn
    generator = torch.Generator().manual_seed(1)
    sizes = ((m, h), (m, f), (shape.experts, f, h))
    return [torch.randn(size, generator=generator).to(shape.dtype) for size in sizes]


class Timer:
    """Seconds of the three products of all calls so far."""

    def __init__(self) -> None:
        self.seconds = torch.zeros(len(PARTS), dtype=torch.float64)

    def run(self, form: Form, x: Tensor, dy: Tensor, weights: Tensor) -> list[Tensor]:
        at = [time.perf_counter()]
        found = []
        for fn, pair in (
            (form.forward, (x, weights)),
            (form.d_rows, (dy, weights)),
            (form.d_weights, (dy, x)),
        ):
            found.append(fn(*pair))
            at.append(time.perf_counter())
        self.seconds += torch.tensor(at, dtype=torch.float64).diff()
        return found

    def read(self) -> Tensor:
        return self.seconds.clone()


def apart(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference, relative to the largest value of each."""
    worst = [
        ((a.double() - b).abs().max() / b.abs().max()).item()
        for a, b in zip(found, wanted, strict=True)
    ]
    return max(float("inf") if x != x else x for x in worst)


def measure(shape: Shape, rounds: int) -> Measured:
    groups, timer, (x, dy, weights) = groups_of(shape), Timer(), tensors(shape)
    cases = []
    for name, form in FORMS.items():
        made = form(groups)
        cases.append(Case(name, lambda made=made: timer.run(made, x, dy, weights)))
    wide = [v.double() for v in (x, dy, weights)]
    wanted = Timer().run(OneByOne(groups), *wide)
    worst = max(apart(case.call(), wanted) for case in cases)
    del wanted, wide
    return Measured.of(cases, (worst, TOLERANCE[shape.dtype]), rounds, timer.read)


def report(shape: Shape, rounds: int) -> Measured | None:
    """Print one case; its times where all agree."""
    (found,) = run_ranks(measure, 1, shape, rounds, timeout_s=3600)
    measured: Measured = found
    rows = groups_of(shape).rows
    title = f"grouped products, {shape}: {min(rows)} to {max(rows)} rows an expert"
    if not measured.agrees(f"{title}, {shape.hidden} to {shape.ffn} features"):
        return None
    print(f"  {'ms':<12}" + "".join(f"{x:>28}" for x in ("all", *PARTS)) + f"{'mm / this':>28}")
    base = measured.times[:, 0, 0]
    for i, name in enumerate(measured.names):
        times = measured.times[:, i]
        columns = [quartiles(1e3 * x) if x.any() else "" for x in times.unbind(1)]
        columns.append(quartiles(base / times[:, 0]))
        print(f"  {name:<12}" + "".join(f"{x:>28}" for x in columns), flush=True)
    return measured


def report_all(shapes: Sequence[Shape], rounds: int) -> bool:
    """All loads of the shapes; then what they say to `compat.has_grouped_product`."""
    found = dict[tuple[Shape, Load], Measured | None]()
    for shape, load in itertools.product(shapes, LOADS):
        found[shape, load] = report(dataclasses.replace(shape, load=load), rounds)
    print("\nforward and d rows, one by one / other (above 1: the other is faster)")
    for shape in shapes:
        agreed = {load: found[shape, load] for load in LOADS}
        ratios = {load: ratio(x, CHOICES[load]) for load, x in agreed.items() if x is not None}
        uneven = [x for load, x in ratios.items() if load != "equal"]
        # The kernel only where it is faster in three rounds of four with every load.
        kernel = bool(uneven) and all(x.quantile(0.25) > 1 for x in uneven)
        each = "".join(f"   {CHOICES[load]}, {load} {quartiles(x)}" for load, x in ratios.items())
        what = f"{shape.dtype}, {shape.experts} experts".removeprefix("torch.")
        print(f"  {what:<22}{each}   uneven: {BY_KERNEL if kernel else BY_MM}", flush=True)
    return None not in found.values()


def ratio(measured: Measured, other: str) -> Tensor:
    """Of forward and d rows, round by round: one by one / `other`."""
    times = measured.times[:, :, 1:3].sum(2)
    return times[:, 0] / times[:, measured.names.index(other)]
