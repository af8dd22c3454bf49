"""Who writes what, and who reads what from where. Pure.

Every rank describes what it holds as shards, each a box of a logical tensor. Given the shards of
all ranks, `save_plan` gives each rank the boxes it writes, so that every element of every tensor is
written exactly once and ranks that hold the same box share the writing of it. Given a manifest and
the shards that a rank wants, `load_plan` gives the boxes to read: resharding between any two
layouts is intersecting boxes. All ranks compute the same plan from the same shards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penteract.checkpoint.cover import cut, cutting_dim, first_overlap, subtract_all
from penteract.checkpoint.format import DTYPES, CheckpointError, StoredTensor
from penteract.placement import Box, copies, whole

# A rank may write more or less than its share, by this part of it, where that saves a cut.
SLACK_PARTS = 32


@dataclass(frozen=True)
class Shard:
    """What a rank holds, or wants: `box` of the logical tensor `tensor` of `shape`."""

    tensor: str
    shape: tuple[int, ...]
    dtype: str
    box: Box

    @property
    def item_bytes(self) -> int:
        return DTYPES[self.dtype][1]


@dataclass(frozen=True)
class Write:
    """`box` is to be written from the rank's own shard number `source`."""

    source: int
    shard: Shard
    box: Box

    @property
    def key(self) -> str:
        """The name in the safetensors file: the tensor's own where it is stored whole."""
        if self.box.size == self.shard.shape:
            return self.shard.tensor
        return f"{self.shard.tensor}@{','.join(map(str, self.box.offset))}"


@dataclass(frozen=True)
class Read:
    """`box` is to be copied from `key` of `file`, which holds `stored`, to wanted `target`."""

    file: str
    key: str
    stored: Box
    target: int
    box: Box


@dataclass(frozen=True)
class _Item:
    """A box still to be dealt, and the ranks that could write it with their shard's number."""

    shard: Shard
    box: Box
    sources: tuple[tuple[int, int], ...]  # (rank, shard number), one a rank, by rank

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank, _ in self.sources)

    @property
    def bytes(self) -> int:
        return self.box.numel * self.shard.item_bytes

    @property
    def rows(self) -> int:
        """Into how many parts the box could be cut."""
        return self.box.size[cutting_dim(self.box)] if self.box.size else 1

    def rows_nearest(self, size_bytes: int) -> int:
        """The number of rows whose bytes are nearest to `size_bytes`, at most all."""
        return min((2 * size_bytes * self.rows + self.bytes) // (2 * self.bytes), self.rows)


def save_plan(shards_by_rank: Sequence[Sequence[Shard]]) -> list[list[Write]]:
    """For each rank, what it writes; bytes are even over the ranks that hold the same boxes.

    Boxes that only one rank holds are its own. The others are dealt, the sets with fewest ranks
    first, each set's boxes laid end to end and cut where the ranks' fair shares end.
    Raises CheckpointError where ranks disagree on a shape or dtype, or elements are missing.
    """
    by_tensor: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for rank, shards in enumerate(shards_by_rank):
        for number, shard in enumerate(shards):
            by_tensor[shard.tensor].append((rank, number))
    faults: list[str] = []
    sets: dict[tuple[int, ...], list[_Item]] = defaultdict(list)
    for name, sources in sorted(by_tensor.items()):
        holders = [(rank, number, shards_by_rank[rank][number]) for rank, number in sources]
        faults += (found := _disagreements(name, holders))
        for item in [] if found else _items(holders):
            sets[item.ranks].append(item)
    if faults:
        raise CheckpointError("cannot save:\n" + "\n".join(faults))
    plan: list[list[Write]] = [[] for _ in shards_by_rank]
    load = [0] * len(shards_by_rank)
    for ranks, items in sorted(sets.items(), key=lambda entry: (len(entry[0]), entry[0])):
        for rank, part in _deal(items, ranks, load):
            source = dict(part.sources)[rank]
            plan[rank].append(Write(source, shards_by_rank[rank][source], part.box))
            load[rank] += part.bytes
    return plan


def even_plan(shards: Sequence[Shard], files: int) -> list[list[Write]]:
    """For each of `files`, what is written to it by one who has all of `shards`; bytes are even."""
    items = [_Item(shard, shard.box, ((0, number),)) for number, shard in enumerate(shards)]
    plan: list[list[Write]] = [[] for _ in range(files)]
    for file, part in _deal([i for i in items if i.bytes], range(files), [0] * files):
        plan[file].append(Write(part.sources[0][1], part.shard, part.box))
    return plan


def _disagreements(name: str, holders: Sequence[tuple[int, int, Shard]]) -> list[str]:
    """What is wrong with one tensor's shards: kinds that differ, boxes outside, a gap."""
    first = holders[0][2]
    if name == "__metadata__" or "@" in name or not name.isprintable() or not name:
        return [f"  {name!r}: a tensor's name is printable, without '@', and not '__metadata__'"]
    kinds = {(shard.shape, shard.dtype): rank for rank, _, shard in reversed(holders)}
    if len(kinds) > 1:
        said = ", ".join(f"{list(k[0])} {k[1]} on rank {r}" for k, r in sorted(kinds.items()))
        return [f"  {name}: ranks disagree: {said}"]
    if first.dtype not in DTYPES:
        return [f"  {name}: dtype {first.dtype} is none of {', '.join(DTYPES)}"]
    full = whole(first.shape)
    for rank, _, shard in holders:
        if len(shard.box.size) != len(first.shape) or not full.contains(shard.box):
            return [f"  {name}: the box {shard.box} on rank {rank} leaves {list(first.shape)}"]
    boxes = {shard.box for _, _, shard in holders if shard.box.numel}
    if first_overlap(list(boxes)) is None:
        missing = full.numel - sum(box.numel for box in boxes)
    else:
        missing = sum(box.numel for box in subtract_all(full, boxes))
    return [f"  {name}: no rank holds {missing} of {full.numel} elements"] if missing else []


def _items(holders: Sequence[tuple[int, int, Shard]]) -> list[_Item]:
    """One tensor's elements as disjoint boxes, each with every rank that holds it.

    Smaller boxes go first, so that where a rank holds more than others do, what they share can be
    written by any of them.
    """
    shard = holders[0][2]
    sources: dict[Box, dict[int, int]] = defaultdict(dict)
    for rank, number, held in holders:
        if held.box.numel:
            sources[held.box].setdefault(rank, number)
    boxes = sorted(sources, key=lambda box: (box.numel, box.offset, box.size))
    if first_overlap(boxes) is None:
        items = [_Item(shard, box, tuple(sorted(sources[box].items()))) for box in boxes]
    else:
        items = []
        for index, box in enumerate(boxes):
            for part in subtract_all(box, boxes[:index]):
                within = [b for b in boxes if b.intersect(part) == part]
                able = {rank: n for b in reversed(within) for rank, n in sources[b].items()}
                items.append(_Item(shard, part, tuple(sorted(able.items()))))
    return sorted(items, key=lambda item: (item.box.offset, item.box.size))


def _deal(
    items: Sequence[_Item], ranks: Sequence[int], load: Sequence[int]
) -> Iterator[tuple[int, _Item]]:
    """Lay `items` end to end and give each of `ranks` its share of the line, cut where it ends."""
    shares = _fair_shares([load[rank] for rank in ranks], sum(item.bytes for item in items))
    at, left = 0, shares[0]
    queue = list(reversed(items))
    while queue:
        while at < len(ranks) - 1 and left <= shares[at] // SLACK_PARTS:
            at += 1
            left += shares[at]  # a rank's surplus or deficit is the next one's gain or loss
        item = queue.pop()
        slack = shares[at] // SLACK_PARTS
        fits = at == len(ranks) - 1 or item.bytes <= left + slack
        rows = item.rows if fits else item.rows_nearest(left)
        if rows == item.rows:
            yield ranks[at], item
            left -= item.bytes
        elif rows:
            head, tail = cut(item.box, cutting_dim(item.box), rows)
            queue.append(_Item(item.shard, tail, item.sources))
            item = _Item(item.shard, head, item.sources)
            yield ranks[at], item
            left -= item.bytes
        else:
            queue.append(item)
            at += 1
            left += shares[at]


def _fair_shares(load: Sequence[int], total: int) -> list[int]:
    """`total` poured over ranks that carry `load` already, so that the levels come out even."""
    order = sorted(range(len(load)), key=lambda index: (load[index], index))
    shares = [0] * len(load)
    count, level = 1, load[order[0]]
    while count < len(order) and (load[order[count]] - level) * count <= total:
        total -= (load[order[count]] - level) * count
        level = load[order[count]]
        count += 1
    for place, index in enumerate(order[:count]):
        shares[index] = level - load[index] + total // count + (place < total % count)
    return shares


def compare(
    tensors: Mapping[str, StoredTensor],
    wanted: Iterable[Shard],
    *,
    skip: tuple[str, ...] = (),
    unread: Collection[str] = (),
) -> list[str]:
    """Every way in which a checkpoint's tensors are not those that are wanted, one line each.

    Names must be the same, both ways, but for stored names that begin with one of `skip` or are
    among `unread`; so must shapes and dtypes. Nothing is guessed: an empty list is the only
    licence to load.
    """
    kinds: dict[str, set[tuple[tuple[int, ...], str]]] = defaultdict(set)
    for shard in wanted:
        kinds[shard.tensor].add((shard.shape, shard.dtype))
    lines: list[str] = []
    for name in sorted(kinds.keys() | tensors.keys()):
        stored = tensors.get(name)
        if name not in kinds:
            if not name.startswith(skip) and name not in unread:
                lines.append(f"  {name}: in the checkpoint, not in the model")
            continue
        for shape, dtype in sorted(kinds[name]):
            if stored is None:
                lines.append(f"  {name}: not in the checkpoint (wanted {list(shape)} {dtype})")
            elif (shape, dtype) != (stored.shape, stored.dtype):
                found = f"{list(stored.shape)} {stored.dtype}"
                lines.append(f"  {name}: checkpoint {found}, wanted {list(shape)} {dtype}")
    return lines


def changed_state(
    stored: Collection[str], wanted: Collection[str], prefixes: Sequence[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """Names of state of tensors that have none on the other side: (stored ones, wanted ones).

    State is what stands under `prefixes`. A frozen tensor has none, so these are the names to leave
    out where some were frozen, or thawed, since. Tensors that lack only a part of their state, or
    that one side does not know at all, are left to `compare`.
    """

    def tensor(name: str) -> str | None:
        found = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        return None if found is None else name.removeprefix(found)

    def alone(names: Collection[str], others: Collection[str]) -> frozenset[str]:
        stateless = set(others) - {tensor(other) for other in others}
        return frozenset(name for name in names if tensor(name) in stateless)

    return alone(stored, wanted), alone(wanted, stored)


def stored_as(
    tensors: Mapping[str, StoredTensor], tensor: str, dtypes: Sequence[str]
) -> tuple[str, str]:
    """(name, dtype) of a weight in a checkpoint: itself or its master, the first of `dtypes`.

    Its own name and the first of `dtypes` where neither is of any, for `compare` to refuse.
    """
    for dtype in dtypes:
        for name in (tensor, f"master/{tensor}"):
            if name in tensors and tensors[name].dtype == dtype:
                return name, dtype
    return tensor, dtypes[0]


def load_plan(tensors: Mapping[str, StoredTensor], wanted: Sequence[Shard]) -> list[Read]:
    """What to read so that every wanted box is filled, by file and key. `compare` comes first.

    Raises ValueError naming the box that the checkpoint does not hold.
    """
    reads: list[Read] = []
    for target, shard in enumerate(wanted):
        stored = tensors[shard.tensor].boxes
        for index, box in copies([item.box for item in stored], shard.box):
            source = stored[index]
            reads.append(Read(source.file, source.key, source.box, target, box))
    return sorted(reads, key=lambda read: (read.file, read.key, read.box.offset, read.target))


def written_bytes(writes: Iterable[Write]) -> int:
    """Bytes of tensor data in `writes`."""
    return sum(write.box.numel * write.shard.item_bytes for write in writes)
