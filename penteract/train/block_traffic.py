"""What the layers of a rank send for one micro-batch: the part of `traffic` that repeats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from penteract.config import Config
from penteract.mesh import Axis
from penteract.nn.attention import Heads
from penteract.nn.block import BlockSpec
from penteract.nn.model import ModelSpec
from penteract.nn.moe import MoESpec
from penteract.nn.router import RouterSpec
from penteract.parallel.buckets import at_least_float32
from penteract.parallel.context.traffic import Sizes as Attended
from penteract.parallel.context.traffic import attention_bytes
from penteract.parallel.expert.dispatchers import Name
from penteract.parallel.expert.places import ExpertParallel
from penteract.parallel.expert.traffic import INTEGER, Routed, Sizes, dispatched_bytes
from penteract.parallel.recompute import Recompute
from penteract.parallel.tensor import TensorParallel

Sent = dict[str, dict[str, int | None]]  # axis: what: bytes, None where they follow from routing


@dataclass(frozen=True)
class Portion:
    """The rows of a micro-batch on one rank."""

    rows: int  # of its context rank, those of padding too
    own: int  # of these on this tensor rank, where they are split
    real: int  # of the own ones, without padding
    together: int  # own rows of all ranks of its group "etp-ep"
    sequences: int  # of the whole micro-batch


@dataclass(frozen=True)
class Held:
    """What a rank holds of a model, and how it is split, on axes with sizes only."""

    config: Config
    spec: ModelSpec
    names: tuple[str, ...]
    tp: TensorParallel
    cp: Axis
    experts: ExpertParallel

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.config.train.dtype)
        return dtype

    @property
    def row_bytes(self) -> int:
        """Of a row of the stream."""
        return self.spec.hidden * self.dtype.itemsize

    def blocks(self) -> Iterator[tuple[int, BlockSpec, frozenset[str]]]:
        """Number, structure and recomputed parts of every block."""
        for name in self.names:
            if name.startswith("layers."):
                number = int(name.removeprefix("layers."))
                parts = Recompute.of(self.config.parallel.recompute, number).parts
                yield number, self.spec.blocks[number], parts


class Again(NamedTuple):
    """What backward repeats of a block's messages."""

    gathers: int  # of the stream before column layers, with sp only
    sums: int
    routed: bool = False  # routing's, and those of tokens on their way to experts
    results: bool = False
    output: bool = False  # of experts, without sp only


def recomputed(parts: frozenset[str], block: BlockSpec, *, dispatcher: Name) -> Again:
    """What is sent again where these parts of a block are recomputed.

    Recomputation ends at the last activation that backward needs, so a half's sum is repeated only
    where something needs what follows it: its dropout, or the other half within a whole layer. With
    experts all is repeated up to their results, shared experts before them. Results come back again
    where losses of the router or dropout follow, or where tokens' places are needed to take them
    apart, as after `all_to_all`; they are put together over tp again for dropout alone.
    """
    layer, attention, dropout = "layer" in parts, "attention" in parts, block.dropout > 0
    second = layer or "mlp" in parts
    gathers, sums = layer + attention, layer + dropout * attention
    if not isinstance(block.mlp, MoESpec):
        return Again(gathers + second, sums + dropout * second)
    shared = second and block.mlp.shared is not None
    needed = dropout or _has_losses(block.mlp.router) or dispatcher == "all_to_all"
    return Again(gathers + shared, sums + shared, second, second and needed, second and dropout)


def micro_batch_bytes(held: Held, portion: Portion, routed: Mapping[int, Routed]) -> Sent:
    """What one micro-batch sends over tp, cp, tp-cp and etp-ep; `routed` is by block, or empty."""
    sent: Sent = {"tp": {**_stream(held, portion)}, "cp": {"attention": _attention(held, portion)}}
    for number, block, parts in held.blocks():
        if isinstance(block.mlp, MoESpec):
            again = recomputed(parts, block, dispatcher=_dispatcher(held.config))
            count(sent, _experts(held, portion, block.mlp, again, routed.get(number)))
    return sent


def count(sent: Sent, more: Sent) -> None:
    """Add `more` to `sent`; what is unknown stays so."""
    for axis, what in more.items():
        found = sent.setdefault(axis, {})
        for name, size in what.items():
            before = found.get(name, 0)
            found[name] = None if before is None or size is None else before + size


def all_reduced(size: int, n: int) -> int:
    """What each of n ranks sends to all-reduce `size` bytes."""
    return 2 * (n - 1) * size // n


def _stream(held: Held, portion: Portion) -> dict[str, int]:
    """Over tp, but for what mixtures of experts split and put together."""
    tp, n, t = held.tp, held.tp.axis.size, portion.rows
    row, wide = held.row_bytes, at_least_float32(held.dtype).itemsize
    gather = (n - 1) * portion.own * row if tp.sequence else 0
    sums = (t - portion.own) * row if tp.sequence else all_reduced(t * row, n)
    embed, head = "embed" in held.names, "head" in held.names
    halves = again = 0  # pairs of a column and a row layer
    for _, block, parts in held.blocks():
        dense = not isinstance(block.mlp, MoESpec) or block.mlp.shared is not None
        halves += 1 + dense
        repeated = recomputed(parts, block, dispatcher=_dispatcher(held.config))
        again += repeated.gathers * gather + repeated.sums * sums
    into, out = halves + head, halves + embed  # column and row layers
    vocabulary = all_reduced(t * wide, n) + all_reduced(3 * t * wide, n)
    return {
        "stream forward": into * gather + out * sums,
        "stream backward": out * gather + into * sums,
        "stream gathered again": into * gather,
        "stream recomputed": again,
        "vocabulary": head * vocabulary,
    }


def _attention(held: Held, portion: Portion) -> int:
    """Over cp."""
    parallel, total = held.config.parallel, 0
    for _, block, parts in held.blocks():
        a, g = Heads.of(block.attention, held.tp.axis).attended
        sizes = Attended(portion.rows, a, g, block.attention.head_size, held.dtype)
        sent = attention_bytes(
            parallel.cp_comm, sizes, cp=parallel.cp, rank=held.cp.rank, inner=parallel.cp_inner
        )
        again = parts & {"layer", "attention", "core"}
        total += (1 + len(again)) * sent.forward + sent.backward
    return total


def _experts(
    held: Held, portion: Portion, moe: MoESpec, again: Again, routed: Routed | None
) -> Sent:
    """Of a block with experts, but for its attention and shared experts."""
    tp, spec, h = held.tp.axis, moe.router, held.spec.hidden
    apart = 0 if held.tp.sequence else (tp.size - 1) * portion.own * held.row_bytes
    routing = _routing(spec, portion, held.experts.parts.size, held.dtype)
    g = held.experts.group.size
    sizes = Sizes(g, portion.own, portion.together, h, spec.topk, held.dtype)
    ways, tokens = dispatched_bytes(_dispatcher(held.config), sizes, routed), None
    if ways is not None:
        tokens = (1 + again.routed) * ways.there + (1 + again.results) * ways.back + ways.backward
    return {
        "tp": {"experts": (2 + again.output) * apart},
        "tp-cp": {what: (1 + again.routed) * size for what, size in routing.items()},
        "etp-ep": {"tokens": tokens},
    }


def _routing(spec: RouterSpec, portion: Portion, n: int, dtype: torch.dtype) -> dict[str, int]:
    """What the n ranks that hold a micro-batch tell each other, once."""
    w, found = at_least_float32(dtype).itemsize, {}

    def rows(numbers: int) -> int:
        """Of every real token so many numbers and its place, after their lengths."""
        return (n - 1) * (INTEGER + portion.real * (numbers * w + INTEGER))

    if spec.balance in ("aux", "seq_aux"):
        sets = portion.sequences if spec.balance == "seq_aux" else 1
        found["loads"] = all_reduced(sets * spec.experts * 8, n)
    if spec.balance == "sinkhorn":
        found["logits"] = rows(spec.experts)
    if spec.capacity is not None:
        found["choices"] = rows(2 * spec.topk)
    return found


def _has_losses(spec: RouterSpec) -> bool:
    return spec.balance.endswith("aux") or spec.z_weight > 0


def _dispatcher(config: Config) -> Name:
    return "all_to_all" if config.moe is None else config.moe.dispatcher
