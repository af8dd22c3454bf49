"""Sparse upcycling: a mixture of experts that starts from a dense model's weights.

Where a block has experts now and a feed-forward layer in the checkpoint, every expert takes that
layer's values, and the router starts fresh. With weights of a token's experts that add up to 1 the
model then computes what the dense one did. It is a renaming of logical tensors, so each rank reads
the boxes of its own experts, in any layout. Source: Komatsuzaki et al., arXiv:2212.05055.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from penteract.checkpoint.format import StoredTensor
from penteract.config import Config, ConfigError, moe_layers


def blocks_to_fill(config: Config, saved: Mapping[str, StoredTensor]) -> list[str]:
    """The blocks with experts now and a feed-forward layer in the checkpoint: "layers.3".

    Raises ConfigError where there is none, or where experts are not as wide as it.
    """
    assert config.moe
    blocks = [f"layers.{number}" for number in moe_layers(config.moe, config.model.layers)]
    widths = {b: saved[up].shape[0] for b in blocks if (up := f"{b}.mlp.up.weight") in saved}
    if not widths:
        raise ConfigError(
            "checkpoint.upcycle = true: the checkpoint has no feed-forward layer in "
            f"{few(blocks)}, where experts are now: leave it out, and experts load as they are"
        )
    if wrong := {*widths.values()} - {config.moe.ffn}:
        raise ConfigError(
            f"moe.ffn = {config.moe.ffn}: checkpoint.upcycle = true needs experts as wide as the "
            f"checkpoint's feed-forward layers: moe.ffn = {min(wrong)}"
        )
    return list(widths)


def source(tensor: str, filled: Collection[str]) -> str | None:
    """The tensor of the checkpoint that has `tensor`'s values; None where it starts fresh."""
    block, _, part = tensor.partition(".moe.")  # part: router.weight, experts.17.up.weight
    if block not in filled:
        return tensor
    kind, _, rest = part.partition(".")
    return f"{block}.mlp.{rest.partition('.')[2]}" if kind == "experts" else None


def note(config: Config, filled: Collection[str]) -> str:
    """What a run says at its start."""
    assert config.moe
    count, routers = len(filled) * config.moe.experts, [f"{b}.moe.router.weight" for b in filled]
    return f"{count} experts take the feed-forward layers' values; fresh: {few(routers)}"


def few(names: Collection[str]) -> str:
    """At most three names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join([*names][:3]) + more
