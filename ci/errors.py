"""Print docs/errors.md: every named error of the package, with its messages, from the source.

Run ``python ci/errors.py >docs/errors.md`` after a change of them.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from megatron_loss_agg import errors

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_loss_agg"
_FEW = 20
HEAD = """\
# Errors

Every error that the package raises is an `AggregationError`, a `ValueError`. Its message says what
was got, what was expected, and what to change. Here they are by their fixed parts, from the source;
`…` stands for what your run puts there.
"""


def text_of(message: ast.expr) -> str | None:
    """The text of a string, with `…` for what is filled in; None if it is no string."""
    if isinstance(message, ast.Constant) and isinstance(message.value, str):
        return message.value
    if isinstance(message, ast.JoinedStr):
        return "".join(text_of(part) or "…" for part in message.values)
    return None


def fixed(text: str) -> int:
    """The letters that are always there: with few, a line tells a reader nothing."""
    return sum(map(str.isalpha, text))


def messages(source: Path) -> Iterator[tuple[str, str]]:
    """(class, message) of every error that ``source`` makes with a message of its own."""
    for node in ast.walk(ast.parse(source.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
            continue
        text = text_of(node.args[0])
        if node.func.id in vars(errors) and text is not None and fixed(text) > _FEW:
            yield node.func.id, " ".join(text.split())


def main() -> None:
    found: dict[str, list[str]] = {}
    for source in sorted(PACKAGE.rglob("*.py")):
        for name, text in messages(source):
            if text not in found.setdefault(name, []):
                found[name].append(text)
    print(HEAD)
    sections = []
    for name, lines in sorted(found.items()):
        head = f"## {name}\n\n{inspect.getdoc(vars(errors)[name])}\n\n"
        sections.append(head + "".join(f"- `{line}`\n" for line in lines))
    print("\n".join(sections), end="")


if __name__ == "__main__":
    main()
