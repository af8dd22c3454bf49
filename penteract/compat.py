"""What differs between torch 2.11 and 2.13, or is private in them: the one place that knows."""

from __future__ import annotations

import functools
import gc
import itertools
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

# torch 2.13 renames two collectives, and its old names warn.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def as_wire(x: Tensor) -> Tensor:
    """The same memory in a dtype that every backend carries: gloo has no float8."""
    is_float8 = x.dtype.is_floating_point and x.element_size() == 1
    return x.view(torch.uint8) if is_float8 else x


def all_gather_into(out: Tensor, x: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Start gathering equal contiguous `x` of every rank into `out`, joined along dim 0."""
    return _gather_into(as_wire(out), as_wire(x), group=group, async_op=True)


def reduce_scatter_into(out: Tensor, x: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Start summing the stacked parts `x` over the ranks, part r into `out` on rank r."""
    return _reduce_scatter_into(out, x, group=group, async_op=True)


def sums_are_ours(x: Tensor) -> bool:
    """True where an all-to-all and a local sum replace the backend's reduce-scatter."""
    return x.is_cpu


def all_to_all_into(
    out: Tensor,
    x: Tensor,
    receive_sizes: Sequence[int],
    send_sizes: Sequence[int],
    group: dist.ProcessGroup | None,
) -> dist.Work:
    """Start an uneven all-to-all over dim 0 of contiguous tensors; sizes are rows per rank."""
    sizes = list(receive_sizes), list(send_sizes)
    return dist.all_to_all_single(as_wire(out), as_wire(x), *sizes, group=group, async_op=True)


def multiplies(x: Tensor) -> bool:
    """Whether the device of `x` has instructions for products of its type."""
    asked = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(x.dtype)
    if asked is None or not x.is_cpu:
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{asked}_supported")())


def has_grouped_product(x: Tensor, weights: Tensor) -> bool:
    """Whether torch multiplies groups of rows by matrices of their own in one kernel, and faster.

    Its kernel for CUDA wants rows that begin at multiples of 16 bytes; on a CPU products one by
    one take as long (`benchmarks/moe.py`).
    """
    aligned = all(n * x.element_size() % 16 == 0 for n in weights.shape[1:])
    return x.is_cuda and aligned and x.dtype == torch.bfloat16


def grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows x [m, i] times weights [e, i, o]; the rows of group e end before `ends[e]`."""
    return torch.nn.functional.grouped_mm(x, weights, offs=ends)


def _patience() -> timedelta | None:
    """How long the default group's messages are waited for; None where its backend does not say."""
    try:
        backend = dist.group.WORLD._get_backend(host_device(None))  # type: ignore[union-attr]
    except RuntimeError:
        return None
    return getattr(getattr(backend, "options", None), "_timeout", None)


def new_group(
    name: str, ranks: Sequence[int], timeout: timedelta | None, backend: str | None
) -> dist.ProcessGroup:
    """A process group of `ranks`, which alone call this, for `name` in the same order.

    torch would name it after the number of groups that a rank has made so far, by which ranks with
    more or fewer of them would never meet.
    """
    timeout = timeout or _patience()  # torch would take the backend's own
    base = f"{name} of {'-'.join(map(str, ranks))}"
    taken = set(c10d._world.pg_names.values())
    unique = next(f"{base}, {n}" for n in itertools.count() if f"{base}, {n}" not in taken)
    with mock.patch.object(c10d, "_process_group_name", return_value=unique):
        group = dist.new_group(
            list(ranks),
            timeout=timeout,
            backend=backend,
            use_local_synchronization=True,
            group_desc=name,
        )
    assert isinstance(group, dist.ProcessGroup), f"rank is not in its own group {name}"
    return group


def leave_group() -> None:
    """Leave the process group and end its threads, before the interpreter ends.

    A thread of gloo that lets go of a tensor after that ends the process in `std::terminate`.
    """
    if dist.is_initialized() and not hasattr(sys, "last_value"):  # after a fault peers may be gone
        dist.destroy_process_group()
        gc.collect()  # a group's threads end with its last holder, and holders form cycles


def host_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where bytes from the host must lie to travel over `group`."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def has_values(x: Tensor) -> bool:
    """False for a fake tensor, which has a shape only."""
    fake = sys.modules.get("torch._subclasses.fake_tensor")  # importing it takes its time
    return fake is None or not isinstance(x, fake.FakeTensor)


def has_modes() -> bool:
    """Whether this thread is under a mode of torch, such as that of fake tensors."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())


def outside_graph(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, called eagerly also from a function under torch.compile, which breaks its graph there.

    On 2.11 a collective inside an autograd function compiles to silently wrong gradients. Importing
    the compiler takes seconds, so this waits until something else has imported it: nothing is
    being compiled before.
    """
    disabled: Callable[..., Any] | None = None

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            compiler = sys.modules.get("torch._dynamo")
            if compiler is None:
                return fn(*args)
            # Else it would compile `call` itself, anew for every lambda among `args`.
            compiler.eval_frame.skip_code(code)
            disabled = compiler.disable(fn)
        return disabled(*args)

    code = call.__code__  # type: ignore[attr-defined]
    return call
