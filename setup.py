"""The description of the distribution; all else is in pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def setting(name: str, file: str) -> str | None:
    """The value of a line ``name = "value"``."""
    text = (ROOT / file).read_text(encoding="utf-8")
    found = re.search(rf'^{name} = "(.+)"$', text, re.MULTILINE)
    return found and found[1]


def description() -> str:
    """README.md with links to this release's files; without links if the sources have no address."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    address = setting("Source", "pyproject.toml")
    relative = r"\[([^\]]*)\]\((?!https?:|#)([^)]*)\)"
    if address is None:
        return re.sub(f"!?{relative}", r"\1", text)
    tag = f"v{setting('__version__', 'megatron_loss_agg/__init__.py')}"
    text = re.sub(f"!{relative}", rf"![\1]({address}/raw/{tag}/\2)", text)
    return re.sub(relative, rf"[\1]({address}/blob/{tag}/\2)", text)


setup(long_description=description(), long_description_content_type="text/markdown")
