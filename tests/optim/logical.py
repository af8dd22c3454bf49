"""Optimizers on logical tensors, written out in float64; and ours in any layout, reported so."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from parity.matrix import MODELS
from reference import bridge
from reference.plain import Weights
from torch import Tensor

from penteract.config import OptimConfig, resolve
from penteract.config_file import from_dict
from penteract.families import model_spec
from penteract.grid import Grid
from penteract.mesh import Mesh, create_mesh, single, split_axis
from penteract.nn.model import Stage
from penteract.optim.groups import group_of
from penteract.optim.optimizer import Optimizer, build
from penteract.parallel.buckets import Sharding
from penteract.parallel.buffers import Buffers
from penteract.parallel.tensor import TensorParallel
from penteract.placement import Fragment, assemble

LR, STEPS, COEFFICIENT = 1e-2, 3, 0.7
NAMES = ("adamw", "sgd", "lion", "muon")
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True)
class Layout:
    """How the ranks of a world are used."""

    dp: int = 1
    tp: int = 1
    zero: int = 0
    replicas: int = 1


@dataclass
class Outcome:
    """What one rank holds at the end: fragments of logical tensors, by what they are."""

    parts: dict[str, list[tuple[Fragment, np.ndarray]]] = field(default_factory=dict)

    def add(self, kind: str, fragments: Iterable[tuple[Fragment, Tensor]]) -> None:
        into = self.parts.setdefault(kind, [])
        # NumPy has no bfloat16; a float32 holds it.
        wide = ((f, x.float() if x.dtype == torch.bfloat16 else x) for f, x in fragments)
        into += [(f, x.detach().clone().numpy()) for f, x in wide]


def optim_of(name: str, **values: Any) -> OptimConfig:
    """A resolved [optim] section."""
    optim = {"name": name, "eps": 1e-4, "betas": [0.8, 0.9], "schedule": "constant", **values}
    config = {"model": MODELS["llama"], "optim": optim, "train": {"steps": 1}}
    return resolve(from_dict(config)).optim


def sharding_of(layout: Layout, mesh: Mesh) -> Sharding:
    axis = mesh.axis("dp-cp")
    if layout.zero == 0:
        return Sharding.whole(axis)
    return Sharding(*split_axis(axis, layout.replicas), layout.zero)


def alone() -> Mesh:
    return create_mesh(Grid(1), 0)


def setting(
    model: str,
    optim: OptimConfig,
    *,
    mesh: Mesh | None = None,
    layout: Layout = Layout(),
    dtype: torch.dtype = torch.float64,
    bucket_bytes: int | None = None,
) -> tuple[Buffers, Optimizer, Weights]:
    """A model with random weights, its optimizer, and those weights."""
    mesh = alone() if mesh is None else mesh
    config = from_dict({"model": MODELS[model], "data": {"seq": 8}, "train": {"steps": 1}})
    spec = model_spec(resolve(config))
    buffers = Buffers(
        Stage(spec, TensorParallel(mesh.axis("tp")), dtype=dtype),
        dataclasses.replace(sharding_of(layout, mesh), offload=optim.offload),
        seed=0,
        bucket_bytes=bucket_bytes,
        more_axes=[mesh.axis("tp")],
        group_of=group_of(optim.rules),
    )
    weights = bridge.random_weights(
        bridge.parameters(Stage(spec, TensorParallel(single("tp")), dtype=torch.float64))
    )
    buffers.wait()
    fill(buffers, "master", weights)
    for bucket in buffers.all_buckets:
        if bucket.kind.group.frozen:
            for _, fragment, view in bucket.owned(bucket.own_parameters):
                view.copy_(weights[fragment.tensor][fragment.box.slices()])
    buffers.publish(frozen=True)
    return buffers, build(buffers, optim, mesh.axes), weights


@torch.no_grad()
def fill(buffers: Buffers, what: str, values: Weights) -> None:
    """Write logical tensors to this rank's slices of "master" or "own_gradient"."""
    for _, fragment, view in buffers.owned(what):
        view.copy_(values[fragment.tensor][fragment.box.slices()])


def gradients(weights: Weights, step: int) -> Weights:
    """Those of a step; some elements are exactly 0."""
    generator = torch.Generator().manual_seed(step)
    found = {}
    for name in sorted(weights):
        x = torch.randn(weights[name].shape, generator=generator, dtype=torch.float64)
        found[name] = torch.where(x.abs() < 0.1, 0.0, 0.05 * x)
    return found


def updated(
    model: str,
    optim: OptimConfig,
    *,
    mesh: Mesh | None = None,
    layout: Layout = Layout(),
    bucket_bytes: int | None = None,
) -> Outcome:
    """What this rank holds after `STEPS` updates."""
    buffers, optimizer, weights = setting(
        model, optim, mesh=mesh, layout=layout, bucket_bytes=bucket_bytes
    )
    for step in range(1, STEPS + 1):
        fill(buffers, "own_gradient", gradients(weights, step))
        optimizer.step(step * LR, torch.tensor(COEFFICIENT, dtype=torch.float64), torch.zeros(()))
    buffers.wait()
    outcome = Outcome()
    outcome.add("weights", ((f, x) for _, f, x in buffers.owned("own_parameters")))
    if layout.zero < 3:
        stored = ((s.entry.placement, s.entry.parameter) for s in buffers.slots())
        outcome.add("weights", bridge.fragments(stored))
    for name, bucket, moment in optimizer.state():
        outcome.add(name, ((f, x) for _, f, x in bucket.owned(moment)))
    assert optimizer.updates == STEPS
    return outcome


def joined(outcomes: Sequence[Outcome]) -> dict[str, Weights]:
    """The logical tensors that all ranks hold together; replicas must agree to the bit."""
    result: dict[str, Weights] = {}
    for kind in outcomes[0].parts:
        by_name: dict[str, list[tuple[Fragment, Tensor]]] = {}
        for outcome in outcomes:
            for fragment, x in outcome.parts[kind]:
                part = torch.from_numpy(x).view(fragment.box.size)
                by_name.setdefault(fragment.tensor, []).append((fragment, part))
        result[kind] = {name: assemble(name, parts) for name, parts in by_name.items()}
        for name, parts in by_name.items():
            for fragment, x in parts:
                same = torch.equal(result[kind][name][fragment.box.slices()], x)
                assert same, f"{kind} of {name}: copies of {fragment.box} differ"
    return result


# --- the definitions, one logical tensor at a time


def is_matrix(name: str) -> bool:
    *_, projection, kind = name.split(".")
    return name.startswith("layers.") and projection in PROJECTIONS and kind == "weight"


def decays(name: str) -> bool:
    more = ("embed.weight", "embed.positions", "head.weight", "router.weight", "shared_gate.weight")
    return is_matrix(name) or name.endswith(more)


def newton_schulz(g: Tensor, eps: float) -> Tensor:
    """Of the singular values alone: five times a s + b s³ + c s⁵."""
    u, s, v = torch.linalg.svd(g / (torch.sqrt((g * g).sum()) + eps), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


def reference(optim: OptimConfig, weights: Weights) -> dict[str, Weights]:
    """Weights and moments after `STEPS` updates."""
    w = {name: x.clone() for name, x in weights.items()}
    state: dict[str, Weights] = {}
    for step in range(1, STEPS + 1):
        clipped = {name: COEFFICIENT * g for name, g in gradients(weights, step).items()}
        update(optim, w, state, clipped, lr=step * LR, step=step)
    return {"weights": w, **state}


def update(
    optim: OptimConfig,
    w: Weights,
    state: dict[str, Weights],
    grads: Weights,
    *,
    lr: float,
    step: int,
) -> None:
    """Update number `step`, from 1, of every weight and of {kind: moments}, in the dictionaries."""
    for name, g in grads.items():
        decay = optim.weight_decay if decays(name) else 0.0
        rule = optim.name
        if rule == "muon" and not is_matrix(name):
            rule = "adamw"
        old = w[name], {kind: x.get(name, torch.zeros_like(g)) for kind, x in state.items()}
        w[name], new = RULES[rule](optim, *old, g, lr, decay, step)
        for kind, x in new.items():
            state.setdefault(kind, {})[name] = x


def _adamw(o: OptimConfig, w: Tensor, s: Weights, g: Tensor, lr: float, decay: float, n: int):
    m, v = (s.get(kind, torch.zeros_like(g)) for kind in ("exp_avg", "exp_avg_sq"))
    m, v = o.betas[0] * m + (1 - o.betas[0]) * g, o.betas[1] * v + (1 - o.betas[1]) * g * g
    change = (m / (1 - o.betas[0] ** n)) / (torch.sqrt(v / (1 - o.betas[1] ** n)) + o.eps)
    return w - lr * decay * w - lr * change, {"exp_avg": m, "exp_avg_sq": v}


def _sgd(o: OptimConfig, w: Tensor, s: Weights, g: Tensor, lr: float, decay: float, n: int):
    m = o.momentum * s.get("momentum", torch.zeros_like(g)) + g + decay * w
    return w - lr * m, {"momentum": m}


def _lion(o: OptimConfig, w: Tensor, s: Weights, g: Tensor, lr: float, decay: float, n: int):
    m = s.get("momentum", torch.zeros_like(g))
    mean = o.betas[0] * m + (1 - o.betas[0]) * g
    change = torch.where(mean.abs() >= o.eps, mean.sign(), mean / o.eps)
    m = o.betas[1] * m + (1 - o.betas[1]) * g
    return w - lr * (change + decay * w), {"momentum": m}


def _muon(o: OptimConfig, w: Tensor, s: Weights, g: Tensor, lr: float, decay: float, n: int):
    m = o.momentum * s.get("momentum", torch.zeros_like(g)) + (1 - o.momentum) * g
    ahead = o.momentum * m + (1 - o.momentum) * g
    change = 0.2 * math.sqrt(max(g.shape)) * newton_schulz(ahead, o.eps)
    return w - lr * (change + decay * w), {"momentum": m}


RULES = {"adamw": _adamw, "sgd": _sgd, "lion": _lion, "muon": _muon}
