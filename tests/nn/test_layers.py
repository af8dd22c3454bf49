"""Single layers: norms, rotary positions, dropout, sequences."""

import pytest
import torch
from torch.nn import functional as F

from penteract.mesh import single
from penteract.nn.attention import Cache
from penteract.nn.build import Build
from penteract.nn.dropout import dropout
from penteract.nn.embedding import Embedding
from penteract.nn.mlp import _SwiGLU
from penteract.nn.norm import Norm, NormSpec
from penteract.nn.rope import apply_rotary
from penteract.nn.sequences import Sequences, Training
from penteract.parallel.parameters import materialise
from penteract.parallel.tensor import TensorParallel
from penteract.placement import Init
from penteract.random import keep_mask

F64 = torch.float64
NOISE = Training(seed=3, step=2, micro_batch=5)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=F64)


def norm_of(size: int, spec: NormSpec, dtype: torch.dtype) -> Norm:
    init = Init("zeros")
    return Norm("n", size, spec, Build(TensorParallel(single("tp")), dtype, init, init))


def test_our_own_derivatives_pass_a_numerical_check() -> None:
    norm = norm_of(5, NormSpec("rms", 1e-2), F64)
    materialise(norm, seed=0)
    cos, sin = Sequences.of((3,), past=7).rotary(6, 100.0, F64)
    checks = (
        (norm, normal(2, 3, 5)),
        (_SwiGLU.apply, normal(3, 8)),
        (lambda x: apply_rotary(x, cos, sin), normal(3, 2, 6)),
    )
    for function, x in checks:
        assert torch.autograd.gradcheck(function, (x.requires_grad_(),))


def test_an_rms_norm_of_zeros_is_zero() -> None:
    norm = norm_of(4, NormSpec("rms", 1e-5), F64)
    materialise(norm, seed=0)
    x = torch.zeros(2, 4, dtype=F64, requires_grad=True)
    y = norm(x)
    y.sum().backward()
    assert not y.any()
    assert bool(x.grad.isfinite().all())


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_of_a_narrow_type_are_computed_in_float32(kind: str) -> None:
    """A mean of squares in bfloat16 would be off by more than the rounding of the result."""
    norm = norm_of(512, NormSpec(kind, 1e-5), torch.bfloat16)
    materialise(norm, seed=0)
    x = (normal(4, 512) * 3).bfloat16()
    wide = x.float()
    wanted = F.rms_norm(wide, (512,), eps=1e-5) if kind == "rms" else F.layer_norm(wide, (512,))
    torch.testing.assert_close(norm(x), wanted.bfloat16(), rtol=0.0, atol=0.0)


def test_rotation_depends_on_distance_alone_even_at_a_million() -> None:
    q, k = normal(2, 1, 8).unsqueeze(1)

    def score(position: int) -> torch.Tensor:
        turned = []
        for x, past in ((q, position + 5), (k, position)):
            cos, sin = Sequences.of((1,), past=past).rotary(8, 10000.0, F64)
            turned.append(apply_rotary(x, cos, sin))
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(10**6), score(0), rtol=1e-8, atol=1e-8)


def test_positions_restart_in_every_document_and_rows_do_not() -> None:
    sequences = Sequences.of((3, 0, 1, 2))
    assert sequences.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert sequences.rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert Sequences.of((2, 2), past=4).positions.tolist() == [4, 5, 4, 5]
    assert Sequences.of(()).positions.shape == (0,)


def test_weights_must_fit_the_sequences() -> None:
    with pytest.raises(ValueError, match="3 tokens in sequences, but weights of shape"):
        Sequences.of((1, 2), weights=torch.ones(2))


def test_dropout_is_a_slice_of_one_global_mask() -> None:
    x, rows = torch.ones(50, 8, dtype=F64), torch.arange(50)
    whole = dropout(x, 0.25, name="layers.0.mlp", rows=rows, training=NOISE)
    part = dropout(x[20:30], 0.25, name="layers.0.mlp", rows=rows[20:30], training=NOISE)
    assert torch.equal(whole[20:30], part)
    index = rows[:, None] * 8 + torch.arange(8)
    mask = keep_mask(3, "dropout/2/5/layers.0.mlp", index, 0.75)
    assert torch.equal(whole, mask.double() / 0.75)
    assert 0.65 < mask.double().mean() < 0.85


@pytest.mark.parametrize("change", ["name", "step", "micro_batch", "seed"])
def test_every_layer_step_and_micro_batch_has_its_own_mask(change: str) -> None:
    x, rows = torch.ones(20, 8), torch.arange(20)
    values = {"seed": 3, "step": 2, "micro_batch": 5}
    before = dropout(x, 0.5, name="a", rows=rows, training=Training(**values))
    again = dropout(x, 0.5, name="a", rows=rows, training=Training(**values))
    name = "b" if change == "name" else "a"
    if change != "name":
        values[change] += 1
    after = dropout(x, 0.5, name=name, rows=rows, training=Training(**values))
    assert torch.equal(before, again)
    assert not torch.equal(before, after)


def test_without_noise_dropout_is_the_identity() -> None:
    x = torch.ones(2, 3)
    assert dropout(x, 0.5, name="a", rows=torch.arange(2), training=None) is x


def test_an_embedding_with_too_few_positions_raises() -> None:
    init = Init("normal", 1.0)
    build = Build(TensorParallel(single("tp")), F64, init, init)
    embedding = Embedding("embed", 5, 4, build, positions=3, dropout=0.0)
    materialise(embedding, seed=0)
    with pytest.raises(IndexError):
        embedding(torch.zeros(4, dtype=torch.int64), Sequences.of((4,)), None)


def test_a_full_cache_refuses_more() -> None:
    cache = Cache(1, 2)
    cache.append(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4))
    with pytest.raises(AssertionError, match="full"):
        cache.append(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4))
