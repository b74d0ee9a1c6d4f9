"""``python -m megatron_loss_agg doctor``: check whether the plugin works in this environment."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

import torch

from megatron_loss_agg import __version__
from megatron_loss_agg.aggregation import units_by_id
from megatron_loss_agg.describe import aggregation_in_words, formula, number_of, terms_in_words
from megatron_loss_agg.errors import AggregationError
from megatron_loss_agg.launch import flags, sft
from megatron_loss_agg.launch.install import hook_from_args, replacements


class Finding(NamedTuple):
    """The result of one check."""

    level: Literal["OK", "WARN", "FAIL"]  # FAIL: the plugin would not run, or would not be exact
    check: str
    text: str


def main(argv: Sequence[str], settings_of: Callable[[str], str], frameworks: Sequence[str]) -> int:
    """Print one finding per line; return 1 if any of them is FAIL, else 0.

    Args:
        settings_of: name of a framework -> the lines that select its adapter; raises an error if the
            installed framework does not have its extension point.
        frameworks: the names that it takes.
    """
    ours = list(itertools.takewhile(lambda arg: arg != "--", argv))
    script_flags = argv[len(ours) + 1 :] if "--" in argv else None
    if script_flags and script_flags[0] == "--cpu":  # as the launcher takes it
        script_flags = script_flags[1:]
    parser = argparse.ArgumentParser(
        prog="megatron_loss_agg doctor",
        usage="%(prog)s [-h] [--json] [--framework NAME] [-- FLAG ...]",
        description="Check whether the plugin works here: one line per finding, and exit code 1 if "
        "any is FAIL. The flags of a launch script, given after --, are checked too.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument(
        "--framework",
        choices=frameworks,
        metavar="NAME",
        help=f"check the adapter of {', '.join(frameworks)}, and print the lines that select it",
    )
    args = parser.parse_args(ours)
    if script_flags and Path(script_flags[0]).is_file():
        # As when the script runs: its folder comes first, where Megatron and modules may lie.
        sys.path.insert(0, str(Path(script_flags[0]).resolve().parent))
    # Megatron's warnings at its import are no findings.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(sys.stderr):
        findings = list(_findings(script_flags))
        if args.framework is not None:
            findings.append(_check_framework(args.framework, settings_of))
    ok = all(finding.level != "FAIL" for finding in findings)
    if args.json:
        print(json.dumps({"ok": ok, "findings": [finding._asdict() for finding in findings]}))
    else:
        for level, check, text in findings:
            print(f"{level:<4}  {check:<18}  {text}")
    return 0 if ok else 1


def _findings(script_flags: Sequence[str] | None) -> Iterator[Finding]:
    """All findings, for the Megatron that is first on ``sys.path``."""
    yield Finding("OK", "python", platform.python_version())
    yield Finding("OK", "megatron_loss_agg", __version__)
    gpus = torch.cuda.device_count()
    if gpus:
        yield Finding("OK", "torch", f"{torch.__version__} sees {number_of(gpus, 'GPU')}")
    else:
        advice = "To train without one, put --cpu before the script."
        yield Finding("WARN", "torch", f"{torch.__version__} sees no GPU. {advice}")
    core = _imported("megatron.core")
    training = _imported("megatron.training")
    if isinstance(core, ModuleType):
        yield check_release(core.__version__, _root(core))
        yield from _check_training(core, training)
        yield from _check_data_helpers(core)
        yield _check_replacements()
    else:
        text = f"{_one_line(core)}. Run pip install megatron-core, or put a checkout on PYTHONPATH."
        yield Finding("FAIL", "megatron-core", text)
    if script_flags is not None:
        yield _check_flags(script_flags, has_training=isinstance(training, ModuleType))


def _check_framework(name: str, settings_of: Callable[[str], str]) -> Finding:
    """The extension point of a framework's adapter; with it, the lines to set."""
    try:
        agg = flags.aggregation_from(argparse.Namespace(**flags.environment_flags()))
        settings = settings_of(name)
    except AggregationError as error:
        return Finding("FAIL", name, _one_line(error))
    except Exception as error:  # whatever the framework's import raises
        return Finding(
            "FAIL", name, f"{_one_line(error)}. Install {name} whole, or another version."
        )
    here = "is not set" if agg is None else f"asks for {aggregation_in_words(agg)}"
    text = (
        f"has the extension point of the adapter; {flags.VARIABLE} {here} here. Set, with the mode "
        f"that you want,\n{settings}"
    )
    return Finding("OK", name, text)


def check_release(version: str, root: Path) -> Finding:
    """The support for this Megatron-Core release, which is installed in ``root``."""
    match = re.match(r"(\d+)\.(\d+)", version)
    release = (int(match[1]), int(match[2])) if match else (0, 0)
    name, text, tested = "megatron-core", f"{version} in {root}", "0.14 to 0.19"
    if release < (0, 13):
        text += f" scales losses in another way than 0.13 and later. Install {tested}."
        return Finding("FAIL", name, text)
    if not (0, 14) <= release <= (0, 19):
        text += f" is not tested; {tested} are. Train with {flags.FLAG}-audit."
        return Finding("WARN", name, text)
    return Finding("OK", name, text)


def _check_training(core: ModuleType, training: ModuleType | Exception) -> Iterator[Finding]:
    name = "megatron.training"
    if isinstance(training, ModuleNotFoundError) and training.name == name:
        text = (
            "not in this megatron-core, whose wheels include it from 0.17 on; loops of other "
            "programs do not need it. For Megatron's own scripts, put a checkout on PYTHONPATH."
        )
        yield Finding("WARN", name, text)
    elif isinstance(training, Exception):
        yield Finding("FAIL", name, f"{_one_line(training)}. Install what is missing, or fix it.")
    elif _root(training) != _root(core):
        text = (
            f"in {_root(training)}, but megatron.core is in {_root(core)}. Put the checkout that "
            "has both on PYTHONPATH."
        )
        yield Finding("WARN", name, text)


def _check_data_helpers(core: ModuleType) -> Iterator[Finding]:
    """The programs that a checkout lacks to build the C++ helpers of its data sets."""
    folder = Path(str(core.__file__)).with_name("datasets")
    built = folder / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    if built.exists() or not (folder / "Makefile").exists():  # wheels have them built
        return
    programs = ("make", os.environ.get("CXX", "g++"), "python3", "python3-config")
    missing = [program for program in programs if shutil.which(program) is None]
    pybind11 = ["python3", "-m", "pybind11", "--includes"]
    if "python3" in missing or subprocess.run(pybind11, capture_output=True).returncode:
        missing.append("pybind11")
    if missing:
        text = (
            f"Megatron's scripts build them in {folder} when they start, and their first rank would end "
            f"there without {', '.join(missing)}. Install a C++ compiler, make and Python's headers, "
            "and run python3 -m pip install pybind11; loops of other programs may not need them."
        )
        yield Finding("WARN", "data set helpers", text)


def _check_replacements() -> Finding:
    name = "launcher"
    try:
        holders = [row.holder.__name__ for row in replacements()]
    except Exception as error:
        return Finding("FAIL", name, _one_line(error))
    text = "replaces functions of Megatron's schedules and optimizers"
    if any(holder.startswith("megatron.training.") for holder in holders):
        text += ", and of megatron.training"
    return Finding("OK", name, text)


def _check_flags(script_flags: Sequence[str], has_training: bool) -> Finding:
    """The first thing that a run with these flags, or those of the environment, would refuse."""
    script = script_flags[0] if script_flags else "--"
    if not (script.startswith("-") or Path(script).is_file()):
        text = f"SCRIPT must be a file, got {script!r}. Give a training script, or flags alone."
        return Finding("FAIL", "flags", text)
    parser: argparse.ArgumentParser = flags.Parser(add_help=False, allow_abbrev=False)
    try:
        if not script.startswith("-"):
            flags.check_place_of_cpu(Path(script), script_flags)
        if has_training:
            from megatron.training.arguments import add_megatron_arguments

            parser = add_megatron_arguments(parser)
        values, script_arguments = flags.process_flags(script_flags)
        args, unknown = parser.parse_known_args(script_arguments)
        vars(args).update(values)
        hook = hook_from_args(args, in_training_loop=True)
    except AggregationError as error:
        return Finding("FAIL", "flags", _one_line(error))
    if hook is None:
        text = f"without {flags.FLAG} the plugin does nothing. Add {flags.FLAG} MODE."
        return Finding("WARN", "flags", text)
    formulas = [formula(term.aggregation) for term in hook.terms.values()]
    also = [f"also {agg.label}" for agg in hook.also]
    loss = "; ".join([terms_in_words(hook.terms), *formulas, *also])
    if not has_training:
        text = f"{loss}; without megatron.training, Megatron's own flags are not checked"
        return Finding("WARN", "flags", text)
    unknown = [flag for flag in unknown if flag.startswith("--")]
    if unknown:
        text = f"{loss}; Megatron has no {', '.join(unknown)}: right only if the script adds them"
        return Finding("WARN", "flags", text)
    units = units_by_id(hook.terms).union(*(agg.by_id for agg in hook.also))
    if flags.hook_options(args)["sft_prompt_field"]:
        units.discard("prompt")  # read from the data's lines
    ids = " and ".join(f"{unit}_ids" for unit in sorted(units))
    needs = f"; the batches must have {ids}" if ids else ""
    if "prompt" in units and getattr(args, "sft", False):
        needs += f"; {sft.FLAG} FIELD gives prompt_ids"
    return Finding("OK", "flags", f"{loss}; no other flag conflicts with it{needs}")


def _imported(name: str) -> ModuleType | Exception:
    try:
        return importlib.import_module(name)
    except Exception as error:
        return error


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _root(module: ModuleType) -> Path:
    """The folder that ``megatron.*`` was imported from."""
    return Path(str(module.__file__)).resolve().parents[2]
