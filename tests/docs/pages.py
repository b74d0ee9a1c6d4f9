"""The fenced blocks of all pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "patches/*.md")
    for path in ROOT.glob(pattern)
)
_FENCE = re.compile(r"^( *)```(?:\{ \.)?(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    page: str
    line: int  # of its first line, from 1
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    """The fenced blocks of ``page``, in order."""
    text = (ROOT / page).read_text()
    return [
        Block(page, text.count("\n", 0, match.start(3)) + 1, match[2], match[3])
        for match in _FENCE.finditer(text)
    ]


def commands(block: Block) -> list[str]:
    """The commands of a block in bash: without comments, each on one line."""
    joined = re.sub(r"\s*\\\n\s*", " ", block.text)
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in joined.splitlines())
    return [line for line in lines if line]
