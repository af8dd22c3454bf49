"""Parameters that are trained unlike the others, by the user's rules over logical names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

from penteract.config import ConfigError, OptimConfig, RuleConfig
from penteract.parallel.buckets import Group, Kind
from penteract.parallel.parameters import Declared


def group_of(rules: Sequence[RuleConfig]) -> Callable[[Declared], Group]:
    """The group of a stored parameter: that of the first rule whose pattern its names match.

    The function raises ConfigError where tensors that are stored together would differ.
    """

    def find(entry: Declared) -> Group:
        names = list(dict.fromkeys(piece.tensor for piece in entry.placement.pieces))
        groups = {name: _group(rules, name) for name in names}
        for name in names[1:]:
            if groups[name] != groups[names[0]]:
                raise ConfigError(
                    f"optim.rules: {', '.join(names)} are stored together, so one rule must hold "
                    f"for them all; {names[0]} has {_rule_of(rules, names[0])}, {name} has "
                    f"{_rule_of(rules, name)}"
                )
        return groups[names[0]] if names else Group()

    return find


def unmatched(rules: Sequence[RuleConfig], names: Iterable[str]) -> list[str]:
    """A message for each rule that matches none of the model's logical tensors, with near names."""
    return no_match("optim.rules: match =", [rule.match for rule in rules], names)


def no_match(key: str, patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """The same for the shell patterns of the configuration's `key`."""
    known = list(dict.fromkeys(names))
    messages = []
    for pattern in patterns:
        if any(fnmatchcase(name, pattern) for name in known):
            continue
        near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.4) or known[:3]
        messages.append(
            f"{key} {pattern!r} matches no tensor of the model; near names: {', '.join(near)}"
        )
    return messages


def weight_decay(kind: Kind, optim: OptimConfig) -> float:
    """Its group's, else the common one for matrices and embeddings, else none."""
    if kind.group.weight_decay is not None:
        return kind.group.weight_decay
    return optim.weight_decay if kind.decay else 0.0


def _first(rules: Sequence[RuleConfig], name: str) -> RuleConfig | None:
    return next((rule for rule in rules if fnmatchcase(name, rule.match)), None)


def _group(rules: Sequence[RuleConfig], name: str) -> Group:
    rule = _first(rules, name)
    if rule is None:
        return Group()
    # What is frozen is frozen alike, or it would lie in buffers of several kinds.
    return Group(frozen=True) if rule.freeze else Group(rule.lr, rule.weight_decay)


def _rule_of(rules: Sequence[RuleConfig], name: str) -> str:
    rule = _first(rules, name)
    return "none" if rule is None else f"match = {rule.match!r}"
