"""The core imports without Megatron, and its public names are frozen."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import megatron_loss_agg

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_loss_agg"
# Everything beside the adapter, whatever it is called.
CORE = sorted(path.stem for path in PACKAGE.glob("[!_]*") if path.stem not in ("mcore", "py"))

PUBLIC = """
    AggregationError CPLayout LossAggregation Microbatch SequenceMean StepPlan StepTerms Term
    predicting_mask token_weights weighted_sum
"""

WITHOUT_HOST = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("megatron", "transformer_engine", "apex"):
            raise ModuleNotFoundError(f"{name} is not to be imported here", name=name)

sys.meta_path.insert(0, Refuse())
try:
    import megatron.core
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("the block does not work")
import importlib
import torch
import megatron_loss_agg
for module in sys.argv[1:]:
    importlib.import_module("megatron_loss_agg." + module)
agg = megatron_loss_agg.LossAggregation(mode="token_mean")
print(megatron_loss_agg.token_weights(agg, torch.ones(1, 2)).tolist())
print([name for name in sys.modules if name.startswith("megatron_loss_agg.mcore")])
"""


def test_the_core_imports_and_works_without_megatron():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_HOST, *CORE], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert {"aggregation", "errors", "policy", "report"} < {*CORE}
    assert done.stdout.splitlines() == ["[[0.5, 0.5]]", "[]"]


def imported_by(path: Path) -> set[Path]:
    """The package's files that a file needs before it can be used itself."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            module = ROOT / node.module.replace(".", "/")
            places = [module / alias.name for alias in node.names] + [module]
            found |= {place.with_suffix(".py") for place in places}
    return found


def test_a_file_of_the_guide_imports_only_what_stands_above_it():
    guide = (ROOT / "docs/derivation.md").read_text().partition("| file | holds |")[2]
    above: set[Path] = set()
    everything = {*PACKAGE.rglob("*.py")}
    for name in re.findall(r"`([a-z_/]+(?:\.py|/))`", guide):
        files = {*(PACKAGE / name).glob("*.py")} if name.endswith("/") else {PACKAGE / name}
        above |= files
        for file in files:
            unknown = imported_by(file) & everything - above
            assert not unknown, f"{file} imports {unknown}"
    assert {path.name for path in everything - above} == {"__init__.py", "__main__.py"}


def test_public_names_are_frozen():
    assert sorted(megatron_loss_agg.__all__) == PUBLIC.split()
    for name in PUBLIC.split():
        assert getattr(megatron_loss_agg, name).__doc__
