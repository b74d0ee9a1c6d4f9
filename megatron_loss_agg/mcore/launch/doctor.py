"""``python -m megatron_loss_agg doctor``: check whether the plugin works in this environment."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
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
from megatron_loss_agg.aggregation import BY_ID
from megatron_loss_agg.errors import AggregationError, InputError
from megatron_loss_agg.mcore.extensions.mtp import number_of_depths
from megatron_loss_agg.mcore.extensions.routers import check_config
from megatron_loss_agg.mcore.hook import Hook
from megatron_loss_agg.mcore.launch import flags
from megatron_loss_agg.mcore.launch.effect import GivenFlags
from megatron_loss_agg.mcore.launch.install import hook_from_args
from megatron_loss_agg.mcore.launch.seams import seams
from megatron_loss_agg.mcore.reading.late import check_possible

_Level = Literal["OK", "WARN", "FAIL"]
"""FAIL: the plugin would not run, or would not be exact."""


class Finding(NamedTuple):
    """The result of one check."""

    level: _Level
    check: str
    text: str


def main(argv: Sequence[str]) -> int:
    """Print one finding per line; return 1 if any of them is FAIL, else 0.

    Raises:
        InputError: ``--megatron`` is not a Megatron-LM checkout.
    """
    ours = list(itertools.takewhile(lambda arg: arg != "--", argv))
    script_flags = argv[len(ours) + 1 :] if "--" in argv else None
    parser = argparse.ArgumentParser(
        prog="megatron_loss_agg doctor",
        usage="%(prog)s [-h] [--json] [--megatron PATH] [-- FLAG ...]",
        description="Check whether the plugin works here: one line per finding, and exit code 1 if "
        "any is FAIL. The flags of a launch script, given after --, are checked too.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.add_argument("--megatron", metavar="PATH", help="a Megatron-LM checkout to examine")
    args = parser.parse_args(ours)
    if args.megatron is not None:
        if not (Path(args.megatron) / "megatron" / "core").is_dir():
            raise InputError(f"--megatron {args.megatron}: no megatron/core; expected a checkout")
        sys.path.insert(0, str(Path(args.megatron).resolve()))
    if script_flags and Path(script_flags[0]).is_file():
        # As when the script runs: its folder comes first, where Megatron and modules may lie.
        sys.path.insert(0, str(Path(script_flags[0]).resolve().parent))
    with _quiet():
        findings = list(_findings(script_flags))
    ok = all(finding.level != "FAIL" for finding in findings)
    if args.json:
        print(json.dumps({"ok": ok, "findings": [finding._asdict() for finding in findings]}))
    else:
        for level, check, text in findings:
            print(f"{level:<4}  {check:<18}  {text}")
    return 0 if ok else 1


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Megatron's import-time output off stdout."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        yield
        logging.disable(logging.NOTSET)


def _findings(script_flags: Sequence[str] | None) -> Iterator[Finding]:
    """All findings, for the Megatron that is first on ``sys.path``."""
    yield Finding("OK", "python", platform.python_version())
    yield Finding("OK", "megatron_loss_agg", __version__)
    yield _check_torch()
    core = _imported("megatron.core")
    release = _check_core(core)
    yield release
    training = _imported("megatron.training")
    if isinstance(core, ModuleType):
        yield from _check_training(core, training)
        yield _check_seams()
    yield _check_transformer_engine()
    yield check_apex()
    if script_flags is not None:
        level, text = _check_flags(script_flags, with_host=isinstance(training, ModuleType))
        yield Finding(level, "flags", text)
    if isinstance(core, ModuleType) and release.level != "FAIL":
        yield how_to_start(_root(core), on_gpu=torch.cuda.is_available())


def _check_torch() -> Finding:
    version, name = str(torch.__version__), "torch"
    if not torch.distributed.is_available():
        return Finding("FAIL", name, f"{version} lacks torch.distributed; use another build")
    if _release(version) < (2, 6):
        text = f"{version} is older than 2.6; pip install --upgrade torch"
        return Finding("WARN", name, text)
    if not torch.cuda.is_available():
        return Finding("WARN", name, f"{version} sees no GPU: for trials on the CPU only")
    return Finding("OK", name, f"{version}, {torch.cuda.device_count()} GPU")


def _check_core(core: ModuleType | Exception) -> Finding:
    if isinstance(core, ModuleType):
        return check_release(core.__version__, _root(core))
    text = _broken(core)
    if isinstance(core, ModuleNotFoundError) and core.name in ("megatron", "megatron.core"):
        text = "not installed; pip install megatron-core, or give a checkout with --megatron PATH"
    return Finding("FAIL", "megatron-core", text)


def check_release(version: str, root: Path) -> Finding:
    """Whether this Megatron-Core release, installed in ``root``, is supported and tested."""
    level: _Level = "OK"
    text, tested = f"{version} in {root}", "0.14 to 0.19"
    if _release(version) < (0, 13):
        level, text = "FAIL", f"{text}: averages losses unlike 0.13 and later; install {tested}"
    elif not (0, 14) <= _release(version) <= (0, 19):
        level, text = "WARN", f"{text}: tested with {tested}; train with --loss-aggregation-audit"
    return Finding(level, "megatron-core", text)


def _check_training(core: ModuleType, training: ModuleType | Exception) -> Iterator[Finding]:
    name = "megatron.training"
    if isinstance(training, ModuleNotFoundError) and training.name == name:
        text = (
            "not in this megatron-core (its wheels include it from 0.17): for its scripts, give a "
            "checkout with --megatron PATH; other loops need none"
        )
        yield Finding("WARN", name, text)
    elif isinstance(training, Exception):
        yield Finding("FAIL", name, _broken(training))
    elif (ours := _root(training)) != (theirs := _root(core)):
        text = f"in {ours}, but megatron.core is in {theirs}; put the checkout on PYTHONPATH"
        yield Finding("WARN", name, text)


def _check_seams() -> Finding:
    try:
        found = seams()
    except Exception as error:
        return Finding("FAIL", "seams", _one_line(error))
    parts = "schedules, optimizers" + (", megatron.training" if found.training else "")
    return Finding("OK", "seams", f"the launcher can wrap Megatron's {parts}")


def _check_transformer_engine() -> Finding:
    name = "transformer-engine"
    module = _imported("transformer_engine.pytorch")
    if isinstance(module, ModuleType):
        package = importlib.import_module("transformer_engine")
        return Finding("OK", name, getattr(package, "__version__", "of unknown version"))
    text = f"cannot be imported ({_one_line(module)}); Megatron goes without"
    if isinstance(module, ModuleNotFoundError) and module.name == "transformer_engine":
        text = (
            "not installed: Megatron needs --transformer-impl local, which on a GPU has no context "
            "parallelism and no packing; pip install 'transformer-engine[pytorch]'"
        )
    return Finding("WARN", name, text)


def check_apex() -> Finding:
    """Whether ``apex`` is NVIDIA's, judged by its files: do not import an unrelated one."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Finding("OK", "apex", "not installed; Megatron has its own replacement")
    folders = [Path(folder) for folder in spec.submodule_search_locations or []]
    parts = ("optimizers/fused_adam.py", "multi_tensor_apply/__init__.py")
    if not any(all((folder / part).is_file() for part in parts) for folder in folders):
        text = (
            f"{spec.origin} is an unrelated project of the same name, which Megatron takes for "
            "NVIDIA's; pip uninstall apex"
        )
        return Finding("WARN", "apex", text)
    if importlib.util.find_spec("amp_C") is None:
        text = "NVIDIA's, but without its kernels (amp_C): rebuild it with its CUDA extensions"
        return Finding("WARN", "apex", text)
    return Finding("OK", "apex", f"NVIDIA's, in {folders[0]}")


def _check_flags(script_flags: Sequence[str], with_host: bool) -> tuple[_Level, str]:
    """The first thing that a run with these flags, or those of the environment, would refuse.

    Args:
        with_host: whether ``megatron.training`` can be imported, to read Megatron's own flags.
    """
    script = script_flags[0] if script_flags else "--"
    if not (script.startswith("-") or Path(script).is_file()):
        return "FAIL", f"{script} is not a file; expected a training script, or flags alone"
    parser: argparse.ArgumentParser = flags.Parser(add_help=False, allow_abbrev=False)
    try:
        training = seams().training if with_host else None
        if training is not None:
            parser = training.add_arguments.function(parser)
        given = GivenFlags(script_flags, flags.in_environment())
        args, others = parser.parse_known_args(given.others)
        given.complete(args)
        hook = hook_from_args(args, in_training_loop=True)
    except AggregationError as error:
        return "FAIL", _one_line(error)
    if hook is None:
        return "WARN", f"without {flags.FLAG} the plugin does nothing; add {flags.FLAG} MODE"
    mode = args.loss_aggregation
    if training is None:
        return "WARN", f"{mode}; Megatron's own flags not checked: no megatron.training"
    try:
        _check_model(hook, args)
    except AggregationError as error:
        return "WARN", f"{mode}; refused if the model is as these flags say: {_one_line(error)}"
    unknown = ", ".join(flag for flag in others if flag.startswith("--") and flag != "--cpu")
    if unknown:
        return "WARN", f"{mode}; Megatron has no {unknown}: valid only if the script adds them"
    units = {u for t in hook.terms.values() for u in (t.aggregation.within, t.aggregation.across)}
    needs = " and ".join(f"{unit}_ids" for unit in BY_ID if unit in units)
    read = f"; the batches must have {needs}" if needs else ""
    return "OK", f"{mode}, and no other flag conflicts with it{read}"


def _check_model(hook: Hook, args: argparse.Namespace) -> None:
    """Raise where the first step of a model built from ``args`` would.

    The model may be another: scripts, checkpoints and YAML files set what these flags do not.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    # Megatron takes flags that may be given several values as lists.
    single = {n: x[0] for n, x in vars(args).items() if isinstance(x, list) and len(x) == 1}
    values = {**vars(args), **single}
    if hasattr(TransformerConfig, "moe_grad_scale_func"):
        values["moe_grad_scale_func"] = None
    config = argparse.Namespace(**values, num_moe_experts=values.get("num_experts"))
    if values.get("loss_aggregation_mtp") == "same":
        number_of_depths(config)
    if values.get("loss_aggregation_moe") == "step":
        check_config(config, ranks=1)
    if values.get("loss_aggregation_mask") == "model":
        check_possible(hook.terms, per_token=args.calculate_per_token_loss, config=config)


def how_to_start(root: Path, on_gpu: bool) -> Finding:
    """The command for a script; ``root`` holds Megatron, whose scripts may be patched."""
    launcher = "torchrun ... -m megatron_loss_agg"
    if not on_gpu:
        return Finding("OK", "start", f"{launcher} --cpu SCRIPT --loss-aggregation MODE")
    text = f"{launcher} SCRIPT --loss-aggregation MODE"
    scripts = sorted(root.glob("*.py")) if (root / "pretrain_gpt.py").is_file() else []
    if patched := [path.name for path in scripts if b"megatron_loss_agg" in path.read_bytes()]:
        text += f"; {', '.join(patched)}, where the patch is applied, also without -m ..."
    return Finding("OK", "start", text)


def _imported(name: str) -> ModuleType | Exception:
    """The module, or the exception that its import raised."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        return error


def _broken(error: Exception) -> str:
    return f"cannot be imported ({_one_line(error)}); install what is missing, or fix it, first"


def _one_line(error: object) -> str:
    """The name and message of an error, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _release(version: str) -> tuple[int, int]:
    """(major, minor); (0, 0) if it cannot be parsed."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _root(module: ModuleType) -> Path:
    """The folder that ``megatron.*`` was imported from."""
    return Path(str(module.__file__)).resolve().parents[2]
