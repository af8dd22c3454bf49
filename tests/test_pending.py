"""The list of faults seen elsewhere names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_named_test_is_there() -> None:
    tested = (HERE / "pending.md").read_text().partition("## Tested")[2]
    named = re.findall(r"\| ([RF]\d+) \| .* \| `(\S+)::(test_\w+)` \|", tested)
    assert len(named) == len(re.findall(r"^\| [RF]\d+ \|", tested, re.M)) > 50
    missing = [
        f"{row}: {file}::{test}"
        for row, file, test in named
        if not (HERE / file).exists() or f"def {test}(" not in (HERE / file).read_text()
    ]
    assert not missing
