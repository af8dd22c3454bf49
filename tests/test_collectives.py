"""Forward values, the one property that proves every backward, and what planted faults do to it."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from penteract import collectives as c
from penteract import compat
from penteract.mesh import Axis, single
from penteract.placement import even_sizes
from penteract.testing import run_ranks, world_axis

F64 = torch.float64
Fault = Callable[[Tensor, Axis, dict[str, Any]], Tensor]
# name: (the type over the axis of the input, of the output)
TYPES = {
    "replicate": "IR",
    "all_reduce": "PI",
    "all_gather": "SR",
    "reduce_scatter": "PS",
    "split": "IS",
    "gather": "SI",
    "all_to_all": "SS",
    "shift": "SS",
}
DUAL = {"S": "S", "I": "I", "R": "P", "P": "R"}


def random_value(letter: str, shape: list[int], seed: int, rank: int) -> Tensor:
    """Equal on all ranks for I and R, of its own on each rank for S and P."""
    own = 1 + rank if letter in "SP" else 0
    return torch.randn(shape, generator=torch.Generator().manual_seed(97 * seed + own), dtype=F64)


def inner(x: Tensor, y: Tensor, letter: str, axis: Axis) -> Tensor:
    """<x, y> over all ranks; a pair of I is one value, counted once."""
    here = (x * y).sum() if letter != "I" or axis.rank == 0 else torch.zeros((), dtype=F64)
    return c.all_reduce_(here.detach().clone(), axis)


def local_shape(name: str, case: dict[str, Any], axis: Axis) -> list[int]:
    shape = [3, 2, 3]
    dim, n, rank = case["dim"], axis.size, axis.rank
    if name == "all_to_all":
        return [sum(case["rows"][rank][:n]), 2, 3]
    shape[dim] = case["total"]
    if TYPES[name][0] == "S" and name != "shift":
        shape[dim] = parts(case, n)[rank]
    return shape


def parts(case: dict[str, Any], n: int) -> list[int]:
    if not case["uneven"]:
        return even_sizes(case["total"], n)
    return [0] * (n - 1) + [case["total"]]


def call(name: str, x: Tensor, axis: Axis, case: dict[str, Any]) -> Tensor:
    fn = getattr(c, name)
    if name in ("replicate", "all_reduce"):
        return fn(x, axis)
    if name == "shift":
        return fn(x, axis, case["k"])
    if name == "all_to_all":
        rows = [row[: axis.size] for row in case["rows"][: axis.size]]
        return fn(x, axis, rows[axis.rank], [row[axis.rank] for row in rows])
    return fn(x, axis, case["dim"], sizes=parts(case, axis.size))


def adjoint_gap(name: str, case: dict[str, Any], fault: Fault | None = None) -> float:
    """|<f(x), g> − <x, fᵀ(g)>| on this process's ranks, with `fault` in the place of f if given."""
    axis, (given_, returned) = world_axis(), TYPES[name]
    x = random_value(given_, local_shape(name, case, axis), 1, axis.rank).requires_grad_()
    y = fault(x, axis, case) if fault else call(name, x, axis, case)
    g = random_value(DUAL[returned], list(y.shape), 2, axis.rank)
    # Not autograd.grad(y, x, g), which loads a second's worth of modules in every process.
    (y * g).sum().backward()
    assert x.grad is not None
    return abs((inner(y, g, returned, axis) - inner(x, x.grad, given_, axis)).item())


CASES = st.fixed_dictionaries(
    {
        "dim": st.sampled_from([0, -1, 1]),
        "total": st.integers(0, 9),
        "uneven": st.booleans(),
        "k": st.integers(-5, 5),
        "rows": st.lists(
            st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=4, max_size=4
        ),
    }
)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_backward_is_the_transpose_of_its_forward(n: int) -> None:
    # Without shrinking: every example starts processes.
    @settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.generate])
    @given(st.lists(CASES, min_size=4, max_size=8))
    def check(cases: list[dict[str, Any]]) -> None:
        def gaps() -> list[float]:
            return [adjoint_gap(name, case) for case in cases for name in TYPES]

        assert max(run_ranks(gaps, n)[0]) < 1e-12

    check()


def wrong(there: Callable[..., Tensor], back: Callable[..., Tensor]) -> Fault:
    """f with another backward, both given (tensor, axis, case)."""

    def fault(x: Tensor, axis: Axis, case: dict[str, Any]) -> Tensor:
        return c._pair(x, lambda x: there(x, axis, case), lambda g: back(g, axis, case))

    return fault


def same(x: Tensor, axis: Axis, case: dict[str, Any]) -> Tensor:
    return x


def total_of(x: Tensor, axis: Axis, case: dict[str, Any]) -> Tensor:
    return c.start_all_reduce(x, axis).wait()


def joined(x: Tensor, axis: Axis, case: dict[str, Any]) -> Tensor:
    return c.start_all_gather(x, axis, case["dim"], sizes=parts(case, axis.size)).wait()


def summed(x: Tensor, axis: Axis, case: dict[str, Any]) -> Tensor:
    return c.start_reduce_scatter(x, axis, case["dim"], sizes=parts(case, axis.size)).wait()


def slice_of(x: Tensor, axis: Axis, case: dict[str, Any]) -> Tensor:
    return c.own_part(x, axis, case["dim"], parts(case, axis.size))


def own_slice_in_zeros(x: Tensor, axis: Axis, case: dict[str, Any]) -> Tensor:
    whole, sizes = joined(x, axis, case), parts(case, axis.size)
    out = torch.zeros_like(whole)
    start = sum(sizes[: axis.rank])
    out.narrow(case["dim"], start, sizes[axis.rank]).copy_(x)
    return out


def mean_of(x: Tensor, axis: Axis, case: dict[str, Any]) -> Tensor:
    return total_of(x, axis, case) / axis.size


def exchanged(x: Tensor, axis: Axis, case: dict[str, Any]) -> Tensor:
    return c.start_all_to_all(x, axis, *[[1] * axis.size] * 2).wait()


def shifted(x: Tensor, axis: Axis, case: dict[str, Any]) -> Tensor:
    return c.start_shift(x, axis, 1).wait()


def doubled(x: Tensor, axis: Axis, case: dict[str, Any]) -> Tensor:
    return summed(x, axis, case) * axis.size


@pytest.mark.parametrize(
    ("name", "there", "back"),
    [
        ("replicate", same, same),
        ("replicate", same, mean_of),
        ("all_reduce", total_of, total_of),
        ("all_gather", joined, slice_of),
        ("all_gather", joined, doubled),
        ("reduce_scatter", summed, own_slice_in_zeros),
        ("split", slice_of, own_slice_in_zeros),
        ("gather", joined, summed),
        ("all_to_all", exchanged, same),
        ("shift", shifted, shifted),
        ("shift", shifted, same),
    ],
)
def test_the_property_catches_a_wrong_backward(
    name: str, there: Callable[..., Tensor], back: Callable[..., Tensor]
) -> None:
    case = {"dim": 0, "total": 7, "uneven": False, "k": 1, "rows": [[1] * 4] * 4}
    right, planted = run_ranks(
        lambda: (adjoint_gap(name, case), adjoint_gap(name, case, wrong(there, back))), 3
    )[0]
    assert right < 1e-12
    assert planted > 1e-3


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_forward_values(n: int, dim: int) -> None:
    shape, sizes = [5, 6, 7], even_sizes([5, 6, 7][dim], n)
    values = [random_value("S", shape, 3, rank) for rank in range(n)]
    total = functools.reduce(torch.add, values)

    def results() -> dict[str, Tensor]:
        axis = world_axis()
        x, part = values[axis.rank], values[0].split(sizes, dim)[axis.rank]
        return {
            "replicate": c.replicate(x, axis),
            "all_reduce": c.all_reduce(x, axis),
            "all_gather": c.all_gather(part, axis, dim, sizes=sizes),
            "reduce_scatter": c.reduce_scatter(x, axis, dim),
            "split": c.split(values[0], axis, dim),
            "gather": c.gather(part, axis, dim, sizes=sizes),
            "shift": c.shift(x, axis, 1),
            "even_gather": c.all_gather(x, axis, dim),
        }

    for rank, found in enumerate(run_ranks(results, n)):
        wanted = {
            "replicate": values[rank],
            "all_reduce": total,
            "all_gather": values[0],
            "reduce_scatter": total.split(sizes, dim)[rank],
            "split": values[0].split(sizes, dim)[rank],
            "gather": values[0],
            "shift": values[rank - 1],
            "even_gather": torch.cat(values, dim),
        }
        for name, value in found.items():
            # Sums are taken in rank order, so that even they are equal to the bit.
            assert torch.equal(value, wanted[name]), (rank, name)
            assert value.is_contiguous(), name


@pytest.mark.parametrize("uneven", [False, True])
def test_sums_by_the_backend_itself(uneven: bool) -> None:
    """The way taken on a GPU, here over gloo: parts padded to equal length."""

    def results() -> Any:
        compat.sums_are_ours = lambda x: False
        cases = [{"dim": dim, "total": 6, "uneven": uneven} for dim in (0, 1, -1)]
        gaps = [adjoint_gap(name, case) for case in cases for name in list(TYPES)[:6]]
        axis, x = world_axis(), torch.arange(10.0).view(2, 5)
        half = c.all_reduce(x.to(torch.bfloat16), axis).dtype
        return max(gaps), c.reduce_scatter(x, axis, 1).tolist(), half

    columns = [[[0, 3], [15, 18]], [[6, 9], [21, 24]], [[12], [27]]]
    for rank, (gap, part, half) in enumerate(run_ranks(results, 3)):
        assert gap < 1e-12
        assert part == columns[rank]
        assert half is torch.bfloat16


def test_all_to_all_sends_each_rank_its_rows() -> None:
    rows = [[2, 0, 1], [0, 0, 3], [1, 0, 0]]  # rank 1 receives nothing

    def received() -> tuple[list[float], list[float]]:
        axis = world_axis()
        x = torch.arange(3.0) + 10 * axis.rank
        uneven = c.all_to_all(
            x[: sum(rows[axis.rank])], axis, rows[axis.rank], [row[axis.rank] for row in rows]
        )
        return uneven.tolist(), c.all_to_all(x, axis).tolist()

    assert run_ranks(received, 3) == [
        ([0, 1, 20], [0, 10, 20]),
        ([], [1, 11, 21]),
        ([2, 10, 11, 12], [2, 12, 22]),
    ]


def test_size_one_returns_the_tensor_itself() -> None:
    x, axis = torch.ones(3, 2, requires_grad=True), single("tp")
    for name in TYPES:
        assert getattr(c, name)(x, axis) is x
    assert c.declare(x, axis, c.R) is x
    for start in (c.start_all_reduce, c.start_all_gather, c.start_reduce_scatter, c.start_shift):
        assert start(x, axis).wait() is x
    y = torch.ones(3)
    assert c.all_reduce_(y, axis, "max") is y
    assert c.broadcast_(y, axis) is y
    assert c.exchange(b"abc", axis) == [b"abc"]
    c.barrier(axis)
    assert axis.traffic.calls == {}


@pytest.mark.parametrize("numel", [1, 1000, 100_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_sums_are_equal_to_the_bit_on_every_rank(numel: int, dtype: torch.dtype) -> None:
    n = 4
    values = [(random_value("S", [numel], 4, rank) * 50).to(dtype) for rank in range(n)]
    exact = functools.reduce(torch.add, [v.to(F64) for v in values])

    def sums() -> tuple[Tensor, Tensor, Tensor]:
        axis = world_axis()
        x = values[axis.rank]
        pending = c.start_all_reduce(x, axis)
        scattered = c.start_reduce_scatter(x, axis).wait()
        total, scattered = (
            pending.wait(),
            c.start_all_gather(scattered, axis, sizes=even_sizes(numel, n)).wait(),
        )
        in_place = x.clone()
        assert c.all_reduce_(in_place, axis) is in_place
        return total, scattered, in_place

    results = run_ranks(sums, n)
    # One rounding of a sum in float32, not one at every addition.
    limit = {torch.bfloat16: 2**-8, torch.float32: 1e-6, torch.int64: 0.0}[dtype]
    scale = functools.reduce(torch.add, [v.to(F64).abs() for v in values])
    for total, scattered, in_place in results:
        assert torch.equal(total, results[0][0])
        assert torch.equal(total, in_place)
        assert torch.equal(scattered, results[0][1])
        for found in (total, scattered):
            bound = limit * (exact.abs() if dtype is torch.bfloat16 else scale) + 1e-5
            assert bool(((found.to(F64) - exact).abs() <= (bound if limit else 0)).all())


def test_in_place_operations() -> None:
    def results() -> Any:
        axis = world_axis()
        weight = torch.nn.Parameter(torch.full((2,), float(axis.rank)))
        strided = torch.full((3, 2), float(axis.rank)).T
        c.broadcast_(strided, axis, 1)
        return (
            c.all_reduce_(torch.tensor([axis.rank, -axis.rank]), axis, "max").tolist(),
            c.all_reduce_(torch.tensor([axis.rank, -axis.rank]), axis, "min").tolist(),
            c.all_reduce_(torch.full((3, 2), 1.0 + axis.rank).T, axis).tolist(),
            c.broadcast_(weight, axis, 2).tolist(),
            strided.tolist(),
            c.all_reduce_(torch.zeros(0), axis).tolist(),
        )

    wanted = ([2, 0], [0, -2], [[6.0] * 3] * 2, [2.0, 2.0], [[1.0] * 3] * 2, [])
    assert run_ranks(results, 3) == [wanted] * 3
    with pytest.raises(ValueError, match="no op 'mean': choose from sum, max, min"):
        c.all_reduce_(torch.ones(1), single("tp"), "mean")


def test_exchange_carries_bytes_of_any_length() -> None:
    payloads = [b"", b"\x00\xff", b"a longer one \x00"]

    def results() -> Any:
        axis = world_axis()
        c.barrier(axis)
        return c.exchange(payloads[axis.rank], axis), c.exchange(b"", axis)

    assert run_ranks(results, 3) == [(payloads, [b""] * 3)] * 3


@pytest.mark.parametrize("n", [2, 4])
def test_shifts_stay_ordered_forward_and_backward(n: int) -> None:
    def results() -> Any:
        axis = world_axis()
        x = torch.full((4,), float(axis.rank), requires_grad=True)
        pending = [c.start_shift(x + 10 * i, axis, k) for i, k in enumerate((1, -1, 1, 2))]
        got = [p.wait()[0].item() for p in pending]
        y = c.shift(x, axis, 1) * 1 + c.shift(x, axis, 1) * 2 + c.shift(x, axis, -1) * 4
        (y * float(1 + axis.rank)).sum().backward()
        return got, x.grad[0].item()

    for rank, (got, grad) in enumerate(run_ranks(results, n)):
        before, behind, far = (rank - 1) % n, (rank + 1) % n, (rank - 2) % n
        assert got == [before, 10 + behind, 20 + before, 30 + far]
        assert grad == 3 * (1 + behind) + 4 * (1 + before)


def test_two_operations_in_flight_and_waits_twice() -> None:
    def results() -> Any:
        axis = world_axis()
        x = torch.arange(4.0) + axis.rank
        first, second = c.start_all_gather(x, axis), c.start_all_reduce_(x.clone(), axis)
        assert second.wait() is second.wait()
        return first.wait().tolist(), second.wait().tolist()

    assert run_ranks(results, 2) == [([0, 1, 2, 3, 1, 2, 3, 4], [1, 3, 5, 7])] * 2


def test_float8_and_bool_travel() -> None:
    def results() -> Any:
        axis = world_axis()
        x = (torch.arange(4.0) + axis.rank).to(torch.float8_e4m3fn)
        moved = c.all_gather(x, axis), c.all_to_all(x, axis), c.shift(x, axis)
        flag = c.broadcast_(torch.tensor(axis.rank == 1), axis, 1)
        return [m.dtype == x.dtype and m.float().tolist() for m in moved], flag.item()

    found = run_ranks(results, 2)
    assert found[0] == ([[0, 1, 2, 3, 1, 2, 3, 4], [0, 1, 1, 2], [1, 2, 3, 4]], True)


def test_traffic_counts_the_bytes_that_leave() -> None:
    def results() -> tuple[dict[str, int], dict[str, int]]:
        axis = world_axis()
        x = torch.ones(9, requires_grad=True)  # 36 bytes
        sizes = [4, 4, 1]
        c.all_reduce(c.replicate(x, axis), axis).sum().backward()  # all_reduce twice: 48 each
        c.all_gather(x[: sizes[axis.rank]], axis, sizes=sizes).sum().backward()
        c.all_to_all(x, axis).sum().backward()  # 24 each way
        c.shift(x, axis, 2).sum().backward()  # 36 each way
        c.broadcast_(x.detach().clone(), axis, 1)
        c.exchange(b"abc"[: axis.rank], axis)
        return axis.traffic.calls, axis.traffic.bytes

    found = run_ranks(results, 3)
    for rank, (calls, sent) in enumerate(found):
        own = 4 * [4, 4, 1][rank]
        assert calls == {
            "all_reduce": 2,
            "all_gather": 1,
            "reduce_scatter": 1,
            "all_to_all": 2,
            "shift": 2,
            "broadcast": 1,
            "exchange": 1,
        }
        assert sent == {
            "all_reduce": 96,
            "all_gather": 2 * own,
            "reduce_scatter": 36 - own,
            "all_to_all": 48,
            "shift": 72,
            "broadcast": 0 if rank == 0 else 36,
            "exchange": 2 * (8 + rank),
        }


def test_wrong_sizes_are_refused_with_the_numbers() -> None:
    axis = Axis("tp", 2, 1, (0, 1))
    x = torch.ones(5, 2)
    with pytest.raises(ValueError, match=r"rank 1 of 2 holds 5 along dim 0.*\[2, 3\]"):
        c.all_gather(x, axis, sizes=[2, 3])
    with pytest.raises(ValueError, match=r"x has 5 along dim 0.*sum 4.*such as \[3, 2\]"):
        c.split(x, axis, sizes=[2, 2])
    with pytest.raises(ValueError, match=r"5 rows are not 2 equal blocks.* 4 or 6 rows"):
        c.all_to_all(x, axis)
    with pytest.raises(ValueError, match="both send and receive sizes"):
        c.all_to_all(x, axis, [2, 3])
    with pytest.raises(ValueError, match="with sum 5, the rows of x; it is 6"):
        c.all_to_all(x, axis, [3, 3], [3, 3])


@pytest.mark.skipif(
    torch.version.cuda is not None,
    reason="under fake tensors torch's CUDA builds start threads, fatal after a fork",
)
def test_under_fake_tensors_with_a_fake_process_group() -> None:
    def shapes() -> Any:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=64)
        axis = world_axis()
        with FakeTensorMode():
            x = torch.ones(8, 4, requires_grad=True)
            sizes = [8] * 63 + [3]
            results = [
                c.all_reduce(c.replicate(x, axis), axis),
                c.all_gather(x, axis, 1),
                c.gather(x, axis, sizes=sizes),
                c.reduce_scatter(x, axis),
                c.split(x, axis),
                c.all_to_all(x, axis, [2] * 4 + [0] * 60, [1] * 64),
                c.shift(x, axis, 5),
                c.all_reduce_(torch.ones(1 << 20), axis),
                c.broadcast_(torch.ones(2), axis),
            ]
            sum(r.sum() for r in results).backward()
            shapes = [list(r.shape) for r in results], list(x.grad.shape)
        dist.destroy_process_group()
        return shapes

    assert run_ranks(shapes, 1)[0] == (
        [[8, 4], [8, 256], [507, 4], [1, 4], [1, 4], [64, 4], [8, 4], [1 << 20], [2]],
        [8, 4],
    )


@pytest.mark.slow
# The compiler looks at the gradients of every tensor that it resumes with.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_gradients_are_right_under_torch_compile() -> None:
    import torch._dynamo  # here, not in every rank

    def block(x: Tensor, w: Tensor, axis: Axis) -> Tensor:
        y = c.all_reduce(torch.tanh(c.replicate(x, axis) * w), axis)
        return c.reduce_scatter(c.all_gather(c.split(y, axis, 1), axis, 1) * w, axis).square()

    def results() -> Any:
        axis = world_axis()
        runs = []
        for backend in (None, "eager", "aot_eager"):
            fn = torch.compile(block, backend=backend) if backend else block
            x = torch.linspace(-1, 1, 16, dtype=F64).view(4, 4).requires_grad_()
            w = (torch.ones(4, 4, dtype=F64) * (1 + axis.rank)).requires_grad_()
            y = fn(x, w, axis)
            y.sum().backward()
            runs.append((y.detach(), x.grad, w.grad))
        return runs

    for plain, *compiled in run_ranks(results, 2):
        for run in compiled:
            torch.testing.assert_close(run, plain, rtol=1e-12, atol=0)
