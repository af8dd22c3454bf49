"""Modules whose parameters say where they belong.

A `Layer` declares each parameter with a `Placement` and gives it no memory; memory comes later,
from `materialise` (a plain script) or from the flat buffers of training. `adopt` declares the
parameters of other makers' modules. A parameter without a placement is an error. Placements are
kept by attribute name on the module, so they survive `.to`, a swap of the parameter object, and a
second registration.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from penteract.collectives import I, Kind, R, S
from penteract.mesh import Axis
from penteract.placement import AxisUse, Init, Piece, Placement, whole
from penteract.random import initialise

Write = Callable[[Tensor, bool], None]  # (where to, overwrite rather than add)


class WeightGradients(Protocol):
    """Who takes weight gradients: the training buffers, or nobody (plain autograd)."""

    def accumulate(self, parameter: nn.Parameter, write: Write) -> None:
        """Take the gradient of one use of `parameter`: `write(out, overwrite)` computes it."""


@dataclass(frozen=True)
class Boundary:
    """What a module's output is, its dims after the first taken together as features.

    Each piece says which features of a logical vector are where among the local ones. The rows are
    those of the micro-batch, split over the axis `rows` where it is larger than 1. The output's
    gradient is the whole one, or for the vectors named in `partial` a part of the sum over ranks.
    """

    pieces: tuple[Piece, ...]
    rows: Axis
    partial: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, features: int, rows: Axis) -> Boundary:
        """All features of one vector."""
        return cls((Piece(name, (features,), whole((features,)), (0,)),), rows)


class Layer(nn.Module):
    """A module that declares its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.placements: dict[str, Placement] = {}
        self.kept: dict[str, str] = {}  # attribute: logical name, of tensors that are no parameter
        self.gradients: WeightGradients | None = None  # set by the buffers of training

    def declare(self, attribute: str, placement: Placement, dtype: torch.dtype) -> None:
        """Register parameter `attribute`, without memory until it is materialised."""
        self.register_parameter(attribute, nn.Parameter(torch.empty(0, dtype=dtype)))
        self.placements[attribute] = placement

    def keep(self, attribute: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Have a tensor of zeros, equal on all ranks of a stage, that a checkpoint holds."""
        setattr(self, attribute, torch.zeros(shape, dtype=dtype))
        self.kept[attribute] = name

    def share(self, attribute: str, owner: Layer, owner_attribute: str) -> None:
        """Use another layer's parameter as this one's `attribute` (tied weights)."""
        self.register_parameter(attribute, getattr(owner, owner_attribute))
        self.placements[attribute] = owner.placements[owner_attribute]


@dataclass
class Declared:
    """One parameter of a model: where it is registered, and its placement."""

    placement: Placement
    parameter: nn.Parameter
    holders: list[tuple[nn.Module, str]] = field(default_factory=list)  # two or more where tied

    @property
    def name(self) -> str:
        """The logical tensors it stores, for messages."""
        return "|".join(dict.fromkeys(piece.tensor for piece in self.placement.pieces))

    def replace(self, data: Tensor) -> None:
        """Give every holder the parameter a new storage: `data` of the placement's shape."""
        assert tuple(data.shape) == self.placement.shape
        requires_grad = self.parameter.requires_grad
        self.parameter = nn.Parameter(data, requires_grad=requires_grad)
        for module, attribute in self.holders:
            setattr(module, attribute, self.parameter)


def declared_parameters(model: nn.Module) -> list[Declared]:
    """Every parameter of the model once, in order of registration.

    Raises ValueError naming a parameter that has no placement.
    """
    found: dict[int, Declared] = {}
    for path, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            placement = getattr(module, "placements", {}).get(attribute)
            if placement is None:
                raise ValueError(
                    f"parameter {path}.{attribute} has no placement: register it with Layer.declare"
                )
            entry = found.setdefault(id(parameter), Declared(placement, parameter))
            entry.holders.append((module, attribute))
    return list(found.values())


def kept_tensors(model: nn.Module) -> Iterator[tuple[Layer, str, str]]:
    """Every tensor that a model keeps besides parameters: its layer, attribute, logical name."""
    for module in model.modules():
        if isinstance(module, Layer):
            for attribute, name in module.kept.items():
                yield module, attribute, name


def place_kept(model: nn.Module, device: torch.device | str) -> None:
    """Move what the model keeps besides parameters to `device`."""
    for layer, attribute, _ in kept_tensors(model):
        setattr(layer, attribute, getattr(layer, attribute).to(device))


def materialise(model: nn.Module, *, seed: int, device: torch.device | str = "cpu") -> None:
    """Allocate and initialise every parameter: each logical tensor a function of (seed, name)."""
    for entry in declared_parameters(model):
        data = torch.empty(entry.placement.shape, dtype=entry.parameter.dtype, device=device)
        entry.replace(data)
        initialise(data, entry.placement, seed)
    place_kept(model, device)


def parameter_kinds(
    model: nn.Module, axes: Collection[str]
) -> dict[str, tuple[Tensor, dict[str, Kind]]]:
    """What `checking` wants to know of a model's parameters: their types over the named axes.

    By their placements: split is S, replicated I, replicated with a partial gradient R. It holds
    for the parameters that the model has now, so materialise it first.
    """
    kinds = {"split": S(), "replicated": I, "partial": R}
    return {
        entry.name: (
            entry.parameter,
            {axis: kinds[use] for axis, use in entry.placement.axes.items() if axis in axes},
        )
        for entry in declared_parameters(model)
    }


def adopt(model: nn.Module) -> None:
    """Declare every parameter of plain torch modules, so that the trainer takes the model as it is.

    Each is whole on every rank, its gradients summed over the data ranks; matrices decay, vectors
    do not. It keeps the values it has, and its logical name is its path in the model. Parameters
    that have a placement keep it. Raises ValueError naming a buffer that a checkpoint would have to
    hold, or a name that a checkpoint cannot take.
    """
    for path, module in model.named_modules():
        placements = dict(getattr(module, "placements", {}))
        for attribute, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{attribute}".lstrip(".")
            if "/" in name or "@" in name:
                raise ValueError(f"parameter {name!r}: / and @ have a meaning in checkpoints")
            shape = tuple(parameter.shape)
            decay = len(shape) >= 2
            placements.setdefault(attribute, replicated(name, shape, Init("zeros"), decay=decay))
        saved = [k for k in module.state_dict() if "." not in k and k not in placements]
        if saved:
            raise ValueError(
                f"module {path or type(module).__name__} has the saved buffer {saved[0]}, which "
                "a checkpoint would lack: make it a parameter, or register it persistent=False"
            )
        module.placements = placements


def replicated(
    name: str,
    shape: tuple[int, ...],
    init: Init,
    *,
    decay: bool = False,
    tp: AxisUse = "replicated",
) -> Placement:
    """Placement of a logical tensor that every tensor rank holds whole.

    Its gradients are identical over tp, or with `tp="partial"` each is a part of the sum.
    """
    piece = Piece(name, shape, whole(shape), (0,) * len(shape))
    return Placement(shape, (piece,), data_partial(tp), init, decay)


def data_partial(tp: AxisUse) -> dict[str, AxisUse]:
    """Axes of a dense parameter: over the data it is replicated, its gradient a partial sum."""
    return {"tp": tp, "dp": "partial", "cp": "partial"}
