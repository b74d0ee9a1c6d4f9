"""The core imports without Megatron, and its public names are frozen."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import megatron_loss_agg

ROOT = Path(__file__).parents[2]
PACKAGE = "megatron_loss_agg"
CORE = (
    "aggregation",
    "checks",
    "elementwise",
    "errors",
    "exchange",
    "explain",
    "gather",
    "layout",
    "loss",
    "masks",
    "microbatch",
    "plan",
    "policy",
    "presets",
    "report",
    "sequences",
    "tally",
    "terms",
    "weights",
)

PUBLIC = (
    "AggregationError",
    "CPLayout",
    "LossAggregation",
    "Microbatch",
    "SequenceMean",
    "StepPlan",
    "StepTerms",
    "Term",
    "predicting_mask",
    "token_weights",
    "weighted_sum",
)
FIXED = {
    "AggregationError",
    "CPLayout",
    "LossAggregation",
    "Microbatch",
    "StepPlan",
    "token_weights",
    "weighted_sum",
}

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
    assert done.stdout.splitlines() == ["[[0.5, 0.5]]", "[]"]


def test_every_module_beside_the_adapter_is_known_to_be_core():
    modules = {path.stem for path in (ROOT / "megatron_loss_agg").glob("[!_]*")}
    assert modules - {"mcore", "py"} == set(CORE)


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
    package = ROOT / PACKAGE
    everything = {*package.rglob("*.py")}
    for name in re.findall(r"`([a-z_/]+(?:\.py|/))`", guide):
        files = {*(package / name).glob("*.py")} if name.endswith("/") else {package / name}
        above |= files
        for file in files:
            unknown = imported_by(file) & everything - above
            assert not unknown, f"{file} imports {unknown}"
    assert {path.name for path in everything - above} == {"__init__.py", "__main__.py"}


def test_public_names_are_frozen():
    assert tuple(sorted(megatron_loss_agg.__all__)) == PUBLIC
    assert FIXED.issubset(PUBLIC)
    for name in PUBLIC:
        assert getattr(megatron_loss_agg, name).__doc__
