"""Trains one cell of the matrix, on this rank or by the reference, and reports logical tensors."""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from parity.matrix import MODELS, Cell
from reference import bridge, plain
from reference.plain import Document, Rates, State, Weights
from torch import Tensor

from penteract.config import Config, resolve
from penteract.config_file import from_dict
from penteract.data.loader import micro_batches
from penteract.data.synthetic import SyntheticSource
from penteract.families import model_spec
from penteract.grid import Grid
from penteract.mesh import Mesh, create_mesh
from penteract.nn.sequences import MicroBatch
from penteract.optim.adamw import AdamW
from penteract.parallel.buffers import Buffers
from penteract.random import keep_mask
from penteract.testing import world_axis
from penteract.train.language_model import synthetic_task
from penteract.train.run import Run
from penteract.train.task import Task

SEQ, STEPS, SEED = 6, 2, 5


def config_of(cell: Cell, **train: Any) -> Config:
    """Clipping is active; eps is large enough that gradients which are zero by symmetry stay so."""
    model = {**MODELS[cell.model], "dropout": cell.dropout}
    sizes = {"global_batch": cell.global_batch, "micro_batch": cell.micro_batch}
    values = {
        "model": model,
        "data": {"seq": SEQ, "seed": 3},
        "optim": {"lr": 1e-2, "schedule": "constant", "eps": 1e-4, "clip": 0.05},
        "train": {"steps": STEPS, "dtype": "float64", "seed": SEED, **sizes, **train},
    }
    return resolve(from_dict(values))


def documents(index: int, vocab: int) -> list[Document]:
    """Sample `index`: one to three documents; half of the labels count, in every fifth none."""
    tokens, labels = SyntheticSource(seq=SEQ, vocab=vocab, seed=3).samples([index])
    weights = [float(index % 5 != 2 and (3 * t + index) % 4 < 2) for t in tokens[0].tolist()]
    cuts = ((0, 6), (0, 1, 6), (0, 2, 3, 6))[index % 3]
    return [
        Document(tokens[0, a:b].tolist(), labels[0, a:b].tolist(), weights[a:b])
        for a, b in itertools.pairwise(cuts)
    ]


def ragged_task(config: Config, mesh: Mesh) -> Task:
    """The task of a configuration on packed documents with masked labels."""
    train, dp = config.train, mesh.axis("dp")

    def batches(step: int) -> list[MicroBatch]:
        first = (step - 1) * train.global_batch
        parts = micro_batches(train.global_batch, train.micro_batch, dp.size, dp.rank)
        rows = [[first + i for i in part] for part in parts]
        vocab = config.model.vocab
        return [bridge.micro_batch([d for i in row for d in documents(i, vocab)]) for row in rows]

    task = synthetic_task(config, mesh, torch.device("cpu"))
    return dataclasses.replace(task, batches=batches)


@dataclass
class Outcome:
    """What a rank holds after the last step; tensors are logical ones."""

    initial_hash: str
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Weights] = field(default_factory=list)  # of every step
    weights: Weights = field(default_factory=dict)
    first: Weights = field(default_factory=dict)
    second: Weights = field(default_factory=dict)
    gradient_messages: int = 0  # all-reduces over the data ranks in the last step
    buckets: int = 0

    # From a rank to its parent a tensor would travel as a file descriptor, and there are thousands.
    def __getstate__(self) -> dict[str, Any]:
        return converted(self.__dict__, Tensor, Tensor.numpy)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(converted(state, np.ndarray, torch.from_numpy))


def converted(value: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    """Nested dictionaries and lists with every value of one kind converted."""
    if isinstance(value, dict):
        return {name: converted(x, kind, convert) for name, x in value.items()}
    if isinstance(value, list):
        return [converted(x, kind, convert) for x in value]
    return convert(value) if isinstance(value, kind) else value


def digest(weights: Weights) -> str:
    """Of the names and the bits of all logical tensors."""
    state = hashlib.sha256()
    for name in sorted(weights):
        state.update(name.encode() + weights[name].contiguous().numpy().tobytes())
    return state.hexdigest()


def new_run(cell: Cell, mesh: Mesh, *, task: Task | None = None, **train: Any) -> Run:
    """A run of the cell at its initial weights."""
    config = config_of(cell, **train)
    task = ragged_task(config, mesh) if task is None else task
    run = Run(task, config, mesh, torch.device("cpu"))
    run.buffers = Buffers(
        run.task.model,
        run.axis,
        seed=SEED,
        bucket_bytes=cell.bucket_bytes,
        more_axes=[mesh.axis("tp")],
    )
    run.optimizer = AdamW(run.buffers, run.config.optim)
    return run


def set_weights(run: Run) -> None:
    """Overwrite the initial weights, whose biases are 0 and norms 1, by ones that show."""
    bridge.write(bridge.masters(run.buffers), bridge.random_weights(bridge.masters(run.buffers)))
    run.buffers.publish()


def keep_gradients(run: Run, into: list[Weights]) -> None:
    """Copy the gradients of every step before the optimizer scales them."""
    step = run.optimizer.step

    def keep_and_step(lr: float, coefficient: Tensor, skip: Tensor) -> None:
        into.append(bridge.logical(bridge.fragments(bridge.buffer_gradients(run.buffers))))
        step(lr, coefficient, skip)

    run.optimizer.step = keep_and_step


def collect(run: Run, outcome: Outcome) -> Outcome:
    """Fill in the weights and moments of a run."""
    outcome.weights = bridge.logical(bridge.fragments(bridge.masters(run.buffers)))
    for name, into in (("exp_avg", outcome.first), ("exp_avg_sq", outcome.second)):
        stored = [(s.entry.placement, x) for n, s, x in run.optimizer.state() if n == name]
        into.update(bridge.logical(bridge.fragments(stored)))
    return outcome


def train(cell: Cell, mesh: Mesh) -> Outcome:
    """Two updates as this rank of `mesh`."""
    run = new_run(cell, mesh)
    initial = bridge.logical(bridge.fragments(bridge.masters(run.buffers)))
    outcome = Outcome(digest(initial))
    set_weights(run)
    keep_gradients(run, outcome.gradients)
    for _ in range(STEPS):
        before = run.axis.traffic.calls.get("all_reduce", 0)
        line = run.update()
        outcome.losses.append(line["loss"])
        outcome.norms.append(line["grad_norm"])
        outcome.gradient_messages = run.axis.traffic.calls.get("all_reduce", 0) - before
    outcome.buckets = sum(len(buffer.buckets) for buffer in run.buffers.buffers)
    return collect(run, outcome)


def train_here(cells: list[Cell]) -> list[Outcome]:
    """Each cell as one rank of all ranks of the default process group."""
    axis = world_axis()
    mesh = create_mesh(Grid(axis.size), axis.rank)
    return [train(cell, mesh) for cell in cells]


def dropping(cell: Cell, step: int, micro_batch: int) -> plain.Drop:
    """Dropout with the mask of a global micro-batch."""
    name_of = f"dropout/{step}/{micro_batch}/{{}}".format

    def drop(name: str, x: Tensor, first_row: int) -> Tensor:
        rows = first_row + torch.arange(x.shape[0])
        index = rows[:, None] * x.shape[1] + torch.arange(x.shape[1])
        mask = keep_mask(SEED, name_of(name), index, 1 - cell.dropout)
        return x * mask / (1 - cell.dropout)

    return drop


def reference_gradients(cell: Cell, weights: Weights, step: int) -> tuple[float, Weights]:
    """Micro-batch by micro-batch, in one process; the count is that of the whole step."""
    config = config_of(cell)
    described = bridge.describe(model_spec(config.model))
    leaves = {name: x.clone().requires_grad_() for name, x in weights.items()}
    first = (step - 1) * cell.global_batch
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for start in range(0, cell.global_batch, cell.micro_batch):
        drop = dropping(cell, step, start // cell.micro_batch) if cell.dropout else plain.keep
        samples = range(start, min(start + cell.micro_batch, cell.global_batch))
        docs = [doc for i in samples for doc in documents(first + i, config.model.vocab)]
        row = 0
        for doc in docs:
            doc = dataclasses.replace(doc, first_row=row)
            row, count = row + len(doc.tokens), count + sum(doc.weights)
            total = total + plain.loss_sum(doc, leaves, described, drop)
    loss = total / count
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return loss.item(), dict(zip(leaves, grads, strict=True))


def reference(cell: Cell) -> Outcome:
    """What two updates of the cell must give, whatever its layout."""
    same = dataclasses.replace(cell, dp=1, bucket_bytes=0)
    # Without dropout nothing depends on how sequences are grouped.
    return _reference(same if cell.dropout else dataclasses.replace(same, micro_batch=8))


@functools.cache
def _reference(cell: Cell) -> Outcome:
    optim = config_of(cell).optim
    shapes = bridge.masters(new_run(cell, create_mesh(Grid(1), 0)).buffers)
    state = State.start(bridge.random_weights(shapes))
    matrices = {n for n in state.weights if n.endswith(".weight") and "norm" not in n}
    rates = Rates(
        lr=lambda step: optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        clip=optim.clip,
        decayed=frozenset(matrices | {"embed.positions"}),
    )
    outcome = Outcome("")
    for step in range(1, STEPS + 1):
        loss, grads = reference_gradients(cell, state.weights, step)
        plain.update(state, loss, grads, rates)
        outcome.losses.append(loss)
        outcome.norms.append(state.norm)
        outcome.gradients.append(grads)
    outcome.weights, outcome.first, outcome.second = state.weights, state.first, state.second
    return outcome


def difference(found: Outcome, wanted: Outcome, *, floor: float = 1e-4) -> tuple[float, str]:
    """The largest relative difference of losses, norms, gradients, weights, moments; and where."""
    results = []
    for kind in ("losses", "norms"):
        pairs = zip(getattr(found, kind), getattr(wanted, kind), strict=True)
        results += [(abs(a - b) / abs(b), f"{kind} of step {i}") for i, (a, b) in enumerate(pairs)]
    steps = enumerate(zip(found.gradients, wanted.gradients, strict=True))
    tensors = [(f"gradient of step {i}", *pair) for i, pair in steps]
    for kind in ("weights", "first", "second"):
        tensors.append((kind, getattr(found, kind), getattr(wanted, kind)))
    for kind, have, want in tensors:
        worst, name = bridge.worst_difference(have, want, floor=floor)
        results.append((worst, f"{kind} {name}"))
    return max(results)
