"""Links of the pages that mkdocs does not see; it checks those under docs/."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

from tests.docs.pages import PAGES, ROOT

_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def _anchors(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {slugify(re.sub(r"[`*]|\]\(.*?\)", "", heading), "-") for heading in headings}


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("docs/")])
def test_links_lead_somewhere(page: str) -> None:
    here = ROOT / page
    dead = []
    for path, anchor in _LINK.findall(here.read_text()):
        target = here.parent / path if path else here
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            dead.append(f"{path}#{anchor}")
    assert dead == []
