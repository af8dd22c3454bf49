"""The task of `penteract train`: next-token prediction on token files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from penteract.config import Config, ConfigError, SourceConfig
from penteract.data.indexed import Ints
from penteract.data.loader import Prefetcher, TrainSource, ValidSource, check_names, micro_batches
from penteract.data.synthetic import SyntheticSource
from penteract.data.tokenizers import load_tokenizer
from penteract.families import model_spec
from penteract.mesh import Axis, Mesh
from penteract.nn.flops import training_flops
from penteract.nn.model import Stage
from penteract.nn.sequences import MicroBatch, Noise
from penteract.train.batch_ramp import cursor, global_batch
from penteract.train.task import Task

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}

Arrays = list[tuple[Ints, Ints]]  # (tokens, labels) [n, s] of each micro-batch


class Source(Protocol):
    """Where samples come from."""

    def samples(self, indices: range) -> tuple[Ints, Ints]: ...


def with_vocabulary(config: Config) -> tuple[Config, str]:
    """The configuration with model.vocab filled in from the tokenizer, and the tokenizer's hash."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    vocab = config.model.vocab or tokenizer.vocab
    if vocab < tokenizer.vocab:
        raise ConfigError(
            f"model.vocab = {vocab} is smaller than the tokenizer's {tokenizer.vocab} tokens"
        )
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, vocab=vocab)
    ), tokenizer.hash


def language_model(config: Config, mesh: Mesh, device: torch.device) -> tuple[Task, Config]:
    """This rank's task of a configuration, and the configuration with its vocabulary."""
    config, tokenizer_hash = with_vocabulary(config)
    source = train_source(config)
    task = synthetic_task(config, mesh, device, source=source)
    validation = {
        valid.name: _validation(config, valid, mesh.axis("dp"), device)
        for valid in _valid_sources(config)
    }

    def describe(step: int) -> list[str]:
        first = cursor(step - 1, config.train)
        found = source.describe(range(first, first + global_batch(step, config.train)))
        return [str(sample) for sample in found]

    state = {
        "tokenizer": tokenizer_hash,
        "data": {
            "files": source.fingerprint(),
            "seq": config.data.seq,
            "seed": config.data.seed,
        },
    }
    return dataclasses.replace(task, validation=validation, describe=describe, state=state), config


def train_source(config: Config) -> TrainSource:
    """The training samples of a configuration that has its vocabulary."""
    data = config.data
    if not data.train:
        raise ConfigError(
            'data.train is empty: name a token file, as in data.train = ["data/text"] '
            "(`penteract data build` makes one)"
        )
    return TrainSource(
        [(s.prefix, s.weight) for s in _sources(data.train)],
        seq=data.seq,
        seed=data.seed,
        vocab=config.model.vocab,
        valid_fraction=0.0 if data.valid else data.valid_fraction,
        global_batch=config.train.global_batch,
    )


def _sources(given: tuple[str | SourceConfig, ...]) -> list[SourceConfig]:
    return [s for s in given if isinstance(s, SourceConfig)]  # `load` leaves no strings


def synthetic_task(
    config: Config, mesh: Mesh, device: torch.device, *, source: Source | None = None
) -> Task:
    """The task without validation; without a source its tokens are made from data.seed."""
    train, seq = config.train, config.data.seq
    spec, dp = model_spec(config.model), mesh.axis("dp")
    model = Stage(spec, mesh.axis("tp"), dtype=DTYPES[train.dtype])
    if source is None:
        source = SyntheticSource(seq=seq, vocab=spec.vocab, seed=config.data.seed)

    def read(step: int) -> Arrays:
        first, batch = cursor(step - 1, train), global_batch(step, train)
        parts = micro_batches(batch, train.micro_batch, dp.size, dp.rank)
        return [source.samples(range(first + p.start, first + p.stop)) for p in parts]

    ahead = _ReadAhead(read)

    def batches(step: int) -> list[MicroBatch]:
        return [MicroBatch.of_samples(*arrays, device=device) for arrays in ahead(step)]

    def loss(batch: MicroBatch, scale: Tensor, noise: Noise | None) -> dict[str, Tensor]:
        terms: dict[str, Tensor] = model(batch, scale=scale, noise=noise).terms
        return terms

    return Task(
        model=model,
        batches=batches,
        loss=loss,
        count=lambda batch: batch.sequences.weights.sum(),
        tokens=lambda step: global_batch(step, train) * seq,
        flops=lambda step: training_flops(spec, [seq] * global_batch(step, train)),
        cursor=lambda step: cursor(step, train),
        close=ahead.close,
    )


class _ReadAhead:
    """Reads the steps that follow the first one asked for in a thread."""

    def __init__(self, read: Callable[[int], Arrays]) -> None:
        self._read = read
        self._prefetcher: Prefetcher[Arrays] | None = None

    def __call__(self, step: int) -> Arrays:
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self._read, first=step)
        return self._prefetcher.get(step)

    def close(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.stop()


def _valid_sources(config: Config) -> list[ValidSource]:
    data = config.data
    held_out = not data.valid and data.valid_fraction > 0
    sources = [
        ValidSource(
            s.prefix,
            seq=data.seq,
            vocab=config.model.vocab,
            sequences=config.train.eval_steps * config.train.global_batch,
            valid_fraction=data.valid_fraction if held_out else None,
        )
        for s in _sources(data.train if held_out else data.valid)
    ]
    check_names([s.name for s in sources])
    return sources


def _validation(
    config: Config, source: ValidSource, dp: Axis, device: torch.device
) -> Callable[[], Iterator[Any]]:
    parts = micro_batches(len(source), config.train.micro_batch, dp.size, dp.rank)

    def batches() -> Iterator[MicroBatch]:
        return (MicroBatch.of_samples(*source.samples(p), device=device) for p in parts)

    return batches
