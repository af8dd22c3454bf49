"""Where a layout first parts from the reference. Pure.

The order is that of the computation: initial weights; then in each step the outputs of modules in
forward order, the loss, in backward order each output's gradient and the gradients of that
module's parameters, the gradient norm, the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from penteract.verify.compare import Fault, faults, relative_scalar
from penteract.verify.gaps import Array, distance, gap, in_words, relative, scales, whole_factor
from penteract.verify.measure import Measured, Reference
from penteract.verify.tolerances import Limits
from penteract.verify.trace import Key, Record, Trace

WHAT: tuple[Literal["outputs"], Literal["gradients"]] = ("outputs", "gradients")


def locate(
    reference: Reference,
    ranks: Sequence[Measured],
    step: int,
    limits: Limits,
    traces: tuple[Trace, Sequence[Trace]] | None,
) -> str:
    """Where the first difference is, of step `step`, in the order of the computation.

    `traces` are those of the reference and of the ranks, of this step; None where step is 0.
    """
    sizes = ranks[0].sizes
    if step == 0:
        return _first(
            faults(reference, ranks, "weights", 0), limits.weights, "initial weights of", ""
        )
    assert traces is not None
    at, i = f", step {step}", step - 1
    outputs, gradients = (Beside(*traces, what, limits.gradients, sizes) for what in WHAT)
    names = _names(list(traces[0].outputs))
    for key in traces[0].outputs:
        if said := outputs.differs(key):
            return f"activation of {names[key]}, {said[0]}{at}: {said[1]}"
    if said := _scalar_words(reference.losses[i], [r.losses[i] for r in ranks], limits.loss, sizes):
        return f"loss, {said[0]}{at}: {said[1]}"
    by_name = {f.tensor: f for f in faults(reference, ranks, "gradients", i)}
    for entry in _backward_order(traces[0], by_name):
        if isinstance(entry, tuple):
            if said := gradients.differs(entry):
                return f"gradient of the output of {names[entry]}, {said[0]}{at}: {said[1]}"
        elif by_name[entry].relative > limits.gradients:
            return _sentence("gradient of", by_name[entry], at)
    if said := _scalar_words(reference.norms[i], [r.norms[i] for r in ranks], limits.norm, sizes):
        return f"gradient norm, {said[0]}{at}: {said[1]}"
    updated = faults(reference, ranks, "weights", step)
    return _first(updated, limits.weights, "weights after the step of", at)


def _first(found: Iterator[Fault], tolerance: float, what: str, at: str) -> str:
    return _sentence(what, next(f for f in found if f.relative > tolerance), at)


def _sentence(what: str, fault: Fault, at: str) -> str:
    return f"{what} {fault.tensor}{fault.place}{at}: {fault.said}"


def _scalar_words(
    wanted: float, found: Sequence[float], tolerance: float, sizes: Mapping[str, int]
) -> tuple[str, str] | None:
    for rank, value in enumerate(found):
        if relative_scalar(value, wanted) > tolerance:
            factor = value / wanted if wanted else 0.0
            said = in_words(factor, sizes) if whole_factor(factor) else ""
            return f"rank {rank}", f"{value:.9g} for {wanted:.9g}{said}"
    return None


def _names(keys: Sequence[Key]) -> dict[Key, str]:
    """A vector's name; of a second module with the same vector, with the module's kind."""
    first: dict[str, str] = {}
    return {
        (tensor, kind): tensor if first.setdefault(tensor, kind) == kind else f"{tensor} ({kind})"
        for tensor, kind in keys
    }


def _backward_order(wanted: Trace, gradients: Mapping[str, Fault]) -> list[Key | str]:
    """Outputs, as keys, and parameters, as names: each output before its module's parameters."""
    places: list[tuple[float, int, Key | str]] = []
    last = len(wanted.places) + 1.0
    for name in gradients:
        places.append((-wanted.parameters.get(name, last), 1, name))
    for key, place in wanted.places.items():
        places.append((-place, 0, key))
    return [entry for _, _, entry in sorted(places, key=lambda p: p[:2])]


class Beside:
    """The outputs of a step, or their gradients, of the ranks of a layout beside the reference."""

    def __init__(
        self,
        reference: Trace,
        ranks: Sequence[Trace],
        what: Literal["outputs", "gradients"],
        tolerance: float,
        sizes: Mapping[str, int],
    ) -> None:
        self.wanted: dict[Key, list[Record]] = getattr(reference, what)
        self.ranks: list[dict[Key, list[Record]]] = [getattr(trace, what) for trace in ranks]
        values = {k: np.concatenate([r.values for r in rs]) for k, rs in self.wanted.items()}
        self.scales, self.tolerance, self.sizes = scales(values), tolerance, sizes

    def differs(self, key: Key) -> tuple[str, str] | None:
        """("rank 1, token 3, feature 0", "2 for 1 (twice)") of one output; None where it is equal.

        Several ranks may hold the same part of an output. Then each is compared, but for partial
        gradients their sum.
        """
        if key not in self.wanted:  # its gradient is not computed
            return None
        wanted = _assembled(self.wanted[key], np.nan)
        held = [(f"rank {i}", r) for i, of in enumerate(self.ranks) for r in of.get(key, [])]
        filled = np.zeros(wanted.shape, dtype=bool)
        for _, record in held:
            filled[record.tokens, record.features] = True
        if any(record.partial for _, record in held):
            total = _assembled([record for _, record in held], 0.0, wanted.shape)
            every = Record(np.arange(len(wanted)), slice(0, wanted.shape[1]), len(wanted), total)
            held = [("the sum over ranks", every)]
        for who, record in held:
            if said := self._gap(key, record, wanted[record.tokens, record.features]):
                return f"{who}, {said[0]}", said[1]
        if not filled[~np.isnan(wanted)].all():
            token, feature = np.argwhere(~filled & ~np.isnan(wanted))[0]
            return f"token {token}, feature {feature}", "no rank computes it"
        return None

    def _gap(self, key: Key, record: Record, wanted: Array) -> tuple[str, str] | None:
        off, found = gap(record.values, wanted), record.values
        if relative(off.size, self.scales[key]) <= self.tolerance:
            return None
        token, feature = _first_token(found, wanted, self.tolerance * self.scales[key])
        place = f"token {record.tokens[token]}, feature {feature + record.features.start}"
        values = f"{found[token, feature]:.6g} for {wanted[token, feature]:.6g}"
        return place, f"{values}{off.hint(self.sizes)}"


def _assembled(
    records: Sequence[Record], empty: float, shape: tuple[int, ...] | None = None
) -> Array:
    """[tokens, features] of a step; the sum where records overlap, `empty` where there is none."""
    if shape is None:
        shape = (1 + max(int(r.tokens.max(initial=-1)) for r in records), records[0].width)
    total, seen = np.zeros(shape), np.zeros(shape, dtype=bool)
    for r in records:
        total[r.tokens, r.features] += r.values
        seen[r.tokens, r.features] = True
    total[~seen] = empty
    return total


def _first_token(found: Array, wanted: Array, allowed: float) -> tuple[int, int]:
    """The first row with a difference of more than `allowed`, and the worst of its features."""
    away = distance(found, wanted)
    token = int(np.argmax((away > allowed).any(axis=1)))
    return token, int(away[token].argmax())
