"""What imports what: the core without Megatron, every folder as a room, and frozen public names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import megatron_loss_agg
from tests.launch.processes import ROOT, run_afresh

PACKAGE = ROOT / "megatron_loss_agg"
FILES = sorted(PACKAGE.rglob("*.py"))
PUBLIC = """
    AggregationError CPLayout LossAggregation Microbatch SequenceMean SequenceSum StepPlan StepTerms
    Term predicting_mask token_weights weighted_sum
"""
WITHOUT_MEGATRON = """
import importlib, sys
sys.modules.update(dict.fromkeys(("megatron", "transformer_engine", "apex")))  # cannot be imported
import torch, megatron_loss_agg
for module in sys.argv[1:]:
    importlib.import_module("megatron_loss_agg." + module)
agg = megatron_loss_agg.LossAggregation(mode="token_mean")
print(megatron_loss_agg.token_weights(agg, torch.ones(1, 2)).tolist())
print([name for name in sys.modules if name.startswith("megatron_loss_agg.mcore")])
"""


def test_the_core_imports_and_works_without_megatron():
    # Everything beside the adapter, whatever it is called.
    core = [path.stem for path in PACKAGE.glob("[!_]*") if path.stem not in ("mcore", "py")]
    done = run_afresh("-c", WITHOUT_MEGATRON, *core)
    assert done.returncode == 0, done.stderr
    assert {"aggregation", "errors", "report"} < {*core}
    assert done.stdout.splitlines() == ["[[0.5, 0.5]]", "[]"]


def file_of(module: str) -> Path | None:
    """The package's file with this dotted name, if it is one."""
    place = ROOT / module.replace(".", "/")
    files = (place.with_name(place.name + ".py"), place / "__init__.py")
    return next((file for file in files if file.is_relative_to(PACKAGE) and file.exists()), None)


def imported_by(source: str) -> set[Path]:
    """The package's files that a source imports anywhere: also in a function, or for types alone.

    The packages around an imported file do not count: Python runs them before the file.
    """
    found: set[Path | None] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {file_of(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, "a relative import, which this test cannot place"
            whole = file_of(node.module)
            assert whole or node.module.split(".")[0] != PACKAGE.name, f"no file {node.module}"
            found |= {file_of(f"{node.module}.{alias.name}") or whole for alias in node.names}
    return {file for file in found if file is not None}


def test_a_file_of_the_guide_imports_only_what_stands_above_it():
    guide = (ROOT / "CONTRIBUTING.md").read_text().partition("| file | holds |")[2]
    above: set[Path] = set()
    public = PACKAGE / "__init__.py"  # stands below the last file whose names it makes public
    made_public = imported_by(public.read_text())
    for name in re.findall(r"`([a-z_/]+(?:\.py|/))`", guide.partition("\n\n")[0]):
        files = {*(PACKAGE / name).glob("*.py")} if name.endswith("/") else {PACKAGE / name}
        above |= files
        above |= {public} if made_public <= above else set()
        for file in files:
            unknown = imported_by(file.read_text()) - above
            assert not unknown, f"{file} imports {unknown}"
    left = {file for file in {*FILES} - above if len(ast.parse(file.read_text()).body) > 1}
    assert left == {PACKAGE / "__main__.py"}  # others are docstrings of folders
    assert len(imported_by((PACKAGE / "plan.py").read_text())) > 5


def test_public_names_are_frozen():
    assert sorted(megatron_loss_agg.__all__) == PUBLIC.split()
    for name in PUBLIC.split():
        assert getattr(megatron_loss_agg, name).__doc__


ROUTE_NAMES = ["hook", "extension", "host", "step", "call_losses", "token_loss", "weigh", "splits"]
ROUTE = {f"mcore/{name}.py" for name in ROUTE_NAMES}
# Public names, and public paths of files that live in another room.
FACADES = {"__init__.py", "mcore/flags.py", "mcore/install.py"}
# A room, and those that it may import besides itself.
CORE = {"core"}
ON_ROUTE = {*CORE, "losses", "reading"}
EXTENSIONS = {*ON_ROUTE, "route"}
ADAPTER = {*EXTENSIONS, "extensions"}
ROOMS = {
    "core": set[str](),
    **dict.fromkeys(("losses", "explain", "logprobs", "cpu"), CORE),
    "reading": {*CORE, "losses"},
    "route": ON_ROUTE,
    "extensions": EXTENSIONS,
    "adapter": ADAPTER,
    "launch": {*ADAPTER, "adapter", "cpu"},
    "command line": {*CORE, "explain", "launch"},
}
# Files whose room is not their folder.
ALONE = {"mcore/__init__.py": "adapter", "mcore/logprobs.py": "logprobs"}
OF_FILES = {**dict.fromkeys(ROUTE, "route"), **ALONE, "__main__.py": "command line"}
# Parts of one check, and what extensions share.
SHARED_EXTENSIONS = {"probe.py", "masked_sum.py"}


def name_of(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def room_of(file: Path) -> str:
    folder = file.parent.relative_to(PACKAGE).as_posix()
    room = "core" if folder in (".", "counting") else folder.removeprefix("mcore/")
    return OF_FILES.get(name_of(file), room)


def lines_of(file: Path) -> int:
    return len(file.read_text().splitlines())


@pytest.mark.parametrize("file", [f for f in FILES if name_of(f) not in FACADES], ids=name_of)
def test_a_room_imports_only_lower_ones(file: Path):
    room = room_of(file)
    assert room in ROOMS, "a new folder: say what it may import"
    allowed = {room, *ROOMS[room]}
    assert not {name_of(x) for x in imported_by(file.read_text()) if room_of(x) not in allowed}


def test_a_facade_is_one_import_and_its_names():
    for name in FACADES:
        statements = ast.parse((PACKAGE / name).read_text()).body
        kinds = {type(x) for x in statements}
        assert kinds <= {ast.Expr, ast.ImportFrom, ast.Assign}, f"{name} does something"


def test_extensions_know_no_other():
    folder = PACKAGE / "mcore/extensions"
    for file in folder.glob("[!_]*.py"):
        others = {x.name for x in imported_by(file.read_text()) if x.parent == folder} - {file.name}
        assert others <= SHARED_EXTENSIONS, f"{file.name} imports {others}"


def test_the_route_is_small():
    alone = {name_of(x) for x in (PACKAGE / "mcore").glob("*.py")} - FACADES
    assert alone == {*ROUTE, *ALONE}
    assert len(ROUTE) <= 8
    assert sum(lines_of(PACKAGE / name) for name in ROUTE) <= 1650
    assert lines_of(PACKAGE / "mcore/hook.py") <= 200


def test_no_folder_has_more_than_14_modules_and_no_file_more_than_300_lines():
    modules: dict[Path, int] = {}
    for file in FILES:
        is_module = file.stem[:2] != "__" and name_of(file) not in FACADES
        modules[file.parent] = modules.get(file.parent, 0) + is_module
    many = {name_of(folder): n for folder, n in modules.items() if n > 14}
    long = {name_of(file): n for file in FILES if (n := lines_of(file)) > 300}
    assert (many, long) == ({}, {})
