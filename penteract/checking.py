"""The checking mode: every tensor carries its type over each axis, and misuse is refused.

Under `with checking():` a tensor has a type per axis name, S(dim), R, I or P as in `collectives`.
A collective that is given another type than its table says, and an operation that mixes types
wrongly, raise KindError at the call. Nothing is sent for it, so a size-1 axis is checked as well.

How types move through torch's operations, axis by axis:

| inputs                     | result                                                          |
|----------------------------|-----------------------------------------------------------------|
| all I                      | I                                                               |
| R with R                   | R                                                               |
| S with S or R              | S, of the same dim where the shape stays, otherwise of unknown  |
| I with R or S              | refused, since I's gradient would be partial: `replicate` first |
| P, linear in it            | P: sums of P with P, multiples by an R or a number, views       |
| P otherwise                | refused: `all_reduce` or `reduce_scatter` first                 |

An I that needs no gradient (a mask, a count) is an R as well. A tensor without a type (a constant
made here, an input) fits everything but a sum with P; `declare` gives it one. Contractions over a
split dim give P, which shapes do not show: `declare(y, axis, P)` says so, and a forgotten one is
found by the collective that follows. A declaration turns S or R into P, and R into S (a slice by
hand); it cannot undo what else is known. Backward from R is refused: every rank would count its
loss.

Gradients: if the forward is typed correctly, then so is every gradient, since each rule's transpose
maps dual types to dual types (S↔S, R↔P, I↔I). So a parameter seeded with its declared type, and
used where the rules let it, has a gradient of the dual type: S for S, P for R (still to be summed),
I for I. `typed(parameter.grad)` tells it. Nothing needs to be looked at in the backward itself.

A mode does not see an autograd function, unless it is a `collectives.Operation`: that is one
operation under the rules above, or under its own `kinds`, checked before it computes.
`parallel.parameters.parameter_kinds` gives the seeds of a model; docs/checking.md is a guide.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary
from torch.utils.weak import WeakTensorKeyDictionary

from penteract import collectives as c
from penteract.collectives import I, Kind, Operation, P, R, S

Seeds = Mapping[str, tuple[Tensor, Mapping[str, Kind]]]

# What each collective takes and gives.
_CALLS: Mapping[Callable[..., Any], tuple[str, str]] = MappingProxyType(
    {
        c.replicate: ("I", "R"),
        c.all_reduce: ("P", "I"),
        c.all_gather: ("S", "R"),
        c.reduce_scatter: ("P", "S"),
        c.split: ("I", "S"),
        c.gather: ("S", "I"),
        c.all_to_all: ("S", "S"),
        c.shift: ("S", "S"),
    }
)
# How to come from what was found to what the refused call would have given, or wanted.
_INSTEAD: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("I", "R"): "call replicate(x, axis)",
        ("I", "S"): "call split(x, axis, dim)",
        ("S", "R"): "call all_gather(x, axis, dim)",
        ("S", "I"): "call gather(x, axis, dim), or declare(x, axis, P) if it is a partial sum",
        ("P", "I"): "call all_reduce(x, axis)",
        ("P", "S"): "call reduce_scatter(x, axis, dim)",
        ("P", "R"): "call replicate(all_reduce(x, axis), axis)",
        ("S", "S"): "split it along the other dim",
        ("I", "P"): "call replicate(x, axis) before the sum is divided over the ranks",
        ("S", "P"): "declare(x, axis, P) if it is a partial sum",
        ("R", "P"): "declare(x, axis, P) if it is a partial sum",
        ("R", "I"): "R cannot become I: use the value before its replicate or all_gather",
        ("R", "S"): "a slice by hand has right gradients; or split the value before its replicate",
    }
)

# What `declare` may make of a type: a contraction over a split dim, a slice by hand.
_BECOMES: Mapping[str, str] = MappingProxyType({"S": "PS", "R": "PS", "I": "", "P": ""})


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Linear in their first argument; of P they make P.
_LINEAR = _words(
    """view reshape transpose t T mT permute movedim flatten unflatten squeeze unsqueeze expand
    contiguous clone detach data sum mean cumsum neg to float double half bfloat16 cpu cuda getitem
    select narrow split chunk unbind tensor_split index_select requires_grad"""
)
_SUMS = _words("add iadd radd sub isub cat concat stack")
_JOINS = _words("cat concat stack")
_QUOTIENTS = _words("div idiv truediv true_divide divide")
_PRODUCTS = _words("mul imul rmul multiply") | _QUOTIENTS
# The second tensor lends its shape or dtype only.
_LIKE = _words("view_as reshape_as expand_as type_as to")
_CONSTANTS = _words(
    """zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty
    new_full new_tensor"""
)
# These can move a dim and leave the shape as it was.
_MOVES = _words(
    """transpose t T mT permute movedim swapaxes swapdims view reshape flatten unflatten matmul mm
    bmm rmatmul linear einsum"""
)
_ROOTS = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


class KindError(ValueError):
    """A value of the wrong type. No TypeError: torch's operators would reword one."""


def typed(x: Tensor) -> dict[str, Kind]:
    """The types that `x` carries, by axis name; empty outside the mode."""
    if has_torch_function_unary(x):
        return handle_torch_function(typed, (x,), x)
    return {}


class checking(TorchFunctionMode):
    """`with checking():` types are carried and checked.

    `parameters` seeds them: name -> (tensor, {axis name: Kind}); names appear in messages, and no
    `declare` may contradict a seed.
    """

    def __init__(self, parameters: Seeds | None = None) -> None:
        super().__init__()
        self._kinds = WeakTensorKeyDictionary()
        self._names = WeakTensorKeyDictionary()
        for name, (tensor, kinds) in (parameters or {}).items():
            self._names[tensor] = name
            self._kinds[tensor] = {axis: _normal(kind, tensor) for axis, kind in kinds.items()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is typed:
            return dict(self._of(args[0]))
        if func is c.declare:
            return self._declare(*args)
        if func in _CALLS:
            return self._collective(func, args, kwargs)
        owner = getattr(func, "__self__", None)
        if isinstance(owner, type) and issubclass(owner, Operation):
            return self._operation(owner, args)
        name = _name(func)
        if func in _ROOTS:
            self._check_roots(args[0])
        result = func(*args, **kwargs)
        outputs = [args[0]] if name == "setitem" else list(_tensors(result))
        if not outputs or name in _CONSTANTS:
            return result
        if name == "grad":  # the attribute of one tensor, or autograd.grad of several
            several = func is torch.autograd.grad
            sources = _tensors(args[1] if several else args[0])
            for gradient, source in zip(result if several else [result], sources, strict=True):
                if gradient is not None:
                    self._kinds[gradient] = {a: _dual(kind) for a, kind in self._of(source).items()}
            return result
        inputs = list(_tensors(args[:1] if name in _LIKE else (args, kwargs)))
        kinds = self._derived(name, inputs, args, kwargs)
        for output in outputs:
            self._kinds[output] = {
                axis: S(self._kept_dim(axis, name, inputs, output)) if kind == S() else kind
                for axis, kind in kinds.items()
            }
        return result

    def _of(self, x: Tensor) -> dict[str, Kind]:
        return self._kinds.get(x, {})

    def _describe(self, x: Tensor, axis: str) -> str:
        label = f" {self._names[x]!r}" if x in self._names else ""
        return f"{self._of(x).get(axis, 'untyped')}{label} {list(x.shape)}"

    def _declare(self, x: Tensor, axis: Any, kind: Kind) -> Tensor:
        kind = _normal(kind, x)
        for name in axis.name.split("-"):
            before = self._of(x).get(name, kind)
            fits = _agree(before, kind)
            if x in self._names and not fits:
                raise KindError(
                    f"declare over {name!r}: parameter {self._names[x]!r} is {before} by its "
                    f"placement, not {kind}"
                )
            if not fits and kind.letter not in _BECOMES[before.letter]:
                raise KindError(
                    f"declare over {name!r}: {self._describe(x, name)} cannot become {kind} by "
                    f"that; instead {_INSTEAD[before.letter, kind.letter]}"
                )
            self._kinds[x] = {**self._of(x), name: kind}
        return x

    def _collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Check x's type over the axis (over each part of a fused one) and give the result its."""
        bound = inspect.signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        x, axis = list(bound.arguments.values())[:2]
        dim = bound.arguments.get("dim")
        dim = dim if dim is None else dim % x.ndim
        takes, gives = _CALLS[func]
        kinds = dict(self._of(x))
        for name in axis.name.split("-"):
            found = kinds.get(name)
            if found is not None and found.letter != takes:
                way = _INSTEAD.get((found.letter, gives), "leave the call out: it is that already")
                raise KindError(
                    f"{func.__name__} over {name!r} takes {takes} and gives {gives}, but found "
                    f"{self._describe(x, name)}; instead {way}"
                )
            if found is not None and None not in (dim, found.dim) and dim != found.dim:
                raise KindError(
                    f"{func.__name__} over {name!r} along dim {dim}, but found "
                    f"{self._describe(x, name)}; instead use dim={found.dim}"
                )
            same = found if takes == gives == "S" else None
            kinds[name] = same or Kind(gives, dim if gives == "S" else None)
        result: Tensor = func(*args, **kwargs)
        if result is x:  # over a size-1 axis; x keeps its own type
            result = x.view_as(x)
        self._kinds[result] = kinds
        return result

    def _operation(self, operation: type[Operation], args: tuple[Any, ...]) -> Any:
        """Check the inputs before it computes or sends, then give the results their types."""
        name, tensors = operation.__name__.strip("_"), list(_tensors(args))
        declared = operation.kinds(args)
        own: dict[str, Kind] = {}
        if declared is not None:
            axis, takes, gives = declared
            own = dict.fromkeys(axis.name.split("-"), gives)
        for axis_name in own:
            for x, kind in zip(tensors, takes, strict=False):  # what is left takes what it gets
                found = self._of(x).get(axis_name, kind)
                if not _agree(found, kind):
                    raise KindError(
                        f"{name} over {axis_name!r} takes {' and '.join(map(str, takes))} and "
                        f"gives {gives}, but found {self._describe(x, axis_name)} for the {kind}; "
                        f"instead {_INSTEAD[found.letter, kind.letter]}"
                    )
        kinds = {**self._derived(name, tensors, args, {}, but=own), **own}
        result = operation.apply(*args)
        for output in _tensors(result):
            self._kinds[output] = dict(kinds)
        return result

    def _check_roots(self, roots: Any) -> None:
        for root in _tensors(roots):
            for axis, kind in self._of(root).items():
                if kind == R:
                    raise KindError(
                        f"backward over {axis!r} from {self._describe(root, axis)}: every rank "
                        f"would count it once; start from the I or P that it stands for"
                    )

    def _derived(
        self, name: str, inputs: list[Tensor], args: Any, kwargs: Any, but: Collection[str] = ()
    ) -> dict[str, Kind]:
        """The result's types over all axes `but` some, an S without its dim."""
        found = sorted({axis for x in inputs for axis in self._of(x)}.difference(but))
        return {axis: self._combined(axis, name, inputs, args, kwargs) for axis in found}

    def _combined(self, axis: str, name: str, inputs: list[Tensor], args: Any, kwargs: Any) -> Kind:
        """The result's type over `axis`, an S without its dim; KindError where there is none."""
        letters: dict[str, Tensor] = {}
        for x in inputs:
            kind = self._of(x).get(axis)
            if kind is not None:
                letters.setdefault("i" if self._is_plain(x, axis) else kind.letter, x)
        if "P" in letters:
            self._check_partial(axis, name, inputs, args, kwargs)
            return P
        if set(letters) <= {"I", "i"}:
            return I
        if "I" in letters:
            other = letters.get("S", letters.get("R", letters["I"]))
            raise KindError(
                f"{name} over {axis!r} mixes {self._describe(letters['I'], axis)} with "
                f"{self._describe(other, axis)}: apply replicate(x, axis) to the I first"
            )
        return S() if "S" in letters else R

    def _check_partial(
        self, axis: str, name: str, inputs: list[Tensor], args: Any, kwargs: Any
    ) -> None:
        """An operation on P must be linear in it, and add nothing that every rank would add."""
        partial = [x for x in inputs if self._of(x).get(axis) == P]
        # Whole numbers beside it are indices, unless they are partial sums (counts) themselves.
        values = [x for x in inputs if x.is_floating_point() or self._of(x).get(axis) == P]
        first = next(_tensors(args), None)
        if name in _LINEAR | _LIKE and partial[0] is first and len(partial) == 1:
            return
        if name in _SUMS:
            numbers = [n for n in (*args, kwargs.get("other")) if isinstance(n, int | float) and n]
            added = [self._describe(x, axis) for x in values if self._of(x).get(axis) != P]
            added += [f"the number {n}" for n in numbers if name not in _JOINS]
            if not added:
                return
            raise KindError(
                f"{name} over {axis!r} adds {added[0]} to the partial sum "
                f"{self._describe(partial[0], axis)}: every rank would add it; add it after "
                f"all_reduce or reduce_scatter, or declare it P if it is a partial sum too"
            )
        others = [x for x in values if x is not partial[0]]
        fit = all(self._of(x).get(axis, R) == R or self._is_plain(x, axis) for x in others)
        is_above = name not in _QUOTIENTS or partial[0] is first
        if name in _PRODUCTS and len(partial) == 1 and is_above and fit:
            return
        with_what = "".join(f" with {self._describe(x, axis)}" for x in others)
        raise KindError(
            f"{name} over {axis!r} is not linear in the partial sum "
            f"{self._describe(partial[0], axis)}{with_what}: call all_reduce(x, axis) or "
            f"reduce_scatter(x, axis, dim) first"
        )

    def _is_plain(self, x: Tensor, axis: str) -> bool:
        """An I that needs no gradient, which is an R as well."""
        return self._of(x).get(axis) == I and not x.requires_grad

    def _kept_dim(self, axis: str, name: str, inputs: list[Tensor], output: Tensor) -> int | None:
        if name in _MOVES:
            return None
        splits = (x for x in inputs if self._of(x).get(axis, R).letter == "S")
        dims = {self._of(x)[axis].dim for x in splits if x.shape == output.shape}
        return dims.pop() if len(dims) == 1 else None


def _dual(kind: Kind) -> Kind:
    return {"R": P, "P": R}.get(kind.letter, kind)


def _normal(kind: Kind, x: Tensor) -> Kind:
    """`kind` with its dim counted from the front."""
    if kind.dim is None:
        return kind
    if not -x.ndim <= kind.dim < x.ndim:
        raise ValueError(f"{kind} names a dim that a tensor of shape {list(x.shape)} does not have")
    return Kind(kind.letter, kind.dim % x.ndim)


def _agree(a: Kind, b: Kind) -> bool:
    """Whether they are one type, as far as the dims are known."""
    return a.letter == b.letter and (a.dim == b.dim or None in (a.dim, b.dim))


def _name(func: Any) -> str:
    """The operation without underscores: `add` for add_, `iadd` for __iadd__, `T` for x.T. Public
    functions outside torch keep their module's name, for no rule by name to fit them.
    """
    if inspect.isfunction(func) and not func.__module__.startswith("torch."):
        return f"{func.__module__}.{func.__name__}"
    is_attribute = func.__name__ == "__get__"
    name: str = func.__self__.__name__ if is_attribute else func.__name__
    return name.strip("_")


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from _tensors(value)
