"""Print ci/errors.md: every named error of the package, with its messages, from the source.

Run ``python ci/errors.py >ci/errors.md`` after a change of them.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from megatron_loss_agg import errors

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_loss_agg"
_FEW = 14
_RAISES_ITS_LAST_ARGUMENT = "failing_together"
"""A function that raises PeerError with the message that it is given."""
HEAD = """\
# Errors

Every error that the package raises is an `AggregationError`, which is a `ValueError`. (One exception:
the iterator that the hook passes on raises `AttributeError` for a missing attribute, as Python does.)
A message is two sentences: what is needed and what was got instead; then what to change. This page
lists the messages of the source. `…` stands for a part that your run fills in.
"""


class Source:
    """A module, with the constants and functions that its messages are made of."""

    constants: ClassVar[dict[str, ast.expr]] = {}  # of all modules that were read

    def __init__(self, path: Path) -> None:
        self.tree = ast.parse(path.read_text())
        self._own = {
            target.id: node.value
            for node in self.tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        self._functions = {n.name: n for n in self.tree.body if isinstance(n, ast.FunctionDef)}
        self.constants.update(self._own)

    def messages(self) -> Iterator[tuple[str, str]]:
        """(class, message) of every error that is made here with a message of its own."""
        for node in ast.walk(self.tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
                continue
            if node.func.id in vars(errors):
                name, message = node.func.id, node.args[0]
            elif node.func.id == "Setting":  # a row of a framework's refusals
                name, message = "HostError", _refused_setting(node)
            elif node.func.id == "Refusal":
                name, message = _refusal(node)
            elif node.func.id == _RAISES_ITS_LAST_ARGUMENT:
                name, message = "PeerError", node.args[-1]
            else:
                continue
            for text in self._texts(message):
                text = re.sub(r"\{\w+\}", "…", text)  # the words of a row
                if fixed(text) > _FEW:
                    yield name, " ".join(text.split())

    def _texts(self, message: ast.expr) -> list[str]:
        """The possible texts of ``message``, with `…` for parts filled in; empty if it is no string."""
        if isinstance(message, ast.Call) and isinstance(message.func, ast.Name):
            function = self._functions.get(message.func.id)
            nodes = ast.walk(function) if function is not None else ()
            returned = [node.value for node in nodes if isinstance(node, ast.Return)]
            return [text for value in returned if value for text in self._texts(value)]
        if isinstance(message, ast.IfExp):
            return [*self._texts(message.body), *self._texts(message.orelse)]
        text = self._text(message)
        return [] if text is None else [text]

    def _text(self, message: ast.expr) -> str | None:
        match message:
            case ast.Constant(value=str(text)):
                return text
            case ast.JoinedStr(values=parts):
                return "".join(self._text(part) or "…" for part in parts)
            case ast.FormattedValue(value=ast.Name() as name) | (ast.Name() as name):
                if not name.id.isupper():
                    return None
                value = self._own.get(name.id, self.constants.get(name.id))
                return None if value is None else self._text(value)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return (self._text(left) or "…") + (self._text(right) or "…")
        return None


def _refusal(row: ast.Call) -> tuple[str, ast.expr]:
    """The class and the message of the error that `frameworks.refusals.refused` makes of a row."""
    needed, remedy, error = [*row.args, *[None] * 2][:3]
    end = ast.Constant(", got …. ")
    values = [needed, end, remedy or ast.Constant("Unset MEGATRON_LOSS_AGG_FLAGS.")]
    return getattr(error, "id", "HostError"), ast.JoinedStr(values)


def _refused_setting(setting: ast.Call) -> ast.expr:
    """The message that `frameworks.refusals.check_settings` makes of a row."""
    options = {keyword.arg: keyword.value for keyword in setting.keywords}
    name, needed, _, remedy, *_ = [*setting.args, *[None] * 4]
    default = ast.Constant("Change it, or unset MEGATRON_LOSS_AGG_FLAGS.")
    parts = name, " must be ", needed, ", got …. ", remedy or options.get("remedy", default)
    values = [ast.Constant(x) if isinstance(x, str) else x for x in parts]
    return ast.JoinedStr(values)


def fixed(text: str) -> int:
    """The letters that are always there: with few, a line tells a reader nothing."""
    return sum(map(str.isalpha, text))


def main() -> None:
    by_class: dict[str, list[str]] = {}
    for source in [Source(path) for path in sorted(PACKAGE.rglob("*.py"))]:
        for name, text in source.messages():
            if text not in by_class.setdefault(name, []):
                by_class[name].append(text)
    print(HEAD)
    sections = []
    for name, lines in sorted(by_class.items()):
        head = f"## {name}\n\n{inspect.getdoc(vars(errors)[name])}\n\n"
        sections.append(head + "".join(f"- `{line}`\n" for line in lines))
    print("\n".join(sections), end="")


if __name__ == "__main__":
    main()
