"""The command-line flags, and how to read them."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from megatron_loss_agg.aggregation import MODES, LossAggregation
from megatron_loss_agg.errors import OptionError
from megatron_loss_agg.presets import SYSTEMS

FLAG = "--loss-aggregation"
VARIABLE = "MEGATRON_LOSS_AGG_FLAGS"
"""The environment variable that holds flags where another program owns the command line."""
_ALIKE = 0.85
"""Of 1, how alike a misspelt flag is to one of ours; Megatron's own are below 0.7."""

_OPTIONS: dict[str, tuple[str | tuple[str, ...] | None, str]] = {
    "divisor": ("D", "the D of 'constant' and 'sum', a number above 0"),
    "levels": (
        "UNIT,UNIT,...",
        "for 'nested_mean': its units from outside to inside, such as prompt,rollout,sample",
    ),
    "empty": (
        "{count,skip}",
        "whether groups without active tokens count (default: count, or as the preset has it)",
    ),
    "rejected": (
        "{count,skip}",
        "whether samples that the batch key 'rejected' marks count in the denominators",
    ),
    "sample_weights": (
        "{count,skip}",
        "whether the batch key 'sample_weights' counts in the denominators",
    ),
    "function": ("MODULE:NAME", "for 'custom': a function (plan, i) -> weights of microbatch i"),
    "batch": (
        "MODULE:NAME",
        "a function batch -> Microbatch, for batches that lack keys such as loss_mask",
    ),
    "factors": (
        "KEY",
        "the batch key of factors by token, which multiply weights and are in no denominator",
    ),
    "mask": (
        ("batch", "model"),
        "who makes the loss mask; the model does in pretrain_vlm.py (default: batch)",
    ),
    "empty_step": (
        ("step", "error", "skip"),
        "what a step without any token does: ends the run, or skips the optimizer (default: step)",
    ),
    "report_datasets": (None, "report each data set of the step (batch key dataset_id)"),
    "audit": (
        None,
        "measure Megatron's averaging for each new number of microbatches, and print it",
    ),
    "unmeasured": (
        ("refuse", "trust"),
        "a model whose averaging cannot be measured; trust: it averages as DDP (default: refuse)",
    ),
    "mtp": (
        ("host", "same"),
        "losses of multi-token prediction: as Megatron averages them, or as the loss "
        "(default: host)",
    ),
    "moe": (
        ("host", "step"),
        "auxiliary losses of routers: as Megatron weighs them, or over the step (default: host)",
    ),
}
"""Value and help of each further flag. None: it takes no value; a tuple: one of these words."""
_OF_AGGREGATION = ("divisor", "levels", "empty", "rejected", "sample_weights", "function")
"""Those that say what is computed; the others are the hook's."""


class Parser(argparse.ArgumentParser):
    """Raises OptionError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(message)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the plugin's flags as a group of their own."""
    group = parser.add_argument_group("loss aggregation")
    group.add_argument(
        FLAG,
        metavar="MODE",
        help=f"mean over the whole optimizer step: {', '.join(MODES)}; or a preset such as "
        "verl/token-mean. Without it nothing changes.",
    )
    for name, (value, text) in _OPTIONS.items():
        shown = "{" + ",".join(value) + "}" if isinstance(value, tuple) else value
        kind: dict[str, Any] = {"metavar": shown} if shown else {"action": "store_true"}
        kind |= {"type": float} if name == "divisor" else {}
        group.add_argument(_flag(name), help=text, **kind)
    return parser


def flag_of(name: str) -> str:
    """The flag that a parser stores as ``name``."""
    return "--" + name.replace("_", "-")


def _flag(option: str) -> str:
    return flag_of(f"loss_aggregation_{option}")


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The values of the further flags that are given, by the names of `_OPTIONS`."""
    values = {name: getattr(args, f"loss_aggregation_{name}", None) for name in _OPTIONS}
    return {name: x for name, x in values.items() if x is not None and x is not False}


def word(args: argparse.Namespace, name: str) -> str:
    """The value of the further flag ``name``, one of its words; by default the first.

    Raises:
        OptionError: it is none of them. A YAML file may say anything.
    """
    words = _OPTIONS[name][0] or ()
    value: str = given(args).get(name, words[0])
    if value not in words:
        raise OptionError(f"{_flag(name)} {value}; expected one of {', '.join(words)}")
    return value


def aggregation_from(args: argparse.Namespace) -> LossAggregation | None:
    """The aggregation that the flags ask for; None without ``--loss-aggregation``.

    Raises:
        AggregationError: a flag's value is bad, or conflicts with another flag.
    """
    known = {"loss_aggregation", *(f"loss_aggregation_{name}" for name in _OPTIONS)}
    for name in vars(args):  # a YAML file may say anything
        if name.replace("-", "_").startswith("loss_aggregation") and name not in known:
            raise OptionError(f"unknown setting {name}; expected one of {', '.join(sorted(known))}")
    mode, further = getattr(args, "loss_aggregation", None), given(args)
    if mode is None:
        if further:
            flag = _flag(next(iter(further)))
            raise OptionError(f"{flag} without {FLAG}; give a mode, or drop it")
        return None
    options = {name: x for name, x in further.items() if name in _OF_AGGREGATION}
    is_preset = "/" in mode or mode in SYSTEMS  # a system alone: the error lists its presets
    if "function" in options:
        if is_preset:
            raise OptionError(f"{FLAG}-function with the preset {mode!r}; expected 'custom'")
        options["function"] = load(f"{FLAG}-function", options["function"])
    if "levels" in options and is_preset:
        raise OptionError(f"{FLAG}-levels with the preset {mode!r}; expected 'nested_mean'")
    if is_preset:
        return LossAggregation.preset(mode, **options)
    return LossAggregation(mode=mode, **options)


def aggregation_from_environment() -> LossAggregation | None:
    """The aggregation that `VARIABLE` asks for; None without it.

    For loops that apply `StepPlan.coefficients` themselves, where other flags have no effect.

    Raises:
        AggregationError: as `aggregation_from`, or the variable holds something else.
    """
    held = in_environment()
    of_hook = held.keys() - {f"loss_aggregation_{name}" for name in _OF_AGGREGATION}
    if others := sorted(of_hook - {"loss_aggregation"}):
        raise OptionError(
            f"{VARIABLE} holds {' '.join(map(flag_of, others))}; expected {FLAG} MODE, and "
            "flags of the aggregation only: this loop has no hook"
        )
    return aggregation_from(argparse.Namespace(**held))


def in_environment() -> dict[str, Any]:
    """The flags in `VARIABLE`, as `taken_from` gives them; it may hold nothing else."""
    held, others = taken_from(shlex.split(os.environ.get(VARIABLE, "")))
    if others:
        raise OptionError(
            f"{VARIABLE} holds {' '.join(others)}; expected {FLAG} MODE and {FLAG}-* only"
        )
    return held


def taken_from(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Our flags among ``argv``, by the parser's names, and the other arguments in their order."""
    parser = add_arguments(
        Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    )
    found, others = parser.parse_known_args(argv)
    names = [FLAG, *(_flag(name) for name in _OPTIONS)]
    # A script that ignores unknown flags would train as without the plugin.
    for flag in (x.partition("=")[0] for x in others if x.startswith("--")):
        least = 0.0 if flag.startswith(FLAG) else _ALIKE
        if nearest := get_close_matches(flag, names, 1, least):
            raise OptionError(
                f"unknown flag {flag}; expected {nearest[0]}, or another of {', '.join(names)}"
            )
    return vars(found), others


def load(flag: str, path: str) -> Callable[..., Any]:
    """The function ``path``, ``module:name``, that is the value of ``flag``."""
    module, _, name = path.partition(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the user's module raises
        raise OptionError(
            f"{flag} {path!r} cannot be loaded ({error}); expected module:name of a function, in a "
            "module on PYTHONPATH or beside the script"
        ) from error
    return function
