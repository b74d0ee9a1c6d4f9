"""``python -m megatron_loss_agg doctor``: check whether the plugin works in this environment."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import logging
import platform
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

import torch

from megatron_loss_agg import __version__
from megatron_loss_agg.aggregation import units_by_id
from megatron_loss_agg.describe import formula, terms_in_words
from megatron_loss_agg.errors import AggregationError
from megatron_loss_agg.launch import flags
from megatron_loss_agg.launch.effect import GivenFlags
from megatron_loss_agg.launch.install import hook_from_args
from megatron_loss_agg.launch.seams import seams


class Finding(NamedTuple):
    """The result of one check."""

    level: Literal["OK", "WARN", "FAIL"]  # FAIL: the plugin would not run, or would not be exact
    check: str
    text: str


def main(argv: Sequence[str]) -> int:
    """Print one finding per line; return 1 if any of them is FAIL, else 0."""
    ours = list(itertools.takewhile(lambda arg: arg != "--", argv))
    script_flags = argv[len(ours) + 1 :] if "--" in argv else None
    parser = argparse.ArgumentParser(
        prog="megatron_loss_agg doctor",
        usage="%(prog)s [-h] [--json] [-- FLAG ...]",
        description="Check whether the plugin works here: one line per finding, and exit code 1 if "
        "any is FAIL. The flags of a launch script, given after --, are checked too.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    args = parser.parse_args(ours)
    if script_flags and Path(script_flags[0]).is_file():
        # As when the script runs: its folder comes first, where Megatron and modules may lie.
        sys.path.insert(0, str(Path(script_flags[0]).resolve().parent))
    # What Megatron says when it is imported is no finding.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(sys.stderr):
        findings = list(_findings(script_flags))
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
    text = f"{torch.__version__} sees {gpus or 'no'} GPU" + ("" if gpus else ": give --cpu")
    yield Finding("OK" if gpus else "WARN", "torch", text)
    core = _imported("megatron.core")
    training = _imported("megatron.training")
    if isinstance(core, ModuleType):
        yield check_release(core.__version__, _root(core))
        yield from _check_training(core, training)
        yield _check_seams()
    else:
        text = f"{_one_line(core)}; pip install megatron-core, or put a checkout on PYTHONPATH"
        yield Finding("FAIL", "megatron-core", text)
    if script_flags is not None:
        yield _check_flags(script_flags, with_host=isinstance(training, ModuleType))


def check_release(version: str, root: Path) -> Finding:
    """Whether this Megatron-Core release, installed in ``root``, is supported and tested."""
    match = re.match(r"(\d+)\.(\d+)", version)
    release = (int(match[1]), int(match[2])) if match else (0, 0)
    name, text, tested = "megatron-core", f"{version} in {root}", "0.14 to 0.19"
    if release < (0, 13):
        text += f": averages losses unlike 0.13 and later; install {tested}"
        return Finding("FAIL", name, text)
    if not (0, 14) <= release <= (0, 19):
        text += f": tested with {tested}; train with --loss-aggregation-audit"
        return Finding("WARN", name, text)
    return Finding("OK", name, text)


def _check_training(core: ModuleType, training: ModuleType | Exception) -> Iterator[Finding]:
    name = "megatron.training"
    if isinstance(training, ModuleNotFoundError) and training.name == name:
        text = (
            "not in this megatron-core (its wheels include it from 0.17): for its scripts, put a "
            "checkout on PYTHONPATH; other loops need none"
        )
        yield Finding("WARN", name, text)
    elif isinstance(training, Exception):
        yield Finding("FAIL", name, f"{_one_line(training)}; install what is missing, or fix it")
    elif (ours := _root(training)) != (theirs := _root(core)):
        text = f"in {ours}, but megatron.core is in {theirs}; put the checkout on PYTHONPATH"
        yield Finding("WARN", name, text)


def _check_seams() -> Finding:
    try:
        found = seams()
    except Exception as error:
        return Finding("FAIL", "seams", _one_line(error))
    parts = "schedules, optimizers" + (", megatron.training" if "setup" in found else "")
    return Finding("OK", "seams", f"the launcher can wrap Megatron's {parts}")


def _check_flags(script_flags: Sequence[str], with_host: bool) -> Finding:
    """The first thing that a run with these flags, or those of the environment, would refuse."""
    script = script_flags[0] if script_flags else "--"
    if not (script.startswith("-") or Path(script).is_file()):
        text = f"{script} is not a file; expected a training script, or flags alone"
        return Finding("FAIL", "flags", text)
    parser: argparse.ArgumentParser = flags.Parser(add_help=False, allow_abbrev=False)
    try:
        if with_host:
            parser = getattr(*seams()["add_arguments"][0])(parser)
        given = GivenFlags(script_flags)
        args, others = parser.parse_known_args(given.others)
        vars(args).update(given.values)
        hook = hook_from_args(args, in_training_loop=True)
    except AggregationError as error:
        return Finding("FAIL", "flags", _one_line(error))
    if hook is None:
        text = f"without {flags.FLAG} the plugin does nothing; add {flags.FLAG} MODE"
        return Finding("WARN", "flags", text)
    formulas = [formula(term.aggregation) for term in hook.terms.values()]
    mode = "; ".join([terms_in_words(hook.terms), *formulas])
    if not with_host:
        text = f"{mode}; Megatron's own flags not checked: no megatron.training"
        return Finding("WARN", "flags", text)
    unknown = ", ".join(flag for flag in others if flag.startswith("--") and flag != "--cpu")
    if unknown:
        text = f"{mode}; Megatron has no {unknown}: valid only if the script adds them"
        return Finding("WARN", "flags", text)
    needs = " and ".join(f"{unit}_ids" for unit in sorted(units_by_id(hook.terms)))
    read = f"; the batches must have {needs}" if needs else ""
    return Finding("OK", "flags", f"{mode}; no other flag conflicts with it{read}")


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
