"""How a stored parameter maps to logical tensors: pieces and boxes of integers, no communication.

A logical tensor is what the model's definition names (one matrix, one bias). A stored parameter is
what a rank holds: a list of pieces, each a box of a logical tensor at a place in the storage. Every
shard in the system is described so, which makes resharding an intersection of boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]


def even_sizes(n: int, parts: int) -> list[int]:
    """Sizes of `n` elements split into `parts`: the first `n % parts` parts get one more."""
    if n < 0 or parts < 1:
        raise ValueError(f"cannot split {n} elements into {parts} parts: need n >= 0, parts >= 1")
    base, extra = divmod(n, parts)
    return [base + (index < extra) for index in range(parts)]


def split_range(n: int, parts: int, index: int) -> tuple[int, int]:
    """(start, stop) of part `index` of `n` elements under the rule of `even_sizes`."""
    if n < 0 or parts < 1:
        raise ValueError(f"cannot split {n} elements into {parts} parts: need n >= 0, parts >= 1")
    if not 0 <= index < parts:
        raise ValueError(f"part {index} of {parts} does not exist: parts are 0 to {parts - 1}")
    base, extra = divmod(n, parts)
    start = index * base + min(index, extra)
    return start, start + base + (index < extra)


@dataclass(frozen=True)
class Box:
    """The elements offset[i] <= x[i] < offset[i] + size[i]; a 0-d box is one element."""

    offset: Shape
    size: Shape

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.size):
            raise ValueError(
                f"box offset {self.offset} and size {self.size} have {len(self.offset)} "
                f"and {len(self.size)} dims; they need the same number"
            )
        if min((*self.offset, *self.size), default=0) < 0:
            raise ValueError(f"box offset {self.offset} and size {self.size} must be >= 0")

    def __str__(self) -> str:
        ranges = (f"{start}:{stop}" for start, stop in zip(self.offset, self.stop, strict=True))
        return f"[{', '.join(ranges)}]"

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def stop(self) -> Shape:
        return tuple(a + n for a, n in zip(self.offset, self.size, strict=True))

    def contains(self, other: Box) -> bool:
        """Whether all of `other` lies inside; an empty box must lie within the bounds too."""
        return all(a <= b for a, b in zip(self.offset, other.offset, strict=True)) and all(
            a >= b for a, b in zip(self.stop, other.stop, strict=True)
        )

    def intersect(self, other: Box) -> Box | None:
        """The common elements, or None where there are none."""
        start = tuple(max(pair) for pair in zip(self.offset, other.offset, strict=True))
        stop = tuple(min(pair) for pair in zip(self.stop, other.stop, strict=True))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))

    def shifted(self, by: Sequence[int]) -> Box:
        return Box(tuple(a + b for a, b in zip(self.offset, by, strict=True)), self.size)

    def relative_to(self, origin: Sequence[int]) -> Box:
        """The same elements in coordinates that begin at `origin`."""
        return self.shifted([-a for a in origin])

    def slices(self) -> tuple[slice, ...]:
        """Index of the box in an array: `array[box.slices()]`."""
        return tuple(slice(a, b) for a, b in zip(self.offset, self.stop, strict=True))

    def minus(self, other: Box) -> list[Box]:
        """Disjoint boxes, at most two a dim, that cover what of this box is not in `other`."""
        hit = self.intersect(other)
        if hit is None:
            return [self] if self.numel else []
        rest = []
        for dim in range(len(self.size)):
            # Dims before this one are already narrowed to the hit, later ones are whole.
            offset = hit.offset[:dim] + self.offset[dim:]
            size = hit.size[:dim] + self.size[dim:]
            before = hit.offset[dim] - offset[dim]
            after = self.stop[dim] - hit.stop[dim]
            for start, length in ((offset[dim], before), (hit.stop[dim], after)):
                if length:
                    box_offset = (*offset[:dim], start, *offset[dim + 1 :])
                    rest.append(Box(box_offset, (*size[:dim], length, *size[dim + 1 :])))
        return [box for box in rest if box.numel]


def whole(shape: Sequence[int]) -> Box:
    """The box of all elements of a tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape))


def flat_range_boxes(size: Sequence[int], start: int, stop: int) -> list[Box]:
    """Boxes that are the elements [start, stop) of a flattened array of n dims, in flat order.

    At most 2n - 1 of them: per dim one box before and one after the rows that are whole.
    Raises ValueError where the range leaves the array.
    """
    total = math.prod(size)
    if not 0 <= start <= stop <= total:
        raise ValueError(
            f"flat range [{start}, {stop}) is not inside the {total} elements of shape "
            f"{tuple(size)}: need 0 <= start <= stop <= {total}"
        )
    return list(_range_boxes((), tuple(size), start, stop))


def _range_boxes(row: Shape, size: Shape, start: int, stop: int) -> Iterator[Box]:
    """The range of the sub-array at index `row`; `size` are the dims below that index."""
    if start == stop:
        return
    if start == 0 and stop == math.prod(size):
        yield Box(row + (0,) * len(size), (1,) * len(row) + size)
        return
    inner = math.prod(size[1:])
    (first, skip), (last, tail) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        yield from _range_boxes((*row, first), size[1:], skip, tail)
        return
    if skip:
        yield from _range_boxes((*row, first), size[1:], skip, inner)
        first += 1
    if first < last:
        offset = (*row, first) + (0,) * len(size[1:])
        yield Box(offset, (1,) * len(row) + (last - first,) + size[1:])
    yield from _range_boxes((*row, last), size[1:], 0, tail)


def _overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Indices of two boxes that share an element, or None; near linear for rows of boxes."""
    order = sorted((i for i in range(len(boxes)) if boxes[i].numel), key=lambda i: boxes[i].offset)
    active: list[int] = []  # earlier boxes whose first dim still reaches the current one
    for i in order:
        start = boxes[i].offset[:1]
        active = [j for j in active if not start or boxes[j].stop[:1] > start]
        for j in active:
            if boxes[i].intersect(boxes[j]) is not None:
                return min(i, j), max(i, j)
        active.append(i)
    return None


@dataclass(frozen=True)
class Piece:
    """A box of one logical tensor and where it lies in the stored one.

    `at` may have more dims than the box: leading stored dims in which the piece has size 1, as for
    one expert's [out, in] matrix inside the grouped [e, out, in].
    """

    tensor: str  # logical name
    shape: Shape  # logical shape
    box: Box  # of the logical tensor
    at: Shape  # offset in the stored tensor

    def __post_init__(self) -> None:
        if len(self.box.size) != len(self.shape) or len(self.at) < len(self.shape):
            raise ValueError(
                f"piece of '{self.tensor}': shape {self.shape}, box {self.box} and place {self.at} "
                "do not fit: the box has the shape's dims, the place at least as many"
            )
        if not whole(self.shape).contains(self.box):
            raise ValueError(
                f"piece of '{self.tensor}': box {self.box} leaves the logical shape {self.shape}"
            )

    @property
    def local(self) -> Box:
        """The piece as a box of the stored tensor."""
        return Box(self.at, (1,) * (len(self.at) - len(self.shape)) + self.box.size)


@dataclass(frozen=True)
class Fragment:
    """A part of a piece: the same elements as a logical box and as a box of the stored tensor."""

    tensor: str
    shape: Shape  # logical shape
    box: Box
    local: Box


@dataclass(frozen=True)
class Init:
    """Start values: `scale` is the standard deviation of "normal", the value of "constant"."""

    kind: Literal["normal", "ones", "zeros", "constant"]
    scale: float = 0.0

    def __post_init__(self) -> None:
        kinds = ("normal", "ones", "zeros", "constant")
        if self.kind not in kinds:
            raise ValueError(f"init kind '{self.kind}' is unknown: use one of {', '.join(kinds)}")
        if not math.isfinite(self.scale) or (self.kind == "normal" and self.scale < 0):
            raise ValueError(f"init scale {self.scale} is not finite, or a deviation below 0")


AxisUse = Literal["split", "replicated", "partial"]


@dataclass(frozen=True)
class Placement:
    """The one declaration of a stored parameter. Elements in no piece are padding.

    Over each mesh axis named in `axes` the parameter is "split"; "replicated" with identical
    gradients; or "partial": replicated, and its gradients still have to be summed over that axis.
    """

    shape: Shape  # of the stored local tensor
    pieces: tuple[Piece, ...]
    axes: Mapping[str, AxisUse]
    init: Init
    decay: bool  # whether weight decay applies
    matrix: bool = False  # a linear map, which an optimizer may treat as a whole (Muon)

    def __post_init__(self) -> None:
        uses = ("split", "replicated", "partial")
        for axis, use in self.axes.items():
            if use not in uses:
                raise ValueError(f"axis '{axis}': '{use}' is not one of {', '.join(uses)}")
        logical: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            if len(piece.at) != len(self.shape) or not whole(self.shape).contains(piece.local):
                raise ValueError(
                    f"piece of '{piece.tensor}' at {piece.local} leaves the stored shape "
                    f"{self.shape}"
                )
            logical.setdefault(piece.tensor, []).append(piece)
        self._check_disjoint([piece.local for piece in self.pieces], self.pieces, "storage")
        for name, pieces in logical.items():
            shapes = {piece.shape for piece in pieces}
            if len(shapes) > 1:
                raise ValueError(f"pieces of '{name}' disagree on its shape: {sorted(shapes)}")
            self._check_disjoint([piece.box for piece in pieces], pieces, "logical tensor")

    @staticmethod
    def _check_disjoint(boxes: Sequence[Box], pieces: Sequence[Piece], where: str) -> None:
        pair = _overlap(boxes)
        if pair is not None:
            i, j = pair
            raise ValueError(
                f"pieces of '{pieces[i].tensor}' at {boxes[i]} and '{pieces[j].tensor}' at "
                f"{boxes[j]} overlap in the {where}"
            )

    @property
    def numel(self) -> int:
        """Stored elements, padding included."""
        return math.prod(self.shape)

    @property
    def partial_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis, use in self.axes.items() if use == "partial")

    @property
    def split_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis, use in self.axes.items() if use == "split")

    def fragments(self, start: int = 0, stop: int | None = None) -> list[Fragment]:
        """What the elements [start, stop) of the flattened stored tensor are, padding left out.

        Raises ValueError where the range leaves the stored tensor.
        """
        found = []
        for part in flat_range_boxes(self.shape, start, self.numel if stop is None else stop):
            for piece in self.pieces:
                local = part.intersect(piece.local)
                if local is None:
                    continue
                extra = len(self.shape) - len(piece.shape)
                within = local.relative_to(piece.at)  # stored dims, counted from the piece
                box = Box(within.offset[extra:], within.size[extra:]).shifted(piece.box.offset)
                found.append(Fragment(piece.tensor, piece.shape, box, local))
        return found


def flat_view(flat: torch.Tensor, shape: Sequence[int], local: Box, start: int = 0) -> torch.Tensor:
    """View of the box `local` of a stored tensor of `shape`, of which `flat` is a flat range.

    `flat` is 1-d with stride 1 and holds the elements from `start` on, as a ZeRO slice does; the
    view has `local.size`. Raises ValueError where the box is not inside the range.
    """
    if flat.dim() != 1 or flat.stride(0) != 1:
        raise ValueError(f"a flat range is 1-d with stride 1, not {flat.shape}, {flat.stride()}")
    strides = row_strides(shape)
    first = sum(a * b for a, b in zip(local.offset, strides, strict=True)) - start
    last = first + sum((n - 1) * b for n, b in zip(local.size, strides, strict=True))
    if local.numel and not 0 <= first <= last < flat.numel():
        raise ValueError(
            f"box {local} of shape {tuple(shape)} is not inside the flat range "
            f"[{start}, {start + flat.numel()})"
        )
    at = flat.storage_offset() + (first if local.numel else 0)
    return flat.as_strided(local.size, strides, at)


def row_strides(shape: Sequence[int]) -> Shape:
    """Elements between neighbours in each dim of a row-major array of this shape."""
    products = accumulate(reversed(shape), lambda product, n: product * n, initial=1)
    return tuple(products)[-2::-1] if shape else ()


def copies(sources: Sequence[Box], wanted: Box) -> list[tuple[int, Box]]:
    """Which box to read from which source so that each element of `wanted` is read once.

    Earlier sources are preferred where several hold the same element. Boxes are in the coordinates
    of the sources; an empty `wanted` needs nothing. Raises ValueError naming a missing box.
    """
    missing = [wanted] if wanted.numel else []
    plan = []
    for index, source in enumerate(sources):
        if not missing or source.intersect(wanted) is None:
            continue
        rest = []
        for box in missing:
            hit = box.intersect(source)
            if hit is not None:
                plan.append((index, hit))
            rest += box.minus(source)
        missing = rest
    if missing:
        raise ValueError(
            f"{sum(box.numel for box in missing)} of {wanted.numel} elements of {wanted} are in "
            f"none of {len(sources)} sources; the first missing box is {missing[0]}"
        )
    return plan


def assemble(tensor: str, parts: Sequence[tuple[Fragment, torch.Tensor]]) -> torch.Tensor:
    """The full logical tensor from its fragments, each with its values (local or logical shape).

    Fragments may overlap, as replicas do: then the earliest counts. Raises ValueError where they
    are of another tensor, disagree on shape or dtype, or leave elements uncovered.
    """
    if not parts:
        raise ValueError(f"'{tensor}' has no fragment to assemble it from")
    (first, like), *_ = parts
    for fragment, values in parts:
        if fragment.tensor != tensor or fragment.shape != first.shape:
            raise ValueError(
                f"'{tensor}' of shape {first.shape} cannot take a fragment of "
                f"'{fragment.tensor}' of shape {fragment.shape}"
            )
        if tuple(values.shape) not in (fragment.box.size, fragment.local.size):
            raise ValueError(
                f"'{tensor}': values of shape {tuple(values.shape)} for a box of {fragment.box}"
            )
        if values.dtype != like.dtype:
            raise ValueError(f"'{tensor}': fragments of {like.dtype} and of {values.dtype}")
    try:
        plan = copies([fragment.box for fragment, _ in parts], whole(first.shape))
    except ValueError as error:
        raise ValueError(f"'{tensor}' is incomplete: {error}") from error
    out = like.new_empty(first.shape)
    for index, box in plan:
        fragment, values = parts[index]
        source = values.reshape(fragment.box.size)
        out[box.slices()] = source[box.relative_to(fragment.box.offset).slices()]
    return out
