"""The task of `penteract train`: next-token prediction on token files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from penteract.config import Config, ConfigError
from penteract.data.build import read_sidecar
from penteract.data.indexed import Ints
from penteract.data.loader import Prefetcher, TrainSource, ValidSource, micro_batches
from penteract.data.packing import balanced, costs
from penteract.data.rows import Rows
from penteract.data.samples import Samples
from penteract.data.synthetic import SyntheticSource
from penteract.data.tokenizers import Tokenizer, load_tokenizer
from penteract.families import model_spec
from penteract.mesh import Axis, Mesh
from penteract.nn.flops import training_flops
from penteract.nn.loss import CROSS_ENTROPY, Objective
from penteract.nn.model import Stages
from penteract.nn.sequences import MicroBatch, Noise
from penteract.parallel.context.exchanges import exchange_of
from penteract.parallel.pipeline.executor import Output, Shape
from penteract.parallel.pipeline.timeline import warning
from penteract.parallel.tensor import TensorParallel
from penteract.train.batch_ramp import cursor, global_batch
from penteract.train.pipeline import micro_batches_of
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
    source, valid = train_source(config), _valid_sources(config)
    every = {rows.file.prefix: rows for rows in [*source.rows, *(v.rows for v in valid)]}
    notes = [_note(rows, config, tokenizer) for rows in every.values()]
    task = pretraining_task(config, mesh, device, source)
    validation = {v.name: _validation(config, v, mesh, device) for v in valid}

    def describe(step: int) -> list[str]:
        first = cursor(step - 1, config.train)
        found = source.describe(range(first, first + global_batch(step, config.train)))
        return [str(sample) for sample in found]

    state = {
        "tokenizer": tokenizer.hash,
        "data": {
            "files": source.fingerprint(),
            "seq": config.data.seq,
            # Absent is the same as None, in checkpoints from before these keys.
            "packing": config.data.packing or None,
            "predict_across": config.data.predict_across or None,
            "seed": config.data.seed,
        },
        **_chat(source.rows),
    }
    task = dataclasses.replace(
        task, validation=validation, describe=describe, state=state, notes=[*notes, *task.notes]
    )
    return task, config


def _chat(sources: Sequence[Rows]) -> dict[str, Any]:
    """The template of the conversations among the sources, for `penteract generate --chat`."""
    found = [(rows.file.prefix, (read_sidecar(rows.file) or {}).get("chat")) for rows in sources]
    chats = [(prefix, chat) for prefix, chat in found if chat is not None]
    for prefix, chat in chats[1:]:
        if chat["hash"] != chats[0][1]["hash"]:
            raise ConfigError(
                f"{prefix} was made with the template {chat['name']}, hash {chat['hash'][:8]}, but "
                f"{chats[0][0]} with {chats[0][1]['name']}, hash {chats[0][1]['hash'][:8]}: train "
                f"on chats of one template"
            )
    return {"chat": chats[0][1]} if chats else {}


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
        vocab=model_spec(config.model).vocab,
        seed=data.seed,
        packing=data.packing,
    )
    return pretraining_task(config, mesh, device, source)


def pretraining_task(config: Config, mesh: Mesh, device: torch.device, source: Measured) -> Task:
    """The task on the samples of `source`, without validation."""
    train, seq = config.train, config.data.seq
    spec, dp, parallel = model_spec(config.model), mesh.axis("dp"), config.parallel
    tp = TensorParallel(mesh.axis("tp"), parallel.sp, parallel.tp_overlap)
    plan, dtype, cp = make_plan(config), getattr(torch, train.dtype), mesh.axis("cp")
    exchange = exchange_of(
        parallel.cp_comm, cp, inner=parallel.cp_inner, overlap=parallel.cp_overlap
    )
    model = Stages(
        spec,
        tp,
        plan.held(mesh.axis("pp").rank),
        dtype=dtype,
        recompute=parallel.recompute,
        vocab_multiple=parallel.vocab_multiple,
        exchange=exchange,
    )
    objective = Objective(train.label_smoothing, train.z_loss)

    flops: dict[int, float] = {}  # of the last steps that were read

    def read(step: int) -> list[MicroBatch]:
        first, batch = cursor(step - 1, train), global_batch(step, train)
        parts = micro_batches(batch, train.micro_batch, dp.size, dp.rank)
        flops.pop(step - READ_STEPS, None)
        lengths = source.lengths(range(first, first + batch))
        flops[step] = training_flops(spec, lengths)
        order = np.arange(first, first + batch)
        if config.data.balance:
            order = first + balanced(costs(lengths, seq), train.micro_batch)
        return [_read(source, order[p.start : p.stop], cp, device) for p in parts]

    ahead = _ReadAhead(read)

    def batches(step: int) -> list[MicroBatch]:
        return [_on(device, batch) for batch in ahead(step)]

    def forward(
        stage: int, batch: MicroBatch, stream: Tensor | None, scale: Tensor, noise: Noise | None
    ) -> Output:
        aim = objective if noise is not None else CROSS_ENTROPY  # evaluation
        output: Output = model[stage](batch, stream, scale=scale, noise=noise, objective=aim)
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
        flops=lambda step: flops.get(step, 0.0),
        cursor=lambda step: cursor(step, train),
        close=ahead.close,
        pipeline=Pipeline(plan.placement, plan.schedule, boundary),
        notes=[few] if few else [],
        terms=("loss", "z_loss") if train.z_loss else ("loss",),
    )


def _read(source: Source, indices: range | Ints, cp: Axis, device: torch.device) -> MicroBatch:
    """This context rank's rows of a micro-batch, on the host."""
    found = source.samples(indices)
    tokens, labels, weights = (x.reshape(-1) for x in (found.tokens, found.labels, found.weights))
    batch = MicroBatch.of(tokens, labels, found.lengths, weights=weights, cp=cp)
    # From pinned memory a copy to the GPU runs beside its computation.
    return batch.moved(Tensor.pin_memory) if device.type == "cuda" else batch


def _on(device: torch.device, batch: MicroBatch) -> MicroBatch:
    return batch.moved(lambda x: x.to(device, non_blocking=True))


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


def _valid_sources(config: Config) -> list[ValidSource]:
    data = config.data
    held_out = not data.valid and data.valid_fraction > 0
    return [
        ValidSource(
            s.prefix,
            seq=data.seq,
            vocab=config.model.vocab,
            sequences=config.train.eval_steps * config.train.global_batch,
            valid_fraction=data.valid_fraction if held_out else None,
            packing=data.packing,
            predict_across=data.predict_across,
        )
        for s in (data.train if held_out else data.valid)
    ]


def _validation(
    config: Config, source: ValidSource, mesh: Mesh, device: torch.device
) -> Callable[[], Iterator[Any]]:
    dp, cp = mesh.axis("dp"), mesh.axis("cp")
    parts = micro_batches(len(source), config.train.micro_batch, dp.size, dp.rank)

    def batches() -> Iterator[MicroBatch]:
        return (_on(device, _read(source, p, cp, device)) for p in parts)

    return batches
