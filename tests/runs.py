"""Small training runs for tests: a corpus, a configuration, and `penteract` on forked ranks.

Ranks are forks of the test, which has imported torch already: two ranks start in a tenth of a
second instead of ten. They go through the command line, the environment and a TCP store all the
same.
"""

from __future__ import annotations

import copy
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
import torch._dynamo  # the optimizer imports it at its first step: once here, not in every fork

from penteract.checkpoint.io import latest_good, read_manifest, read_tensor
from penteract.checkpoint.storage import Files
from penteract.cli import main
from penteract.data.writer import IndexedWriter

WITHIN_S = 60.0

BASE: dict[str, dict[str, Any]] = {
    "model": {"layers": 1, "hidden": 16, "ffn": 24, "heads": 2, "kv_heads": 1},
    "data": {"train": ["text"], "valid_fraction": 0.1, "seq": 12},
    "optim": {"lr": 1e-2, "warmup": 2},
    "train": {"steps": 6, "global_batch": 4, "dtype": "float64", "device": "cpu"},
    "log": {"every": 1},
}


def write_corpus(prefix: Path, *, tokens: int = 3000, seed: int = 0) -> None:
    """A token file of random words in documents of many lengths, in bytes tokens."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 6))) for _ in range(40)]
    with IndexedWriter(prefix, 257) as writer:
        written = 0
        while written < tokens:
            text = " ".join(draw.choices(words, k=draw.randint(1, 30)))
            ids = np.array([*text.encode(), 256], np.int64)
            writer.add(ids)
            written += len(ids)


def write_config(folder: Path, sections: dict[str, dict[str, Any]] | None = None) -> Path:
    """`folder/run.toml`: BASE with `sections` over it, beside a corpus `folder/text`."""
    config = copy.deepcopy(BASE)
    config["log"]["dir"] = str(folder / "run")
    for section, keys in (sections or {}).items():
        config.setdefault(section, {}).update(keys)
    if not (folder / "text.bin").exists():
        write_corpus(folder / "text")
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(config))
    return path


class Ranks:
    """`penteract ARGV` on `n` forked ranks that are running or have ended."""

    def __init__(
        self, argv: Sequence[object], n: int = 1, *, prepare: Callable[[int], None] | None = None
    ) -> None:
        """`prepare(rank)` runs in each rank first: the place to plant a fault."""
        assert torch.get_num_threads() == 1, "set OMP_NUM_THREADS=1"
        words = [str(word) for word in argv]
        context = multiprocessing.get_context("fork")
        port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="penteract-test-"))
        self.processes = []
        for rank in range(n):
            place = {} if n == 1 else _environment(rank, n, port)
            arguments = (words, rank, place, prepare, self.folder)
            process = context.Process(target=_rank, args=arguments)
            process.start()
            self.processes.append(process)
        self.out = [""] * n
        self.err = [""] * n

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    @property
    def codes(self) -> list[int | None]:
        return [process.exitcode for process in self.processes]

    def wait(self, within_s: float = WITHIN_S) -> Ranks:
        """Until all have ended; what they wrote is in `out` and `err` then."""
        end = time.monotonic() + within_s
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        late = [rank for rank, code in enumerate(self.codes) if code is None]
        self.kill()
        if self.folder.exists():
            for rank in range(len(self.processes)):
                self.out[rank], self.err[rank] = _read(self.folder, rank)
            shutil.rmtree(self.folder)
        assert not late, f"ranks {late} did not end within {within_s} s: {self.err}"
        return self

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _environment(rank: int, n: int, port: int) -> dict[str, str]:
    names = {"RANK": rank, "WORLD_SIZE": n, "LOCAL_RANK": rank, "MASTER_PORT": port}
    return {"MASTER_ADDR": "localhost", **{name: str(value) for name, value in names.items()}}


def _read(folder: Path, rank: int) -> list[str]:
    """What a rank wrote; one that was killed at once has written nothing."""
    files = [folder / f"{name}{rank}" for name in ("out", "err")]
    return [file.read_text() if file.exists() else "" for file in files]


def _rank(argv: list[str], rank: int, place: dict[str, str], prepare: Any, folder: Path) -> None:
    """A rank's whole life; it never returns into the test."""
    code = 99
    try:
        sys.stdout, sys.stderr = ((folder / f"{name}{rank}").open("w") for name in ("out", "err"))
        os.dup2(sys.stderr.fileno(), 2)
        logging.root.handlers.clear()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(place)
        if prepare is not None:
            prepare(rank)
        code = main(argv)
    except SystemExit as error:
        code = error.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def run(argv: Sequence[object], n: int = 1, *, code: int = 0, **options: Any) -> Ranks:
    """Run to the end and check every rank's exit code."""
    ranks = Ranks(argv, n, **options).wait()
    assert ranks.codes == [code] * n, (ranks.codes, ranks.err)
    return ranks


def metrics(folder: Path) -> dict[int, dict[str, Any]]:
    """The lines of `folder/metrics.jsonl` by step; the later of two counts."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if "valid" not in line}


def evaluations(folder: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["valid"] for line in lines if "valid" in line}


def numbers(line: dict[str, Any]) -> tuple[Any, ...]:
    """What of a metrics line is a function of the run and not of the clock."""
    return tuple(line[key] for key in ("step", "loss", "grad_norm", "lr", "tokens"))


def curve(folder: Path) -> list[tuple[Any, ...]]:
    return [numbers(line) for _, line in sorted(metrics(folder).items())]


def newest(folder: Path) -> Path:
    """The newest step of `folder/checkpoints`, whose hashes are right."""
    path = latest_good(folder / "checkpoints", hashes=True)
    assert path is not None, f"no checkpoint in {folder}"
    return path


def tensors(step: Path) -> dict[str, torch.Tensor]:
    return {name: read_tensor(step, name) for name in read_manifest(step).tensors}


def assert_same_state(a: Path, b: Path, *, tolerance: float = 0.0) -> None:
    """Weights and moments of two steps are equal, to the bit where the tolerance is 0."""
    mine, other = tensors(a), tensors(b)
    assert mine.keys() == other.keys()
    assert any("/" in name for name in mine), "moments are saved too"
    for name, value in mine.items():
        worst = (value - other[name]).abs().max().item()
        assert worst <= tolerance * max(1.0, other[name].abs().max().item()), (name, worst)
    states = [read_manifest(step).state for step in (a, b)]
    assert states[0] == states[1]


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.name` is `make(what it was)` for a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, make(getattr(owner, name)))
        yield


def killed_in(operation: str) -> Callable[[int], None]:
    """For `prepare`: rank 0 is killed inside its first such operation on storage."""

    def killed(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def prepare(rank: int) -> None:
        if rank == 0:
            setattr(Files, operation, killed)

    return prepare


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], Any], within_s: float = WITHIN_S) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
