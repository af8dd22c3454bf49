"""The rules that tie the sizes of a layout together, on plain integers.

A layout is a number of ranks, five sizes and an order. Each rule raises `UserError` that says the
rule, the numbers, and the nearest values that work; nothing here needs torch or a process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isqrt, lcm, prod

from penteract.errors import UserError

SIZES = ("tp", "cp", "pp", "ep", "etp")
ORDER_AXES = ("tp", "cp", "ep", "dp", "pp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"
MAX_WORLD = 2**24  # far above any machine; keeps the search for nearest values quick


def divisors(n: int) -> list[int]:
    """All divisors of `n` >= 1, ascending."""
    low = [i for i in range(1, isqrt(n) + 1) if n % i == 0]
    return low + [n // i for i in reversed(low) if i * i != n]


def nearest(value: int, allowed: Iterable[int]) -> list[int]:
    """The nearest allowed value below and the nearest above `value`, where there is one."""
    below, above = None, None
    for candidate in allowed:
        if candidate < value and (below is None or candidate > below):
            below = candidate
        elif candidate > value and (above is None or candidate < above):
            above = candidate
    return [found for found in (below, above) if found is not None]


def check_layout(world: int, sizes: Mapping[str, int | None], order: str = DEFAULT_ORDER) -> None:
    """Refuse sizes that do not factor `world` into a dense grid and an expert grid.

    `sizes` maps tp, cp, pp, ep, etp to their sizes; a missing one is 1, `etp` missing or None is
    `tp`. The dense grid is tp·cp·dp·pp ranks, the expert grid etp·ep·edp·pp ranks, with the same
    pipeline groups. Raises UserError with the rule, the numbers and the nearest values that work.
    """
    problem = _problem(world, sizes, order)
    if problem:
        raise UserError(problem + _alternatives(world, sizes, order))


def check_chunks(chunks: int, *, pp: int) -> None:
    """Refuse virtual stages (`chunks` > 1) without a pipeline; raises UserError."""
    if chunks < 1:
        raise UserError(f"chunks = {chunks}: a rank holds at least 1 stage; use chunks = 1")
    if chunks > 1 and pp == 1:
        raise UserError(
            f"chunks = {chunks} with pp = 1: virtual stages need a pipeline; "
            "use chunks = 1, or pp = 2 or more"
        )


def check_experts(experts: int, *, ep: int) -> None:
    """Refuse experts that do not divide evenly over `ep` ranks; raises UserError."""
    if experts < 1 or ep < 1:
        raise UserError(f"experts = {experts}, ep = {ep}: both are at least 1")
    if experts % ep:
        multiples = nearest(experts, (experts // ep * ep, (experts // ep + 1) * ep))
        raise UserError(
            f"experts = {experts} do not divide evenly over ep = {ep}; values that work: "
            f"ep {_either(nearest(ep, divisors(experts)))}; "
            f"experts {_either([n for n in multiples if n])}"
        )


def check_inner(inner: int, *, cp: int) -> None:
    """Refuse groups of `inner` context ranks that do not split `cp` evenly; raises UserError."""
    if inner < 1 or cp % inner:
        raise UserError(
            f"cp_inner = {inner} does not divide cp = {cp}; "
            f"values that work: cp_inner {_either(divisors(cp))}"
        )


def check_replicas(replicas: int, *, dp: int, axis: str = "dp") -> None:
    """Refuse `replicas` that do not split the data axis evenly; raises UserError."""
    if replicas < 1 or dp % replicas:
        raise UserError(
            f"replicas = {replicas} does not divide {axis} = {dp}; "
            f"values that work: replicas {_either(nearest(replicas, divisors(dp)))}"
        )


def least_dp(sizes: Mapping[str, int | None]) -> int:
    """The least dp for which a world satisfies both factorisations.

    Raises UserError where a size is not a positive integer.
    """
    full = _full(sizes)
    problem = next(filter(None, (_bad_size(name, full[name]) for name in SIZES)), None)
    if problem:
        raise UserError(problem)
    dense = full["tp"] * full["cp"] * full["pp"]
    return lcm(dense, full["etp"] * full["ep"] * full["pp"]) // dense


def _full(sizes: Mapping[str, int | None]) -> dict[str, int]:
    unknown = sorted(set(sizes) - set(SIZES))
    assert not unknown, f"unknown sizes {unknown}"
    full = {name: 1 if sizes.get(name) is None else sizes[name] for name in SIZES}
    if sizes.get("etp") is None:
        full["etp"] = full["tp"]
    return full  # type: ignore[return-value]


def _bad_size(name: str, value: object) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return f"{name} = {value!r} is not a whole number"
    if not 1 <= value <= MAX_WORLD:
        return f"{name} = {value} is outside 1 .. {MAX_WORLD}"
    return None


def _problem(world: int, sizes: Mapping[str, int | None], order: str) -> str | None:
    """The first rule that is broken, in words, or None."""
    full = _full(sizes)
    for name, value in (("world", world), *full.items()):
        if problem := _bad_size(name, value):
            return problem
    products = (("tp", "cp", "pp", "dense layers"), ("etp", "ep", "pp", "experts"))
    for *names, what in products:
        product = prod(full[name] for name in names)
        if world % product:
            numbers = "*".join(str(full[name]) for name in names)
            return (
                f"world = {world} is not a multiple of {'*'.join(names)} = {numbers} = {product}, "
                f"the least number of ranks for its {what}"
            )
    return _order_problem(world, full, order)


def _order_problem(world: int, full: dict[str, int], order: str) -> str | None:
    names = order.split("-")
    if set(names) - set(ORDER_AXES) or len(set(names)) < len(names):
        return (
            f"order = {order!r} must name each of {', '.join(ORDER_AXES)} at most once, "
            f"joined by '-', such as {DEFAULT_ORDER!r}"
        )
    dense = {name: full[name] for name in ("tp", "cp", "pp")}
    dense["dp"] = world // prod(dense.values())
    expert = {"tp": full["etp"], "ep": full["ep"], "pp": full["pp"]}
    expert["dp"] = world // prod(expert.values())
    missing = [
        name
        for name in ORDER_AXES
        if name not in names and max(dense.get(name, 1), expert.get(name, 1)) > 1
    ]
    if missing:
        fixed = "-".join([*names, *missing])
        return (
            f"order = {order!r} leaves out {', '.join(missing)}, which is larger than 1; "
            f"{fixed!r} names it"
        )
    if full["pp"] == 1:
        return None
    before = names[: names.index("pp")]
    dense_stride = prod(dense.get(name, 1) for name in before)
    expert_stride = prod(expert.get(name, 1) for name in before)
    if dense_stride == expert_stride:
        return None
    return (
        f"order = {order!r} gives dense layers and experts different pipeline groups: before pp "
        f"lie {dense_stride} ranks of the dense grid and {expert_stride} of the expert grid; "
        f"an order that ends in pp, such as {DEFAULT_ORDER!r}, always works"
    )


def _alternatives(world: int, sizes: Mapping[str, int | None], order: str) -> str:
    """For each number that could be changed alone, the nearest values that satisfy every rule."""
    values = {"world": world, **{n: v for n, v in sizes.items() if v is not None}}
    if any(isinstance(v, bool) or not isinstance(v, int) for v in values.values()):
        return ""
    full = _full(sizes)
    found = []
    for name in ("world", *SIZES):
        if name != "world" and sizes.get(name) is None:
            continue
        good = [
            n
            for n in _candidates(name, values[name], world, full)
            if _works(name, n, world=world, sizes=sizes, order=order)
        ]
        if near := nearest(values[name], good):
            found.append(f"{name} {_either(near)}")
    return f". Values that work, changing one: {'; '.join(found)}" if found else ""


def _candidates(name: str, value: int, world: int, full: Mapping[str, int]) -> list[int]:
    if name != "world":
        return divisors(world) if 1 <= world <= MAX_WORLD else []
    if min(full.values()) < 1:
        return []
    step = lcm(full["tp"] * full["cp"] * full["pp"], full["etp"] * full["ep"] * full["pp"])
    base = min(max(value, 0), MAX_WORLD) // step * step
    return [n for n in (base - step, base, base + step) if 1 <= n <= MAX_WORLD]


def _works(
    name: str, value: int, *, world: int, sizes: Mapping[str, int | None], order: str
) -> bool:
    if name == "world":
        return _problem(value, sizes, order) is None
    return _problem(world, {**sizes, name: value}, order) is None


def _either(values: list[int]) -> str:
    return " or ".join(str(value) for value in values)
