"""The files that start a framework: `doctor` says whether they would load our adapter, and how."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from megatron_loss_agg.errors import HostError, OptionError
from megatron_loss_agg.frameworks.installation import (
    FRAMEWORKS,
    Launch,
    read_aggregations,
    read_launch,
    read_settings,
)
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


def launch(name: str, text: str, folder: Path) -> Launch:
    """What a file of the text says; ROLL's is of settings."""
    file = folder / ("start.yaml" if name == "roll" else "start.sh")
    file.write_text(text)
    return read_launch(FRAMEWORKS[name], [str(file)])


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_settings_of_a_page_load_the_adapter_and_misspelt_ones_do_not(
    name: str, tmp_path: Path
) -> None:
    text = settings(name) + CALLS.get(name, "")
    (lines, batch_kind), *_ = FRAMEWORKS[name].entry_points.items()
    settings_in_text = launch(name, text, tmp_path)
    assert settings_in_text.batch_kind == batch_kind
    modes = {agg.mode for agg in read_aggregations(settings_in_text)}
    assert modes <= {"prompt_mean", "sample_mean"}
    for words in lines:
        setting = re.split("[ =:]", words)[0].rpartition(".")[2]
        misspelt = text.replace(setting, f"x{setting}")
        with pytest.raises(OptionError, match=r"must load the adapter of .*, got .*Write"):
            launch(name, misspelt, tmp_path)
    commented = "".join(f"# {line}\n" for line in text.splitlines())
    with pytest.raises(OptionError, match="must load the adapter"):
        launch(name, commented, tmp_path)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_flags_that_the_adapter_would_refuse_are_found_in_the_settings(
    name: str, tmp_path: Path
) -> None:
    text = settings(name) + CALLS.get(name, "")
    for flags, error in (
        ("prompt_men", "unknown mode 'prompt_men'"),
        ("dataset_mean", "must group tokens by .*, got dataset"),
        ("token_mean --loss-aggregation-divisor 2", "divisor"),
    ):
        changed = launch(name, re.sub(r"(sample|prompt)_mean", flags, text), tmp_path)
        with pytest.raises(OptionError, match=error):
            read_aggregations(changed)


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
def test_scripts_and_json_are_read(name: str, text: str, tmp_path: Path) -> None:
    assert launch(name, text, tmp_path).flags == []


@pytest.mark.parametrize(
    "text, flags",
    [
        ("export FLAGS='--loss-aggregation sum'", ["--loss-aggregation sum"]),
        ("FLAGS=--loss-aggregation=sum python x.py", ["--loss-aggregation=sum"]),
        (r'RUNTIME="{\"FLAGS\": \"--loss-aggregation sum\"}"', ["--loss-aggregation sum"]),
        ('os.environ["FLAGS"] = "--loss-aggregation sum"', ["--loss-aggregation sum"]),
        ('os.environ.setdefault("FLAGS", "--loss-aggregation sum")', ["--loss-aggregation sum"]),
        ('FLAGS="$MINE"', []),
        ('FLAGS=""', []),
        ('# FLAGS="--loss-aggregation sum"', []),
        # Values of a program, or filled in by a shell.
        ('"FLAGS": os.environ["FLAGS"],\n    "NCCL_DEBUG": "INFO",', []),
        ('"FLAGS": f"--loss-aggregation {mode}"', []),
        ("env = {'FLAGS': flags}", []),
        (": ${FLAGS:?set it}", []),
        (": ${FLAGS=none}", []),
        ('echo "flags: ${FLAGS:-none}"', []),
        ('os.environ["FLAGS"] = "--loss-aggregation {}".format(mode)', []),
        ('os.environ["FLAGS"] = "--loss-aggregation %s" % mode', []),
        ('os.environ["FLAGS"] = "--loss-aggregation " + mode', []),
        ('FLAGS="--loss-aggregation="$MODE', []),
        ("FLAGS=`cat flags.txt`", []),
        ('for name in ["FLAGS", "WORLD_SIZE"]:', []),
        ('[ "$FLAGS" = "none" ] && exit 1', []),
        ('echo "FLAGS: set"', []),
        # Mistakes, for the adapter would not take them.
        ("export FLAGS=prompt_mean", ["prompt_mean"]),
        ('"FLAGS": "prompt_mean"', ["prompt_mean"]),
    ],
)
def test_the_variable_is_read_where_scripts_set_it(
    text: str, flags: list[str], tmp_path: Path
) -> None:
    adapter = f"--rollout-data-postprocess-path {OURS}.slime.postprocess\n"
    assert launch("slime", adapter + text.replace("FLAGS", VARIABLE), tmp_path).flags == flags


ROLL = f"""
loss_agg_mode: seq-mean-token-sum
actor_train:
  worker_cls: {OURS}.roll.AggregatedRLVRWorker
  system_envs: {{{VARIABLE}: "--loss-aggregation prompt_mean"}}
  strategy_args: {{strategy_name: megatron_train}}
"""


def test_settings_that_stand_elsewhere_have_no_effect(tmp_path: Path) -> None:
    assert launch("roll", ROLL, tmp_path).flags == ["--loss-aggregation prompt_mean"]
    moved = ROLL.replace("actor_train:", "actor_infer:")
    with pytest.raises(OptionError, match=r"a name other than actor_train\.worker_cls"):
        launch("roll", moved, tmp_path)
    below = ROLL.replace("loss_agg_mode", "actor_infer:\n  loss_agg_mode")
    with pytest.raises(OptionError, match="got no loss_agg_mode"):
        launch("roll", below, tmp_path)
    of_all = ROLL.replace("  system_envs", "system_envs").replace("  strategy_args", "x_args")
    assert launch("roll", of_all, tmp_path).flags == ["--loss-aggregation prompt_mean"]
    of_others = of_all.replace("system_envs:", "reference:\n  system_envs:")
    assert launch("roll", of_others, tmp_path).flags == []


@pytest.mark.parametrize(
    "name, text, error",
    [
        ("roll", f"length_loss_weight: true{ROLL}", "length_loss_weight must be off"),
        ("roll", f"{ROLL}  pg_variant: topr\n", "pg_variant must be unset"),
        ("roll", ROLL.replace("megatron_train", "fsdp2_train"), "must be megatron_train"),
        ("roll", f"{ROLL}  apply_loss_scale: ${{mine}}\n", None),
        ("rlinf", "algorithm: {early_stop_imp_ratio: 5.0}", "early_stop_imp_ratio must be unset"),
        ("rlinf", "algorithm: {early_stop_imp_ratio: null, entropy_bonus: 0.0}", None),
        ("verl", "actor_rollout_ref: {actor: {loss_agg_mode: sum}}", "loss_agg_mode must be token"),
        ("skyrl", "trainer: {algorithm: {loss_reduction: sum}}", "loss_reduction must be token"),
        ("areal", "actor: {m2_threshold: 0.1}", "m2_threshold must be unset"),
        ("areal", "actor:", None),
        # Groups of Hydra, and what others may write.
        ("verl", "actor_rollout_ref: default", None),
        ("areal", "actor: [one, two]", None),
        ("roll", "actor_train: {strategy_args: default}", None),
    ],
)
def test_settings_that_the_adapter_would_refuse_are_found(
    name: str, text: str, error: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    if error is None:
        assert read_settings(FRAMEWORKS[name], file)
        return
    with pytest.raises(HostError, match=error):
        read_settings(FRAMEWORKS[name], file)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    file = tmp_path / "start.yaml"
    with pytest.raises(
        OptionError, match="FILE must be the script or the settings that start ROLL"
    ):
        read_launch(FRAMEWORKS["roll"], [str(file)])
    file.write_text("actor_train: {")
    with pytest.raises(OptionError, match=r"start\.yaml must be YAML, got"):
        read_launch(FRAMEWORKS["roll"], [str(file)])


def test_a_script_and_its_settings_are_read_together(tmp_path: Path) -> None:
    script, config = tmp_path / "main_grpo.py", tmp_path / "config.yaml"
    script.write_text(f"from {OURS}.rlinf import MegatronActor\nactor_worker_cls = MegatronActor\n")
    config.write_text(
        f"cluster:\n  node_groups:\n    - env_configs: [env_vars: [{VARIABLE}: --x]]\n"
    )
    assert read_launch(FRAMEWORKS["rlinf"], [str(script), str(config)]).flags == ["--x"]


def test_the_end_of_a_file_ends_its_last_line(tmp_path: Path) -> None:
    script, config = tmp_path / "start.sh", tmp_path / "config.yaml"
    script.write_text("python examples/start_rlvr_pipeline.py")
    config.write_text(ROLL.lstrip())
    assert read_launch(FRAMEWORKS["roll"], [str(script), str(config)]).flags


def test_a_variable_without_a_value_in_a_yaml_file_is_not_set(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    for value in ("null", "'???'", "'{{ flags }}'", "'${flags}'"):
        config.write_text(ROLL.replace('"--loss-aggregation prompt_mean"', value))
        assert read_launch(FRAMEWORKS["roll"], [str(config)]).flags == []


def test_another_function_of_ours_does_not_do(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="got no --rollout-data-postprocess-path"):
        launch("slime", f"--rollout-data-postprocess-path {OURS}.slime.postprocess2", tmp_path)
    with pytest.raises(OptionError, match="under a name other than --rollout-data-postprocess-p"):
        launch("slime", f"--rollout-postprocess-path {OURS}.slime.postprocess", tmp_path)


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
