"""The pages hold: links lead somewhere, commands parse, named files and tests exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from penteract.cli import RUNS
from penteract.config_file import split_config
from penteract.options import parser

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")
PATH = re.compile(r"`((?:penteract|tests|docs|configs|examples|benchmarks)/[\w./-]+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_paths(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [x for x in LINK.findall(text) if not x.startswith("http")]
    missing = [x for x in links if not (page.parent / x).exists()]
    missing += [x for x in PATH.findall(text) if not (ROOT / x).exists()]
    assert not missing, f"{page}: {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_parse(page: Path) -> None:
    blocks = re.findall(
        r"```(?:sh|console|bash)?\n(.*?)```", page.read_text(encoding="utf-8"), re.S
    )
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    for line in lines:
        if line.startswith("penteract ") and "|" not in line and "…" not in line:
            words = shlex.split(line, comments=True)[1:]
            _, rest = parser(RUNS).parse_known_args(words)
            if words[0] in ("train", "verify") or words[:2] == ["data", "show"]:
                _, rest = split_config(rest)
            assert all(word.startswith("--") or "." not in word for word in rest), (line, rest)


def test_readme_is_short_and_finished() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 150
    assert not re.search(r"@[A-Z]+@|TODO", text)
