"""Trains one cell of the matrix, on this rank or by the reference."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from optim import logical
from parity.matrix import SPLIT_MODELS, Cell
from parity.mixtures import coupled, kept_after, kept_at_start, section, skew
from parity.outcome import (
    LOSSES,
    Outcome,
    Part,
    difference,
    joined,
    relative,
    same,
    unequal,
)
from parity.reference_step import reference_step
from reference import bridge
from reference.bridge import Fragments
from reference.mixture import Padding
from reference.plain import Document, Weights

from penteract.checkpoint.steps import step_name
from penteract.config import Config, resolve
from penteract.config_file import from_dict
from penteract.data.loader import micro_batches
from penteract.data.synthetic import SyntheticSource
from penteract.families import model_spec
from penteract.grid import Grid
from penteract.mesh import Mesh, create_mesh, single
from penteract.nn.model import Stage
from penteract.nn.sequences import MicroBatch
from penteract.parallel.buffers import Buffers
from penteract.parallel.parameters import kept_tensors
from penteract.parallel.tensor import TensorParallel
from penteract.testing import run_ranks, world_axis
from penteract.train import assembly
from penteract.train.language_model import synthetic_task
from penteract.train.run import Run
from penteract.train.task import Task

STEPS, SEED = 2, 5


def config_of(cell: Cell, **train: Any) -> Config:
    """Clipping is active; eps is large enough that gradients which are zero by symmetry stay so."""
    sizes = {"global_batch": cell.global_batch, "micro_batch": cell.micro_batch}
    aim = {"label_smoothing": cell.label_smoothing, "z_loss": cell.z_loss}
    values = {
        "model": {
            **SPLIT_MODELS[cell.model],
            "dropout": cell.dropout,
            "window": cell.window,
            "attention_dropout": cell.attention_dropout,
            **({"attention": "plain"} if cell.attention_dropout else {}),
        },
        "parallel": {
            "tp": cell.tp,
            "sp": cell.sp,
            "recompute": list(cell.recompute),
            "vocab_multiple": cell.vocab_multiple,
            "tp_overlap": cell.overlap,
            "dp_overlap": cell.overlap,
            "zero": cell.zero,
            "replicas": cell.replicas,
            "pp": cell.pp,
            "chunks": cell.chunks,
            "schedule": cell.schedule,
            "stages": cell.stages,
            "cp": cell.cp,
            "cp_comm": cell.cp_comm,
            "cp_overlap": cell.overlap,
            "ep_overlap": cell.overlap,
            "ep": cell.ep,
            "etp": cell.etp,
        },
        "data": {"seq": cell.seq, "seed": 3},
        "optim": {
            "name": cell.optimizer,
            "lr": 1e-2,
            "schedule": "constant",
            "eps": 1e-4,
            "clip": 0.05,
        },
        "train": {"steps": STEPS, "dtype": "float64", "seed": SEED, **sizes, **aim, **train},
        "log": {"every": 1},
        **({"moe": section(cell.moe, cell.dispatcher)} if cell.moe else {}),
    }
    return resolve(from_dict(values))


def documents(
    index: int,
    vocab: int,
    seq: int = 6,
    *,
    ragged: bool = False,
    mask: str = "half",
    padded: bool = False,
) -> list[Document]:
    """Sample `index`: one to three documents; half of the labels count, in every fifth none.

    Ragged samples have 1 to `seq` tokens. With a mask of "one" a single label of every third sample
    counts, with "front" the first quarter of each. Padded ones end in padding of several lengths.
    """
    seq -= index % seq if ragged else 0
    found = SyntheticSource(seq=seq, vocab=vocab, seed=3).samples([index])
    tokens, labels = found.tokens, found.labels
    weights = [float(index % 5 != 2 and (3 * t + index) % 4 < 2) for t in tokens[0].tolist()]
    if mask == "one":
        weights = [float(index % 3 == 0 and i == seq // 2) for i in range(seq)]
    elif mask == "front":
        weights = [float(i <= seq // 4) for i in range(seq)]
    end = seq - min(seq, (0, 2, seq, 4, 1)[index % 5] if padded else 0)
    weights[end:] = [0.0] * (seq - end)
    cuts = sorted({0, end, seq, *((), (1,), (2, 3))[index % 3]})
    return [
        (Padding if a >= end else Document)(
            tokens[0, a:b].tolist(), labels[0, a:b].tolist(), weights[a:b]
        )
        for a, b in itertools.pairwise(cut for cut in cuts if cut <= seq)
    ]


def samples_of(cell: Cell) -> Callable[[int], list[Document]]:
    """The documents of each sample of a cell."""
    made = functools.partial(documents, ragged=cell.ragged, mask=cell.mask, padded=cell.padded)
    return lambda index: made(index, SPLIT_MODELS[cell.model]["vocab"], cell.seq)


def packed_task(cell: Cell, config: Config, mesh: Mesh) -> Task:
    """The task of a configuration on packed documents with masked labels."""
    train, dp, sample = config.train, mesh.axis("dp"), samples_of(cell)

    def batches(step: int) -> list[MicroBatch]:
        first = (step - 1) * train.global_batch
        parts = micro_batches(train.global_batch, train.micro_batch, dp.size, dp.rank)
        docs = [[doc for i in part for doc in sample(first + i)] for part in parts]
        return [bridge.micro_batch(found, mesh.axis("cp")) for found in docs]

    task = synthetic_task(config, mesh, torch.device("cpu"))
    return dataclasses.replace(task, batches=batches)


def new_run(cell: Cell, mesh: Mesh, *, task: Task | None = None, **train: Any) -> Run:
    """A run of the cell at its initial weights."""
    config = config_of(cell, **train)
    task = packed_task(cell, config, mesh) if task is None else task
    sized = functools.partial(Buffers, bucket_bytes=cell.bucket_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "Buffers", sized)
        return Run(task, config, mesh, torch.device("cpu"))


def set_weights(run: Run, moe: str = "") -> None:
    """Overwrite the initial weights, whose biases are 0 and norms 1, by ones that show."""
    bridge.set_owned(run.buffers, "master", random_weights(run.config, moe))
    run.buffers.publish()


def random_weights(config: Config, moe: str = "") -> Weights:
    """Those of the whole model, with a mixture of that name."""
    alone = TensorParallel(single("tp"))
    model = Stage(model_spec(config), alone, dtype=torch.float64)
    weights = bridge.random_weights(bridge.parameters(model))
    return skew(weights) if moe == "skewed" else weights


def keep_gradients(run: Run, into: list[Fragments]) -> None:
    """Copy the gradients of every step before they are clipped."""
    run.on_gradients = lambda run: into.append(bridge.owned(run.buffers, "own_gradient"))


def update(run: Run, part: Part) -> None:
    """One step, and what it says."""
    before = run.axis.traffic.calls.get("all_reduce", 0)
    line = run.update()
    part.losses.append(line["loss"])
    part.z_losses.append(line.get("z_loss", 0.0))
    part.balance_losses.append(line.get("balance_loss", 0.0))
    part.router_z_losses.append(line.get("router_z_loss", 0.0))
    said = line.get("experts", {})
    part.routed.append({name: (row["tokens"], row["dropped"]) for name, row in said.items()})
    kept = kept_tensors(run.task.model)
    part.kept.append({name: getattr(layer, at).clone() for layer, at, name in kept})
    part.norms.append(line["grad_norm"])
    part.weights.append(bridge.owned(run.buffers, "master"))
    part.gradient_messages = run.axis.traffic.calls.get("all_reduce", 0) - before


def collect(run: Run, part: Part) -> Part:
    """Fill in the moments of a run."""
    for kind, bucket, flat in run.optimizer.state():
        pieces = [(f, x.clone()) for _, f, x in bucket.owned(flat)]
        part.moments.setdefault(kind, []).extend(pieces)
    part.buckets = len(run.buffers.buckets)
    return part


def meshes() -> Callable[..., Mesh]:
    """For numbers of tensor, pipeline and context ranks the mesh, its groups made once."""
    axis = world_axis()

    def mesh(tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, etp: int | None = None) -> Mesh:
        return create_mesh(Grid(axis.size, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp), axis.rank)

    return functools.cache(mesh)


def mesh_of(cell: Cell, mesh: Callable[..., Mesh]) -> Mesh:
    return mesh(cell.tp, cell.pp, cell.cp, cell.ep, cell.etp)


def train(cell: Cell, mesh: Mesh, folder: Path | None = None) -> Part:
    """Two updates as this rank of `mesh`; with a folder, their checkpoint is there."""
    run = new_run(cell, mesh)
    part = Part(initial=bridge.owned(run.buffers, "master"))
    set_weights(run, cell.moe)
    keep_gradients(run, part.gradients)
    for _ in range(STEPS):
        update(run, part)
    if folder is not None:
        run.save(folder)
    return collect(run, part)


def train_here(cells: Sequence[Cell], folders: Sequence[Path] = ()) -> list[Part]:
    """Each cell as one rank of all ranks of the default process group."""
    mesh = meshes()
    pairs = itertools.zip_longest(cells, folders)
    return [train(cell, mesh_of(cell, mesh), folder) for cell, folder in pairs]


def resume_here(cells: Sequence[Cell], folders: Sequence[Path]) -> list[Part]:
    """The step that follows the checkpoint in each folder, in each cell's layout."""
    mesh, parts = meshes(), []
    for cell, folder in zip(cells, folders, strict=True):
        run, part = new_run(cell, mesh_of(cell, mesh)), Part()
        run.resume(folder / step_name(STEPS))
        keep_gradients(run, part.gradients)
        update(run, part)
        parts.append(collect(run, part))
    return parts


def reference(cell: Cell) -> Outcome:
    """What the first two updates of the cell must give, whatever its layout."""
    return _reference(_trained(cell))[0]


def next_step(cell: Cell) -> Outcome:
    """What the update after those must give: one that never stopped."""
    return _next_step(_trained(cell))


def _trained(cell: Cell) -> Cell:
    """The cell with everything set to one value on which the numbers do not depend."""
    same = dataclasses.replace(
        cell,
        dp=1,
        tp=1,
        sp=False,
        recompute=(),
        vocab_multiple=1,
        overlap=True,
        bucket_bytes=0,
        zero=0,
        replicas=1,
        pp=1,
        chunks=1,
        schedule="1f1b",
        cut="even",
        count="",
        cp=1,
        cp_comm="ring",
        ep=1,
        etp=None,
        dispatcher="all_to_all",
    )
    # Otherwise nothing depends on how sequences are grouped.
    grouped = cell.dropout or cell.attention_dropout or coupled(cell.moe)
    return same if grouped else dataclasses.replace(same, micro_batch=8)


@dataclass(frozen=True)
class State:
    """Logical weights and moments after `step` updates."""

    weights: Weights
    moments: dict[str, Weights] = field(default_factory=dict)
    kept: Weights = field(default_factory=dict)  # by its name
    step: int = 0


@functools.cache
def _reference(cell: Cell) -> tuple[Outcome, State]:
    weights = random_weights(config_of(cell), cell.moe)
    return _advanced(cell, State(weights, kept=kept_at_start(cell.moe)), STEPS)


@functools.cache
def _next_step(cell: Cell) -> Outcome:
    return _advanced(cell, _reference(cell)[1], 1)[0]


def _advanced(cell: Cell, state: State, steps: int) -> tuple[Outcome, State]:
    """What some more updates give, and the state after them; that before is not changed."""
    config, outcome, kept = config_of(cell), Outcome(), state.kept
    optim = config.optim
    weights, moments = {**state.weights}, {kind: {**x} for kind, x in state.moments.items()}
    for step in range(state.step + 1, state.step + steps + 1):
        found = reference_step(cell, config, samples_of(cell), weights, kept, step)
        grads, kept = found.gradients, kept_after(cell.moe, kept, found.counts)
        norm = math.sqrt(sum(x * x for g in grads.values() for x in g.flatten().tolist()))
        coefficient = min(1.0, optim.clip / (norm + 1e-6))
        clipped = {name: coefficient * g for name, g in grads.items()}
        logical.update(optim, weights, moments, clipped, lr=optim.lr, step=step)
        for kind, loss in zip(LOSSES, found.losses, strict=True):
            getattr(outcome, kind).append(loss)
        outcome.routed.append(found.routed)
        outcome.kept.append(kept)
        outcome.norms.append(norm)
        outcome.gradients.append(grads)
        outcome.weights.append({**weights})
    outcome.moments = moments
    return outcome, State(weights, moments, kept, state.step + steps)


def first_difference(cell: Cell) -> str | None:
    """The first quantity, in the order of computing, that is not the reference's."""
    return first_of(
        [held for (held,) in run_ranks(train_here, cell.world, [cell])], reference(cell)
    )


def first_of(parts: Sequence[Part], wanted: Outcome) -> str | None:
    """The first quantity that ranks compute otherwise than wanted; "copies" where they disagree."""
    found = joined(parts)
    differences = {}
    for i, norm in enumerate(wanted.norms):
        of_step = f" of step {i + 1}" if i else ""
        differences |= {
            f"routed{of_step}": float(found.routed[i] != wanted.routed[i]),
            f"loss{of_step}": relative(found.losses[i], wanted.losses[i]),
            f"balance loss{of_step}": relative(found.balance_losses[i], wanted.balance_losses[i]),
            f"gradients{of_step}": worst(found.gradients[i], wanted.gradients[i]),
            f"norm{of_step}": relative(found.norms[i], norm),
            f"weights{of_step}": worst(found.weights[i], wanted.weights[i]),
            f"kept{of_step}": float(not same(found.kept[i], wanted.kept[i])),
        }
    differences["moments"] = difference(found, wanted)[0]  # what else there is
    differences["copies"] = float(len(unequal(parts)))
    return next((name for name, x in differences.items() if not x <= 1e-9), None)


def worst(found: Weights, wanted: Weights) -> float:
    return bridge.worst_difference(found, wanted)[0]
