"""From the number of a sample to its tokens: training sources, validation sources, read-ahead.

Step n of a run (from 1) sees the global batch of samples `[cursor, cursor + global_batch)`, where
the cursor is the number of samples seen before: one integer, whatever the layout, the micro-batch
size or the restarts. Arrays are numpy's; a sample is `seq` inputs and the `seq` labels one token
further on. With packing the index's document boundaries cut it into documents; what tokens are in
them never does. A file of conversations has rows of whole conversations instead.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import TracebackType
from typing import Generic, Self, TypeVar

import numpy as np
import xxhash

from penteract.data.blend import Blend
from penteract.data.indexed import DataError, IndexedFile, Ints
from penteract.data.order import SourceOrder, split_samples
from penteract.data.rows import Rows, rows_of
from penteract.data.samples import Samples
from penteract.data.tokenizers import Tokenizer
from penteract.errors import UserError

T = TypeVar("T")
Prefix = str | os.PathLike[str]


def micro_batches(global_batch: int, micro_batch: int, dp: int, rank: int) -> list[range]:
    """The micro-batches of data rank `rank`, as positions in the step's global batch.

    Micro-batch j holds `[j·micro_batch, (j+1)·micro_batch)`, cut at the global batch's end, and
    goes to rank j mod dp. Every rank gets the same number; what is missing is an empty range.
    """
    if min(global_batch, micro_batch, dp) < 1:
        raise ValueError(
            f"global_batch {global_batch}, micro_batch {micro_batch} and dp {dp} must be at least 1"
        )
    assert 0 <= rank < dp, (rank, dp)
    turns = -(-global_batch // (micro_batch * dp))
    starts = ((turn * dp + rank) * micro_batch for turn in range(turns))
    return [
        range(min(start, global_batch), min(start + micro_batch, global_batch)) for start in starts
    ]


@dataclass(frozen=True)
class SampleId:
    """What one sample of a run is."""

    index: int  # in the run, from 0
    source: str
    epoch: int  # of the source, from 0
    sample: int  # in the source
    place: str  # of its tokens and of the last label, or of its conversations


class TrainSource:
    """The samples of a run: sources mixed by weight, each in an order of its own every epoch.

    `sources` are (prefix, weight); a source with weight None weighs as many samples as it holds.
    The last `valid_fraction` of each source is left out. With `packing` samples are cut into their
    documents, whose last tokens count only to `predict_across`. Raises DataError for bad files or
    too few samples for one global batch, UserError for bad weights.
    """

    def __init__(
        self,
        sources: Sequence[tuple[Prefix, float | None]],
        *,
        seq: int,
        seed: int,
        vocab: int | None = None,
        valid_fraction: float = 0.0,
        global_batch: int = 1,
        packing: bool = False,
        predict_across: bool = False,
    ) -> None:
        if not sources:
            raise UserError("data.train names no source")
        self.seq = seq
        files = [IndexedFile(prefix, vocab) for prefix, _ in sources]
        how = {"packing": packing, "predict_across": predict_across}
        self.rows = [rows_of(file, seq, **how) for file in files]
        self.sizes = [
            len(split_samples(len(rows), valid_fraction, rows.file.prefix)[0]) for rows in self.rows
        ]
        if sum(self.sizes) < global_batch:
            sizes = " + ".join(map(str, self.sizes))
            raise DataError(
                f"the training data holds {sizes} = {sum(self.sizes)} samples of seq {seq}, fewer "
                f"than one global batch of {global_batch}: use more data, a shorter data.seq or a "
                f"train.global_batch of at most {sum(self.sizes)}"
            )
        pairs = zip(sources, self.sizes, strict=True)
        self.blend = Blend([size if weight is None else weight for (_, weight), size in pairs])
        self._orders = [SourceOrder(size, seed, i) for i, size in enumerate(self.sizes)]

    def samples(self, indices: Sequence[int] | range | Ints) -> Samples:
        """Samples `indices` [n] of the run."""
        parts = [self.rows[i].samples(numbers) for i, numbers in self._by_source(indices)]
        return Samples.joined(parts or [self.rows[0].samples([])])

    def lengths(self, indices: Sequence[int] | range | Ints) -> tuple[int, ...]:
        """Lengths of the documents of samples `indices`, as in `samples`; reads no token."""
        parts = [self.rows[i].lengths(numbers) for i, numbers in self._by_source(indices)]
        return tuple(length for part in parts for length in part)

    def _by_source(self, indices: Sequence[int] | range | Ints) -> Iterator[tuple[int, list[int]]]:
        """Sources, each with the numbers of its rows that follow each other in `indices`."""
        source, _, sample = self._locate(np.asarray(indices, np.int64))
        pairs = zip(source.tolist(), sample.tolist(), strict=True)
        for i, found in groupby(pairs, key=lambda pair: pair[0]):
            yield i, [number for _, number in found]

    def _locate(self, indices: Ints) -> tuple[Ints, Ints, Ints]:
        """Source, epoch and sample number in the source, [n] each."""
        source, ordinal = self.blend.locate(indices)
        epoch, sample = np.empty_like(ordinal), np.empty_like(ordinal)
        for i in np.unique(source).tolist():
            mine = source == i
            epoch[mine] = self._orders[i].epochs(ordinal[mine])
            sample[mine] = self._orders[i].sample(ordinal[mine])
        return source.astype(np.int64), epoch, sample

    def describe(self, indices: Sequence[int] | range | Ints) -> list[SampleId]:
        """What samples `indices` of the run are."""
        wanted = np.asarray(indices, np.int64)
        places = zip(wanted, *self._locate(wanted), strict=True)
        return [self._describe(*map(int, place)) for place in places]

    def _describe(self, index: int, source: int, epoch: int, sample: int) -> SampleId:
        rows = self.rows[source]
        return SampleId(index, rows.file.name, epoch, sample, rows.place(sample))

    def fingerprint(self) -> str:
        """Changes when the files, their order or their weights do; to be compared on resume."""
        hasher = xxhash.xxh3_128()
        for rows, size, weight in zip(self.rows, self.sizes, self.blend.weights, strict=True):
            hasher.update(f"{rows.file.fingerprint()} {size} {weight}\n".encode())
        return hasher.hexdigest()


class ValidSource:
    """A fixed set of samples in file order, the same at every evaluation.

    It is the first `sequences` rows of a file, or of its last `valid_fraction`; all of them where
    `sequences` is None or more than there are. Raises DataError where there is no sample.
    """

    def __init__(
        self, rows: Rows, *, sequences: int | None = None, valid_fraction: float | None = None
    ) -> None:
        assert sequences is None or sequences > 0, sequences
        self.rows, self.name = rows, rows.file.name
        held = range(len(rows))
        if valid_fraction is not None:
            held = split_samples(len(held), valid_fraction, rows.file.prefix)[1]
        if not held:
            raise DataError(f"{rows.file.prefix}: valid_fraction {valid_fraction} holds no sample")
        self._held = held if sequences is None else held[:sequences]

    def __len__(self) -> int:
        return len(self._held)

    def samples(self, indices: Sequence[int] | range | Ints) -> Samples:
        """Samples `indices` [n] of [0, len)."""
        wanted = np.asarray(indices, np.int64)
        assert len(wanted) == 0 or (wanted.min() >= 0 and wanted.max() < len(self)), wanted
        return self.rows.samples((self._held.start + wanted).tolist())


class Prefetcher(Generic[T]):
    """Calls `load(step)` for the steps to come in a thread, at most `depth` ahead.

    An error in `load` is raised by `get` of its step. `wait_ms` is how long the last `get` waited.
    """

    def __init__(
        self, load: Callable[[int], T], *, first: int, depth: int = 2, timeout_s: float = 300.0
    ) -> None:
        self.wait_ms = 0.0
        self._load = load
        self._next = first
        self._timeout_s = timeout_s
        self._stopping = threading.Event()
        self._ready: queue.Queue[tuple[int, T | None, BaseException | None]] = queue.Queue(depth)
        self._thread = threading.Thread(target=self._run, args=(first,), daemon=True)
        self._thread.start()

    def _run(self, step: int) -> None:
        while not self._stopping.is_set():
            try:
                self._put((step, self._load(step), None))
            except BaseException as error:  # whatever it is, the consumer must learn of it
                self._put((step, None, error))
                return
            step += 1

    def _put(self, item: tuple[int, T | None, BaseException | None]) -> None:
        while not self._stopping.is_set():
            try:
                return self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def get(self, step: int) -> T:
        """The value of `step`; steps must be asked for in order. Raises TimeoutError when stuck."""
        assert step == self._next, (step, self._next)
        begin = time.perf_counter()
        try:
            found, value, error = self._ready.get(timeout=self._timeout_s)
        except queue.Empty:
            raise TimeoutError(
                f"the data of step {step} did not arrive within {self._timeout_s} s: the reading "
                f"thread is stuck"
            ) from None
        self.wait_ms = (time.perf_counter() - begin) * 1e3
        if error is not None:
            raise error
        assert found == step, (found, step)
        self._next += 1
        return value  # type: ignore[return-value]  # without an error there is a value

    def stop(self) -> None:
        """Ends the thread and waits for it (a stuck one for a second: it dies with the process)."""
        self._stopping.set()
        self._thread.join(1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def show(
    source: TrainSource, *, cursor: int, global_batch: int, tokenizer: Tokenizer | None = None
) -> list[str]:
    """A line for each sample of the step that starts at `cursor`.

    That is the number of samples of all steps before it: `(step − 1)·global_batch`, and with
    train.ramp, whose first steps are smaller, what `train.batch_ramp.cursor` counts.
    """
    lines = []
    for found in source.describe(range(cursor, cursor + global_batch)):
        line = (
            f"{found.index}  {found.source}  epoch {found.epoch}  sample {found.sample}  "
            f"{found.place}"
        )
        if tokenizer is not None:
            tokens = source.samples([found.index]).tokens
            line += f"  {tokenizer.decode(tokens[0, :24].tolist())!r}"
        lines.append(line)
    return lines
