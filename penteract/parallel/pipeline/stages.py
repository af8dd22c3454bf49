"""How the layers of a model are cut into pipeline stages: evenly, by cost, or as a string says.

A model's layers are `("embed", "layers.0", …, "layers.n-1", "norm", "head")`, in the order in which
data meets them. A cut is a tuple of names for each stage; put together again they are all the
names. The first stage always begins with the first name and the last ends with the last, since
data enters and the loss leaves there; stages between may be empty: they pass tensors on.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from penteract.errors import UserError

_BLOCK = "layers."
_ITEM = re.compile(r"(?:(\d{1,9})\*)?([A-Za-z_][\w.]*)")
_REST = ("...", "…")
EXAMPLE = "embed,3*layer | ... | 3*layer,norm,head"

Cut = tuple[tuple[str, ...], ...]


def cut(
    names: Sequence[str],
    stages: int,
    how: str = "even",
    *,
    cost: Callable[[str], float] | None = None,
) -> Cut:
    """The names that each of `stages` stages holds.

    `how` is "even" (blocks evenly; what does not divide goes to the middle stages, since the first
    also has the embedding and the last the head), "cost" (the most expensive stage as cheap as can
    be, a name weighing `cost(name)`), or the stages in words, such as
    `"embed,3*layer | 4*layer | … | 3*layer,norm,head"`: a stage that is only `...` or `…` stands
    for all stages that are missing, which share the remaining blocks evenly. Raises UserError
    where the words do not fit the model or the number of stages.
    """
    assert stages >= 1, f"{stages} stages"
    assert len(set(names)) == len(names) >= 2, names
    if how == "even":
        sizes = _even(names, stages)
    elif how == "cost":
        assert cost is not None, "a cut by cost needs the cost of a layer"
        sizes = _balanced([cost(name) for name in names], stages)
    else:
        sizes = _in_words(names, stages, how)
    ends = [0, *accumulate(sizes)]
    result = tuple(tuple(names[a:b]) for a, b in pairwise(ends))
    assert len(result) == stages, (result, stages)
    assert sum(result, ()) == tuple(names), (result, names)  # no layer is lost
    return result


def share(things: int, places: int) -> list[int]:
    """`things` over `places`, in numbers that differ by at most one, the larger in the middle."""
    each, more = divmod(things, max(places, 1))
    first = (places - more) // 2
    return [each + (first <= i < first + more) for i in range(places)]


def _even(names: Sequence[str], stages: int) -> list[int]:
    blocks = [i for i, name in enumerate(names) if name.startswith(_BLOCK)]
    before = blocks[0] if blocks else 1
    sizes = share(len(blocks), stages)
    sizes[0] += before
    sizes[-1] += len(names) - before - len(blocks)
    return sizes


def _balanced(costs: Sequence[float], stages: int) -> list[int]:
    """Sizes of the contiguous cut with the cheapest most expensive stage, exactly.

    Two passes of dynamic programming over (stages, names): the first finds the least limit that
    every stage can keep to, the second, among the cuts within that limit, the one with the least
    sum of squares, which is the most even one.
    """
    assert all(0 <= c < float("inf") for c in costs), costs
    n, sums = len(costs), [0.0, *accumulate(costs)]
    least = sums  # least[j]: the limit for the first j names in the stages so far
    for _ in range(stages - 1):
        least = [min(max(least[i], sums[j] - sums[i]) for i in range(j + 1)) for j in range(n + 1)]
    limit = least[n] * (1 + 1e-12)  # room for the rounding of sums
    # best[j]: (sum of squares, end of each stage) of the first j names. The first stage is not
    # empty; nor is the last, which is seen to at the end.
    best: dict[int, tuple[float, tuple[int, ...]]] = {
        j: (sums[j] ** 2, (j,)) for j in range(1, n + 1) if sums[j] <= limit
    }
    for stage in range(1, stages):
        ends = [n] if stage == stages - 1 else range(1, n + 1)
        longer = {}
        for j in ends:
            last = j - (stage == stages - 1)
            found = [
                (best[i][0] + (sums[j] - sums[i]) ** 2, (*best[i][1], j))
                for i in range(last, 0, -1)
                if i in best and sums[j] - sums[i] <= limit
            ]
            if found:
                longer[j] = min(found)
        best = longer
    return [b - a for a, b in pairwise((0, *best[n][1]))]


def _in_words(names: Sequence[str], stages: int, how: str) -> list[int]:
    """Sizes of the stages that a string lists."""
    blocks = sum(name.startswith(_BLOCK) for name in names)
    order = list(dict.fromkeys("layer" if n.startswith(_BLOCK) else n for n in names))
    words = [re.sub(r"\s", "", stage) for stage in how.split("|")]
    rest = [i for i, stage in enumerate(words) if stage in _REST]
    if len(rest) > 1:
        raise _wrong(how, f"{len(rest)} stages are '...'; at most one can be")
    listed = [[] if stage in _REST else _items(stage, how, order) for stage in words]
    missing = stages - len(listed) + len(rest)
    if missing < 0 or (missing and not rest):
        there = f"{len(listed) - len(rest)}{' besides ...' if rest else ''}"
        raise _wrong(how, f"stages: {there}; needed (pipeline ranks times chunks): {stages}")
    _check_order([name for stage in listed for name, _ in stage], how, order)
    left = blocks - sum(count for stage in listed for name, count in stage if name == "layer")
    if left < 0 or (left and not missing):
        what = f"{-left} too many" if left < 0 else f"{left} too few"
        raise _wrong(how, f"it has {blocks - left} layers, the model {blocks}: {what}")
    if rest:
        listed[rest[0] : rest[0] + 1] = [[("layer", n)] for n in share(left, missing)]
        _check_order([n for stage in listed for n, count in stage if count], how, order)
    for stage, end, which in ((listed[0], order[0], "first"), (listed[-1], order[-1], "last")):
        if not any(name == end and count for name, count in stage):
            raise _wrong(how, f"the {which} stage must hold {end}")
    return [sum(count for _, count in stage) for stage in listed]


def _items(stage: str, how: str, order: Sequence[str]) -> list[tuple[str, int]]:
    """(name, how many) of each item of one stage."""
    found = []
    for item in stage.split(",") if stage else ():
        match = _ITEM.fullmatch(item)
        count, name = (match[1], match[2]) if match else (None, item)
        if any(mark in item for mark in _REST):
            raise _wrong(how, f"{stage!r}: '...' stands alone between two |")
        if name not in order:
            near = difflib.get_close_matches(name, [*order, "even", "cost"], n=1)
            hint = f", did you mean {near[0]!r}?" if near else ";"
            raise _wrong(how, f"unknown item {item!r}{hint} known: {', '.join(order)}, n*layer")
        if count is not None and name != "layer":
            raise _wrong(how, f"{item!r}: only layers are counted")
        found.append((name, int(count or 1)))
    return found


def _check_order(found: Sequence[str], how: str, order: Sequence[str]) -> None:
    """Refuse layers that are missing, there twice, or not in the order of the model."""
    for name in order:
        if name != "layer" and found.count(name) != 1:
            raise _wrong(how, f"{name} must be there once; it is there {found.count(name)} times")
    for before, after in pairwise(found):
        if order.index(before) > order.index(after):
            raise _wrong(how, f"{before} comes before {after}; the order is {', '.join(order)}")


def _wrong(how: str, what: str) -> UserError:
    return UserError(f'parallel.stages = "{how}": {what}. For example "{EXAMPLE}"')
