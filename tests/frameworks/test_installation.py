"""The files that start a framework: `doctor` says whether they would load our adapter."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from megatron_loss_agg.errors import OptionError
from megatron_loss_agg.frameworks.installation import FRAMEWORKS, names_variable
from megatron_loss_agg.launch.flags import VARIABLE
from tests.frameworks.harness import ROOT, page

ADAPTERS = ROOT / "megatron_loss_agg" / "frameworks"
CALLS = {"nemo_rl": "aggregate_losses(policy)"}
OURS = "megatron_loss_agg.frameworks"


def settings(name: str) -> str:
    """`SETTINGS` of the adapter, without an import of the framework."""
    module = ADAPTERS / f"{name}.py"
    source = (module if module.is_file() else ADAPTERS / name / "__init__.py").read_text()
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "SETTINGS":
            return str(ast.literal_eval(statement.value))
    raise AssertionError(name)


def loads(name: str, text: str, folder: Path) -> bool:
    """True if the file loads the adapter and names the variable."""
    file = folder / "start"
    file.write_text(text)
    return names_variable(FRAMEWORKS[name], str(file))


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_settings_of_a_page_load_the_adapter_and_misspelt_ones_do_not(
    name: str, tmp_path: Path
) -> None:
    text = settings(name) + CALLS.get(name, "")
    assert loads(name, text, tmp_path)
    for words in FRAMEWORKS[name].doors[0]:
        setting = words.replace("=", " ").split()[0]
        misspelt = text.replace(setting, f"x{setting}")
        with pytest.raises(OptionError, match=r"must load the adapter of .*, got .*Write"):
            loads(name, misspelt, tmp_path)
        commented = "".join(f"# {line}\n" for line in text.splitlines())
        with pytest.raises(OptionError):
            loads(name, commented, tmp_path)


OTHER_FORMS = {
    "verl": (
        f"""VERL_USE_EXTERNAL_MODULES="recipe.mine,{OURS}.verl" python -m verl.trainer.main_ppo""",
        f'''{{"env_vars": {{"VERL_USE_EXTERNAL_MODULES": "{OURS}.verl"}}}}''',
        f"env_vars:\n  VERL_USE_EXTERNAL_MODULES: {OURS}.verl\n",
    ),
    "slime": (
        f"ARGS=(\n   --rollout-data-postprocess-path \\\n      {OURS}.slime.postprocess\n)",
        f"--rollout-data-postprocess-path={OURS}.slime.postprocess",
    ),
    "nemo_rl": (
        f"from {OURS}.nemo_rl import (\n    aggregate_losses,\n)\npolicy = aggregate_losses(policy)",
    ),
    "rlinf": (
        f"from {OURS}.rlinf import MegatronActor\nactor = MegatronActor.create_group(cfg, placement)",
    ),
    "skyrl": (
        f"from {OURS}.skyrl import ExactLoss\nclass Exact(ExactLoss, Mine): ...",
        f"trainer.override_entrypoint='{OURS}.skyrl'",
    ),
    "ms_swift": ("external_plugins:\n  - /opt/megatron_loss_agg/frameworks/ms_swift/plugin.py\n",),
}


@pytest.mark.parametrize("name, text", [(x, y) for x, forms in OTHER_FORMS.items() for y in forms])
def test_scripts_yaml_and_json_are_read(name: str, text: str, tmp_path: Path) -> None:
    assert not loads(name, text, tmp_path)  # they do not name the variable
    assert loads(name, f"{VARIABLE}=...\n{text}", tmp_path)


def test_another_function_of_ours_does_not_do(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="got no --rollout-data-postprocess-path"):
        loads("slime", f"--rollout-data-postprocess-path {OURS}.slime.postprocess2", tmp_path)
    with pytest.raises(OptionError, match="under another name than --rollout-data-postprocess-p"):
        loads("slime", f"--rollout-postprocess-path {OURS}.slime.postprocess", tmp_path)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_page_has_the_settings_and_names_what_was_tried(name: str) -> None:
    framework = FRAMEWORKS[name]
    assert settings(name) in page(framework.title.lower())
    table = (ROOT / "docs/frameworks.md").read_text()
    (row,) = (x for x in table.splitlines() if x.startswith(f"| [{framework.title}]("))
    assert all(version in row for version in framework.tried)


def test_the_folder_of_the_plugin_hides_no_package() -> None:
    """ms-swift puts it first on the path."""
    assert {path.stem for path in (ADAPTERS / "ms_swift").glob("*.py")} == {"__init__", "plugin"}
