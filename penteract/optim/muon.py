"""Muon: the momentum of each logical matrix is orthogonalised before it is applied.

With G a matrix's gradient, M its momentum and mu the factor `optim.momentum`:

    M  ← mu M + (1-mu) G            elementwise, on the slices that a rank owns
    O  = NS(mu M + (1-mu) G)        of the whole logical matrix, on its owner
    W  ← W - lr (0.2 sqrt(max(r, c)) O + weight_decay W)

NS is five Newton–Schulz steps of a quintic that brings singular values near 1, in at least float32.
The factor gives the update the root mean square that AdamW's has, so one learning rate serves both:
what is no matrix of a block (embeddings, head, norms, biases) is AdamW's.

A fused q|k|v is three matrices, and a tensor rank's part is none: the unit is what the placement's
pieces name. Each matrix has one owner among all ranks that hold something of it, dealt by cost
(`muon_plan`). Data ranks with equal copies share the work too: a matrix takes some 30 min(r, c)
operations an element, its exchange one element each, and what one rank computes all have alike.

| what                                    | axis     | bytes a rank                | when         |
|-----------------------------------------|----------|-----------------------------|--------------|
| what it holds, to the owners            | tp-dp-cp | at most that                | in each step |
| results of its matrices, to all holders | tp-dp-cp | once for every copy         | in each step |
| names and shapes of its matrices        | tp-dp-cp | JSON, to n-1 ranks          | at the start |
| the list of boxes that it holds         | tp-dp-cp | 40 a box, to n-1 ranks      | at the start |

What must hold: every rank lists the same matrices in the same order, those of other ranks' experts
too; momentum stays finite, since a skipped step changes nothing. Sources: Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon; Liu et al., arXiv:2502.16982 (weight decay, the factor).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from penteract import compat
from penteract.collectives import exchange, start_all_to_all
from penteract.config import OptimConfig
from penteract.mesh import Axis
from penteract.optim.elementwise import Update
from penteract.optim.groups import weight_decay
from penteract.optim.moments import Moments
from penteract.optim.muon_plan import Held, Matrix, Part, Parts, Plan, imagine, plan
from penteract.optim.offload import on_host
from penteract.parallel.buckets import Bucket
from penteract.placement import Box

STEPS = 5
QUINTIC = (3.4445, -4.7750, 2.0315)  # x ← a x + b x³ + c x⁵, steep at 0, near 1 after five


def orthogonalise(x: Tensor, eps: float) -> Tensor:
    """[r, c] → roughly the nearest semi-orthogonal matrix: singular values about 0.7 to 1.2.

    Those that were tiny beside the largest come out smaller, and a matrix whose norm is far below
    `eps` stays small: noise is not blown up to a full update.
    """
    a, b, c = QUINTIC
    tall = x.shape[0] > x.shape[1]
    y = x.mT if tall else x
    y = y / (torch.linalg.vector_norm(y) + eps)
    for _ in range(STEPS):
        square = y @ y.mT  # [min(r, c), min(r, c)]
        y = torch.addmm(y, torch.addmm(square, square, square, beta=b, alpha=c), y, beta=a)
    return y.mT if tall else y


class Muon:
    """The rule for kinds of matrices."""

    def __init__(self, moments: Moments, optim: OptimConfig, axis: Axis) -> None:
        assert optim.momentum is not None, "an unresolved configuration"
        self.moments, self.optim, self.axis = moments, optim, axis
        buckets = moments.buckets
        self.dtype = max((b.kind.wide for b in buckets), key=lambda dtype: dtype.itemsize)
        self.matrices = _matrices(buckets, axis)
        number = {matrix.name: i for i, matrix in enumerate(self.matrices)}
        self.held: list[Held] = [
            (number[fragment.tensor], fragment.box)
            for bucket in buckets
            for _, fragment, _ in bucket.owned(bucket.master)
        ]
        self.plan = self._plan(buckets[0].master)

    def _plan(self, like: Tensor) -> Plan:
        """All ranks tell each other once what they hold."""
        axis = self.axis
        if axis.size > 1 and not compat.has_values(like):
            held: Sequence[Sequence[Held]]
            held = imagine(self.matrices, self.held, axis.rank, axis.size)
        else:
            held = [_unpacked(row) for row in exchange(_packed(self.held), axis)]
        return plan(self.matrices, held, axis.rank)

    def update(self, update: Update) -> None:
        """Update all buckets; matrices are orthogonalised where gradients lie, on the device."""
        factor = self.optim.momentum
        assert factor is not None
        changes = []
        for bucket, flat in on_host((b, b.own_gradient) for b in self.moments.buckets):
            with self.moments.widened(bucket, update.done) as (momentum,):
                gradient = flat * update.coefficient
                new = momentum.lerp(gradient, 1 - factor)
                change = gradient.lerp_(new, factor)
                momentum.copy_(torch.where(update.skip, momentum, new))
            changes.append((bucket, change.to(bucket.own_gradient.device)))
        self._orthogonalise(changes)
        for bucket, change in on_host(changes):
            rate = update.rate(bucket)
            kept = 1 - rate * weight_decay(bucket.kind, self.optim)
            new = (bucket.master * kept).sub_(change, alpha=rate)
            bucket.master.copy_(torch.where(update.skip, bucket.master, new))

    def _orthogonalise(self, changes: Sequence[tuple[Bucket, Tensor]]) -> None:
        """Replace what this rank holds of every matrix by its part of the scaled result."""
        views = [view for bucket, flat in changes for _, _, view in bucket.owned(flat)]
        mine = [i for i, owner in enumerate(self.plan.owners) if owner == self.axis.rank]
        like = changes[0][1].new_empty(0, dtype=self.dtype)
        whole = {i: like.new_empty(self.matrices[i].shape) for i in mine}
        sent = [
            _inside(views[p.held], p.box.relative_to(self.held[p.held][1].offset))
            for parts in self.plan.to_owners
            for p in parts
        ]
        came = self._send(sent, self.plan.to_owners, self.plan.at_owner, like)
        for part, values in came:
            _inside(whole[part.matrix], part.box).copy_(values)
        for i, x in whole.items():
            scale = 0.2 * math.sqrt(max(x.shape))
            whole[i] = orthogonalise(x, self.optim.eps).mul_(scale)
        sent = [_inside(whole[p.matrix], p.box) for parts in self.plan.to_holders for p in parts]
        for part, values in self._send(sent, self.plan.to_holders, self.plan.at_holder, like):
            views[part.held].copy_(values)

    def _send(
        self, values: Sequence[Tensor], there: Parts, here: Parts, like: Tensor
    ) -> Iterator[tuple[Part, Tensor]]:
        """Send each rank its parts in one message; what came, part by part."""
        sent, received = ([sum(p.box.numel for p in parts) for parts in x] for x in (there, here))
        flat = torch.cat([like, *(x.reshape(-1).to(self.dtype) for x in values)])
        came = start_all_to_all(flat, self.axis, sent, received).wait()
        parts = [part for parts in here for part in parts]
        split = came.split([part.box.numel for part in parts]) if parts else ()
        for part, x in zip(parts, split, strict=True):
            yield part, x.view(part.box.size)


def _matrices(buckets: Sequence[Bucket], axis: Axis) -> list[Matrix]:
    """The logical matrices of all ranks' buckets, by name; in a dry run this rank's alone."""
    pieces = (p for b in buckets for slot in b.slots for p in slot.entry.placement.pieces)
    shapes = {piece.tensor: piece.shape for piece in pieces}
    for name, shape in shapes.items():
        assert len(shape) == 2, f"{name} of shape {shape} is no matrix"
    if compat.has_values(buckets[0].master):
        for answer in exchange(json.dumps(shapes).encode(), axis):
            shapes.update((name, tuple(shape)) for name, shape in json.loads(answer).items())
    return [Matrix(name, shapes[name]) for name in sorted(shapes)]


def _inside(x: Tensor, box: Box) -> Tensor:
    return x[box.slices()]


def _packed(held: Sequence[Held]) -> bytes:
    rows = [(matrix, *box.offset, *box.size) for matrix, box in held]
    return np.array(rows, dtype="<i8").tobytes()


def _unpacked(payload: bytes) -> list[Held]:
    rows = np.frombuffer(payload, dtype="<i8").reshape(-1, 5).tolist()
    return [(m, Box((r, c), (height, width))) for m, r, c, height, width in rows]
