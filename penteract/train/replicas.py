"""Copies of a tensor on several ranks must be equal to the bit: every n steps they are compared.

Nothing keeps copies equal but that all start alike and are changed alike. A bit that flips in one
rank's memory, or a kernel that computes wrongly once, would go on unseen, and a checkpoint holds
one of the copies. So each rank sums the bits of what it holds, each word times an odd factor of its
place, and the sums are compared over the ranks that hold the same:

| what                                       | equal over                                        |
|--------------------------------------------|---------------------------------------------------|
| working weights, kept whole                | dp-cp, of experts edp                             |
| those that stage 3 keeps in parts          | the replicas of a part                            |
| masters and moments                        | all of these in stage 0, else replicas of a part  |
| any of them where tp, etp do not split it  | tp, etp besides                                   |
| of a tied weight                           | the first and the last pipeline rank besides      |
| what routers keep                          | tp-dp-cp                                          |

A word times an odd number modulo 2^64 changes whenever one of its bits does, the sign of a zero
too; two words that change places, or changes of several words, cancel with a chance of about 2^-32.

| what is sent                                  | axis       | bytes a rank          | when        |
|-----------------------------------------------|------------|-----------------------|-------------|
| two bounds of each bucket's sum               | each above | 2 (n-1)/n · 16 each   | every check |
| whether all are equal                         | world      | 2 (n-1)/n · 8         | every check |
| sums of the boxes in unequal buckets, as JSON | world      | 100 a box, n-1 times  | then        |

Besides, a check reads everything once, and waits for the device once.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penteract.checkpoint.model import kept
from penteract.collectives import all_reduce_, exchange
from penteract.mesh import Axis, Mesh
from penteract.parallel.buckets import Bucket
from penteract.random import bits_range
from penteract.train.rerun import HardwareError

if TYPE_CHECKING:
    from penteract.train.run import Run

COLUMNS = 1 << 14  # words with factors of their own; rows of them have others
ROWS = {"cpu": 8, "cuda": 512}  # so many are multiplied at once: in a cache, or in few kernels
MOST = 8  # unequal buckets that are looked into, tensors that are named


@dataclass(frozen=True)
class Copied:
    """A tensor of which other ranks hold a copy: all ranks of each of `axes`, one after another."""

    what: str  # weight, master, a moment, or a logical name
    flat: Tensor
    axes: tuple[Axis, ...]
    bucket: Bucket | None = None

    def boxes(self) -> Iterator[tuple[str, Tensor]]:
        """Its parts by names that are the same on all ranks that hold them."""
        bucket = self.bucket
        if bucket is None:
            yield self.what, self.flat
        elif self.flat is bucket.parameters:
            for slot in bucket.slots:
                stored, placement = slot.view(self.flat), slot.entry.placement
                for found in placement.fragments():
                    yield f"{self.what} {found.tensor}{found.box}", stored[found.local.slices()]
        else:
            for _, found, view in bucket.owned(self.flat):
                yield f"{self.what} {found.tensor}{found.box}", view


def copied(run: Run) -> Iterator[Copied]:
    """All that this rank holds and others too, in one order on all ranks that hold the same."""
    for bucket in run.buffers.all_buckets:
        sharding, also = bucket.kind.sharding, _unsplit(bucket, run.mesh)
        owners = (sharding.replicate, *also)
        if bucket.kept:
            assert bucket.parameters is not None
            yield Copied("weight", bucket.parameters, (sharding.shard, *owners), bucket)
        else:
            yield Copied("weight", bucket.own_parameters, owners, bucket)
        if bucket.master is not bucket.own_parameters:
            yield Copied("master", bucket.master, owners, bucket)
    for name, bucket, moment in run.optimizer.state():
        owners = (bucket.kind.sharding.replicate, *_unsplit(bucket, run.mesh))
        yield Copied(name, moment, owners, bucket)
    for shard, x in kept(run.task.model):
        yield Copied(shard.tensor, x.reshape(-1), (run.mesh.axis("tp-dp-cp"),))


def _unsplit(bucket: Bucket, mesh: Mesh) -> tuple[Axis, ...]:
    """Axes besides those of its sharding over which a bucket is whole on every rank."""
    kind = bucket.kind
    names = ("ep", "etp") if kind.sharding.shard.name == "edp" else ("tp",)
    tied = ("tied",) if "tied" in kind.more_axes else ()
    return tuple(mesh.axis(name) for name in (*names, *tied) if name not in kind.split_axes)


class Replicas:
    """Looks after the copies every `train.check_replicas` steps, and before each save."""

    def __init__(self, run: Run) -> None:
        self.run, self.every = run, run.config.train.check_replicas
        self.checked = run.step

    def look(self, *, saving: bool) -> None:
        """Between two steps, all ranks together. Raises HardwareError as `check_replicas`."""
        step = self.run.step
        if self.every and self.checked != step and (saving or step % self.every == 0):
            self.run.activity.now("comparing copies")
            check_replicas(self.run)
            self.checked = step


def check_replicas(run: Run) -> None:
    """Raise HardwareError on every rank where copies of anything differ; all ranks together.

    `run.unequal` says it then, which marks what is saved.
    """
    run.buffers.wait()
    found = [item for item in copied(run) if any(axis.size > 1 for axis in item.axes)]
    unequal = _unequal(found, run.device)
    world = run.mesh.axis("world")
    some = torch.tensor(int(bool(unequal)), device=run.device)
    if not int(all_reduce_(some, world, "max")):
        return
    mine = dict(chain.from_iterable(item.boxes() for item in unequal[:MOST]))
    sums = {name: int(bit_sum(x)) for name, x in mine.items()}
    told = exchange(json.dumps([socket.gethostname(), sums]).encode(), world)
    facts = _facts([json.loads(answer) for answer in told])
    run.unequal = facts
    raise HardwareError(
        f"after step {run.step} copies that must be equal to the bit are not: {facts}; of two that "
        "differ both are named. This step is saved and marked, so that no run continues it by "
        "itself. Test or replace that machine before going on from the step before"
    )


def _unequal(found: Sequence[Copied], device: torch.device) -> list[Copied]:
    """Those whose copies differ, the same ones on all ranks that hold them."""
    groups: dict[tuple[str, ...], list[Copied]] = {}
    for item in found:
        groups.setdefault(tuple(axis.name for axis in item.axes), []).append(item)
    ordered = [items for _, items in sorted(groups.items())]
    bad: list[Tensor] = []
    for items in ordered:
        sums = torch.stack([bit_sum(item.flat).to(device) for item in items])
        bounds = torch.stack([sums, ~sums])  # ~x is -x-1: the largest of it is the least of x
        for axis in items[0].axes:
            all_reduce_(bounds, axis, "max")
        bad.append(bounds[0] != ~bounds[1])
    flags = torch.cat(bad).tolist() if bad else []
    return [item for item, flag in zip(chain(*ordered), flags, strict=True) if flag]


@torch.no_grad()
def bit_sum(x: Tensor) -> Tensor:
    """The sum of a tensor's words, each times the factor of its place; int64, modulo 2^64."""
    flat = x.reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    words = _words(flat)
    factors = _factors("columns", min(len(words), COLUMNS), x.device)
    whole = len(words) // COLUMNS * COLUMNS
    rows, rest = words[:whole].view(-1, COLUMNS), words[whole:]
    of_rows = _factors("rows", len(rows) + 1, x.device)
    n = ROWS[x.device.type]
    for part, factor in zip(rows.split(n), of_rows[:-1].split(n), strict=True):
        if len(part):
            total += ((part * factors).sum(1) * factor).sum()
    return total.add_((rest * factors[: len(rest)]).sum() * of_rows[-1])


def _words(flat: Tensor) -> Tensor:
    """The bits in words of at most 4 bytes: of 8, a sign that changed places would be lost."""
    size = flat.element_size()
    if size < 4 and (len(flat) * size) % 4 == 0:
        flat, size = (flat if flat.storage_offset() * size % 4 == 0 else flat.clone()), 4
    return flat.view({1: torch.uint8, 2: torch.int16}.get(size, torch.int32))


def _factors(stream: str, n: int, device: torch.device) -> Tensor:
    """Odd numbers below 2^64, [n], the same on all ranks."""
    words = bits_range(0, f"replicas {stream}", 0, 2 * n, device=device)
    return (words[:n] << 32) | words[n:] | 1


def _facts(told: Sequence[tuple[str, Mapping[str, int]]]) -> str:
    """What is said of copies whose sums of bits are these, by rank, each with its host."""
    holders: dict[str, dict[int, list[int]]] = {}
    for rank, (_, sums) in enumerate(told):
        for name, found in sums.items():
            holders.setdefault(name, {}).setdefault(found, []).append(rank)
    differ = {name: groups for name, groups in holders.items() if len(groups) > 1}
    odd: set[int] = set()
    for groups in differ.values():
        most = max(map(len, groups.values()))
        same = [ranks for ranks in groups.values() if len(ranks) == most]
        agreed = set(same[0]) if len(same) == 1 else set()
        odd |= {rank for ranks in groups.values() for rank in ranks} - agreed
    names = [*sorted(differ)[:MOST], *(["…"] if len(differ) > MOST else [])]
    tensors = ", ".join(names) or "no tensor's own elements: padding, or sums that were wrong once"
    ranks = ", ".join(f"rank {rank} ({told[rank][0]})" for rank in sorted(odd)) or "no rank"
    return f"{tensors}. The odd ones: {ranks}"


def flip_bit(run: Run) -> None:
    """Flip the lowest bit of the first weight that others hold too, if any (`train.inject`)."""
    run.buffers.wait()
    for item in copied(run):
        if any(axis.size > 1 for axis in item.axes):
            _words(item.flat[:4])[0] ^= 1
            return
