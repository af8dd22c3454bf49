"""Recomputation changes what is kept and what is sent again, and no number."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from parity.matrix import SPLIT_MODELS
from parity.training import documents
from reference import bridge
from torch import Tensor

from penteract.config import RECOMPUTE, ConfigError, resolve
from penteract.config_file import from_dict
from penteract.families import model_spec
from penteract.mesh import Axis, Traffic, single
from penteract.nn.attention import Attention
from penteract.nn.model import Stage
from penteract.nn.sequences import Sequences, Training
from penteract.parallel.parameters import declared_parameters, materialise
from penteract.parallel.tensor import TensorParallel
from penteract.testing import run_ranks, world_axis

Kinds = tuple[str, ...]
KINDS: tuple[Kinds, ...] = (
    *((kind,) for kind in RECOMPUTE), ("layer/2",), ("attention", "mlp", "core"),
)  # fmt: skip
SEQ = 7


def build(axis: Axis, *, sp: bool = False, kinds: Kinds = (), dropout: float = 0.1) -> Stage:
    values = {
        "model": {**SPLIT_MODELS["llama"], "dropout": dropout},
        "data": {"seq": SEQ},
        "train": {"steps": 1},
    }
    spec = model_spec(resolve(from_dict(values)))
    model = Stage(spec, TensorParallel(axis, sp), dtype=torch.float64, recompute=kinds)
    materialise(model, seed=0)
    return model


def forward(model: Stage) -> Tensor:
    docs = [doc for i in range(2) for doc in documents(i, model.spec.vocab, SEQ)]
    batch = bridge.micro_batch(docs)
    return model(batch, scale=torch.tensor(0.1), training=Training(0, 1, 0)).terms["loss"]


def gradients(axis: Axis, sp: bool, kinds: Kinds) -> list[Tensor]:
    """The loss and every gradient of a step with dropout."""
    model = build(axis, sp=sp, kinds=kinds)
    loss = forward(model)
    loss.backward()
    return [loss.detach(), *(entry.parameter.grad for entry in declared_parameters(model))]


def compare(axis: Axis, sp: bool) -> None:
    kept = gradients(axis, sp, ())
    for kinds in KINDS:
        again = gradients(axis, sp, kinds)
        assert all(torch.equal(a, b) for a, b in zip(again, kept, strict=True)), kinds


def test_gradients_are_equal_to_the_bit() -> None:
    compare(single("tp"), sp=False)


@pytest.mark.parametrize("sp", [False, True])
def test_gradients_are_equal_to_the_bit_on_two_ranks(sp: bool) -> None:
    """Dropout masks are those of the rows that a rank holds, in the second forward too."""
    run_ranks(lambda: compare(world_axis("tp"), sp), 2)


def kept(model: Stage, run: Callable[[], Tensor]) -> dict[int, Tensor]:
    """What a forward holds for its backward, parameters apart, by its place in memory."""
    found: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        found[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        assert run().requires_grad
    for parameter in model.parameters():
        found.pop(parameter.untyped_storage().data_ptr(), None)
    return found


def test_less_is_kept() -> None:
    order: list[Kinds] = [
        (), ("core",), ("mlp",), ("layer/2",), ("attention",), ("attention", "mlp"), ("layer",),
    ]  # fmt: skip
    found = []
    for kinds in order:
        model = build(single("tp"), kinds=kinds)
        tensors = kept(model, lambda model=model: forward(model)).values()
        found.append(sum(x.untyped_storage().nbytes() for x in tensors))
    assert all(b < a for a, b in pairwise(found)), list(zip(order, found, strict=True))


def test_a_recomputed_layer_keeps_the_stream_alone() -> None:
    sequences = Sequences.of((3, 4))
    for kinds, alone in ((("layer",), True), (("attention", "mlp"), False)):
        model = build(single("tp"), kinds=kinds)
        block = model.layers[1]
        x = torch.randn(7, model.spec.hidden, dtype=torch.float64, requires_grad=True)
        tensors = kept(model, lambda b=block, x=x: b(x, sequences, Training(0, 1, 0)))
        assert (tensors.keys() == {x.data_ptr()}) == alone, kinds


def test_every_nth_layer_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    once = Attention.forward

    def count(self: Attention, *arguments: Any) -> Tensor:
        ran.append(self)
        return once(self, *arguments)

    monkeypatch.setattr(Attention, "forward", count)
    for kinds, times in (((), [1, 1]), (("layer/2",), [2, 1]), (("layer",), [2, 2])):
        model = build(single("tp"), kinds=kinds)
        ran.clear()
        forward(model).backward()
        blocks = [module for module in model.modules() if isinstance(module, Attention)]
        assert [ran.count(block) for block in blocks] == times, kinds


@pytest.mark.parametrize("kind", ["layers", "attn", "layer/0", "layer/-1", "core/2", "layer/"])
def test_a_kind_that_names_nothing_is_refused(kind: str) -> None:
    values = {"model": SPLIT_MODELS["llama"], "train": {"steps": 1}}
    with pytest.raises(ConfigError, match=r"parallel\.recompute.*layer, attention, mlp, core"):
        from_dict({**values, "parallel": {"recompute": ["mlp", kind]}})


# --- what is sent


def sent(sp: bool, kinds: Kinds, dropout: float) -> tuple[str, str]:
    """Collectives of forward and of backward as letters, in order: Gather, Scatter, Reduce."""
    calls: list[str] = []
    letters = {"all_gather": "G", "reduce_scatter": "S", "all_reduce": "R"}
    model = build(world_axis("tp"), sp=sp, kinds=kinds, dropout=dropout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Traffic, "add", lambda self, call, size_bytes: calls.append(letters[call]))
        loss = forward(model)
        n = len(calls)
        loss.backward()
    return "".join(calls[:n]), "".join(calls[n:])


# What a block sends again where it is `layer`. Its last reduction is wanted for dropout only.
AGAIN = {(False, 0.0): "R", (False, 0.1): "RR", (True, 0.0): "GSG", (True, 0.1): "GSGS"}


@pytest.mark.parametrize(("sp", "dropout"), AGAIN)
def test_collectives_come_in_one_order_on_every_rank(sp: bool, dropout: float) -> None:
    first, second = run_ranks(lambda: [sent(sp, kinds, dropout) for kinds in ((), *KINDS)], 2)
    assert first == second
    by_kind = dict(zip(((), *KINDS), first, strict=True))
    there, back = by_kind[()]
    block = "GSGS" if sp else "RR"
    # The embedding, two blocks, the head's input, and two reductions of the loss.
    assert there == ("S" if sp else "R") + 2 * block + ("GRR" if sp else "RR")
    # Of a column layer: its input gathered again under sp, its gradient summed.
    one = "GGSGGS" if sp else "RR"
    assert back == ("GS" if sp else "R") + 2 * one + ("G" if sp else "")
    assert {forward for forward, _ in by_kind.values()} == {there}
    assert len(by_kind["core",][1]) == len(back), "nothing is sent for the core"
    for kinds, blocks in ((("layer",), 2), (("layer/2",), 1)):
        more = by_kind[kinds][1]
        assert len(more) == len(back) + blocks * len(AGAIN[sp, dropout])
        letters = sorted(back + blocks * AGAIN[sp, dropout])
        assert sorted(more) == letters, kinds


def test_ranks_that_recompute_unlike_parts_are_told() -> None:
    """Collectives in another order end in an error that says so, and do not hang."""

    def unlike() -> None:
        axis = world_axis("tp")
        forward(build(axis, sp=True, kinds=("layer",) if axis.rank else ())).backward()

    with pytest.raises(RuntimeError, match="the ranks do different things"):
        run_ranks(unlike, 2, timeout_s=20)
