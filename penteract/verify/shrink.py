"""A small model with the structure of a large one: `verify --shrink`. Pure.

A size matters to a layout through a few facts: whether it is odd, whether the layout's sizes divide
it, whether it is smaller than they are. Each size becomes the smallest one with the same facts, so
that what is uneven or indivisible in the large model is so in the small one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import product

from penteract.config import Config, ModelConfig, TrainConfig, resolve

LEAST = {"layers": 2, "hidden": 8, "ffn": 10, "vocab": 24, "seq": 6}
LARGEST_RATIO = 8  # of query heads to key/value heads


def shrink(config: Config, sizes: Iterable[int]) -> tuple[Config, list[str]]:
    """A small configuration for layouts that split by `sizes`, and what became what, line by line.

    `config` is resolved and has its vocabulary; so is the result.
    """
    facts = tuple(sorted({n for n in sizes if n > 1}))
    seq = smallest(config.data.seq, facts, LEAST["seq"])
    small = resolve(
        dataclasses.replace(
            config,
            model=_shrink_model(config.model, facts, old_seq=config.data.seq, seq=seq),
            data=dataclasses.replace(config.data, seq=seq),
            train=_shrink_batch(config.train, facts),
        )
    )
    return small, list(_changes(config, small))


def pattern(n: int, sizes: Sequence[int]) -> tuple[object, ...]:
    """What a layout that splits by `sizes` can tell about the number `n`."""
    return (n % 2, *((n % size == 0, n < size) for size in sizes))


def smallest(n: int, sizes: Sequence[int], least: int) -> int:
    """The smallest number from `least` on with the pattern of `n`; never more than `n`."""
    wanted = pattern(n, sizes)
    return next((m for m in range(least, n) if pattern(m, sizes) == wanted), n)


def _shrink_model(
    model: ModelConfig, sizes: tuple[int, ...], *, old_seq: int, seq: int
) -> ModelConfig:
    assert model.kv_heads and model.head_size and model.vocab and model.max_positions  # noqa: PT018
    kv_heads, heads = _shrink_heads(model.kv_heads, model.heads, sizes)
    # Rotary positions pair the halves of a head: 4 and 6 have an even and an odd half.
    head_size = smallest(model.head_size, (4,), 4)
    hidden = smallest(model.hidden, sizes, LEAST["hidden"])
    if model.heads * model.head_size == model.hidden:
        hidden = heads * head_size
    elif hidden == heads * head_size:  # keep them apart, so that one cannot pass for the other
        hidden = smallest(model.hidden, sizes, hidden + 1)
    spare = min(model.max_positions - old_seq, 4)
    window = model.window
    if window is not None and window < old_seq:  # the same share of a sequence
        window = max(1, window * seq // old_seq)
    return dataclasses.replace(
        model,
        layers=smallest(model.layers, (), min(model.layers, LEAST["layers"])),
        hidden=hidden,
        ffn=smallest(model.ffn, sizes, LEAST["ffn"]),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        vocab=smallest(model.vocab, sizes, LEAST["vocab"]),
        window=window,
        max_positions=seq + max(spare, 0),
    )


def _shrink_heads(kv_heads: int, heads: int, sizes: tuple[int, ...]) -> tuple[int, int]:
    """(key/value heads, query heads): the pattern of both, and the ratio unless it is large."""
    ratio = heads // kv_heads
    ratios = [ratio] if ratio <= LARGEST_RATIO else range(2, ratio + 1)
    wanted = pattern(kv_heads, sizes), pattern(heads, sizes)
    least_kv = min(kv_heads, 2)
    found = (
        (g, g * r)
        for g, r in sorted(
            product(range(least_kv, kv_heads + 1), ratios), key=lambda x: x[0] * x[1]
        )
        if (pattern(g, sizes), pattern(g * r, sizes)) == wanted
    )
    return next(found)


def _shrink_batch(train: TrainConfig, sizes: tuple[int, ...]) -> TrainConfig:
    """Few sequences: the same evenness of micro-batches over ranks, a last one that is not full."""
    micro = smallest(train.micro_batch, (), min(train.micro_batch, 2))
    if micro == 1 or train.global_batch < train.micro_batch:
        micro = min(train.micro_batch, 2)
    full, rest = divmod(train.global_batch, train.micro_batch)
    count = smallest(full + (rest > 0), sizes, min(full + (rest > 0), 2))
    batch = min(count * micro - (rest > 0 and micro > 1), train.global_batch)
    ramp = tuple((until, min(size, batch)) for until, size in train.ramp)
    return dataclasses.replace(train, micro_batch=micro, global_batch=max(batch, 1), ramp=ramp)


def _changes(old: Config, new: Config) -> Iterable[str]:
    for section in ("model", "data", "train"):
        before, after = getattr(old, section), getattr(new, section)
        for field in dataclasses.fields(before):
            a, b = getattr(before, field.name), getattr(after, field.name)
            if a != b:
                yield f"{section}.{field.name} {a} -> {b}"
