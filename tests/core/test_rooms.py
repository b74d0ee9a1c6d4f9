"""Every folder is one room: what it may import, and how large it may be."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.core.test_imports import PACKAGE, imported_by

ROUTE_NAMES = (
    *("hook", "extension", "host", "step"),
    *("call_losses", "token_loss", "weigh", "splits"),
)
ROUTE = {f"mcore/{name}.py" for name in ROUTE_NAMES}
# Public names, and public paths of files that live in another room.
FACADES = {"__init__.py", "policy.py", "mcore/flags.py", "mcore/install.py"}
# A room, and those that it may import besides itself.
CORE = {"core"}
READING = {*CORE, "losses"}
ON_ROUTE = {*READING, "reading"}
EXTENSIONS = {*ON_ROUTE, "route"}
ADAPTER = {*EXTENSIONS, "extensions"}
ROOMS = {
    "core": set[str](),
    "losses": CORE,
    "explain": CORE,
    "logprobs": CORE,
    "cpu": CORE,
    "reading": READING,
    "route": ON_ROUTE,
    "extensions": EXTENSIONS,
    "adapter": ADAPTER,
    "launch": {*ADAPTER, "adapter", "cpu"},
    "command line": {*CORE, "explain", "launch"},
}
# Files that are a room of their own.
ALONE = {
    "mcore/__init__.py": "adapter",
    "mcore/logprobs.py": "logprobs",
    "__main__.py": "command line",
}
# Parts of one check, and what extensions share.
SHARED_EXTENSIONS = {"probe.py", "masked_sum.py"}

FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def room_of(file: Path) -> str:
    name = name_of(file)
    if name in ROUTE:
        return "route"
    if name in ALONE:
        return ALONE[name]
    folder = file.parent.relative_to(PACKAGE).as_posix()
    return "core" if folder in (".", "counting") else folder.removeprefix("mcore/")


def forbidden(file: Path, source: str) -> set[str]:
    """The files that a source in this place imports and must not."""
    room = room_of(file)
    return {
        name_of(other)
        for other in imported_by(source)
        if room_of(other) not in {room, *ROOMS[room]}
    }


def lines_of(file: Path) -> int:
    return len(file.read_text().splitlines())


@pytest.mark.parametrize("file", [f for f in FILES if name_of(f) not in FACADES], ids=name_of)
def test_a_room_imports_only_lower_ones(file: Path) -> None:
    assert room_of(file) in ROOMS, "a new folder: say what it may import"
    assert not forbidden(file, file.read_text())


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("plan.py", "from megatron_loss_agg.mcore.host import Call"),
        ("losses/policy.py", "import megatron_loss_agg.mcore.host"),
        ("mcore/reading/keys.py", "def f():\n    from megatron_loss_agg.mcore.step import Step"),
        ("mcore/hook.py", "from megatron_loss_agg.mcore.extensions.audit import Audit"),
        ("mcore/extensions/masks.py", "from megatron_loss_agg.mcore import LossHook"),
        ("mcore/__init__.py", "from megatron_loss_agg.mcore.launch import flags"),
        ("mcore/extensions/audit.py", "from megatron_loss_agg.mcore import cpu"),
        ("explain/table.py", "from megatron_loss_agg.losses import policy"),
    ],
)
def test_an_import_of_a_higher_room_is_found(place: str, source: str) -> None:
    assert forbidden(PACKAGE / place, source)


def test_a_facade_is_one_import_and_its_names() -> None:
    for name in FACADES:
        statements = ast.parse((PACKAGE / name).read_text()).body
        kinds = {type(x) for x in statements}
        assert kinds <= {ast.Expr, ast.ImportFrom, ast.Assign}, f"{name} does something"


def test_extensions_know_no_other() -> None:
    folder = PACKAGE / "mcore/extensions"
    for file in folder.glob("[!_]*.py"):
        others = {x.name for x in imported_by(file.read_text()) if x.parent == folder} - {file.name}
        assert others <= SHARED_EXTENSIONS, f"{file.name} imports {others}"


def test_the_route_is_small() -> None:
    alone = {name_of(x) for x in (PACKAGE / "mcore").glob("*.py")} - FACADES
    assert alone == {*ROUTE, *ALONE.keys() - {"__main__.py"}}
    assert len(ROUTE) <= 8
    assert sum(lines_of(PACKAGE / name) for name in ROUTE) <= 1650
    assert lines_of(PACKAGE / "mcore/hook.py") <= 200


def test_no_folder_has_more_than_14_modules_and_no_file_more_than_300_lines() -> None:
    modules: dict[Path, int] = {}
    for file in FILES:
        is_module = file.stem[:2] != "__" and name_of(file) not in FACADES
        modules[file.parent] = modules.get(file.parent, 0) + is_module
    many = {name_of(folder): n for folder, n in modules.items() if n > 14}
    long = {name_of(file): n for file in FILES if (n := lines_of(file)) > 300}
    assert (many, long) == ({}, {})
