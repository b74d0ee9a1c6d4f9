"""The core imports without Megatron, and its public names are frozen."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import megatron_loss_agg

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_loss_agg"
# Everything beside the adapter, whatever it is called.
CORE = sorted(path.stem for path in PACKAGE.glob("[!_]*") if path.stem not in ("mcore", "py"))

PUBLIC = """
    AggregationError CPLayout LossAggregation Microbatch SequenceMean StepPlan StepTerms Term
    predicting_mask token_weights weighted_sum
"""

REFUSE_HOST = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"{name} is not to be imported here", name=name)

sys.meta_path.insert(0, Refuse())
"""
CORE_ALONE = """
REFUSED = ("megatron", "transformer_engine", "apex")
try:
    import megatron.core
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("the block does not work")
import importlib, torch, megatron_loss_agg
for module in sys.argv[1:]:
    importlib.import_module("megatron_loss_agg." + module)
agg = megatron_loss_agg.LossAggregation(mode="token_mean")
print(megatron_loss_agg.token_weights(agg, torch.ones(1, 2)).tolist())
print([name for name in sys.modules if name.startswith("megatron_loss_agg.mcore")])
"""


def test_the_core_imports_and_works_without_megatron():
    command = [sys.executable, "-c", REFUSE_HOST + CORE_ALONE, *CORE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"aggregation", "errors", "policy", "report"} < {*CORE}
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


@pytest.mark.parametrize(
    ("source", "files"),
    [
        ("import megatron_loss_agg.plan", {"plan.py"}),
        ("def f():\n    from megatron_loss_agg.plan import StepPlan", {"plan.py"}),
        ("if TYPE_CHECKING:\n    from megatron_loss_agg import plan, StepPlan", {"plan.py", ""}),
        ("try:\n    import torch, megatron_loss_agg.explain as e\nfinally:\n    0", {"explain/"}),
        ("from megatron_loss_agg.mcore.cpu import device, enable", {"mcore/cpu/device.py", "cpu/"}),
        ("from megatron.core import parallel_state", set()),
    ],
)
def test_an_import_is_seen_wherever_it_stands(source, files):
    full = {"": "__init__.py", "explain/": "explain/__init__.py", "cpu/": "mcore/cpu/__init__.py"}
    assert imported_by(source) == {PACKAGE / full.get(file, file) for file in files}


def test_a_file_of_the_guide_imports_only_what_stands_above_it():
    guide = (ROOT / "docs/derivation.md").read_text().partition("| file | holds |")[2]
    above: set[Path] = set()
    everything = {*PACKAGE.rglob("*.py")}
    public = PACKAGE / "__init__.py"  # stands below the last file whose names it makes public
    made_public = imported_by(public.read_text())
    for name in re.findall(r"`([a-z_/]+(?:\.py|/))`", guide):
        files = {*(PACKAGE / name).glob("*.py")} if name.endswith("/") else {PACKAGE / name}
        above |= files
        above |= {public} if made_public <= above else set()
        for file in files:
            unknown = imported_by(file.read_text()) - above
            assert not unknown, f"{file} imports {unknown}"
    left = {file for file in everything - above if len(ast.parse(file.read_text()).body) > 1}
    assert left == {PACKAGE / "__main__.py"}  # others are docstrings of folders


def test_no_file_imports_itself_over_others():
    # Also among the files of one folder, which stand in one line of the guide.
    imports = {file: imported_by(file.read_text()) for file in PACKAGE.rglob("*.py")}
    assert len(imports[PACKAGE / "plan.py"]) > 5
    TopologicalSorter(imports).prepare()  # raises CycleError


def test_public_names_are_frozen():
    assert sorted(megatron_loss_agg.__all__) == PUBLIC.split()
    for name in PUBLIC.split():
        assert getattr(megatron_loss_agg, name).__doc__
