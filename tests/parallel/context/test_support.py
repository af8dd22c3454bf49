"""What each backend can do with each exchange: run, and written into docs/context.md.

Exchanges run on two ranks, a hierarchical one on four, in two groups of two.
"""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from parallel.context.attention_case import (
    COMMS,
    Case,
    attend_here,
    differences,
    expected,
    joined,
    run_cases,
)
from torch import Tensor

from penteract.config import ConfigError, resolve
from penteract.config_file import from_dict
from penteract.mesh import Axis, single
from penteract.parallel.context.cut import Cut
from penteract.parallel.context.exchange import attend
from penteract.parallel.context.exchanges import Comm, exchange_of
from penteract.parallel.context.kernels import Backend, dropping, kernel_of
from penteract.parallel.context.score_dropout import Drop
from penteract.random import keep_mask
from penteract.testing import run_ranks, world_axis

PAGE = Path(__file__).parents[3] / "docs" / "context.md"
BACKENDS: tuple[Backend, ...] = get_args(Backend)
ALONE = Case(lengths=(9,), sinks=False)
CASES = {
    "one sequence": ALONE,
    "packed documents": replace(ALONE, lengths=(5, 1, 0, 11)),
    "window": replace(ALONE, window=3),
    "sinks": replace(ALONE, sinks=True),
    "soft cap": replace(ALONE, kernel=("flash", 1.5)),
}
LENGTHS, HEADS, D, RATE = (5, 1, 4), 4, 6, 0.3


def supported(backend: Backend) -> dict[str, bool]:
    """For each case, whether all exchanges give the formulas' numbers; False if it is refused."""
    cases = {name: replace(case, kernel=(backend, case.kernel[1])) for name, case in CASES.items()}
    taken = [case for case in cases.values() if takes(case)]
    attend_here(taken[0], exchange_of("ring", single("cp")))  # what it imports ranks have then
    for comm in COMMS:
        cp, inner = (4, 2) if comm == "hierarchical" else (2, None)
        for case, ranks in zip(taken, run_cases(taken, comm, cp, inner=inner), strict=True):
            worst = max(differences(joined(case, ranks), expected(case)).values())
            assert worst < 1e-11, (comm, case)
    return {name: case in taken for name, case in cases.items()}


def takes(case: Case) -> bool:
    """Whether there is such a kernel."""
    try:
        kernel_of(*case.kernel)
    except ValueError:
        return False
    return True


def drops(backend: Backend) -> bool:
    """Whether the backend takes dropout; that its numbers are right is the last test's."""
    try:
        return dropping(kernel_of(backend), Drop(RATE, 7, "scores", ())).drop is not None
    except ValueError:
        return False


@pytest.mark.slow
def test_the_page_says_what_is_supported() -> None:
    with warnings.catch_warnings():  # FlexAttention is not compiled on a CPU, and says so
        warnings.simplefilter("ignore")
        found = {backend: supported(backend) for backend in BACKENDS}
    for backend, row in found.items():
        row["dropout"] = drops(backend)
    names = [*CASES, "dropout"]
    lines = [f"| `attention` | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for backend, row in found.items():
        cells = ("all four exchanges" if row[name] else "refused" for name in names)
        lines.append(f"| {backend} | {' | '.join(cells)} |")
    table = "\n".join(lines)
    assert table in PAGE.read_text(encoding="utf-8"), f"docs/context.md should have:\n{table}"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"softcap": 1.5}, "flash kernels have no soft cap"),
        ({"attention_dropout": 0.1}, 'give model.attention = "plain"'),
        ({"attention_dropout": 0.1, "attention": "flex"}, 'give model.attention = "plain"'),
    ],
)
def test_what_is_refused_says_what_works(model: dict[str, object], message: str) -> None:
    sizes = {"layers": 1, "hidden": 8, "ffn": 8, "heads": 2, "vocab": 5}
    with pytest.raises(ConfigError, match=message):
        resolve(from_dict({"model": {**sizes, **model}, "train": {"steps": 1}}))


def inputs() -> list[Tensor]:
    draw, t = torch.Generator().manual_seed(0), sum(LENGTHS)
    return [torch.randn(t, HEADS, D, generator=draw, dtype=torch.float64) for _ in range(4)]


def dropped(axis: Axis, comm: Comm) -> dict[str, list[list[list[float]]]]:
    """Output and gradients of this rank's rows, with dropout of scores."""
    exchange, cut, (*qkv, d_out) = exchange_of(comm, axis), Cut.of(LENGTHS, axis.size), inputs()
    rows = torch.from_numpy(cut.rows(axis.rank))
    mine = [x[rows.clamp(min=0)].requires_grad_() for x in qkv]
    kernel = dropping(kernel_of("plain"), Drop(RATE, 7, "scores", tuple(range(HEADS))))
    plan = exchange.plan(cut, None, rows)
    out = attend(*mine, exchange=exchange, plan=plan, kernel=kernel)
    found = torch.autograd.grad(out, mine, d_out[rows.clamp(min=0)] * (rows >= 0)[:, None, None])
    named = zip(("out", "dq", "dk", "dv"), (out.detach(), *found), strict=True)
    return {name: x[rows >= 0].tolist() for name, x in named}


def by_the_formulas() -> dict[str, Tensor]:
    """One query and head at a time, each probability dropped by its numbers in the micro-batch."""
    *qkv, d_out = inputs()
    q, k, v = (x.requires_grad_() for x in qkv)
    t, rows, start = sum(LENGTHS), [], 0
    for length in LENGTHS:
        for i in range(start, start + length):
            heads = []
            for head in range(HEADS):
                seen = torch.arange(start, i + 1)
                p = torch.softmax(k[seen, head] @ q[i, head] / D**0.5, 0)
                keep = keep_mask(7, "scores", (head * t + i) * t + seen, 1 - RATE)
                heads.append((p * keep / (1 - RATE)) @ v[seen, head])
            rows.append(torch.stack(heads))
        start += length
    out = torch.stack(rows)
    return dict(
        zip(
            ("out", "dq", "dk", "dv"),
            (out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)),
            strict=True,
        )
    )


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_dropout_is_a_part_of_one_global_mask(cp: int) -> None:
    wanted, cut = by_the_formulas(), Cut.of(LENGTHS, cp)

    def of_rank() -> list[dict[str, list[list[list[float]]]]]:
        axis = world_axis("cp") if cp > 1 else single("cp")
        return [dropped(axis, comm) for comm in COMMS]

    ranks = run_ranks(of_rank, cp) if cp > 1 else [of_rank()]
    for rank, results in enumerate(ranks):
        rows = torch.from_numpy(cut.rows(rank))
        for found in results:
            for name, x in found.items():
                part = torch.tensor(x, dtype=torch.float64)
                torch.testing.assert_close(part, wanted[name][rows[rows >= 0]])
