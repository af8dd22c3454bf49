"""The global norm counts every element once; the clip coefficient."""

import pytest
import torch
from parity.matrix import MODELS
from reference import bridge

from penteract.config import resolve
from penteract.config_file import from_dict
from penteract.families import model_spec
from penteract.mesh import single
from penteract.nn.model import Stage
from penteract.optim.norm import clip_coefficient, gradient_norm
from penteract.parallel.buffers import Buffers
from penteract.parallel.parameters import Layer, replicated
from penteract.parallel.tensor import TensorParallel
from penteract.placement import Init


@pytest.mark.parametrize(
    ("norm", "limit", "wanted"),
    [
        (2.0, 1.0, 0.49999975000012500),  # 1 / (2 + 1e-6)
        (0.5, 1.0, 1.0),
        (1.0, 1.0, 0.99999900000099999),  # 1 / (1 + 1e-6)
        (0.0, 1.0, 1.0),
        (100.0, 0.0, 1.0),
        (4.0, 0.5, 0.12499996875000781),
    ],
)
def test_clip_coefficient(norm: float, limit: float, wanted: float) -> None:
    found = clip_coefficient(torch.tensor(norm, dtype=torch.float64), limit)
    assert found.item() == pytest.approx(wanted, rel=1e-15)


@pytest.mark.parametrize("name", MODELS)
def test_the_norm_is_that_of_all_logical_gradients(name: str) -> None:
    """A tied weight is one parameter: its gradient counts once."""
    config = from_dict({"model": MODELS[name], "data": {"seq": 8}, "train": {"steps": 1}})
    model = Stage(
        model_spec(resolve(config).model), TensorParallel(single("tp")), dtype=torch.float64
    )
    buffers = Buffers(model, single("dp-cp"), seed=0, more_axes=[single("tp")])
    gradients = bridge.random_weights(bridge.masters(buffers))
    bridge.write(bridge.buffer_gradients(buffers), gradients)
    total = sum(value**2 for x in gradients.values() for value in x.flatten().tolist())
    found = gradient_norm(buffers, {"tp": single("tp")})
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(total**0.5, rel=1e-12)


def test_a_float32_norm_of_many_elements_keeps_its_digits() -> None:
    """One long float32 sum on a CPU is 7e-4 off at this length."""
    layer = Layer()
    layer.declare("weight", replicated("w", (1 << 24,), Init("zeros")), torch.float32)
    buffers = Buffers(layer, single("dp-cp"), seed=0)
    for flat in (buffer.gradient for buffer in buffers.buffers):
        flat.normal_(generator=torch.Generator().manual_seed(0))
        wanted = torch.linalg.vector_norm(flat.double()).item()
    assert gradient_norm(buffers, {}).item() == pytest.approx(wanted, rel=1e-6)
