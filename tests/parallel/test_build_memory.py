"""Building a model touches the memory of this rank's boxes only."""

import resource
import sys

import pytest
import torch

from penteract.config import resolve
from penteract.config_file import from_dict
from penteract.families import model_spec
from penteract.mesh import Axis, single
from penteract.nn.model import ModelSpec, Stage
from penteract.parallel.buckets import Sharding
from penteract.parallel.buffers import Buffers
from penteract.parallel.parameters import materialise
from penteract.parallel.tensor import TensorParallel
from penteract.testing import run_ranks

TP = 8
# Random numbers in the making (a chunk, whatever the model), modules, norms. An embedding made
# whole would be 48 MiB.
FIXED_BYTES = 28 << 20
COPIES = {"materialise": 1, "buffers": 2}  # parameters; and gradients
# The kernel counts pages in batches a thread, and a fork starts below its parent's peak: the
# rise can read some MiB short. The lower bound only shows that something was measured.
LEAST = 0.75


def large_spec() -> ModelSpec:
    """32 million parameters, 129 MB; nothing but norms is held whole at tp = 8."""
    model = {"layers": 1, "hidden": 768, "ffn": 2048, "heads": 16, "kv_heads": 8, "head_size": 64}
    values = {"model": {**model, "vocab": 16384}, "data": {"seq": 8}, "train": {"steps": 1}}
    return model_spec(resolve(from_dict(values)))


def peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def build(n: int, rank: int, how: str) -> tuple[int, int]:
    """(bytes by which the peak of this process rises, bytes of parameters); in a fork of its own.

    The peak of a fork starts at what its parent holds.
    """
    axis = Axis("tp", n, rank, tuple(range(n)))
    before = peak_bytes()
    model = Stage(large_spec(), TensorParallel(axis), dtype=torch.float32)
    if how == "materialise":
        materialise(model, seed=0)
    else:
        Buffers(model, Sharding.whole(single("dp-cp")), seed=0, more_axes=[axis])
    return peak_bytes() - before, sum(p.numel() * 4 for p in model.parameters())


@pytest.mark.parametrize("how", COPIES)
def test_building_at_tp_8_peaks_near_an_eighth(how: str) -> None:
    build(512, 0, how)  # here, so that no fork counts what a first use loads
    ((peak, whole),) = run_ranks(lambda: build(1, 0, how), 1)
    assert whole > 100e6
    assert LEAST * COPIES[how] * whole <= peak < COPIES[how] * whole + FIXED_BYTES
    for rank in (0, TP - 1):
        ((peak, held),) = run_ranks(lambda rank=rank: build(TP, rank, how), 1)
        assert held == pytest.approx(whole / TP, rel=0.01)
        assert LEAST * COPIES[how] * held <= peak < COPIES[how] * held + FIXED_BYTES
