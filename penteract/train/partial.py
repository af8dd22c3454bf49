"""Which tensors a run takes from a checkpoint: `checkpoint.load_only` and `load_missing`.

Shell patterns over the model's logical names. What is not taken keeps its initial values, and is
said. All else stays strict: what is taken must be there, of the same shape and type, and what the
checkpoint has under a name that `load_only` takes must be in the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from penteract.config import CheckpointConfig, ConfigError
from penteract.optim.groups import no_match
from penteract.train.upcycle import few


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def taken(
    sources: Mapping[str, str | None], weights: Collection[str], options: CheckpointConfig
) -> set[str]:
    """Names of the model's tensors that are loaded.

    `sources` says for every tensor of the model which of the checkpoint has its values (None: it
    starts fresh), `weights` what the checkpoint has. Raises ConfigError where a pattern matches no
    tensor of the model, or nothing is left.
    """
    only, missing = options.load_only, options.load_missing
    wrong = no_match("checkpoint.load_only:", only, sources)
    wrong += no_match("checkpoint.load_missing:", missing, sources)
    if wrong:
        raise ConfigError("\n".join(wrong))
    found = {
        name
        for name, source in sources.items()
        if source is not None
        and (not only or matches(name, only))
        and (source in weights or not matches(name, missing))
    }
    if (only or missing) and not found & {name for name in sources if sources[name] in weights}:
        raise ConfigError(
            "checkpoint.load_only and checkpoint.load_missing leave nothing that the checkpoint "
            f"has: it has {few(sorted(weights))}"
        )
    return found


def left_out(
    sources: Mapping[str, str | None], weights: Collection[str], loaded: Collection[str]
) -> Iterator[str]:
    """What is said of tensors on either side that were not loaded."""
    read = {sources[name] for name in loaded}
    if there := sorted({*weights} - read):
        yield f"in the checkpoint, not loaded: {few(there)}"
    if here := sorted({*sources} - {*loaded}):
        yield f"in the model, not loaded, initial values: {few(here)}"
