"""The checking mode: types move by its rules, and each planted mistake is refused at the call."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function_unary

from penteract.checking import KindError, checking, typed
from penteract.collectives import (
    I,
    Operation,
    P,
    R,
    S,
    all_gather,
    all_reduce,
    all_to_all,
    declare,
    gather,
    reduce_scatter,
    replicate,
    shift,
    split,
)
from penteract.mesh import Axis, single
from penteract.testing import run_ranks, world_axis

TP = single("tp")


def value(kind, *shape: int, axis: Axis = TP) -> Tensor:
    return declare(torch.randn(shape or (4, 6), requires_grad=True), axis, kind)


def kind_of(x: Tensor):
    return typed(x).get("tp")


def mlp(x: Tensor, up: Tensor, down: Tensor, bias: Tensor, axis: Axis, fault: str = "") -> Tensor:
    """A column then a row layer on x [t, h] I, as the strategy will write it, or with a fault."""
    x = x if fault == "no replicate" else replicate(x, axis)
    y = torch.tanh(F.linear(x, up))  # [t, f/tp]
    y = F.linear(y, down)  # [t, h] P(tp)
    if fault != "no declare":
        declare(y, axis, P)
    if fault == "bias on a partial sum":
        y = y + bias
    if fault != "no reduction":
        y = all_reduce(y, axis)
    if fault == "twice":
        y = all_reduce(y, axis)
    return y + bias


def mlp_loss(axis: Axis, fault: str = "") -> tuple[Tensor, list[Tensor]]:
    weights = [torch.randn(size, requires_grad=True) for size in ((8, 6), (6, 8), (6,))]
    up, down, bias = weights
    seeds = {
        "up": (up, {axis.name: S(0)}),
        "down": (down, {axis.name: S(1)}),
        "bias": (bias, {axis.name: I}),
    }
    with checking(seeds):
        x = declare(torch.randn(4, 6, requires_grad=True), axis, I)
        loss = mlp(x, up, down, bias, axis, fault).square().sum()
        loss.backward()
        kinds = [typed(w.grad)[axis.name] for w in weights]
    return loss, kinds


def test_a_right_block_passes_and_its_gradients_have_the_declared_types() -> None:
    _, kinds = mlp_loss(TP)
    assert kinds == [S(0), S(1), I]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("bias on a partial sum", r"add over 'tp' adds I 'bias' \[6\] to the partial sum P"),
        (
            "no replicate",
            r"linear over 'tp' mixes I \[4, 6\] with S\(0\) 'up'.*replicate\(x, axis\)",
        ),
        ("twice", r"all_reduce over 'tp' takes P and gives I, but found I.*leave the call out"),
        ("no reduction", r"add over 'tp' adds I 'bias' \[6\] to the partial sum P"),
        ("no declare", r"all_reduce over 'tp' takes P.*found S.*declare\(x, axis, P\)"),
    ],
)
def test_planted_mistakes_are_refused(fault: str, message: str) -> None:
    with pytest.raises(KindError, match=message):
        mlp_loss(TP, fault)


def test_gather_where_all_gather_is_needed() -> None:
    with checking():
        weight = value(S(0), 3, 6)
        x = value(S(0), 4, 6)
        assert kind_of(F.linear(all_gather(x, TP), weight)) == S()
        with pytest.raises(KindError, match=r"mixes I \[4, 6\] with S\(0\) \[3, 6\]"):
            F.linear(gather(x, TP), weight)


def test_a_loss_of_a_partial_sum_is_refused() -> None:
    with checking():
        logits = value(P, 4, 8)
        with pytest.raises(KindError, match="cross_entropy over 'tp' is not linear in the partial"):
            F.cross_entropy(logits, torch.zeros(4, dtype=torch.int64))
        F.cross_entropy(all_reduce(logits, TP), torch.zeros(4, dtype=torch.int64))


def test_backward_from_a_replicated_loss_is_refused() -> None:
    with checking():
        for kind in (I, P, S()):
            declare(torch.ones((), requires_grad=True), TP, kind).clone().backward()
        loss = value(R).sum()
        for backward in (
            loss.backward,
            lambda: torch.autograd.backward([loss]),
            lambda: torch.autograd.grad(loss, [loss]),
        ):
            with pytest.raises(KindError, match="backward over 'tp' from R"):
                backward()


def test_gradients_have_dual_types() -> None:
    with checking():
        for kind, dual in ((S(1), S(1)), (R, P), (I, I)):
            x = value(kind)
            loss = x.sum() if kind == I else all_reduce(declare(x.sum(), TP, P), TP)
            unused = value(I)
            grads = torch.autograd.grad(loss, [x, unused], allow_unused=True, retain_graph=True)
            assert kind_of(grads[0]) == dual
            assert grads[1] is None
            loss.backward()
            assert x.grad is not None
            assert kind_of(x.grad) == dual


CALLS = {
    replicate: ("I", "R"),
    all_reduce: ("P", "I"),
    all_gather: ("S", "R"),
    reduce_scatter: ("P", "S"),
    split: ("I", "S"),
    gather: ("S", "I"),
    all_to_all: ("S", "S"),
    shift: ("S", "S"),
}
KINDS = {"S": S(0), "R": R, "I": I, "P": P}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("letter", "SRIP")
def test_collectives_take_and_give_their_types(call, letter: str) -> None:
    takes, gives = CALLS[call]
    with checking():
        x = value(KINDS[letter])
        arguments = (x, TP, 1) if call is shift else (x, TP)
        if letter == takes:
            result = call(*arguments)
            assert kind_of(result) == KINDS[gives]
            assert kind_of(x) == KINDS[letter]  # although its memory is the same
        else:
            message = (
                f"{call.__name__} over 'tp' takes {takes} and gives {gives}, but found {letter}"
            )
            with pytest.raises(KindError, match=message):
                call(*arguments)
        assert kind_of(call(torch.ones(4, 6), *arguments[1:])).letter == gives  # untyped fits


def test_the_dim_of_a_split_is_followed_where_it_can_be() -> None:
    with checking():
        x = value(S(-1))
        assert kind_of(x) == S(1)
        assert kind_of(torch.tanh(x) * 2 + torch.ones(6)) == S(1)
        assert kind_of(x.T) == kind_of(x.view(6, 4)) == kind_of(x.sum(0)) == S()
        with pytest.raises(KindError, match=r"all_gather over 'tp' along dim 0, but found S\(1\)"):
            all_gather(x, TP, 0)
        assert kind_of(gather(x, TP, -1)) == I
        assert kind_of(reduce_scatter(value(P), TP, -1)) == S(1)
        assert kind_of(gather(x.T, TP, 0)) == I  # not known, so not refused
        with pytest.raises(ValueError, match=r"S\(2\) names a dim .* shape \[4, 6\]"):
            declare(torch.ones(4, 6), TP, S(2))


def test_types_of_mixtures() -> None:
    with checking():
        s, r, i, p = (value(kind) for kind in (S(0), R, I, P))
        mask = declare(torch.ones(4, 6), TP, I)  # needs no gradient
        constant = torch.ones(4, 6)
        assert kind_of(i * i) == kind_of(i * mask) == kind_of(i + constant) == I
        assert kind_of(r * r) == kind_of(r * mask) == R
        assert kind_of(s * r) == kind_of(s * mask) == kind_of(torch.zeros_like(s) + s) == S(0)
        assert kind_of(torch.zeros_like(p)) is None
        for other in (s, r):
            with pytest.raises(KindError, match=r"mul over 'tp' mixes I .* replicate\(x, axis\)"):
                i * other
        buffer = torch.zeros(4, 6)
        buffer[0] = s[0].detach()
        assert kind_of(buffer) == S()


def test_partial_sums_stay_in_linear_operations() -> None:
    with checking():
        p, r, i, s = value(P), value(R), value(I), value(S(0))
        mask = declare(torch.ones(4, 6), TP, I)
        linear = (
            p + value(P), p - p, sum([p, p]), torch.cat([p, p]), 2 * p, p / 2, p * r, p * mask,
            -p, p.sum(), p.T, p.view(6, 4), p[1:], p.double(), p.view_as(i), p.detach(),
        )  # fmt: skip
        assert {kind_of(x) for x in linear} == {P}
        refused = (
            lambda: p + 1, lambda: 1 - p, lambda: p + torch.ones(6), lambda: p + i, lambda: p + r,
            lambda: p * p, lambda: p * i, lambda: p * s, lambda: r / p, lambda: 1 / p,
            p.relu, lambda: torch.cat([p, i]), lambda: p @ r.T, lambda: F.linear(p, r),
        )  # fmt: skip
        for operation in refused:
            with pytest.raises(KindError, match="partial sum P"):
                operation()
        counts = declare(torch.arange(3), TP, P)
        assert kind_of((counts + counts)[torch.tensor([0, 1])]) == P
        with pytest.raises(KindError, match="adds the number 1 to the partial sum P"):
            counts + 1
        with pytest.raises(KindError, match="linear over 'tp' is not linear in the partial sum"):
            F.linear(p, r, value(I, 4))
        assert "tensor" in repr(p)  # looking is no operation


def test_each_axis_is_checked_by_itself() -> None:
    dp, fused = single("dp"), single("tp-cp")
    with checking():
        x = declare(value(I), dp, S(0))
        y = replicate(x, TP)
        assert typed(y) == {"tp": R, "dp": S(0)}
        z = declare(declare(torch.ones(2), TP, P), single("cp"), P)
        assert typed(all_reduce(z, fused)) == {"tp": I, "cp": I}
        with pytest.raises(KindError, match="all_reduce over 'cp' takes P"):
            all_reduce(declare(declare(torch.ones(2), TP, P), single("cp"), I), fused)


def test_a_declaration_against_the_seed_is_refused() -> None:
    weight = torch.ones(2)
    with checking({"norm.weight": (weight, {"tp": I})}):
        assert kind_of(declare(weight, TP, I)) == I
        with pytest.raises(KindError, match=r"'norm\.weight' is I by its placement, not R"):
            declare(weight, TP, R)


def test_a_declaration_cannot_undo_what_is_known() -> None:
    with checking():
        for kind, other in ((S(0), P), (S(), S(1)), (R, P), (R, S(0)), (P, P)):
            assert kind_of(declare(value(kind), TP, other)) == other
        for kind, other in ((I, P), (I, R), (I, S(0)), (R, I), (S(0), I), (S(0), R), (P, I)):
            with pytest.raises(KindError, match=f"declare over 'tp': {kind.letter}.*cannot become"):
                declare(value(kind), TP, other)


class _Scaled(Operation):
    @staticmethod
    def forward(ctx, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return g * scale, g * x


class _Columns(Operation):
    """The local columns of a whole x, and their sum over all ranks."""

    @staticmethod
    def kinds(args):
        return args[2], (R, S(0)), I

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, axis: Axis, count: list[int]) -> Tensor:
        count.append(1)
        return (x @ weight.T).sum()

    @staticmethod
    def backward(ctx, g: Tensor) -> None:
        raise NotImplementedError


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    if has_torch_function_unary(x):
        return handle_torch_function(scaled, (x,), x, scale)
    return _Scaled.apply(x, scale)


@pytest.mark.parametrize(("call", "name"), [(_Scaled.apply, "Scaled"), (scaled, r".*\.scaled")])
def test_an_operation_is_one_call_under_the_rules(call, name: str) -> None:
    with checking():
        assert kind_of(call(value(S(0)), value(R))).letter == "S"
        assert kind_of(call(torch.ones(4, 6), value(I))) == I
        with pytest.raises(KindError, match=f"^{name} over 'tp' mixes I"):
            call(value(I), value(R))
        with pytest.raises(KindError, match=f"^{name} over 'tp' is not linear"):
            call(value(P), value(R))
        x = value(I)
        call(x, value(I)).sum().backward()
        assert kind_of(x.grad) == I


def test_an_operation_that_communicates_has_types_of_its_own() -> None:
    count: list[int] = []
    with checking():
        x = declare(value(R), single("dp"), S(0))
        result = _Columns.apply(x, value(S(0)), TP, count)
        assert typed(result) == {"tp": I, "dp": S()}
        assert kind_of(_Columns.apply(torch.ones(4, 6), torch.ones(4, 6), TP, count)) == I
        for arguments, found in (
            ((value(I), value(S(0))), r"found I \[4, 6\] for the R; instead call replicate"),
            ((value(R), value(R)), r"found R \[4, 6\] for the S\(0\); instead a slice by hand"),
            ((value(R), value(S(1))), r"found S\(1\) \[4, 6\] for the S\(0\)"),
        ):
            with pytest.raises(KindError, match=rf"^Columns over 'tp' takes R and S\(0\).*{found}"):
                _Columns.apply(*arguments, TP, count)
        with pytest.raises(KindError, match="Columns over 'dp' mixes I"):
            _Columns.apply(x, declare(value(S(0)), single("dp"), I), TP, count)
    assert len(count) == 2  # a refused one has not computed anything


def test_nothing_is_carried_outside_the_mode() -> None:
    x = torch.ones(2)
    assert declare(x, TP, P) is x
    assert typed(x) == {}
    with checking():
        declare(x, TP, P)
    with checking():
        assert typed(x) == {}
    assert typed(x) == {}


def test_on_ranks_the_mode_changes_no_number() -> None:
    def losses() -> tuple[float, float]:
        axis, found = world_axis("tp"), []
        for mode in (False, True):
            torch.manual_seed(axis.rank)
            up, down = torch.randn(8, 6, requires_grad=True), torch.randn(6, 8, requires_grad=True)
            bias = torch.ones(6, requires_grad=True)
            x = torch.ones(4, 6, requires_grad=True)
            if mode:
                seeds = {"up": (up, {"tp": S(0)}), "bias": (bias, {"tp": I}), "x": (x, {"tp": I})}
                with checking(seeds):
                    mlp(x, up, down, bias, axis).square().sum().backward()
                    assert typed(up.grad) == {"tp": S(0)}
            else:
                mlp(x, up, down, bias, axis).square().sum().backward()
            found.append(torch.cat([w.grad.flatten() for w in (x, up, down, bias)]).tolist())
        return found

    for plain, checked in run_ranks(losses, 2):
        assert plain == checked
