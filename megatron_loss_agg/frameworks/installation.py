"""Checks for ``doctor --framework NAME``: the installed framework and the files that start it."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_loss_agg.aggregation import LossAggregation
from megatron_loss_agg.describe import aggregation_in_words
from megatron_loss_agg.errors import HostError, OptionError
from megatron_loss_agg.frameworks import check_aggregation
from megatron_loss_agg.frameworks.refusals import BATCHES, SETTINGS, check_settings, value_at
from megatron_loss_agg.launch.flags import (
    VARIABLE,
    aggregation_from_environment,
    aggregations_from,
    environment_flags,
)

_OURS = "megatron_loss_agg.frameworks"


class Framework(NamedTuple):
    """A framework with an adapter; the adapter is a module of this package."""

    title: str
    package: str
    distribution: str
    """Its name on the package index."""
    tried: tuple[str, ...]
    """Releases, or commits of a clone, that the adapter was run on."""
    entry_points: dict[tuple[str, ...], str]
    """Ways to load the adapter. Maps settings or lines, all of them needed, to a `BATCHES` key."""
    settings: tuple[tuple[str, str], ...] = ()
    """Sections of its configuration, with dots between nested names, and their keys in `SETTINGS`."""
    variables: str = ".*"
    """Matches sections whose variables reach the processes that load the adapter."""
    in_driver: bool = False
    """True if the process that loads the adapter does not train and needs no Megatron."""


FRAMEWORKS = {
    "verl": Framework(
        title="verl",
        package="verl",
        distribution="verl",
        tried=("0.9.1", "0.9.0"),
        entry_points={(f"VERL_USE_EXTERNAL_MODULES={_OURS}.verl",): "verl"},
        settings=(("actor_rollout_ref.actor", "verl"),),
        variables=r".*\benv_vars",
    ),
    "slime": Framework(
        title="slime",
        package="slime",
        distribution="slime",
        tried=("624b824", "7405851"),
        entry_points={(f"--rollout-data-postprocess-path {_OURS}.slime.postprocess",): "slime"},
    ),
    "miles": Framework(
        title="miles",
        package="miles",
        distribution="miles",
        tried=("31f1ca9",),
        entry_points={
            (f"--custom-convert-samples-to-train-data-path {_OURS}.miles.convert",): "miles",
            (f"--rollout-data-postprocess-path {_OURS}.miles.postprocess",): "miles with its patch",
        },
    ),
    "nemo_rl": Framework(
        title="NeMo-RL",
        package="nemo_rl",
        distribution="nemo-rl",
        tried=("7ea279a",),
        entry_points={
            (f"from {_OURS}.nemo_rl import aggregate_losses", "aggregate_losses("): "NeMo-RL",
        },
        in_driver=True,
    ),
    "areal": Framework(
        title="AReaL",
        package="areal",
        distribution="areal",
        tried=("cbff54d", "2.0.0", "1.0.4"),
        entry_points={
            (f"from {_OURS}.areal import PPOTrainer",): "AReaL",
            (f"from {_OURS}.areal import SFTTrainer",): "AReaL's SFT",
        },
        settings=(("actor", "areal"),),
        variables=r"(actor|critic)\.scheduling_spec\.env_vars",
    ),
    "rlinf": Framework(
        title="RLinf",
        package="rlinf",
        distribution="rlinf",
        tried=("a3816b5",),
        entry_points={
            (f"from {_OURS}.rlinf import MegatronActor", "actor_worker_cls=MegatronActor"): "RLinf",
            (f"from {_OURS}.rlinf import MegatronActor", "MegatronActor.create_group("): "RLinf",
        },
        settings=(("", "rlinf"),),
        variables=r"cluster\..*\benv_vars",
    ),
    "roll": Framework(
        title="ROLL",
        package="roll",
        distribution="roll",
        tried=("8eb27cc",),
        entry_points={
            (
                f"actor_train.worker_cls: {_OURS}.roll.Aggregated{pipeline}Worker",
                "loss_agg_mode: seq-mean-token-sum",
            ): f"ROLL's {name} pipeline"
            for pipeline, name in (("RLVR", "RLVR"), ("Agentic", "agentic"))
        },
        settings=(
            ("", "roll"),
            ("actor_train", "roll, worker"),
            ("actor_train.strategy_args", "roll, strategy"),
        ),
        variables=r"(actor_train\.)?system_envs",
    ),
    "skyrl": Framework(
        title="SkyRL",
        package="skyrl",
        distribution="skyrl",
        tried=("0.4.0",),
        entry_points={
            (f"trainer.override_entrypoint={_OURS}.skyrl",): "SkyRL",
            (f"from {_OURS}.skyrl import ExactLoss", "(ExactLoss"): "SkyRL",
            (f"from {_OURS}.skyrl import ExactAsyncTrainer", "ExactAsyncTrainer("): "SkyRL",
        },
        settings=(("", "skyrl"),),
        in_driver=True,
    ),
    "ms_swift": Framework(
        title="ms-swift",
        package="swift",
        distribution="ms-swift",
        tried=("4.6.0",),
        entry_points={("external_plugins", "ms_swift/plugin.py"): "ms-swift"},
    ),
}
"""All frameworks, by the names of their adapters."""


class Launch(NamedTuple):
    """Settings for the adapter in the files that start a framework."""

    batch_kind: str
    """A key of `BATCHES`."""
    flags: list[str]
    """The variable's values, except those that a shell, a program or another file fills in."""


def examine_framework(name: str, files: Sequence[str] = ()) -> tuple[str, str]:
    """OK, or WARN for a version that was not tried; and a text with the lines to set.

    Args:
        files: the script and the settings that start the framework.

    Raises:
        HostError: the framework is not installed or lacks a name that the adapter uses, or a file
            has a setting with which the adapter is not exact.
        OptionError: bad flags in a file or in the environment, or files that load no adapter.
    """
    framework = FRAMEWORKS[name]
    if importlib.util.find_spec(framework.package) is None:
        raise HostError(
            f"{name} must be installed in this Python, or its checkout be on PYTHONPATH, got "
            "neither. Use the Python that trains."
        )
    launch = Launch(next(iter(framework.entry_points.values())), [])
    if files:
        launch = read_launch(framework, files)
    aggregations = read_aggregations(launch)
    settings = importlib.import_module(f"{_OURS}.{name}").SETTINGS
    version = _version(framework)
    level, state = "OK", f"{version}, tried"
    if version not in framework.tried:
        level, state = "WARN", f"{version}, not tried: expects {' or '.join(framework.tried)}"
    state += "; has the names that the adapter uses"
    words = ", ".join(dict.fromkeys(map(aggregation_in_words, aggregations)))
    if files:
        state += f"; {' and '.join(files)} load{'s' * (len(files) == 1)} the adapter"
        if not aggregations:
            state += f", but {VARIABLE} has no value that can be read there, and none here"
            return "WARN", f"{state}. Set it."
        return level, f"{state}; {VARIABLE} asks for {words}"
    here = f"asks for {words}" if aggregations else "is not set"
    return level, (
        f"{state}; {VARIABLE} {here} here. Set, with the mode that you want,\n{settings}"
    )


def _version(framework: Framework) -> str:
    """The commit of the framework's clone, otherwise its installed release."""
    spec = importlib.util.find_spec(framework.package)
    assert spec is not None and spec.submodule_search_locations
    root = Path(next(iter(spec.submodule_search_locations))).parent
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "rev-parse", "--short=7", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True)
        if commit.returncode == 0:
            return commit.stdout.strip()
    try:
        return importlib.metadata.version(framework.distribution)
    except importlib.metadata.PackageNotFoundError:
        return "a version without a number"


def read_aggregations(launch: Launch) -> list[LossAggregation]:
    """The aggregations that the adapter would read: from the files, otherwise the environment.

    Raises:
        OptionError: the adapter would refuse the flags.
    """
    aggregations = []
    for text in launch.flags or [os.environ.get(VARIABLE, "")]:
        if BATCHES[launch.batch_kind].has_hook:
            aggregations += aggregations_from(argparse.Namespace(**environment_flags(text)))
        elif (agg := aggregation_from_environment(text)) is not None:
            aggregations.append(agg)
    for agg in aggregations:
        check_aggregation(agg, launch.batch_kind)
    return aggregations


def read_launch(framework: Framework, files: Sequence[str]) -> Launch:
    """The settings in the files, which together must load the adapter.

    Raises:
        OptionError: they do not load it. A framework ignores a setting that it does not know, or
            imports another class, and then trains on its own mean.
        HostError: a setting with which the adapter is not exact.
    """
    texts, flags = [], []
    for name in files:
        path = Path(name)
        if not path.is_file():
            raise OptionError(
                f"FILE must be the script or the settings that start {framework.title}, got "
                f"{name!r}. Give a file."
            )
        if path.suffix in (".yaml", ".yml"):
            values = read_settings(framework, path)
            texts += [f"{key}: {value}" for key, value in values]
            for key, value in values:
                section, _, variable = key.rpartition(".")
                if variable == VARIABLE and re.fullmatch(framework.variables, section):
                    flags.append(str(value or ""))
        else:
            code = re.sub(r"(^|\s)#.*", r"\1", path.read_text(errors="replace"))
            texts.append(code)
            flags += [match["quoted"] or match["word"] for match in _FLAGS.finditer(code)]
    batch_kind = entry_point_in(framework, " and ".join(files), "\n".join(texts))
    return Launch(batch_kind, [x for x in flags if x and not _FILLED_IN.search(x)])


def read_settings(framework: Framework, path: Path) -> list[tuple[str, Any]]:
    """Names in a YAML file, such as ``actor_train.worker_cls``, and values, one per list item.

    Raises:
        OptionError: the file is not YAML.
        HostError: a setting with which the adapter is not exact.
    """
    import yaml  # type: ignore[import-untyped]  # installed with each framework that has such files

    try:
        config = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise OptionError(f"{path} must be YAML, got {error}. Correct it.") from error
    values = [*_flat(config)]
    # Other settings are defaults or are filled in from elsewhere.
    set_here = {key for key, value in values if "${" not in str(value)}
    for section, row in framework.settings:
        prefix = section and f"{section}."
        settings = (x for x in SETTINGS[row] if prefix + x.name in set_here)
        check_settings(value_at(config, section), *settings)
    return values


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, x in value.items():
            yield from _flat(x, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for x in value:
            yield from _flat(x, name)
    else:
        yield name, value


def entry_point_in(framework: Framework, files: str, text: str) -> str:
    """The key of `BATCHES` for the first entry point that is complete in the text.

    Raises:
        OptionError: no entry point is.
    """
    missing = {}
    for words, batch_kind in framework.entry_points.items():
        missing[words] = [x for x in words if not re.search(_pattern(x), text)]
        if not missing[words]:
            return batch_kind
    needed = min(missing.values(), key=len)[0]
    setting, _, value = re.sub(": |=", " ", needed).partition(" ")
    got = f"no {needed}"
    if value.startswith(_OURS) and re.search(_pattern(value), text):
        got = f"{value} under a name other than {setting}"
    raise OptionError(
        f"{files} must load the adapter of {framework.title}, got {got}. Write {needed}."
    )


_FLAGS = re.compile(
    # Neither "${VARIABLE=...}" nor a comparison with "$VARIABLE".
    rf"""(?<![\w$])(?<!\$\{{){VARIABLE}"""
    # An argument may be something else, such as the next of several names.
    r"""(?:\\*["']?(?:\]?\s*[:=]|\s*,(?=\s*["']-))\s*(?P<quote>\\*["'])(?P<quoted>.*?)(?P=quote)"""
    # Outside a shell, a word without quotes is a variable.
    r"""|=(?P<word>[^\s"'&;)]+))"""
)
"""The variable and its value, as written in a shell, in JSON or in a program."""
_FILLED_IN = re.compile(r"[$`{%?]|[ =]$")
"""A value that a shell, a template or Hydra fills in, or that continues after its quotes."""


def _pattern(words: str) -> str:
    """Matches words of a command line or a program, also as written in YAML, JSON or a shell."""
    parts = map(re.escape, re.split("[ =]|: ", words))
    # Quotes and signs between a name and its value, and other values of a list.
    between = r"""["']?(?:\s|\\|=|:)+["'\[(\s]*(?:[\w./]+,\s*)*"""
    # Variables may follow any section that passes them on; settings are named with all sections.
    start = "" if words[0] == "(" else r"(?<!\w)" if words[0].isupper() else r"(?<![\w.])"
    return start + between.join(parts) + (r"(?!\w)" if words[-1] != "(" else "")
