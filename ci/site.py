"""What MkDocs is told beside mkdocs.yml: the site's first page is the README.

The README lies at the repository's root, and the site's pages lie in docs/.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """For docs/index.md the README: its links as they are from docs/, and none out of the site."""
    if page.file.src_uri != "index.md":
        return markdown
    text = README.read_text(encoding="utf-8").replace("](docs/", "](")
    return re.sub(r"(?<!!)\[([^\]]+)\]\(examples/[^)]+\)", r"\1", text)
