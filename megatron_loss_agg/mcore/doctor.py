"""``python -m megatron_loss_agg doctor``: check whether the plugin works in this environment."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import platform
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import torch

from megatron_loss_agg import __version__
from megatron_loss_agg.errors import InputError
from megatron_loss_agg.mcore.packages import (
    Finding,
    check_apex,
    check_torch,
    check_transformer_engine,
    one_line,
    release,
    try_import,
)
from megatron_loss_agg.mcore.script_flags import check_flags
from megatron_loss_agg.mcore.seams import seams

# Megatron-Core releases: the first whose loss averaging is that of `host`, and those tested.
_EXACT_FROM = (0, 13)
_VERIFIED = ((0, 14), (0, 19))


def main(argv: Sequence[str]) -> int:
    """Print one finding per line; return 1 if any of them is FAIL, else 0.

    Raises:
        InputError: ``--megatron`` is not a Megatron-LM checkout.
    """
    ours = list(itertools.takewhile(lambda arg: arg != "--", argv))
    script_flags = argv[len(ours) + 1 :] if "--" in argv else None
    args = _parser().parse_args(ours)
    if args.megatron is not None:
        if not (Path(args.megatron) / "megatron" / "core").is_dir():
            raise InputError(f"--megatron {args.megatron}: no megatron/core; expected a checkout")
        sys.path.insert(0, str(Path(args.megatron).resolve()))
    if script_flags and Path(script_flags[0]).is_file():
        # As when the script runs: its folder comes first, where Megatron and modules may lie.
        sys.path.insert(0, str(Path(script_flags[0]).resolve().parent))
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
    """All findings, for the Megatron that is first on ``sys.path``.

    Args:
        script_flags: flags of a launch script, to check together; None: skip this check.
    """
    yield Finding("OK", "python", platform.python_version())
    yield Finding("OK", "megatron_loss_agg", __version__)
    yield check_torch()
    core = try_import("megatron.core")
    release = _check_core(core)
    yield release
    training: ModuleType | Exception | None = None
    if isinstance(core, ModuleType):
        training = try_import("megatron.training")
        yield from _check_training(core, training)
        yield _check_seams()
    yield check_transformer_engine()
    yield check_apex()
    if script_flags is not None:
        yield check_flags(script_flags, with_host=isinstance(training, ModuleType))
    if isinstance(core, ModuleType) and release.level != "FAIL":
        yield how_to_start(_root(core), on_gpu=torch.cuda.is_available())


def _check_core(core: ModuleType | Exception) -> Finding:
    name = "megatron-core"
    if isinstance(core, ModuleNotFoundError) and core.name in ("megatron", "megatron.core"):
        text = "not installed; pip install megatron-core, or give a checkout with --megatron PATH"
        return Finding("FAIL", name, text)
    if isinstance(core, Exception):
        return Finding("FAIL", name, f"cannot be imported ({one_line(core)}); fix that first")
    return check_release(core.__version__, _root(core))


def check_release(version: str, root: Path) -> Finding:
    """Whether this Megatron-Core release, installed in ``root``, is supported and tested."""
    name, where = "megatron-core", f"{version} in {root}"
    first, last = (".".join(map(str, bound)) for bound in _VERIFIED)
    if release(version) < _EXACT_FROM:
        text = f"{where}: averages losses unlike 0.13 and later; install {first} to {last}"
        return Finding("FAIL", name, text)
    if not _VERIFIED[0] <= release(version) <= _VERIFIED[1]:
        text = f"{where}: tested with {first} to {last}; train with --loss-aggregation-audit"
        return Finding("WARN", name, text)
    return Finding("OK", name, where)


def _check_training(core: ModuleType, training: ModuleType | Exception) -> Iterator[Finding]:
    name = "megatron.training"
    if isinstance(training, ModuleNotFoundError) and training.name == name:
        text = (
            "not in this megatron-core (its wheels include it from 0.17): for its scripts, give a "
            "checkout with --megatron PATH; other loops need none"
        )
        yield Finding("WARN", name, text)
        return
    if isinstance(training, ModuleNotFoundError):
        text = f"cannot be imported: {training}; install the package that has this module"
        yield Finding("FAIL", name, text)
        return
    if isinstance(training, Exception):
        yield Finding("FAIL", name, f"cannot be imported ({one_line(training)}); fix that first")
        return
    if (ours := _root(training)) != (theirs := _root(core)):
        text = f"in {ours}, but megatron.core is in {theirs}; put the checkout on PYTHONPATH"
        yield Finding("WARN", name, text)


def _check_seams() -> Finding:
    try:
        found = seams()
    except Exception as error:
        return Finding("FAIL", "seams", one_line(error))
    parts = ["schedules", "optimizers", *(["megatron.training"] if found.training else [])]
    return Finding("OK", "seams", f"the launcher can wrap Megatron's {', '.join(parts)}")


def how_to_start(root: Path, on_gpu: bool) -> Finding:
    """The command for a script; ``root`` holds Megatron, whose scripts may be patched."""
    launcher = "torchrun ... -m megatron_loss_agg"
    if not on_gpu:
        return Finding("OK", "start", f"{launcher} --cpu SCRIPT --loss-aggregation MODE")
    scripts = sorted(root.glob("*.py")) if (root / "pretrain_gpt.py").is_file() else []
    patched = [path.name for path in scripts if b"megatron_loss_agg" in path.read_bytes()]
    text = f"{launcher} SCRIPT --loss-aggregation MODE"
    if patched:
        text += f"; {', '.join(patched)}, where the patch is applied, also without -m ..."
    return Finding("OK", "start", text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron_loss_agg doctor",
        usage="%(prog)s [-h] [--json] [--megatron PATH] [-- FLAG ...]",
        description="Check whether the plugin works here: one line per finding, and exit code 1 if "
        "any is FAIL. The flags of a launch script, given after --, are checked too.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument("--megatron", metavar="PATH", help="a Megatron-LM checkout to examine")
    return parser


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Megatron's import-time output off stdout."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def _root(module: ModuleType) -> Path:
    """The folder that ``megatron.*`` was imported from."""
    return Path(str(module.__file__)).resolve().parents[2]
