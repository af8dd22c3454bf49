"""The task of `penteract train`: next-token prediction on token files."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from penteract.config import Config, ConfigError
from penteract.data.build import read_sidecar
from penteract.data.indexed import IndexedFile, Ints
from penteract.data.loader import Prefetcher, TrainSource, ValidSource, micro_batches
from penteract.data.packing import balanced, costs
from penteract.data.rows import Rows, rows_of
from penteract.data.samples import Samples
from penteract.data.synthetic import SyntheticSource
from penteract.data.tokenizers import Tokenizer, load_tokenizer
from penteract.families import model_spec
from penteract.mesh import Axis, Mesh
from penteract.nn.flops import training_flops
from penteract.nn.loss import CROSS_ENTROPY, Objective
from penteract.nn.model import Stages
from penteract.nn.sequences import MicroBatch, Training
from penteract.parallel.context.exchanges import exchange_of
from penteract.parallel.expert.places import ExpertParallel
from penteract.parallel.pipeline.executor import Output, Shape
from penteract.parallel.pipeline.timeline import warning
from penteract.parallel.tensor import TensorParallel
from penteract.parallel.turns import Turns
from penteract.train.batch_ramp import cursor, global_batch
from penteract.train.pipeline import Plan, micro_batches_of
from penteract.train.pipeline import plan as make_plan
from penteract.train.task import Pipeline, Task

READ_STEPS = 8  # at least as many as are read ahead


class Source(Protocol):
    """Where samples come from."""

    def samples(self, indices: range | Ints) -> Samples: ...


class Measured(Source, Protocol):
    """A source that tells the lengths of documents without reading them."""

    def lengths(self, indices: range) -> tuple[int, ...]: ...


def with_vocabulary(config: Config) -> tuple[Config, Tokenizer]:
    """The configuration with model.vocab filled in from its tokenizer, and the tokenizer."""
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.end_of_document)
    vocab = config.model.vocab or tokenizer.vocab
    if vocab < tokenizer.vocab:
        raise ConfigError(
            f"model.vocab = {vocab} is smaller than the tokenizer's {tokenizer.vocab} tokens: it "
            f"must be at least {tokenizer.vocab}"
        )
    model = dataclasses.replace(config.model, vocab=vocab)
    return dataclasses.replace(config, model=model), tokenizer


def language_model(config: Config, mesh: Mesh, device: torch.device) -> tuple[Task, Config]:
    """This rank's task of a configuration, and the configuration with its vocabulary."""
    config, tokenizer = with_vocabulary(config)
    source = train_source(config)
    valid = _valid_sources(config, source)
    every = {rows.file.prefix: rows for rows in [*source.rows, *(v.rows for v in valid)]}
    notes = [_note(rows, config, tokenizer) for rows in every.values()]
    task = pretraining_task(config, mesh, device, source)
    validation = {v.name: _validation(config, v, mesh, device) for v in valid}

    def describe(step: int) -> list[str]:
        first = cursor(step - 1, config.train)
        found = source.describe(range(first, first + global_batch(step, config.train)))
        return [str(sample) for sample in found]

    # Conversations never predict across.
    across = config.data.predict_across and any(rows.file.mask is None for rows in source.rows)
    state = {
        "tokenizer": tokenizer.hash,
        "data": {
            "files": source.fingerprint(),
            "seq": config.data.seq,
            # Absent is the same as None, in checkpoints from before these keys.
            "packing": config.data.packing or None,
            "predict_across": across or None,
            "seed": config.data.seed,
        },
        **_chat(source.rows, every.values()),
    }
    task = dataclasses.replace(
        task, validation=validation, describe=describe, state=state, notes=[*notes, *task.notes]
    )
    return task, config


def _chat(trained: Sequence[Rows], every: Iterable[Rows]) -> dict[str, Any]:
    """The template of the conversations among `trained`, for `penteract generate --chat`.

    ConfigError where `every` source, those of validation too, does not have the same one.
    """
    found = ((rows.file, (read_sidecar(rows.file) or {}).get("chat")) for rows in every)
    chats = {file.prefix: chat for file, chat in found if chat is not None}
    for (one, a), (other, b) in itertools.pairwise(chats.items()):
        if a["hash"] != b["hash"]:
            raise ConfigError(
                f"{other} was made with the template {b['name']}, hash {b['hash'][:8]}, but {one} "
                f"with {a['name']}, hash {a['hash'][:8]}: train and validate on chats of one "
                f"template"
            )
    kept = [chats[rows.file.prefix] for rows in trained if rows.file.prefix in chats]
    return {"chat": kept[0]} if kept else {}


def _note(rows: Rows, config: Config, tokenizer: Tokenizer) -> str:
    """What a token file holds; refuses one that was made with another tokenizer."""
    file = rows.file
    facts = read_sidecar(file) or {}
    if facts.get("tokenizer_hash", tokenizer.hash) != tokenizer.hash:
        raise ConfigError(
            f"{file.prefix} was made with another tokenizer: {facts.get('tokenizer')}, end of "
            f"document {facts.get('end_of_document')}, hash {str(facts['tokenizer_hash'])[:8]}; "
            f"data.tokenizer is {config.data.tokenizer}, end of document "
            f"{tokenizer.end_of_document}, hash {tokenizer.hash[:8]}"
        )
    note, entropy = f"{file.name}: {rows.note()}", facts.get("unigram_entropy_nats")
    return note if entropy is None else f"{note}, unigram entropy {entropy:.4f} nats a token"


def train_source(config: Config) -> TrainSource:
    """The training samples of a configuration that has its vocabulary."""
    data = config.data
    if not data.train:
        raise ConfigError(
            'data.train is empty: name a token file, as in data.train = ["data/text"] '
            "(`penteract data build` makes one)"
        )
    return TrainSource(
        [(s.prefix, s.weight) for s in data.train],
        seq=data.seq,
        seed=data.seed,
        vocab=config.model.vocab,
        valid_fraction=0.0 if data.valid else data.valid_fraction,
        global_batch=config.train.global_batch,
        packing=data.packing,
        predict_across=data.predict_across,
    )


def synthetic_task(config: Config, mesh: Mesh, device: torch.device) -> Task:
    """The task on tokens that are made from data.seed."""
    data = config.data
    source = SyntheticSource(
        seq=data.seq,
        vocab=model_spec(config).vocab,
        seed=data.seed,
        packing=data.packing,
    )
    return pretraining_task(config, mesh, device, source)


def pretraining_task(config: Config, mesh: Mesh, device: torch.device, source: Measured) -> Task:
    """The task on the samples of `source`, without validation."""
    train, seq = config.train, config.data.seq
    spec, plan, parallel = model_spec(config), make_plan(config), config.parallel
    tp = TensorParallel(mesh.axis("tp"), parallel.sp, parallel.tp_overlap)
    experts = ExpertParallel.of(mesh)
    model = _model(config, mesh, tp, plan, experts)
    dtype, objective = getattr(torch, train.dtype), Objective(train.label_smoothing, train.z_loss)
    reader = _Reader(config, mesh, device, source)
    ahead = _ReadAhead(reader.read)

    def batches(step: int) -> list[MicroBatch]:
        return [_on(device, batch) for batch in ahead(step)]

    def forward(
        stage: int,
        batch: MicroBatch,
        stream: Tensor | None,
        scale: Tensor,
        training: Training | None,
    ) -> Output:
        aim = objective if training is not None else CROSS_ENTROPY  # evaluation
        output: Output = model[stage](batch, stream, scale=scale, training=training, objective=aim)
        return output

    last = len(plan.stages) - 1

    def boundary(stage: int, batch: MicroBatch) -> Shape | None:
        rows = batch.sequences.part(tp.stream).sizes[tp.stream.rank]
        return ((rows, spec.hidden), dtype) if stage < last else None

    few = warning(plan.schedule(micro_batches_of(config, mesh.grid.world, max(1, train.steps))))
    return Task(
        model=model,
        batches=batches,
        forward=forward,
        count=lambda batch: batch.sequences.weights.sum(),
        tokens=lambda step: global_batch(step, train) * seq,
        flops=lambda step: reader.flops.get(step, 0.0),
        cursor=lambda step: cursor(step, train),
        close=ahead.close,
        pipeline=Pipeline(plan.placement, plan.schedule, boundary, _turns(config, experts)),
        notes=[few] if few else [],
        terms=("loss", "z_loss") if train.z_loss else ("loss",),
        real=None if config.moe is None else lambda batch: batch.sequences.real.sum(),
        auxiliary=_auxiliary(config),
    )


def _model(
    config: Config, mesh: Mesh, tp: TensorParallel, plan: Plan, experts: ExpertParallel
) -> Stages:
    """The stages that this rank holds."""
    parallel = config.parallel
    exchange = exchange_of(
        parallel.cp_comm,
        mesh.axis("cp"),
        inner=parallel.cp_inner,
        overlap=parallel.cp_overlap,
    )
    return Stages(
        model_spec(config),
        tp,
        plan.held(mesh.axis("pp").rank),
        dtype=getattr(torch, config.train.dtype),
        recompute=parallel.recompute,
        vocab_multiple=parallel.vocab_multiple,
        exchange=exchange,
        experts=experts,
        dispatcher="all_to_all" if config.moe is None else config.moe.dispatcher,
    )


def _turns(config: Config, experts: ExpertParallel) -> Turns | None:
    """What a forward and a backward take while tokens of the other travel.

    With zero = 3 only one of the two could have its parameters whole.
    """
    parallel = config.parallel
    travels = config.moe is not None and experts.group.size > 1
    return experts.turns if travels and parallel.ep_overlap and parallel.zero < 3 else None


def _auxiliary(config: Config) -> tuple[str, ...]:
    """The losses that routers add."""
    moe = config.moe
    if moe is None:
        return ()
    balance = ("balance_loss",) if moe.balance.endswith("aux") else ()
    return (*balance, *(("router_z_loss",) if moe.z_weight else ()))


def _read(source: Source, indices: range | Ints, cp: Axis, device: torch.device) -> MicroBatch:
    """This context rank's rows of a micro-batch, on the host."""
    found = source.samples(indices)
    tokens, labels, weights = (x.reshape(-1) for x in (found.tokens, found.labels, found.weights))
    batch = MicroBatch.of(tokens, labels, found.lengths, weights=weights, cp=cp)
    # From pinned memory a copy to the GPU runs beside its computation.
    return batch.moved(Tensor.pin_memory) if device.type == "cuda" else batch


def _on(device: torch.device, batch: MicroBatch) -> MicroBatch:
    return batch.moved(lambda x: x.to(device, non_blocking=True))


class _Reader:
    """Reads this rank's micro-batches of a step, and counts the FLOPs of the whole step."""

    def __init__(self, config: Config, mesh: Mesh, device: torch.device, source: Measured) -> None:
        self.flops: dict[int, float] = {}  # of the last steps that were read
        self._config, self._spec, self._source = config, model_spec(config), source
        self._dp, self._cp, self._device = mesh.axis("dp"), mesh.axis("cp"), device

    def read(self, step: int) -> list[MicroBatch]:
        train, data, dp = self._config.train, self._config.data, self._dp
        first, batch = cursor(step - 1, train), global_batch(step, train)
        lengths = self._source.lengths(range(first, first + batch))
        self.flops.pop(step - READ_STEPS, None)
        self.flops[step] = training_flops(self._spec, lengths)
        order = np.arange(first, first + batch)
        if data.balance:
            order = first + balanced(costs(lengths, data.seq), train.micro_batch)
        return [
            _read(self._source, order[p.start : p.stop], self._cp, self._device)
            for p in micro_batches(batch, train.micro_batch, dp.size, dp.rank)
        ]


class _ReadAhead:
    """Reads the steps that follow the first one asked for in a thread."""

    def __init__(self, read: Callable[[int], list[MicroBatch]]) -> None:
        self._read = read
        self._prefetcher: Prefetcher[list[MicroBatch]] | None = None

    def __call__(self, step: int) -> list[MicroBatch]:
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self._read, first=step)
        return self._prefetcher.get(step)

    def close(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.stop()


def _valid_sources(config: Config, train: TrainSource) -> list[ValidSource]:
    """Those of data.valid; without them the tails of the training sources, if any are held out."""
    data, fraction = config.data, None
    files = [IndexedFile(s.prefix, config.model.vocab) for s in data.valid]
    how = {"packing": data.packing, "predict_across": data.predict_across}
    every = [rows_of(file, data.seq, **how) for file in files]
    if not every and data.valid_fraction > 0:
        every, fraction = train.rows, data.valid_fraction
    sequences = config.train.eval_steps * config.train.global_batch
    return [ValidSource(rows, sequences=sequences, valid_fraction=fraction) for rows in every]


def _validation(
    config: Config, source: ValidSource, mesh: Mesh, device: torch.device
) -> Callable[[], Iterator[Any]]:
    dp, cp = mesh.axis("dp"), mesh.axis("cp")
    parts = micro_batches(len(source), config.train.micro_batch, dp.size, dp.rank)

    def batches() -> Iterator[MicroBatch]:
        return (_on(device, _read(source, p, cp, device)) for p in parts)

    return batches
