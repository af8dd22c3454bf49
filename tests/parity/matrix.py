"""The matrices of models and layouts, as data."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import prod
from typing import Any

from parity.mixtures import LAYOUTS, MIXTURES, SCENES, SIZES

# Values that expose: biases, eps 1e-2, a head size that is not hidden / heads, an odd vocabulary.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "family": "llama", "layers": 2, "hidden": 12, "ffn": 10, "heads": 4, "kv_heads": 2,
        "head_size": 6, "vocab": 13, "norm_eps": 1e-2, "rope_theta": 100.0, "qk_norm": True,
    },
    "llama-tied-bias": {
        "family": "llama", "layers": 1, "hidden": 10, "ffn": 7, "heads": 3, "kv_heads": 1,
        "head_size": 8, "vocab": 11, "norm_eps": 1e-2, "tied": True, "bias": True,
    },
    "gpt2": {
        "family": "gpt2", "layers": 2, "hidden": 12, "ffn": 20, "heads": 2, "vocab": 17,
        "norm_eps": 1e-2, "tied": True, "max_positions": 16,
    },
    "gpt2-plain": {
        "family": "gpt2", "layers": 1, "hidden": 9, "ffn": 5, "heads": 4, "kv_heads": 2,
        "head_size": 5, "vocab": 7, "norm_eps": 1e-2, "bias": False, "qk_norm": True,
        "max_positions": 16,
    },
}  # fmt: skip

# Heads, widths and vocabularies that a number of tensor ranks divides, divides not, or exceeds.
SPLIT_MODELS: dict[str, dict[str, Any]] = {
    **MODELS,
    "six-heads": {
        "family": "llama", "layers": 2, "hidden": 10, "ffn": 9, "heads": 6, "kv_heads": 2,
        "head_size": 4, "vocab": 19, "norm_eps": 1e-2, "bias": True, "qk_norm": True,
    },
    "nine-heads": {  # on 2 ranks a key/value head serves 3 query heads here and 1 or 2 there
        "family": "llama", "layers": 1, "hidden": 8, "ffn": 6, "heads": 9, "kv_heads": 3,
        "head_size": 2, "vocab": 16, "norm_eps": 1e-2, "qk_norm": True, "tied": True,
    },
    "eight-kv-heads": {
        "family": "llama", "layers": 1, "hidden": 6, "ffn": 16, "heads": 8, "head_size": 2,
        "vocab": 24, "norm_eps": 1e-2, "bias": True, "qk_norm": True,
    },
    "tiny": {
        "family": "llama", "layers": 2, "hidden": 5, "ffn": 2, "heads": 1, "head_size": 2,
        "vocab": 3, "norm_eps": 1e-2, "bias": True,
    },
    "deep": {
        "family": "llama", "layers": 7, "hidden": 6, "ffn": 5, "heads": 2, "kv_heads": 1,
        "head_size": 4, "vocab": 9, "norm_eps": 1e-2, "tied": True,
    },
    "sinks": {  # each rank of four has a head or two, and key/value heads are fewer than ranks
        "family": "llama", "layers": 2, "hidden": 8, "ffn": 6, "heads": 5, "kv_heads": 1,
        "head_size": 4, "vocab": 13, "norm_eps": 1e-2, "rope_theta": 100.0, "sinks": True,
        "bias": True,
    },
    "capped": {
        "family": "llama", "layers": 1, "hidden": 8, "ffn": 6, "heads": 4, "kv_heads": 2,
        "head_size": 4, "vocab": 13, "norm_eps": 1e-2, "softcap": 1.5, "attention": "plain",
        "tied": True, "sinks": True,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One way to train: what is trained, and over how many ranks in which portions."""

    model: str
    dp: int
    micro_batch: int
    global_batch: int
    bucket_bytes: int
    dropout: float
    seq: int = 6
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    tp: int = 1
    sp: bool = False
    recompute: tuple[str, ...] = ()
    vocab_multiple: int = 1
    overlap: bool = True
    zero: int = 0
    replicas: int = 1
    optimizer: str = "adamw"
    pp: int = 1
    chunks: int = 1
    schedule: str = "1f1b"
    cut: str = "even"  # even, cost; ends: blocks in neither the first stage nor the last; gap
    count: str = ""  # micro-batches a rank, in terms of the pipeline ranks p
    ragged: bool = False  # samples of several lengths
    cp: int = 1
    cp_comm: str = "ring"
    window: int | None = None
    attention_dropout: float = 0.0
    mask: str = "half"  # which labels count: half; one of the step; front, those of the first ranks
    moe: str = ""  # one of `MIXTURES`
    ep: int = 1
    etp: int | None = None
    dispatcher: str = "all_to_all"
    padded: bool = False  # samples of which a part, or all, is padding

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def stages(self) -> str:
        """The cut as `parallel.stages` says it."""
        n, blocks = self.pp * self.chunks, SPLIT_MODELS[self.model]["layers"]
        if n == 1 or self.cut in ("even", "cost"):
            return "cost" if self.cut == "cost" else "even"
        if n == 2:
            return f"embed | {blocks}*layer,norm,head"
        if self.cut == "ends":
            return "embed | ... | norm,head"
        return f"embed,{blocks}*layer {'| ' * (n - 1)} norm,head"

    @property
    def accumulation(self) -> int:
        """Micro-batches a rank."""
        return -(-self.global_batch // (self.micro_batch * self.dp))

    @property
    def short(self) -> int:
        """Sequences that the batch lacks for every rank's micro-batches to be full."""
        return self.accumulation * self.micro_batch * self.dp - self.global_batch


Factors = dict[str, tuple[Any, ...]]

# dp 3 and micro-batch 3 divide neither batch; batch 2 leaves ranks and micro-batches empty.
DATA_PARALLEL: Factors = {
    "model": tuple(MODELS),
    "dp": (1, 2, 3, 4),
    "micro_batch": (1, 2, 3, 8),
    "global_batch": (8, 2),
    "bucket_bytes": (25 << 20, 256),
    "dropout": (0.0, 0.1),
}

# Sequences of 7 tokens divide over no number of ranks; of 1 leave ranks without a row.
TENSOR_PARALLEL: Factors = {
    "tp": (1, 2, 3, 4, 8),
    "sp": (False, True),
    "model": tuple(SPLIT_MODELS),
    "recompute": (
        (), ("layer",), ("layer/2",), ("attention",), ("mlp",), ("core",),
        ("attention", "mlp", "core"),
    ),
    "dropout": (0.0, 0.1),
    "vocab_multiple": (1, 4),
    "label_smoothing": (0.0, 0.1),
    "z_loss": (0.0, 1e-2),
    "dp": (1, 2),
    "micro_batch": (1, 2, 3),
    "seq": (7, 1),
    "overlap": (True, False),
    "global_batch": (3,),
    "bucket_bytes": (256,),
}  # fmt: skip
CROSSED = ("tp", "sp", "model", "recompute")  # whose full product is run
# No rule of the configuration refuses a cell; one that did would fail as an error.

# Batches are told by micro-batches a rank. One sequence too few leaves the last micro-batch smaller
# or empty. "tiny" has parameters of fewer elements than ranks, so some own nothing of them.
ZERO: Factors = {
    "dp": (1, 2, 3, 4),
    "zero": (0, 1, 2, 3),
    "tp": (1, 2),
    "accumulation": (1, 3),
    "replicas": (1, 2),
    "optimizer": ("adamw", "sgd", "lion", "muon"),
    "model": ("gpt2", "llama-tied-bias", "gpt2-plain", "nine-heads", "tiny"),
    "micro_batch": (1, 2),
    "short": (0, 1),
    "bucket_bytes": (25 << 20, 4096, 256),
    "overlap": (True, False),
    "sp": (False, True),
    "recompute": ((), ("layer/2",), ("attention", "mlp", "core")),
    "dropout": (0.0, 0.1),
    "vocab_multiple": (1, 4),
    "seq": (4,),
}  # fmt: skip
# Batches are told by micro-batches a rank, in terms of the pipeline ranks.
PIPELINE: Factors = {
    "pp": (2, 3, 4),
    "chunks": (1, 2, 3),
    "schedule": ("gpipe", "1f1b", "1f1b-pairs", "interleaved", "zb-h1", "zb-v", "dualpipe-v"),
    "count": ("1", "p-1", "p", "p+1", "2p", "3p+1"),
    "cut": ("even", "cost", "ends", "gap"),
    "model": ("deep", "gpt2", "llama", "six-heads", "nine-heads"),
    "dp": (1, 2),
    "tp": (1, 2),
    "sp": (False, True),
    "zero": (0, 1, 2, 3),
    "replicas": (1, 2),
    "optimizer": ("adamw", "muon"),
    "recompute": ((), ("layer/2",), ("attention", "mlp", "core")),
    "dropout": (0.0, 0.1),
    "ragged": (False, True),
    "z_loss": (0.0, 1e-2),
    "micro_batch": (1, 2),
    "short": (0, 1),
    "bucket_bytes": (25 << 20, 256),
    "overlap": (True, False),
    "seq": (4,),
}  # fmt: skip
# Two or three samples of 1 to three documents each, down to length 1; rows and chunks of lengths
# that no number of ranks divides. With a mask of "front" the last ranks have no counted token.
CONTEXT: Factors = {
    "cp": (2, 3, 4),
    "cp_comm": ("ring", "all_gather", "all_to_all", "hierarchical"),
    "window": (None, 1, 3),
    "model": ("llama", "sinks", "capped", "six-heads", "deep", "gpt2"),
    "seq": (13, 8, 1),
    "ragged": (False, True),
    "mask": ("half", "one", "front"),
    "tp": (1, 2),
    "sp": (False, True),
    "pp": (1, 2),
    "dp": (1, 2),
    "zero": (0, 1, 2, 3),
    "replicas": (1, 2),
    "optimizer": ("adamw", "muon"),
    "recompute": ((), ("layer/2",), ("attention", "mlp", "core")),
    "dropout": (0.0, 0.1),
    "z_loss": (0.0, 1e-2),
    "micro_batch": (1, 2, 3),
    "overlap": (True, False),
    "global_batch": (3,),
    "bucket_bytes": (25 << 20, 256),
}  # fmt: skip
CONTEXT_CROSSED = ("cp", "cp_comm", "window", "seq", "ragged")
PIPELINE_CROSSED = ("pp", "chunks", "schedule", "count")
COUNTS = {
    "1": lambda p: 1,
    "p-1": lambda p: p - 1,
    "p": lambda p: p,
    "p+1": lambda p: p + 1,
    "2p": lambda p: 2 * p,
    "3p+1": lambda p: 3 * p + 1,
}
CHUNKS = {
    "1f1b": (1,),
    "1f1b-pairs": (1,),
    "zb-h1": (1,),
    "zb-v": (2,),
    "dualpipe-v": (2,),
}  # of others any

ZERO_CROSSED = ("dp", "zero", "tp", "accumulation", "replicas", "optimizer")


def cell_of(chosen: Mapping[str, Any]) -> Cell:
    """The cell with these values, where `accumulation` and `short` may stand for the batch."""
    fields = dict(chosen)
    if "count" in fields:
        fields["accumulation"] = COUNTS[fields["count"]](fields["pp"])
    if "accumulation" in fields:
        full = fields.pop("accumulation") * fields["dp"] * fields["micro_batch"]
        fields["global_batch"] = full - fields.pop("short")
    return Cell(**fields)


def cells(matrix: Factors) -> Iterator[Cell]:
    """The full product."""
    return (cell_of(dict(zip(matrix, values, strict=True))) for values in product(*matrix.values()))


def values(cell: Cell, names: Iterable[str], n: int) -> set[tuple[tuple[str, Any], ...]]:
    """The values that `cell` has of every `n` of the named factors together."""
    return set(combinations([(name, getattr(cell, name)) for name in names], n))


def pairwise(matrix: Factors) -> list[Cell]:
    """Few cells that together hold every pair of values of any two factors, greedily chosen."""
    candidates = {cell: values(cell, matrix, 2) for cell in cells(matrix)}
    missing = set().union(*candidates.values())
    chosen = []
    while missing:
        best = max(candidates, key=lambda cell: len(candidates[cell] & missing))
        chosen.append(best)
        missing -= candidates[best]
    return chosen


def fits(
    factors: Iterable[tuple[str, Any]], max_world: int, matrix: Mapping[str, Sequence[Any]] = {}
) -> bool:
    """Whether values of some factors leave a layout of at most so many ranks, and a batch.

    Other sizes are the least of the matrix.
    """
    some = dict(factors)
    full = some.get("dp", 2) * some.get("micro_batch", 2) > some.get("short", 0)
    names = ("tp", "dp", "pp", "cp")
    sizes = {name: min(matrix.get(name, (1,))) for name in names} | some
    sizes["dp"] = max(sizes["dp"], some.get("replicas", 1))
    few = prod(sizes[name] for name in names) <= max_world
    return few and full and not refused(some) and has_places(some, max_world, matrix)


def has_places(
    some: Mapping[str, Any], max_world: int, matrix: Mapping[str, Sequence[Any]] = {}
) -> bool:
    """Whether some sizes of the matrix, with those given, place experts on at most so many ranks.

    The dense grid and the expert grid are of the same ranks, and each is cut into replicas.
    """
    if not {"ep", "etp", "moe"} & some.keys():
        return True
    choices = [(some[name],) if name in some else matrix.get(name, (1,)) for name in SIZES]
    experts = MIXTURES[some["moe"]]["experts"] if "moe" in some else 12
    for tp, cp, pp, ep, etp, dp in product(*choices):
        edp, rest = divmod(tp * cp * dp, ep * etp)
        whole = rest == dp % some.get("replicas", 1) == edp % some.get("replicas", 1) == 0
        if whole and experts % ep == 0 and tp * cp * pp * dp <= max_world:
            return True
    return False


def refused(some: Mapping[str, Any]) -> bool:
    """Whether a rule of the configuration refuses these values of some factors."""
    chunks = CHUNKS.get(some.get("schedule", ""), (1, 2, 3))
    odd = "chunks" in some and some["chunks"] not in chunks
    # One token alone is balanced whoever takes it.
    few = some.get("moe") == "sinkhorn" and some.get("ragged", False)
    return odd or few or some.get("dp", 2) % some.get("replicas", 1) != 0


def drawn(matrix: Factors, draw: random.Random, max_world: int, **fixed: Any) -> Cell:
    """A random cell of the matrix with some factors fixed, on at most `max_world` ranks."""
    while True:
        chosen = {name: draw.choice(choices) for name, choices in matrix.items()} | fixed
        if fits(chosen.items(), max_world):
            return cell_of(chosen)


def tuples(matrix: Factors, n: int, max_world: int) -> set[tuple[tuple[str, Any], ...]]:
    """All values of every `n` factors together that a cell of the matrix can have."""
    names = combinations(matrix, n)
    found = (zip(ns, xs, strict=True) for ns in names for xs in product(*(matrix[m] for m in ns)))
    return {found for each in found if fits(found := tuple(each), max_world, matrix)}


def sampled(matrix: Factors, max_world: int, *, tries: int = 60) -> list[Cell]:
    """As `pairwise`, of a product that is too large to list: the best of some cells with a pair."""
    draw, missing, chosen = random.Random(0), tuples(matrix, 2, max_world), []
    while missing:
        pair = dict(min(missing, key=repr))
        candidates = [drawn(matrix, draw, max_world, **pair) for _ in range(tries)]
        chosen.append(max(candidates, key=lambda cell: len(values(cell, matrix, 2) & missing)))
        missing -= values(chosen[-1], matrix, 2)
    return chosen


def crossed(
    matrix: Factors, names: Sequence[str], max_world: int, *, tries: int = 12
) -> list[Cell]:
    """The product of the named factors; the others vary, so that new triples of values occur.

    What a rule of the configuration refuses is left out.
    """
    combinations = product(*(matrix[name] for name in names))
    fixed = (dict(zip(names, combination, strict=True)) for combination in combinations)
    return varied(matrix, [some for some in fixed if not refused(some)], max_world, tries=tries)


def varied(
    matrix: Factors, given: Iterable[Mapping[str, Any]], max_world: int, *, tries: int = 12
) -> list[Cell]:
    """A cell for each of some fixed values; the others vary, so that new triples occur."""
    draw, seen, chosen = random.Random(0), set(), []
    for fixed in given:
        candidates = [drawn(matrix, draw, max_world, **fixed) for _ in range(tries)]
        chosen.append(max(candidates, key=lambda cell: len(values(cell, matrix, 3) - seen)))
        seen |= values(chosen[-1], matrix, 3)
    return chosen


def placed(max_world: int) -> list[dict[str, Any]]:
    """Every mixture in every layout in which it has a place, by turns in one of the scenes."""
    found = []
    for (i, layout), (j, moe) in product(enumerate(LAYOUTS.values()), enumerate(MIXTURES)):
        some = layout | {"moe": moe} | SCENES[(i + j) % len(SCENES)]
        some["ragged"] = some["ragged"] and moe != "sinkhorn"
        found += [some] if fits(some.items(), max_world) else []
    return found
