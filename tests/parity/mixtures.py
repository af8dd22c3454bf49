"""Ways to have experts, and layouts for them, as data."""

from collections.abc import Mapping
from typing import Any

import torch
from reference.mixture import Mixture, moved
from reference.plain import Weights

# An expert's width divides over no number of ranks. Rates and weights are large enough to show.
MIXTURES: dict[str, dict[str, Any]] = {
    "none": {"experts": 4, "balance": "none"},
    "aux": {
        "experts": 4, "normalise": False, "balance": "aux", "balance_weight": 0.5, "z_weight": 0.1,
    },
    "seq_aux": {
        "experts": 4, "score": "sigmoid", "route_scale": 2.5, "balance": "seq_aux",
        "balance_weight": 0.5,
    },
    "global_aux": {
        "experts": 4, "balance": "global_aux", "balance_weight": 0.5, "z_weight": 0.1,
    },
    "bias": {
        "experts": 4, "score": "sigmoid", "normalise": False, "balance": "bias", "bias_rate": 0.2,
    },
    "sinkhorn": {"experts": 4, "topk": 1, "normalise": False, "balance": "sinkhorn"},
    "groups": {
        "experts": 6, "score": "sigmoid", "groups": 3, "topk_groups": 2, "route_scale": 2.5,
        "balance": "bias", "bias_rate": 0.2, "z_weight": 0.1,
    },
    "best-group": {
        "experts": 4, "groups": 2, "topk_groups": 1, "balance": "aux", "balance_weight": 0.5,
    },
    "half-by-score": {
        "experts": 4, "capacity": 0.5, "drop": "score", "balance": "seq_aux",
        "balance_weight": 0.5,
    },
    "half-by-position": {
        "experts": 4, "capacity": 0.5, "drop": "position", "normalise": False, "balance": "aux",
        "balance_weight": 0.5,
    },
    "full-by-score": {
        "experts": 6, "topk": 3, "score": "sigmoid", "capacity": 1.0, "drop": "score",
        "balance": "global_aux", "balance_weight": 0.5,
    },
    "full-by-position": {
        "experts": 4, "topk": 1, "normalise": False, "capacity": 1.0, "drop": "position",
        "balance": "bias", "bias_rate": 0.2,
    },
    "padded-to-capacity": {
        "experts": 4, "capacity": 1.0, "pad": True, "balance": "aux", "balance_weight": 0.5,
    },
    "shared": {"experts": 4, "shared_ffn": 3, "balance": "none", "z_weight": 0.1},
    "shared-gate": {
        "experts": 6, "shared_ffn": 7, "shared_gate": True, "balance": "seq_aux",
        "balance_weight": 0.5,
    },
    "one": {
        "experts": 4, "topk": 1, "normalise": False, "balance": "aux", "balance_weight": 0.5,
    },
    "every": {"experts": 4, "topk": 4, "balance": "bias", "bias_rate": 0.2},
    "second-block": {
        "experts": 6, "layers": [1], "balance": "global_aux", "balance_weight": 0.5,
    },
    "skewed": {  # all tokens go to one expert: see `skew`
        "experts": 4, "topk": 1, "normalise": False, "balance": "aux", "balance_weight": 0.5,
    },
}  # fmt: skip
WIDTH = 5
BLOCKS = 2  # of every model that they are tried with

SIZES = ("tp", "cp", "pp", "ep", "etp", "dp")
# Experts split over data, context and tensor ranks; each whole, or cut over more or fewer ranks
# than other matrices are; ranks that hold the same ones.
LAYOUTS: dict[str, dict[str, int]] = {
    name: dict(zip(SIZES, sizes, strict=True))
    for name, sizes in {
        "one": (1, 1, 1, 1, 1, 1),
        "dp2": (1, 1, 1, 1, 1, 2),
        "dp2-ep2": (1, 1, 1, 2, 1, 2),
        "dp2-etp2": (1, 1, 1, 1, 2, 2),
        "tp2": (2, 1, 1, 1, 2, 1),
        "tp2-etp1": (2, 1, 1, 1, 1, 1),
        "tp2-ep2": (2, 1, 1, 2, 1, 1),
        "cp2": (1, 2, 1, 1, 1, 1),
        "cp2-ep2": (1, 2, 1, 2, 1, 1),
        "cp2-etp2": (1, 2, 1, 1, 2, 1),
        "pp2": (1, 1, 2, 1, 1, 1),
        "dp3-ep3": (1, 1, 1, 3, 1, 3),
        "cp3-ep3": (1, 3, 1, 3, 1, 1),
        "dp4-ep4": (1, 1, 1, 4, 1, 4),
        "dp4-ep2": (1, 1, 1, 2, 1, 4),
        "dp4-ep2-etp2": (1, 1, 1, 2, 2, 4),
        "tp2-dp2-ep2": (2, 1, 1, 2, 2, 2),
        "tp2-dp2-ep4": (2, 1, 1, 4, 1, 2),
        "tp2-cp2-ep2": (2, 2, 1, 2, 2, 1),
        "tp4-ep2-etp2": (4, 1, 1, 2, 2, 1),
        "tp4-ep4": (4, 1, 1, 4, 1, 1),
        "cp2-dp2-ep4": (1, 2, 1, 4, 1, 2),
        "cp4-ep2": (1, 4, 1, 2, 1, 1),
        "pp2-dp2-ep2": (1, 1, 2, 2, 1, 2),
        "pp2-tp2-ep2": (2, 1, 2, 2, 1, 1),
        "dp6-ep6": (1, 1, 1, 6, 1, 6),
        "dp6-ep3": (1, 1, 1, 3, 1, 6),
        "tp2-dp3-ep3": (2, 1, 1, 3, 2, 3),
        "cp2-dp3-ep2-etp3": (1, 2, 1, 2, 3, 3),
        "dp8-ep4-etp2": (1, 1, 1, 4, 2, 8),
        "tp2-cp2-dp2-ep2": (2, 2, 1, 2, 2, 2),
        "tp2-cp2-dp2-ep4": (2, 2, 1, 4, 1, 2),
        "tp4-dp2-ep2-etp4": (4, 1, 1, 2, 4, 2),
        "pp2-tp2-dp2-ep4": (2, 1, 2, 4, 1, 2),
        "pp2-cp2-dp2-ep2-etp2": (1, 2, 2, 2, 2, 2),
    }.items()
}

EXPERTS: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2),
    "cp": (1, 2),
    "pp": (1, 2),
    "ep": (1, 2, 4),
    "etp": (1, 2),
    "dp": (1, 2),
    "moe": tuple(MIXTURES),
    "model": ("llama", "gpt2", "six-heads"),
    "dispatcher": ("all_to_all", "all_gather"),
    "schedule": ("1f1b", "1f1b-pairs"),
    "sp": (False, True),
    "zero": (0, 1, 2, 3),
    "replicas": (1, 2),
    "optimizer": ("adamw", "muon"),
    "recompute": ((), ("layer",), ("mlp",), ("experts",), ("expert_act", "core")),
    "micro_batch": (1, 2),
    "ragged": (False, True),
    "padded": (False, True),
    "mask": ("half", "one"),
    "dropout": (0.0, 0.1),
    "overlap": (True, False),
    "bucket_bytes": (25 << 20, 256),
    "global_batch": (3,),
    "seq": (6,),
}  # fmt: skip

# What is trained beside a mixture, on which the reference's numbers depend.
SCENES: tuple[dict[str, Any], ...] = (
    {
        "model": "llama", "optimizer": "adamw", "micro_batch": 1, "ragged": False, "padded": False,
        "mask": "half", "dropout": 0.0,
    },
    {
        "model": "gpt2", "optimizer": "muon", "micro_batch": 2, "ragged": True, "padded": True,
        "mask": "half", "dropout": 0.0,
    },
    {
        "model": "six-heads", "optimizer": "adamw", "micro_batch": 1, "ragged": False,
        "padded": True, "mask": "one", "dropout": 0.1,
    },
    {
        "model": "gpt2", "optimizer": "adamw", "micro_batch": 2, "ragged": True, "padded": False,
        "mask": "half", "dropout": 0.1,
    },
)  # fmt: skip


def section(name: str, dispatcher: str) -> dict[str, Any]:
    """A mixture as `[moe]` says it."""
    return {"ffn": WIDTH, "dispatcher": dispatcher, **MIXTURES[name]}


def mixture_of(name: str) -> Mixture:
    """The same for the reference; without a name a model that has no experts."""
    if not name:
        return Mixture(layers=(), experts=1)
    values = dict(MIXTURES[name])
    groups = values.get("groups", 1)
    return Mixture(
        layers=tuple(values.pop("layers", range(BLOCKS))),
        scale=values.pop("route_scale", 1.0),
        topk_groups=values.pop("topk_groups", groups),
        shared=values.pop("shared_ffn", None) is not None,
        **{k: v for k, v in values.items() if k not in ("bias_rate", "pad")},
    )


def coupled(name: str) -> bool:
    """Whether numbers depend on which sequences a micro-batch has."""
    m = mixture_of(name)
    return m.balance in ("aux", "sinkhorn") or m.capacity is not None


def skew(weights: Weights) -> Weights:
    """All tokens go to expert 0 of each layer, since all have the same large feature."""
    found = {name: x.clone() for name, x in weights.items()}
    found["embed.weight"][:, 0] = 30.0
    for name, x in found.items():
        if name.endswith("router.weight"):
            x[:, 0] = torch.tensor([2.0, 1.0, *[-1.0] * (len(x) - 2)])
    return found


def kept_at_start(name: str) -> Weights:
    """What routers keep, by its name, before the first step."""
    m = mixture_of(name)
    where = {"bias": ("{}.bias", torch.float64), "global_aux": ("load/{}", torch.int64)}
    if m.balance not in where:
        return {}
    form, dtype = where[m.balance]
    routers = [f"layers.{i}.moe.router" for i in m.layers]
    return {form.format(router): torch.zeros(m.experts, dtype=dtype) for router in routers}


def kept_after(name: str, kept: Weights, counts: Mapping[str, list[int]]) -> Weights:
    """The same after a step in which experts were chosen so often, by router."""
    found, rate = {}, MIXTURES.get(name, {}).get("bias_rate", 0.0)
    for key, x in kept.items():
        if key.startswith("load/"):
            found[key] = torch.tensor(counts[key.removeprefix("load/")])
        else:
            new = moved(x.tolist(), counts[key.removesuffix(".bias")], rate)
            found[key] = torch.tensor(new, dtype=torch.float64)
    return found
