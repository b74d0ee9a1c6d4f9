"""Imports: the core and explain without Megatron, the rule on rooms, and frozen public names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import megatron_loss_agg
from tests.launch.processes import ROOT, run_afresh

PACKAGE = ROOT / "megatron_loss_agg"
FILES = sorted(PACKAGE.rglob("*.py"))
PUBLIC = """
    AggregationError CPLayout LossAggregation Microbatch SequenceMean SequenceSum StepPlan Term
    predicting_mask token_weights weigh weighted_sum
"""
WITHOUT_MEGATRON = """
import importlib, sys
sys.modules.update(dict.fromkeys(("megatron", "transformer_engine", "apex")))  # cannot be imported
import torch, megatron_loss_agg
for module in sys.argv[1:]:
    importlib.import_module("megatron_loss_agg." + module)
agg = megatron_loss_agg.LossAggregation(mode="token_mean")
print(megatron_loss_agg.token_weights(agg, torch.ones(1, 2)).tolist())
command_line = importlib.import_module("megatron_loss_agg.__main__")
assert command_line.main(["explain", "--lengths=2,2"]) == 0
higher = "megatron_loss_agg.mcore", "megatron_loss_agg.launch"
print([name for name in sys.modules if name.startswith(higher)])
"""


def test_the_core_and_explain_import_and_work_without_megatron():
    core = [file.stem for file in PACKAGE.glob("[!_]*.py")]
    done = run_afresh("-c", WITHOUT_MEGATRON, *core, "explain")
    assert done.returncode == 0, done.stderr
    assert {"aggregation", "errors", "plan", "report"} < {*core}
    lines = done.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("[[0.5, 0.5]]", "[]")
    assert "token_mean: w_t = m_t / 4" in lines


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


def test_public_names_are_frozen():
    assert sorted(megatron_loss_agg.__all__) == PUBLIC.split()
    for name in PUBLIC.split():
        assert getattr(megatron_loss_agg, name).__doc__


MAY_IMPORT = {
    "core": {"core"},  # the files of the package itself
    "mcore": {"core", "mcore"},
    "launch": {"core", "mcore", "launch"},
    "frameworks": {"core", "mcore", "launch", "frameworks"},
    "explain": {"core", "explain"},  # works without Megatron, which mcore needs
    "command line": {"core", "mcore", "launch", "frameworks", "explain"},
}
"""The rooms that each may import."""


def room_of(file: Path) -> str:
    folder = file.relative_to(PACKAGE).parts[0]
    if folder == "__main__.py":
        return "command line"
    return "core" if folder.endswith(".py") else folder


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_a_room_imports_only_lower_ones(file: Path):
    room = room_of(file)
    assert room in MAY_IMPORT, "a new folder: say what it may import"
    higher = {x for x in imported_by(file.read_text()) if room_of(x) not in MAY_IMPORT[room]}
    assert not higher


def test_imports_are_found():
    assert room_of(PACKAGE / "mcore/parts/mtp.py") == "mcore"
    source = "def f():\n    from megatron_loss_agg.mcore import hook\nimport megatron_loss_agg.plan"
    assert imported_by(source) == {PACKAGE / "mcore/hook.py", PACKAGE / "plan.py"}
