"""Settings of MkDocs beside mkdocs.yml: pages of the root folder, formulas, colours of code.

A page of the site loads nothing from elsewhere: formulas become SVG here, and Pygments' colours two
style sheets, for the theme's two colour schemes.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import ziamath
from mkdocs.structure.files import File, Files
from pygments.formatters import HtmlFormatter

ROOT = Path(__file__).parents[1]
OF_ROOT = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md"}
"""Pages whose text is that of a file of the root folder."""
ziamath.config.svg2 = False  # glyphs without ids, which formulas of a page would share
STYLES = {"code-light.css": "default", "code-dark.css": "github-dark"}


def on_config(config: Any) -> None:
    """Make fences of the language ``math`` formulas, as GitHub does."""
    fence = {"name": "math", "class": "math", "format": formula}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}


def formula(source: str, *_: Any, **__: Any) -> str:
    return f'<div class="math">{svg(source, inline=False)}</div>'


def svg(latex: str, inline: bool) -> str:
    """The formula in the colour of the text around it, on its line where ``inline``."""
    drawn = ziamath.Latex(latex, size=18, color="currentColor", inline=inline)
    place = f"vertical-align: {drawn.getyofst():.2f}px"
    label = f'role="img" aria-label="{html.escape(latex)}" style="{place}"'
    return str(drawn.svg().replace("<svg ", f"<svg {label} ", 1))


def on_files(files: Files, config: Any) -> None:
    for path, style in STYLES.items():
        rules = HtmlFormatter(style=style).get_style_defs(".highlight")
        files.append(File.generated(config, path, content=rules))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Formulas in lines; of a file of the root folder its text, with links as they are from docs/.

    Links out of the site are left out.
    """
    path = page.file.src_uri
    if path not in OF_ROOT:
        return re.sub(r"\$`([^`]+)`\$", lambda found: svg(found[1], inline=True), markdown)
    text = (ROOT / OF_ROOT[path]).read_text(encoding="utf-8").replace("](docs/", "](")
    text = text.replace("](CONTRIBUTING.md)", "](contributing.md)")
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?:examples|patches)/[^)]+\)", r"\1", text)
