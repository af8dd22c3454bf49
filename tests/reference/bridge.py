"""From a penteract model to the reference's dictionaries and back; the measure of a difference."""

from collections.abc import Iterable

import numpy as np
import torch
from reference.mixture import Padding
from reference.plain import Description, Document, Weights
from torch import Tensor, nn

from penteract.mesh import Axis
from penteract.nn.model import ModelSpec
from penteract.nn.moe import MoESpec
from penteract.nn.sequences import MicroBatch
from penteract.parallel.buffers import Buffers
from penteract.parallel.parameters import declared_parameters
from penteract.placement import Fragment, Placement, assemble

Stored = tuple[Placement, Tensor]
Fragments = list[tuple[Fragment, Tensor]]
LARGE = {"sinks": 3.0, "router.weight": 0.6}  # standard deviations of random weights, else 0.4


def describe(spec: ModelSpec) -> Description:
    """What the reference needs to know of a model."""
    block = spec.blocks[0]
    mlp = block.mlp.expert if isinstance(block.mlp, MoESpec) else block.mlp
    return Description(
        layers=len(spec.blocks),
        heads=block.attention.heads,
        kv_heads=block.attention.kv_heads,
        head_size=block.attention.head_size,
        norm=spec.norm.kind,
        eps=spec.norm.eps,
        activation=mlp.activation,
        theta=block.attention.rope_theta,
        qk_norm=block.attention.qk_norm is not None,
        tied=spec.tied,
        window=block.attention.window,
        sinks=block.attention.sinks,
        softcap=block.attention.softcap,
    )


def fragments(stored: Iterable[Stored]) -> Fragments:
    """Every piece of every stored tensor with its values, copied."""
    return [(f, x.detach()[f.local.slices()].clone()) for p, x in stored for f in p.fragments()]


def logical(parts: Fragments) -> Weights:
    """The logical tensors that fragments, from one rank or from several, make up."""
    names = dict.fromkeys(fragment.tensor for fragment, _ in parts)
    return {n: assemble(n, [part for part in parts if part[0].tensor == n]) for n in names}


def parameters(model: nn.Module) -> list[Stored]:
    return [(entry.placement, entry.parameter) for entry in declared_parameters(model)]


def plain_gradients(model: nn.Module) -> list[Stored]:
    """What autograd left on the parameters of a model without buffers."""
    return [(e.placement, e.parameter.grad) for e in declared_parameters(model)]


def placements(buffers: Buffers) -> list[Stored]:
    """What `random_weights` wants to know of the parameters of some buffers."""
    return [(slot.entry.placement, torch.empty(0)) for slot in buffers.slots()]


def owned(buffers: Buffers, name: str) -> Fragments:
    """What this rank owns: copies of its slices of "master" or "own_gradient", in logical boxes."""
    return [(f, view.clone()) for _, f, view in buffers.owned(name)]


@torch.no_grad()
def set_owned(buffers: Buffers, name: str, weights: Weights) -> None:
    """Fill what this rank owns from logical tensors."""
    buffers.wait()
    for _, f, view in buffers.owned(name):
        view.copy_(weights[f.tensor][f.box.slices()])


@torch.no_grad()
def write(stored: Iterable[Stored], weights: Weights) -> None:
    """Fill stored tensors from logical ones."""
    for placement, x in stored:
        for f in placement.fragments():
            x[f.local.slices()] = weights[f.tensor][f.box.slices()].view(f.local.size).to(x.dtype)


def random_weights(stored: Iterable[Stored], seed: int = 0) -> Weights:
    """Logical tensors none of whose elements is 0 or 1: biases and norm weights show up too."""
    shapes = {piece.tensor: piece.shape for placement, _ in stored for piece in placement.pieces}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name in sorted(shapes):
        x = torch.randn(shapes[name], generator=generator, dtype=torch.float64)
        large = next((size for end, size in LARGE.items() if name.endswith(end)), 0.4)
        weights[name] = 1 + 0.3 * x if name.endswith("norm.weight") else large * x
    return weights


def micro_batch(documents: list[Document], cp: Axis | None = None) -> MicroBatch:
    """The documents one behind the other, cut over `cp`."""
    tokens, labels = (
        np.array([t for doc in documents for t in getattr(doc, x)], np.int64)
        for x in ("tokens", "labels")
    )
    weights = np.array([w for doc in documents for w in doc.weights], np.float64)
    lengths = tuple(len(doc.tokens) for doc in documents)
    real = None
    if any(isinstance(doc, Padding) for doc in documents):
        real = np.array([not isinstance(doc, Padding) for doc in documents]).repeat(lengths)
    return MicroBatch.of(tokens, labels, lengths, weights=weights, real=real, cp=cp)


def worst_difference(found: Weights, wanted: Weights, *, floor: float = 1e-4) -> tuple[float, str]:
    """(largest relative difference, its tensor); infinite where names, shapes or finiteness differ.

    A difference is divided by max(largest magnitude in that tensor, `floor` of the largest of all),
    since some gradients are mathematically zero (those of key biases).
    """
    if found.keys() != wanted.keys():
        return float("inf"), str(sorted(found.keys() ^ wanted.keys()))
    largest = max(float(x.abs().max()) for x in wanted.values() if x.numel())
    worst = 0.0, ""
    for name, want in wanted.items():
        have = found[name].double()
        if have.shape != want.shape or not torch.isfinite(have).all():
            return float("inf"), name
        scale = max(float(want.abs().max()), floor * largest)
        difference = float((have - want).abs().max())
        worst = max(worst, (difference / scale if scale else difference, name))
    return worst


def assert_close(found: Weights, wanted: Weights, tolerance: float) -> None:
    difference, name = worst_difference(found, wanted)
    assert difference <= tolerance, f"{name}: relative difference {difference:.3g}"
