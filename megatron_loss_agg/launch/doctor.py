"""``python -m megatron_loss_agg doctor``: check whether the plugin works in this environment."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import platform
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

from megatron_loss_agg import __version__
from megatron_loss_agg.aggregation import units_by_id
from megatron_loss_agg.describe import formula, number_of, terms_in_words
from megatron_loss_agg.errors import AggregationError
from megatron_loss_agg.launch import flags, sft, sft_checks
from megatron_loss_agg.launch.install import hook_from_args, replacements
from megatron_loss_agg.mcore.checks.before import has_transformer_engine_loss

Result = tuple[str, str]
"""OK, WARN or FAIL, and a text. FAIL: the plugin would not run, or its loss would not be exact."""
Check = Callable[[], Result | None]
"""Returns None if there is nothing to report. An exception is also a FAIL."""


def main(
    argv: Sequence[str],
    examine: Callable[[str, Sequence[str]], Result],
    frameworks: Mapping[str, bool],
) -> int:
    """Print one finding per line; return 1 if any of them is FAIL, else 0.

    Args:
        examine: maps a framework's name and the files that start it to the finding on its adapter;
            raises an error if the installed framework lacks the adapter's extension point.
        frameworks: by name of each framework with an adapter, True if the adapter works in a
            process that needs no Megatron.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    script_flags = argv[end + 1 :] if end < len(argv) else None
    if script_flags and script_flags[0] == "--cpu":  # where the launcher expects it
        script_flags = script_flags[1:]
    parser = argparse.ArgumentParser(
        prog="megatron_loss_agg doctor",
        usage="%(prog)s [-h] [--framework NAME [FILE ...]] [-- FLAG ...]",
        description="Check whether the plugin works here: one line per finding, and exit code 1 if "
        "any is FAIL. The flags of a launch script, given after --, are checked too.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--framework",
        choices=frameworks,
        metavar="NAME",
        help=f"check the adapter of {', '.join(frameworks)}, and print the lines that select it",
    )
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="the script and the settings that start the framework: would they load the adapter, "
        "and would it take their flags?",
    )
    args = parser.parse_args(argv[:end])
    if args.files and not args.framework:
        parser.error("FILE needs --framework NAME; flags of a launch script go after --")
    if script_flags and Path(script_flags[0]).is_file():
        # As when the script runs: its folder comes first and may contain Megatron or modules.
        sys.path.insert(0, str(Path(script_flags[0]).resolve().parent))
    # Megatron's warnings at import are not about the plugin.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(sys.stderr):
        checks = _checks(script_flags)
        if args.framework is not None:
            checks[args.framework] = partial(_check_framework, args.framework, args.files, examine)
            if frameworks[args.framework] and "launcher" not in checks:  # Megatron is not here
                text = f"not here; the adapter of {args.framework} works in a process without it"
                checks["megatron-core"] = lambda: ("OK", text)
        results = {name: _result_of(check) for name, check in checks.items()}
    findings = {name: result for name, result in results.items() if result is not None}
    for name, (level, text) in findings.items():
        print(f"{level:<4}  {name:<18}  {text}")
    return int(any(level == "FAIL" for level, _ in findings.values()))


def _result_of(check: Check) -> Result | None:
    try:
        return check()
    except Exception as error:  # an AggregationError, or whatever Megatron raises
        return "FAIL", _one_line(error)


def _checks(script_flags: Sequence[str] | None) -> dict[str, Check]:
    """The checks, by name, for the Megatron that is first on ``sys.path``."""
    core, training = _imported("megatron.core"), _imported("megatron.training")
    checks: dict[str, Check] = {
        "python": lambda: ("OK", platform.python_version()),
        "megatron_loss_agg": lambda: ("OK", __version__),
        "torch": _check_torch,
    }
    if isinstance(core, Exception):
        advice = "Run pip install megatron-core, or put a checkout on PYTHONPATH."
        checks["megatron-core"] = lambda: ("FAIL", f"{_one_line(core)}. {advice}")
    else:
        root = Path(str(core.__file__)).resolve().parents[2]
        checks |= {
            "megatron-core": partial(check_release, core.__version__, root),
            "megatron.training": partial(_check_training, training),
            "launcher": _check_launcher,
        }
    if script_flags is not None:
        has_training = not isinstance(training, Exception)
        version = getattr(core, "__version__", "")
        checks["flags"] = partial(_check_flags, script_flags, has_training, version)
    return checks


def _check_torch() -> Result:
    gpus = torch.cuda.device_count()
    if gpus:
        return "OK", f"{torch.__version__} sees {number_of(gpus, 'GPU')}"
    advice = "To train without one, put --cpu before the script."
    return "WARN", f"{torch.__version__} sees no GPU. {advice}"


def _release(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def check_release(version: str, root: Path) -> Result:
    """How well this Megatron-Core release, installed in ``root``, is supported."""
    release = _release(version)
    text, tested = f"{version} in {root}", "0.14 to 0.19"
    if release < (0, 13):
        text += f" scales losses differently from 0.13 and later. Install {tested}."
        return "FAIL", text
    if not (0, 14) <= release <= (0, 19):
        text += f" is not tested; {tested} are. Train with {flags.FLAG}-audit."
        return "WARN", text
    return "OK", text


def _check_training(training: ModuleType | Exception) -> Result | None:
    if isinstance(training, ModuleNotFoundError) and training.name == "megatron.training":
        return "WARN", (
            "not in this megatron-core, whose wheels include it from 0.17 on; loops of other "
            "programs do not need it. For Megatron's own scripts, put a checkout on PYTHONPATH."
        )
    if isinstance(training, Exception):
        return "FAIL", f"{_one_line(training)}. Install what is missing, or fix it."
    return None


def _check_launcher() -> Result:
    text = "replaces functions of Megatron's schedules and optimizers"
    if any(row.holder.__name__.startswith("megatron.training.") for row in replacements()):
        text += ", and of megatron.training"
    return "OK", text


def _check_flags(script_flags: Sequence[str], has_training: bool, core_version: str) -> Result:
    """The first thing that a run with these flags, or the environment's, would refuse."""
    script = script_flags[0] if script_flags else "--"
    if not (script.startswith("-") or Path(script).is_file()):
        return (
            "FAIL",
            f"SCRIPT must be a file, got {script!r}. Give a training script, or flags alone.",
        )
    parser: argparse.ArgumentParser = flags.Parser(add_help=False, allow_abbrev=False)
    if has_training:
        from megatron.training.arguments import add_megatron_arguments

        parser = add_megatron_arguments(parser)
    values, script_arguments = flags.process_flags(script_flags)
    args, unknown = parser.parse_known_args(script_arguments)
    vars(args).update(values)
    hook = hook_from_args(args, in_training_loop=True)
    if hook is None and getattr(args, "yaml_cfg", None):
        return "WARN", (
            f"settings in {args.yaml_cfg} are not read here: a run with --yaml-cfg reads and checks them"
        )
    if hook is None:
        return "WARN", f"without {flags.FLAG} the plugin does nothing. Add {flags.FLAG} MODE."
    formulas = [formula(term.aggregation) for term in hook.terms.values()]
    also = [f"also {agg.label}" for agg in hook.also]
    loss = "; ".join([terms_in_words(hook.terms), *formulas, *also])
    if not has_training:
        return "WARN", f"{loss}; without megatron.training, Megatron's own flags are not checked"
    if getattr(args, "sft", False):
        sft_checks.check_attention_mask(args, _release(core_version))
        sft_checks.check_split(args)
    unknown = [flag for flag in unknown if flag.startswith("--")]
    if unknown:
        unknown_flags = ", ".join(unknown)
        return (
            "WARN",
            f"{loss}; Megatron has no {unknown_flags}: right only if the script adds them",
        )
    if has_transformer_engine_loss(args) and find_spec("transformer_engine") is None:
        engine = "needs Transformer Engine 2.11 or later, and there is none here"
        return "WARN", f"{loss}; --cross-entropy-fusion-impl te {engine}"
    units = units_by_id(hook.terms).union(*(agg.by_id for agg in hook.also))
    if flags.hook_options(args)["sft_prompt_field"]:
        units.discard("prompt")  # read from the lines of the data
    ids = " and ".join(f"{unit}_ids" for unit in sorted(units))
    needs = f"; the batches must have {ids}" if ids else ""
    if "prompt" in units and getattr(args, "sft", False):
        needs += f"; {sft.PROMPT_FLAG} FIELD gives prompt_ids"
    return "OK", f"{loss}; no other flag conflicts with it{needs}"


def _check_framework(
    name: str, files: Sequence[str], examine: Callable[[str, Sequence[str]], Result]
) -> Result:
    try:
        return examine(name, files)
    except AggregationError:
        raise
    except Exception as error:  # whatever the framework's import raises
        return "FAIL", f"{_one_line(error)}. Install all of {name}, or another version."


def _imported(name: str) -> ModuleType | Exception:
    try:
        return importlib.import_module(name)
    except Exception as error:
        return error


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
