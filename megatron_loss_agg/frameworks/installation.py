"""What ``doctor --framework NAME`` looks at: the installed framework, and the file that starts it."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from megatron_loss_agg.describe import aggregation_in_words
from megatron_loss_agg.errors import HostError, OptionError
from megatron_loss_agg.frameworks import aggregation_from_environment
from megatron_loss_agg.launch.flags import VARIABLE, aggregation_from, environment_flags

_OURS = "megatron_loss_agg.frameworks"


class Framework(NamedTuple):
    """A framework with an adapter, a module of this package."""

    title: str
    package: str
    distribution: str
    """Its name on the package index."""
    tried: tuple[str, ...]
    """Releases, or commits of a clone, on which the adapter was run."""
    doors: tuple[tuple[str, ...], ...]
    """Ways to load the adapter, each with the settings or lines that it takes."""
    in_driver: bool = False
    """The process that loads the adapter trains nothing, and needs no Megatron."""


FRAMEWORKS = {
    "verl": Framework(
        *("verl", "verl", "verl", ("0.9.1", "0.9.0")),
        ((f"VERL_USE_EXTERNAL_MODULES={_OURS}.verl",),),
    ),
    "slime": Framework(
        *("slime", "slime", "slime", ("624b824", "7405851")),
        ((f"--rollout-data-postprocess-path {_OURS}.slime.postprocess",),),
    ),
    "miles": Framework(
        *("miles", "miles", "miles", ("31f1ca9",)),
        (
            (f"--custom-convert-samples-to-train-data-path {_OURS}.miles.convert",),
            (f"--rollout-data-postprocess-path {_OURS}.miles.postprocess",),
        ),
    ),
    "nemo_rl": Framework(
        *("NeMo-RL", "nemo_rl", "nemo-rl", ("7ea279a",)),
        ((f"from {_OURS}.nemo_rl import aggregate_losses", "aggregate_losses("),),
        in_driver=True,
    ),
    "areal": Framework(
        *("AReaL", "areal", "areal", ("cbff54d", "2.0.0", "1.0.4")),
        ((f"from {_OURS}.areal import PPOTrainer",), (f"from {_OURS}.areal import SFTTrainer",)),
    ),
    "rlinf": Framework(
        *("RLinf", "rlinf", "rlinf", ("a3816b5",)),
        (
            (f"from {_OURS}.rlinf import MegatronActor", "actor_worker_cls=MegatronActor"),
            (f"from {_OURS}.rlinf import MegatronActor", "MegatronActor.create_group("),
        ),
    ),
    "roll": Framework(
        *("ROLL", "roll", "roll", ("8eb27cc",)),
        (
            (f"worker_cls: {_OURS}.roll.AggregatedRLVRWorker", "seq-mean-token-sum"),
            (f"worker_cls: {_OURS}.roll.AggregatedAgenticWorker", "seq-mean-token-sum"),
        ),
    ),
    "skyrl": Framework(
        *("SkyRL", "skyrl", "skyrl", ("0.4.0",)),
        (
            (f"trainer.override_entrypoint={_OURS}.skyrl",),
            (f"from {_OURS}.skyrl import ExactLoss", "(ExactLoss"),
            (f"from {_OURS}.skyrl import ExactAsyncTrainer", "ExactAsyncTrainer("),
        ),
        in_driver=True,
    ),
    "ms_swift": Framework(
        *("ms-swift", "swift", "ms-swift", ("4.6.0",)),
        (("external_plugins", "ms_swift/plugin.py"),),
    ),
}
"""All frameworks by the names of their adapters."""


def examined(name: str, launch_file: str | None = None) -> tuple[str, str]:
    """OK, or WARN for a version that was not tried; and a text with the lines to set.

    Args:
        launch_file: a script, or a file of settings, that starts the framework.

    Raises:
        HostError: the framework is not there, or lacks a name that the adapter uses.
        OptionError: bad flags in the environment, or a launch file that loads no adapter.
    """
    framework = FRAMEWORKS[name]
    if importlib.util.find_spec(framework.package) is None:
        raise HostError(
            f"{name} must be installed in this Python, or its checkout be on PYTHONPATH, got neither. "
            "Give the Python that trains."
        )
    # ms-swift's loop has a hook, which takes all flags.
    agg = aggregation_from(argparse.Namespace(**environment_flags()))
    if name != "ms_swift":
        aggregation_from_environment()
    settings = importlib.import_module(f"{_OURS}.{name}").SETTINGS
    version = _version(framework)
    level, state = "OK", f"{version}, tried"
    if version not in framework.tried:
        level, state = "WARN", f"{version}, not tried: expects {' or '.join(framework.tried)}"
    state += "; has the names that the adapter uses"
    if launch_file is not None:
        if not names_variable(framework, launch_file) and agg is None:
            return "WARN", (
                f"{state}; {launch_file} loads the adapter, but {VARIABLE} is set neither there nor "
                "here. Set it."
            )
        return level, f"{state}; {launch_file} loads the adapter"
    here = "is not set" if agg is None else f"asks for {aggregation_in_words(agg)}"
    return level, (
        f"{state}; {VARIABLE} {here} here. Set, with the mode that you want,\n{settings}"
    )


def _version(framework: Framework) -> str:
    """The commit of the framework's clone, or else its installed release."""
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


def names_variable(framework: Framework, launch_file: str) -> bool:
    """True if the file, which loads the adapter, also names the variable.

    Raises:
        OptionError: it does not load the adapter. A framework passes over a setting that it does
            not have, or imports another class, and its own mean is trained.
    """
    path = Path(launch_file)
    if not path.is_file():
        raise OptionError(
            f"FILE must be the script or the settings that start {framework.title}, got "
            f"{launch_file!r}. Give a file."
        )
    text = re.sub(r"(^|\s)#.*", r"\1", path.read_text(errors="replace"))
    missing = [[x for x in door if not re.search(_pattern(x), text)] for door in framework.doors]
    if all(missing):
        words = min(missing, key=len)[0]
        setting, _, value = words.replace("=", " ").partition(" ")
        got = f"no {words}"
        if value.startswith(_OURS) and re.search(_pattern(value), text):
            got = f"{value} under another name than {setting}"
        raise OptionError(
            f"{launch_file} must load the adapter of {framework.title}, got {got}. Write {words}."
        )
    return VARIABLE in text


def _pattern(words: str) -> str:
    """Words of a command line or a program, also as YAML, JSON or a shell write them."""
    parts = map(re.escape, re.split("[ =]|: ", words))
    # Quotes and signs between a name and its value, and other values of a list.
    between = r"""["']?(?:\s|\\|=|:)+["'\[(\s]*(?:[\w./]+,\s*)*"""
    start, end = (r"(?<!\w)" if words[0] != "(" else ""), (r"(?!\w)" if words[-1] != "(" else "")
    return start + between.join(parts) + end
