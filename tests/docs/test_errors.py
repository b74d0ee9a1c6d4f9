"""docs/errors.md lists every error, and every error says what to do."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT

# After what was got: what was expected, or what to do.
_CURE = re.compile(
    r"expected|pip install|; (?:call|drop|fix|give|pass|write)\b|: (?:change|wrap|or drop)\b|"
    r"or choose|; it has|only '?\w+'? takes one"
)


def test_every_error_says_what_to_do() -> None:
    messages = re.findall(r"^- `(.*)`$", (ROOT / "docs/errors.md").read_text(), re.MULTILINE)
    assert len(messages) > 150
    assert [message for message in messages if not _CURE.search(message)] == []


def test_errors_that_troubleshooting_quotes_exist() -> None:
    listed = (ROOT / "docs/errors.md").read_text().splitlines()
    page = (ROOT / "docs/troubleshooting.md").read_text()
    quoted = re.findall(r'^\*\*"(.*?)"\*\*', page, re.MULTILINE)
    assert len(quoted) > 5
    for quote in quoted:
        pattern = ".*".join(re.escape(part) for part in quote.split("..."))
        assert any(re.search(pattern, line) for line in listed), quote
