"""Faults that experts invite, planted: `test_experts` would see each."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity.matrix import Cell
from parity.training import first_difference, reference, samples_of
from reference.mixture import Padding
from torch import Tensor

from penteract.config import Config
from penteract.mesh import Axis, Mesh, single
from penteract.nn import balance as balance_module
from penteract.nn import experts as experts_module
from penteract.nn import moe as moe_module
from penteract.nn.balance import Losses, counted, moved_bias
from penteract.nn.experts import Experts
from penteract.nn.moe import Router, Seen
from penteract.nn.router import RouterSpec, Routing, Tokens, _Whole
from penteract.parallel.buckets import Sharding
from penteract.parallel.expert import grouped as grouped_module
from penteract.parallel.expert.all_to_all import _Sent
from penteract.parallel.expert.travel import Travel
from penteract.placement import AxisUse, Placement
from penteract.train import assembly
from penteract.train.loads import Loads
from penteract.train.run import Run

# The first block has no experts, so that a fault in them cannot show in what the next ones choose.
LATE = Cell(
    "llama", dp=2, micro_batch=1, global_batch=3, bucket_bytes=256, dropout=0.0,
    moe="second-block", ep=2,
)  # fmt: skip
BIASES = dataclasses.replace(LATE, model="gpt2", dp=1, tp=2, ep=1, etp=2)
CUT = dataclasses.replace(LATE, model="gpt2", ep=1, etp=2)
TP = dataclasses.replace(LATE, dp=1, tp=2, etp=1)
GATE = dataclasses.replace(TP, moe="shared-gate", sp=True)
CP = dataclasses.replace(LATE, dp=1, cp=2, moe="aux")
CAPACITY = dataclasses.replace(CP, moe="half-by-score")
SINKHORN = dataclasses.replace(CP, moe="sinkhorn")
PADDED = dataclasses.replace(LATE, moe="aux", padded=True)
RAGGED = dataclasses.replace(LATE, moe="aux", ragged=True)
BIAS = dataclasses.replace(LATE, moe="bias")
AGAIN = dataclasses.replace(LATE, recompute=("layer",), dropout=0.1)  # which needs all outputs

Fault = Callable[[pytest.MonkeyPatch], None]


def _not_partial(patch: pytest.MonkeyPatch, name: str) -> None:
    declared = moe_module.replicated

    def whole(full: str, *arguments: Any, tp: AxisUse, **options: Any) -> Placement:
        use: AxisUse = "replicated" if full.endswith(name) else tp
        return declared(full, *arguments, tp=use, **options)

    patch.setattr(moe_module, "replicated", whole)


def router_gradient_of_own_tokens(patch: pytest.MonkeyPatch) -> None:
    """It is not summed over tp."""
    _not_partial(patch, "router.weight")


def gate_gradient_of_own_tokens(patch: pytest.MonkeyPatch) -> None:
    """With sequence parallelism the shared experts' gate sees some rows of the stream."""
    _not_partial(patch, "shared_gate.weight")


def expert_gradients_divided_by_ep(patch: pytest.MonkeyPatch) -> None:
    """As if the data ranks had averaged."""
    write = grouped_module.write_product

    def less(a: Tensor, b: Tensor, out: Tensor, overwrite: bool) -> None:
        write(a / 2, b, out, overwrite)

    patch.setattr(grouped_module, "write_product", less)


def experts_summed_over_all_data_ranks(patch: pytest.MonkeyPatch) -> None:
    """Ranks that hold other experts are among them."""

    def everywhere(config: Config, mesh: Mesh) -> tuple[Sharding, Sharding]:
        axis, zero = mesh.axis("dp-cp"), config.parallel.zero
        named = dataclasses.replace(axis, name="edp")
        return tuple(Sharding.over(each, zero, 1, True, False) for each in (axis, named))

    patch.setattr(assembly, "sharding_of", everywhere)


def down_bias_on_every_etp_rank(patch: pytest.MonkeyPatch) -> None:
    init = Experts.__init__

    def everywhere(self: Experts, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        self.first = True

    patch.setattr(Experts, "__init__", everywhere)


def down_bias_gradient_not_summed(patch: pytest.MonkeyPatch) -> None:
    """Only the first etp rank has one."""
    axes = experts_module.expert_axes
    patch.setattr(
        experts_module,
        "expert_axes",
        lambda etp: axes("replicated" if etp == "partial" else etp),
    )


def loads_of_own_tokens(patch: pytest.MonkeyPatch) -> None:
    """f is counted on a rank that holds a part of the micro-batch."""
    patch.setattr(balance_module, "all_reduce_", lambda x, axis: x)


def _with_tokens(patch: pytest.MonkeyPatch, change: Callable[[Tokens], Tokens]) -> None:
    def made(rows: Tensor, real: Tensor, parts: Axis) -> Tokens:
        return change(Tokens(rows, real, parts))

    patch.setattr(moe_module, "Tokens", made)


def padding_is_routed(patch: pytest.MonkeyPatch) -> None:
    _with_tokens(patch, lambda tokens: tokens._replace(real=torch.ones_like(tokens.real)))


def decided_by_own_tokens(patch: pytest.MonkeyPatch) -> None:
    """Capacity and sinkhorn are those of a rank's part of the micro-batch."""
    of = _Whole.of

    def own(x: Tensor, tokens: Tokens) -> _Whole:
        return of(x, tokens._replace(parts=single("tp-cp")))

    patch.setattr(_Whole, "of", own)


def weights_not_normalised(patch: pytest.MonkeyPatch) -> None:
    route = moe_module.route

    def raw(spec: RouterSpec, *arguments: Any) -> Routing:
        return route(dataclasses.replace(spec, normalise=False), *arguments)

    patch.setattr(moe_module, "route", raw)


def _with_losses(patch: pytest.MonkeyPatch, change: Callable[[Losses, Tokens], Losses]) -> None:
    found = moe_module.losses

    def others(*arguments: Any, **options: Any) -> Losses:
        _, _, _, tokens = arguments
        return change(found(*arguments, **options), tokens)

    patch.setattr(moe_module, "losses", others)


def loads_of_this_micro_batch(patch: pytest.MonkeyPatch) -> None:
    """In place of those of the last step."""
    found = moe_module.losses

    def now(
        spec: RouterSpec, logits: Tensor, routing: Routing, *others: Any, **options: Any
    ) -> Losses:
        load = counted(spec, routing.chosen)[0]
        return found(spec, logits, routing, *others, **{**options, "load": load})

    patch.setattr(moe_module, "losses", now)


def a_mean_of_micro_batches(patch: pytest.MonkeyPatch) -> None:
    """Each counts alike, however many tokens it has."""
    n = sum(len(doc.tokens) for i in range(RAGGED.global_batch) for doc in samples_of(RAGGED)(i))

    def alike(found: Losses, tokens: Tokens) -> Losses:
        t = max(1, int(tokens.real.sum()))
        return found._replace(balance=found.balance * n / (t * RAGGED.global_batch))

    _with_losses(patch, alike)


def losses_a_counted_label(patch: pytest.MonkeyPatch) -> None:
    """Divided by the labels that count, as the cross-entropy is, and not by the tokens."""
    totals = Run._totals

    def first(self: Run, *several: Any) -> Tensor:
        found = totals(self, *several)
        return found[:1].expand(len(found))

    patch.setattr(Run, "_totals", first)


def bias_moves_by_own_tokens(patch: pytest.MonkeyPatch) -> None:
    def commit(self: Loads) -> None:
        for router in self.routers.values():
            assert router.bias is not None
            load = torch.stack([seen.load for seen in router.seen.values()]).sum(0)
            router.bias.copy_(moved_bias(router.bias, load, router.spec.bias_rate))

    patch.setattr(Loads, "commit", commit)


def counted_again_in_recomputation(patch: pytest.MonkeyPatch) -> None:
    class Adding(dict[int, Seen]):
        def __setitem__(self, key: int, value: Seen) -> None:
            old = self.get(key)
            if old is not None:
                value = Seen(old.load + value.load, old.sums + value.sums)
            super().__setitem__(key, value)

    init = Router.__init__

    def adding(self: Router, *arguments: Any) -> None:
        init(self, *arguments)
        self.seen = Adding()

    patch.setattr(Router, "__init__", adding)


def results_of_one_rank_only(patch: pytest.MonkeyPatch) -> None:
    """Of a token that went to two ranks the second's overwrites that of the first."""

    def leave(self: _Sent, y: Tensor) -> Tensor:
        (back,) = Travel(self.turns, self.back, self.there, y).wait()
        return back.new_zeros(self.length, back.shape[1]).index_copy(0, self.token, back)

    patch.setattr(_Sent, "leave", leave)


FAULTS: tuple[tuple[Fault, Cell, str], ...] = (  # and the first quantity in which each shows
    (router_gradient_of_own_tokens, TP, "gradients"),
    (gate_gradient_of_own_tokens, GATE, "gradients"),
    (expert_gradients_divided_by_ep, LATE, "gradients"),
    (experts_summed_over_all_data_ranks, LATE, "gradients"),
    (down_bias_on_every_etp_rank, BIASES, "loss"),
    (down_bias_on_every_etp_rank, CUT, "loss"),
    (down_bias_gradient_not_summed, BIASES, "weights"),  # by the norm of the rank that has none
    (loads_of_own_tokens, CP, "balance loss"),
    (padding_is_routed, PADDED, "routed"),
    (decided_by_own_tokens, CAPACITY, "routed"),
    (decided_by_own_tokens, SINKHORN, "routed"),
    (weights_not_normalised, LATE, "loss"),
    (loads_of_this_micro_batch, LATE, "balance loss"),
    (a_mean_of_micro_batches, RAGGED, "balance loss"),
    (losses_a_counted_label, LATE, "balance loss"),
    (bias_moves_by_own_tokens, BIAS, "kept"),
    (counted_again_in_recomputation, AGAIN, "routed"),
    (results_of_one_rank_only, LATE, "loss"),
)


@pytest.mark.parametrize(
    ("fault", "cell", "shows"), FAULTS, ids=[f"{f.__name__}-{c.moe}" for f, c, _ in FAULTS]
)
def test_a_planted_fault_is_seen(
    fault: Fault, cell: Cell, shows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference(cell)  # before anything is broken
    fault(monkeypatch)
    assert first_difference(cell) == shows


CELLS = list(dict.fromkeys(cell for _, cell, _ in FAULTS))


@pytest.mark.parametrize("cell", CELLS, ids=[f"{c.model}-{c.moe}" for c in CELLS])
def test_without_a_fault_there_is_none(cell: Cell) -> None:
    assert first_difference(cell) is None


def test_padding_of_samples_is_there() -> None:
    """A sample with some, and one that is nothing else."""
    kinds = [{type(doc) is Padding for doc in samples_of(PADDED)(i)} for i in range(3)]
    assert {True} in kinds
    assert {True, False} in kinds
