"""``python -m megatron_loss_agg doctor``: whether the plugin runs in this environment."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import platform
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from megatron_loss_agg import __version__
from megatron_loss_agg.errors import AggregationError, InputError
from megatron_loss_agg.mcore import flags
from megatron_loss_agg.mcore.install import check_host_flags, seams
from megatron_loss_agg.mcore.packages import (
    Finding,
    check_apex,
    check_torch,
    check_transformer_engine,
    one_line,
    release,
    try_import,
)

# Releases of Megatron-Core whose averaging `scaling` undoes: before the first it was another.
_EXACT_FROM = (0, 13)
_VERIFIED = ((0, 14), (0, 19))


def main(argv: Sequence[str]) -> int:
    """Print the findings, one a line; returns 1 if one of them is FAIL, and 0 otherwise.

    Raises:
        InputError: ``--megatron`` names no checkout of Megatron-LM.
    """
    ours, script_flags = _split(argv)
    args = _parser().parse_args(ours)
    if args.megatron is not None:
        if not (Path(args.megatron) / "megatron" / "core").is_dir():
            raise InputError(f"--megatron {args.megatron}: no megatron/core; expected a checkout")
        sys.path.insert(0, str(Path(args.megatron).resolve()))
    with _quiet():
        findings = list(examine(script_flags))
    ok = all(finding.level != "FAIL" for finding in findings)
    if args.json:
        print(json.dumps({"ok": ok, "findings": [finding._asdict() for finding in findings]}))
    else:
        for level, check, text in findings:
            print(f"{level:<4}  {check:<18}  {text}")
    return 0 if ok else 1


def examine(script_flags: Sequence[str] | None = None) -> Iterator[Finding]:
    """Every finding, for the Megatron that is first on ``sys.path``.

    Args:
        script_flags: flags of a launch script, to be checked against each other; None: not checked.
    """
    yield Finding("OK", "python", platform.python_version())
    yield Finding("OK", "megatron_loss_agg", __version__)
    yield check_torch()
    core = try_import("megatron.core")
    yield _check_core(core)
    training: ModuleType | Exception | None = None
    if isinstance(core, ModuleType):
        training = try_import("megatron.training")
        yield from _check_training(core, training)
        yield from check_source(Path(str(core.__file__)).resolve().parents[2])
    yield check_transformer_engine()
    yield check_apex()
    if script_flags is not None:
        yield _check_flags(script_flags, with_host=isinstance(training, ModuleType))


def _check_core(core: ModuleType | Exception) -> Finding:
    name = "megatron-core"
    if isinstance(core, ModuleNotFoundError) and core.name in ("megatron", "megatron.core"):
        text = "not installed; pip install megatron-core, or name a checkout with --megatron PATH"
        return Finding("FAIL", name, text)
    if isinstance(core, Exception):
        return Finding("FAIL", name, f"cannot be imported ({one_line(core)}); mend that first")
    return check_release(core.__version__, Path(str(core.__file__)).resolve().parents[2])


def check_release(version: str, root: Path) -> Finding:
    """Whether this release of Megatron-Core, installed in ``root``, is a known one."""
    name, where = "megatron-core", f"{version} in {root}"
    first, last = (".".join(map(str, bound)) for bound in _VERIFIED)
    if release(version) < _EXACT_FROM:
        text = f"{where}: averages a loss otherwise than from 0.13 on; install {first} to {last}"
        return Finding("FAIL", name, text)
    if not _VERIFIED[0] <= release(version) <= _VERIFIED[1]:
        text = f"{where}: verified with {first} to {last}; train with --loss-aggregation-audit"
        return Finding("WARN", name, text)
    return Finding("OK", name, where)


def _check_training(core: ModuleType, training: ModuleType | Exception) -> Iterator[Finding]:
    name = "megatron.training"
    if isinstance(training, ModuleNotFoundError) and training.name == name:
        yield Finding(
            "WARN",
            name,
            "not in this megatron-core (its wheels have it from 0.17 on): wrap your own loop with "
            "LossHook, or name a checkout with --megatron PATH",
        )
        return
    if isinstance(training, Exception):
        yield Finding("FAIL", name, f"cannot be imported ({one_line(training)}); mend that first")
        return
    roots = [Path(str(module.__file__)).resolve().parents[2] for module in (core, training)]
    if roots[0] != roots[1]:
        text = f"in {roots[1]}, but megatron.core in {roots[0]}; put the checkout on PYTHONPATH"
        yield Finding("WARN", name, text)
    try:
        wrapped = ", ".join(f"{seam.module.__name__}.{seam.name}" for seam in seams())
    except Exception as error:
        yield Finding("FAIL", "seams", one_line(error))
    else:
        yield Finding("OK", "seams", f"the launcher can wrap {wrapped}")


def check_source(root: Path) -> Iterator[Finding]:
    """Which scripts of a checkout at ``root`` call the plugin themselves; none outside of one."""
    if not (root / "pretrain_gpt.py").is_file():
        return
    scripts = [path for path in sorted(root.glob("*.py")) if "megatron_loss_agg" in _text(path)]
    if scripts:
        names = ", ".join(path.name for path in scripts)
        yield Finding("OK", "patch", f"applied to {names}: start it without -m megatron_loss_agg")
    else:
        yield Finding("OK", "patch", "none applied: put -m megatron_loss_agg before the script")


class _FlagParser(argparse.ArgumentParser):
    """Megatron's parser, except that a bad flag is an error to report and not the end."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def _check_flags(script_flags: Sequence[str], with_host: bool) -> Finding:
    if script_flags and Path(script_flags[0]).is_file():
        # As when it is run: what the flags name may lie beside it.
        sys.path.insert(0, str(Path(script_flags[0]).resolve().parent))
    parser: argparse.ArgumentParser = _FlagParser(add_help=False, allow_abbrev=False)
    try:
        if with_host:
            parser = seams()[0].function(parser)
        args, others = flags.add_arguments(parser).parse_known_args(list(script_flags))
        if flags.settings_from(args) is None:
            text = f"without {flags.FLAG} the plugin does nothing; add {flags.FLAG} MODE"
            return Finding("WARN", "flags", text)
        check_host_flags(args)
    except AggregationError as error:
        return Finding("FAIL", "flags", one_line(error))
    mode = args.loss_aggregation
    if not with_host:
        text = (
            f"{mode}; not checked against Megatron's own flags, since megatron.training cannot be "
            "imported"
        )
        return Finding("WARN", "flags", text)
    unknown = [flag for flag in others if flag.startswith("--") and flag != "--cpu"]
    if unknown:
        text = f"{mode}; Megatron has no {', '.join(unknown)}: right only if the script adds them"
        return Finding("WARN", "flags", text)
    return Finding("OK", "flags", f"{mode}, and no other flag is against it")


def _split(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """What is before ``--``, and what is after it if there is one."""
    args = list(argv)
    if "--" not in args:
        return args, None
    at = args.index("--")
    return args[:at], args[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron_loss_agg doctor",
        usage="%(prog)s [-h] [--json] [--megatron PATH] [-- FLAG ...]",
        description="Say whether the plugin runs here: a line for each finding, and exit code 1 if "
        "one of them is FAIL. After -- come the flags of a launch script, to be checked too.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument("--megatron", metavar="PATH", help="a checkout of Megatron-LM to look at")
    return parser


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what Megatron prints while it is imported out of the findings."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
