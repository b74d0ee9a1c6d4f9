"""Settings of MkDocs beside mkdocs.yml: pages of the root folder, formulas, descriptions, edit links.

A page of the site loads nothing from elsewhere: formulas become SVG here.
"""

from __future__ import annotations

import html
import re
import textwrap
from pathlib import Path
from typing import Any

import ziamath

ROOT = Path(__file__).parents[1]
OF_ROOT = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md"}
"""Pages whose text is that of a file of the root folder."""
ziamath.config.svg2 = False  # glyphs without ids, which formulas of a page would share


def repository() -> str:
    """The address that the sources are published at, which pyproject.toml holds; or nothing."""
    settings = (ROOT / "pyproject.toml").read_text()
    return "".join(re.findall(r'^Source = "(.+)"$', settings, re.MULTILINE))


def on_config(config: Any) -> None:
    """Make fences of the language ``math`` formulas, as GitHub does."""
    fence = {"name": "math", "class": "math", "format": formula}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}


def formula(source: str, *_: Any, **__: Any) -> str:
    return f'<div class="math">{svg(source, inline=False)}</div>'


def svg(latex: str, inline: bool) -> str:
    """The formula in the colour of the text around it, on its line where ``inline``."""
    drawn = ziamath.Latex(latex, size=18, color="currentColor", inline=inline)
    style = f"vertical-align: {drawn.getyofst():.2f}px"
    label = f'role="img" aria-label="{html.escape(latex)}" style="{style}"'
    return str(drawn.svg().replace("<svg ", f"<svg {label} ", 1))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Formulas in lines; directives out of comments, in which a code host hides them; of a file of the
    root folder its text, with links as they are from docs/.

    Links out of the site are left out.
    """
    path = page.file.src_uri
    source = OF_ROOT.get(path, f"docs/{path}")
    if path in OF_ROOT:
        markdown = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        markdown = markdown.replace("](CONTRIBUTING.md)", "](contributing.md)")
        markdown = re.sub(r"(?<!!)\[([^\]]+)\]\((?:examples|patches)/[^)]+\)", r"\1", markdown)
    markdown = re.sub(r"^<!-- (::: .*) -->$", r"\1", markdown, flags=re.MULTILINE)
    if repository():
        page.edit_url = f"{repository()}/edit/main/{source}"
    page.meta.setdefault("description", first_sentences(markdown))
    if path.startswith("verification/"):
        page.meta["search"] = {"boost": 0.001}  # tables, in which nearly every word occurs
    return re.sub(r"\$`([^`]+)`\$", lambda match: svg(match[1], inline=True), markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Flags in code get a class: browsers would break them at their hyphens."""
    flag = re.compile(r"(?<![\w-])--\w[\w-]*(?![^<]*>)")

    def marked(code: re.Match[str]) -> str:
        return flag.sub(r'<span class="flag">\g<0></span>', code[0])

    return re.sub(r"<code>.*?</code>", marked, content, flags=re.DOTALL)


def first_sentences(markdown: str) -> str:
    """The first paragraph of a page as plain text, at most 160 characters: what search engines show."""
    without_code = re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    paragraph = re.search(r"^(?![#|!:<\-]).+(?:\n.+)*", without_code, re.MULTILINE)
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)|[`*$]", r"\1", paragraph[0] if paragraph else "")
    return textwrap.shorten(text, 160, placeholder=" ...")
