"""Saving and loading beside torch.distributed.checkpoint (DCP), on two processes.

    python benchmarks/checkpoint.py [--megabytes 1000] [--rounds 9] [--directory DIR] [--cold]

The state is a run's under `zero = 1`: bfloat16 weights whole on both ranks; masters and two moments
in float32 split by rows. DCP has the same values as plain tensors and as DTensors. Both write one
file a rank into the same file system and bring it to the disk (fsync); ours hashes what it writes,
and checks the hashes before it loads, which DCP does not.

All take turns in the same processes; a time is that of the slower rank, from a barrier on. `sync`
comes before each save, so that none pays for another's pages. Files that are loaded were just
written and lie in the page cache, unless `--cold` drops them from it before each load. Printed are
medians with quartiles; DCP's / ours round by round (above 1: ours is faster); how long a save in
the background keeps a run waiting, as a share of our save that does not; where our time goes; and
the growth of the peak of a rank's own memory, in processes of their own. Exit code 1 where what
either loads is not what was saved.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tensor_parallel import quartiles
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from penteract.checkpoint import examine, io
from penteract.checkpoint.plan import Shard as Held
from penteract.checkpoint.saving import start_save
from penteract.checkpoint.storage import Files
from penteract.checkpoint.writing import Staging
from penteract.placement import Box, whole
from penteract.testing import run_ranks, world_axis
from penteract.wire import all_reduce_, barrier

RANKS, HIDDEN, WARM_UP = 2, 1024, 1
BYTES = 2 + 4 + 4 + 4  # a parameter: weight, master, two moments
SAVES = ("ours", "ours, in the background", "DCP", "DCP, async_save")
LOADS = ("ours", "ours, hashes not checked", "DCP")
STATE = ("master", "exp_avg", "exp_avg_sq")
LATE_S = 600.0


def shapes(megabytes: float) -> dict[str, tuple[int, int]]:
    """Matrices of a Llama's blocks, as many as it takes."""
    h, found, left = HIDDEN, dict[str, tuple[int, int]](), 1e6 * megabytes / BYTES
    block = {"q": (h, h), "k": (h, h), "v": (h, h), "out": (h, h)}
    block |= {"gate": (3 * h, h), "up": (3 * h, h), "down": (h, 3 * h), "norm": (h, 1)}
    for layer in itertools.count():
        for name, shape in block.items():
            found[f"layers.{layer}.{name}"] = shape
            left -= shape[0] * shape[1]
            if left <= 0:
                return found
    raise AssertionError


class State:
    """One rank's tensors, as each side takes them."""

    def __init__(self, megabytes: float) -> None:
        axis = world_axis()
        mesh = init_device_mesh("cpu", (RANKS,))
        self.ours: list[tuple[Held, Tensor]] = []
        self.theirs: dict[str, Tensor] = {}
        for number, (name, shape) in enumerate(shapes(megabytes).items()):
            generator = torch.Generator().manual_seed(number)
            weight = torch.randn(shape, generator=generator).bfloat16()
            self.ours.append((Held(name, shape, "bfloat16", whole(shape)), weight))
            self.theirs[name] = weight
            rows = shape[0] // RANKS
            box = Box((axis.rank * rows, 0), (rows, shape[1]))
            for kind in STATE:
                part = torch.randn(rows, shape[1], generator=generator.manual_seed(axis.rank))
                self.ours.append((Held(f"{kind}/{name}", shape, "float32", box), part))
                self.theirs[f"{kind}/{name}"] = DTensor.from_local(part, mesh, [Shard(0)])
        self.tensors = [tensor for _, tensor in self.ours]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class Sides:
    """What is timed: every save into a directory of its own under `folder`, every load from one."""

    def __init__(self, state: State, folder: Path) -> None:
        self.state, self.folder, self.axis = state, folder, world_axis()
        self.staging = Staging()
        self.group = dist.new_group(
            backend="gloo"
        )  # DCP's thread sends messages, and needs its own

    def save(self, case: str, step: int, files: Files | None = None) -> Callable[[], Any]:
        """Save; what waits until a save in the background is done."""
        directory = self.folder / case.replace(" ", "-")
        record = io.Record(step)
        if case == "ours":
            io.save(directory, record, self.state.ours, axis=self.axis, files=files)
        elif case == SAVES[1]:
            saving = start_save(
                directory, record, self.state.ours, axis=self.axis, staging=self.staging
            )
            return lambda: saving.wait(LATE_S)
        elif case == "DCP":
            dcp.save(self.state.theirs, storage_writer=self.writer(directory, step))
        else:
            writer = self.writer(directory, step)
            future = dcp.async_save(
                self.state.theirs, storage_writer=writer, process_group=self.group
            )
            return future.result
        return lambda: None

    def writer(self, directory: Path, step: int) -> dcp.FileSystemWriter:
        return dcp.FileSystemWriter(directory / f"step-{step:08d}", sync_files=True)

    def load(self, case: str, step: int) -> None:
        path = self.folder / case.partition(",")[0] / f"step-{step:08d}"
        if case == "DCP":
            dcp.load(self.state.theirs, storage_reader=dcp.FileSystemReader(path))
        else:
            io.load(path, self.state.ours, axis=self.axis, check_hashes=case == "ours")

    def clear(self) -> None:
        barrier(self.axis)
        if self.axis.rank == 0:
            shutil.rmtree(self.folder)
            self.folder.mkdir()
        barrier(self.axis)


def came_back(sides: Sides) -> dict[str, bool]:
    """Whether each way of saving gives back every bit, into tensors that were zero."""
    saved, found = [tensor.clone() for tensor in sides.state.tensors], {}
    for step, case in enumerate(SAVES):
        sides.save(case, step)()
        for tensor in sides.state.tensors:
            tensor.zero_()
        if case.startswith("ours"):
            path = sides.folder / case.replace(" ", "-") / f"step-{step:08d}"
            io.load(path, sides.state.ours, axis=sides.axis)
        else:
            path = sides.folder / case.replace(" ", "-") / f"step-{step:08d}"
            dcp.load(sides.state.theirs, storage_reader=dcp.FileSystemReader(path))
        pairs = zip(sides.state.tensors, saved, strict=True)
        found[case] = all(torch.equal(x, y) for x, y in pairs)
    sides.clear()
    return found


def drop_cached(folder: Path) -> None:
    """Let go of the pages of all files; they are on the disk."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed(act: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the slower rank, and this rank's result."""
    axis = world_axis()
    barrier(axis)
    began = time.perf_counter()
    result = act()
    took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    return all_reduce_(took, axis, "max").item(), result


def measure(megabytes: float, rounds: int, folder: str, cold: bool) -> Any:
    """On one rank: what came back; [rounds, saves, (pause, whole)] and [rounds, loads] in s."""
    sides = Sides(State(megabytes), Path(folder))
    same = came_back(sides)
    saves = torch.zeros(WARM_UP + rounds, len(SAVES), 2, dtype=torch.float64)
    loads = torch.zeros(WARM_UP + rounds, len(LOADS), dtype=torch.float64)
    for i in range(WARM_UP + rounds):
        for j in range(len(SAVES))[:: 1 if i % 2 else -1]:
            os.sync()
            pause, wait = timed(functools.partial(sides.save, SAVES[j], i))
            rest, _ = timed(wait)
            saves[i, j] = torch.tensor([pause, pause + rest])
        for j in range(len(LOADS))[:: 1 if i % 2 else -1]:
            if cold:
                drop_cached(sides.folder)
            loads[i, j] = timed(functools.partial(sides.load, LOADS[j], i))[0]
        sides.clear()
    return same, saves[WARM_UP:], loads[WARM_UP:], sides.state.bytes


# --- where the time goes, and memory


def clocked(act: Callable[..., Any], clock: Counter[str], name: str) -> Callable[..., Any]:
    """`act` with its seconds added to `clock`."""

    def call(*arguments: Any, **more: Any) -> Any:
        began = time.perf_counter()
        result = act(*arguments, **more)
        clock[name] += time.perf_counter() - began  # type: ignore[assignment]
        return result

    return call


class Clocked(Files):
    """Storage that adds up how long it is busy."""

    def __init__(self, clock: Counter[str]) -> None:
        self.write = clocked(super().write, clock, "write")  # type: ignore[method-assign]
        self.sync = clocked(super().sync, clock, "fsync")  # type: ignore[method-assign]
        of_names = clocked(super().sync_directory, clock, "fsync of directories")
        self.sync_directory = of_names  # type: ignore[method-assign]


def profile(megabytes: float, rounds: int, folder: str) -> list[dict[str, float]]:
    """On one rank, ms: of a save and a load of ours, each part's median."""
    sides = Sides(State(megabytes), Path(folder))
    kept: list[list[Counter[str]]] = [[], []]
    for i in range(1 + rounds):
        save: Counter[str] = Counter()
        load: Counter[str] = Counter()
        whole_s, _ = timed(functools.partial(sides.save, "ours", i, Clocked(save)))
        save["hash, copies, messages"] = whole_s - sum(save.values())  # type: ignore[assignment]
        with (
            mock.patch.object(examine, "hash_file", clocked(examine.hash_file, load, "hash")),
            mock.patch.object(io, "_fill", clocked(io._fill, load, "fill")),
        ):
            whole_s, _ = timed(functools.partial(sides.load, "ours", i))
        load["plan, messages"] = whole_s - sum(load.values())  # type: ignore[assignment]
        for clocks, clock in zip(kept, (save, load), strict=True):
            clocks.append(clock)
        sides.clear()
    names = [clocks[0].keys() for clocks in kept]
    return [
        {n: 1e3 * torch.tensor([c[n] for c in clocks[1:]]).median().item() for n in of}
        for clocks, of in zip(kept, names, strict=True)
    ]


def own_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def growth(case: str, loading: bool, megabytes: float, folder: str) -> float:
    """On one rank, bytes: by how much its own memory rises at most while it does the same twice."""
    sides = Sides(State(megabytes), Path(folder))
    if loading:
        sides.save(case.partition(",")[0], 0)()
    peak, stop, before = [0], threading.Event(), own_bytes()

    def watch() -> None:
        while not stop.wait(0.001):
            peak[0] = max(peak[0], own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    for step in (0, 1):
        if loading:
            sides.load(case, 0)
        else:
            sides.save(case, step)()
    stop.set()
    watcher.join()
    sides.clear()
    return peak[0] - before


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=1000.0, help="of state (1000)")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (9)")
    parser.add_argument("--directory", help="where to write; the system's temporary one")
    parser.add_argument("--cold", action="store_true", help="load what is not in the page cache")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, gloo, {RANKS} ranks, {arguments.megabytes:g} MB of state, "
        f"{arguments.rounds} rounds in turn, {'cold' if arguments.cold else 'warm'} page cache; "
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        return report(arguments, str(Path(folder, "saved")))


def report(arguments: argparse.Namespace, folder: str) -> int:
    Path(folder).mkdir()
    ranks = functools.partial(run_ranks, timeout_s=7200, backend="gloo")
    size, rounds = arguments.megabytes, arguments.rounds
    (same, saves, loads, held), *_ = found = ranks(
        measure, RANKS, size, rounds, folder, arguments.cold
    )
    same = {case: all(rank[0][case] for rank in found) for case in same}
    for case, ok in same.items():
        if not ok:
            print(f"{case}: OTHER BITS come back")
    print("\nsaves, s: until training goes on; until the step is on the disk")
    for case, (pause, landed) in zip(SAVES, saves.permute(1, 2, 0), strict=True):
        print(f"  {case:<26} {quartiles(pause)}   {quartiles(landed)}")
    print("loads, s")
    for case, row in zip(LOADS, loads.T, strict=True):
        print(f"  {case:<26} {quartiles(row)}")
    print("DCP's / ours")
    print(f"  {'save':<26} {quartiles(saves[:, 2, 0] / saves[:, 0, 0])}")
    print(f"  {'pause in the background':<26} {quartiles(saves[:, 3, 0] / saves[:, 1, 0])}")
    print(f"  {'load':<26} {quartiles(loads[:, 2] / loads[:, 0])}")
    print(f"  {'load, hashes not checked':<26} {quartiles(loads[:, 2] / loads[:, 1])}")
    print("a pause in the background / our save that is none")
    print(f"  {'':<26} {quartiles(saves[:, 1, 0] / saves[:, 0, 0])}", flush=True)
    print("where our time goes, ms of rank 0, medians")
    for name, parts in zip(
        ("save", "load"), ranks(profile, RANKS, size, rounds, folder)[0], strict=True
    ):
        told = ", ".join(f"{part} {ms:.0f}" for part, ms in parts.items())
        print(f"  {name:<26} {told}", flush=True)
    writes = size / RANKS
    print(
        f"\npeak growth of own memory, MB a rank, which holds {held / 1e6:.0f}, writes {writes:.0f}"
    )
    for loading, cases in ((False, SAVES), (True, LOADS)):
        for case in cases:
            most = max(ranks(growth, RANKS, case, loading, size, folder))
            name = f"{'load' if loading else 'save'}: {case}"
            print(f"  {name:<32} {most / 1e6:8.0f}", flush=True)
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")
    return 0 if all(same.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
