"""The command-line flags, and how to read them into `Settings`."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, NoReturn

from megatron_loss_agg.aggregation import MODES, LossAggregation, Term
from megatron_loss_agg.errors import AggregationError, DivisorError, FunctionError, ModeError
from megatron_loss_agg.mcore.batches import ReadBatch
from megatron_loss_agg.mcore.choices import CHOICES
from megatron_loss_agg.mcore.late_masks import check_possible

FLAG = "--loss-aggregation"
VARIABLE = "MEGATRON_LOSS_AGG_FLAGS"
"""The environment variable that holds flags where another program owns the command line."""
_ALIKE = 0.85
"""Of 1, how alike a misspelt flag is to one of ours; Megatron's own are below 0.7."""


def _either(name: str) -> str:
    """The `CHOICES` of a setting, as a parser shows them."""
    return "{" + ",".join(CHOICES[name]) + "}"


_OPTIONS = {
    "divisor": ("D", "the D of 'constant' and 'sum', a number from 1e-37 to 1e37"),
    "empty": (
        "{count,skip}",
        "whether samples, rollouts, prompts and data sets without active tokens count (default: "
        "count)",
    ),
    "rejected": (
        "{count,skip}",
        "whether samples that the batch key 'rejected' marks (weight 0) count in the denominators; "
        "required if there are any, unless the preset says it",
    ),
    "sample_weights": (
        "{count,skip}",
        "whether the batch key 'sample_weights', which multiplies the weights of tokens, counts in "
        "the denominators; required if there is any",
    ),
    "function": ("MODULE:NAME", "for 'custom': a function (plan, i) -> weights of microbatch i"),
    "batch": (
        "MODULE:NAME",
        "a function batch -> Microbatch, for batches that lack the keys loss_mask, cu_seqlens, "
        "prompt_ids, rollout_ids or dataset_ids",
    ),
    "mask": (
        _either("mask"),
        "who makes the loss mask: the batch brings it, or the model makes it in its forward pass, "
        "as in pretrain_vlm.py (default: batch)",
    ),
    "empty_step": (
        _either("empty_step"),
        "a step without any token moves the model by momentum and weight decay, as without the "
        "plugin, ends the run, or leaves model and optimizer as they are (default: step)",
    ),
    "report_datasets": (
        None,
        "report the mean over tokens and the aggregated loss of each data set of the step (batch "
        "key dataset_id, as Megatron's blended data sets have it, or dataset_ids)",
    ),
    "audit": (
        None,
        "measure the host's averaging before the first step of each number of microbatches, and "
        "print it (without it: once, before the first step)",
    ),
    "unmeasured": (
        _either("unmeasured"),
        "a model whose averaging cannot be measured ends the run, or is taken to average as "
        "Megatron's DDP does (default: refuse)",
    ),
    "mtp": (
        _either("mtp"),
        "losses of multi-token prediction are averaged by the host, or aggregated as the loss is "
        "(default: host)",
    ),
    "moe": (
        _either("moe"),
        "the auxiliary losses of routers (MoE) keep Megatron's own weights, or are averaged over "
        "the whole step by tokens, on any layout (default: host)",
    ),
}
"""Value and help of each further flag; None: it takes no value."""
_OF_AGGREGATION = ("divisor", "empty", "rejected", "sample_weights", "function")
"""Those that say what is computed; the others are the hook's."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ModeError(message)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the plugin's flags as a group of their own."""
    group = parser.add_argument_group("loss aggregation")
    group.add_argument(
        FLAG,
        metavar="MODE",
        help=f"mean over the whole optimizer step: {', '.join(MODES)}; or a preset such as "
        "verl/token-mean. Without it nothing changes.",
    )
    for name, (metavar, text) in _OPTIONS.items():
        kind: dict[str, Any] = {"metavar": metavar} if metavar else {"action": "store_true"}
        group.add_argument(flag_of(f"loss_aggregation_{name}"), help=text, **kind)
    return parser


def flag_of(name: str) -> str:
    """The flag that a parser stores as ``name``."""
    return "--" + name.replace("_", "-")


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The values of further flags, by the names of `_OPTIONS`; False: a switch is off."""
    values = {name: getattr(args, f"loss_aggregation_{name}", None) for name in _OPTIONS}
    return {name: value for name, value in values.items() if value is not None}


def refuse(error: AggregationError) -> int:
    """Print ``error`` as one line on stderr; return the exit code."""
    print(f"megatron_loss_agg: {type(error).__name__}: {error}", file=sys.stderr)
    return 2


class Settings(NamedTuple):
    """What the flags ask for."""

    aggregation: LossAggregation
    read_batch: ReadBatch | None
    audit: bool
    report_datasets: bool
    choices: dict[str, Any]  # one of `CHOICES` for each


def settings_from(args: argparse.Namespace) -> Settings | None:
    """The flags' values, checked; None without ``--loss-aggregation``.

    Raises:
        AggregationError: a flag's value is bad, cannot be loaded, or conflicts with another flag.
    """
    aggregation = aggregation_from(args)
    if aggregation is None:
        return None
    given = _given(args)
    report_datasets = bool(given.get("report_datasets"))
    choices = {name: _choice(given, name) for name in CHOICES}
    if choices["mask"] == "model":
        check_possible({aggregation.label: Term(aggregation)}, choices, report_datasets)
    return Settings(
        aggregation,
        read_batch_from(args),
        bool(given.get("audit")),
        report_datasets,
        choices,
    )


def aggregation_from(args: argparse.Namespace) -> LossAggregation | None:
    """The aggregation that the flags ask for; None without ``--loss-aggregation``.

    Raises:
        AggregationError: a flag's value is bad, or conflicts with another flag.
    """
    mode = getattr(args, "loss_aggregation", None)
    given = _given(args)
    if mode is None:
        for name, value in given.items():
            if value is not False:
                shown = "" if value is True else f" {value}"
                flag = flag_of(f"loss_aggregation_{name}")
                raise ModeError(f"{flag}{shown} without {FLAG}; give a mode, or drop it")
        return None
    options = {name: given[name] for name in _OF_AGGREGATION if name in given}
    if "divisor" in options:
        options["divisor"] = _number(options["divisor"])
    if "function" in options:
        options["function"] = _load(f"{FLAG}-function", options["function"])
    elif mode == "custom":
        raise FunctionError(f"{FLAG} custom without {FLAG}-function; expected module:name there")
    if "/" in mode and "function" in options:
        raise FunctionError(f"{FLAG}-function with preset {mode!r}; only 'custom' takes one")
    try:
        if "/" in mode:
            return LossAggregation.preset(mode, **options)
        return LossAggregation(mode=mode, **options)
    except AggregationError as error:
        raise type(error)(f"{error} (flags {FLAG} and {FLAG}-*)") from None


def aggregation_from_environment() -> LossAggregation | None:
    """The aggregation that `VARIABLE` asks for; None without it.

    For loops that apply `StepPlan.coefficients` themselves, where other flags have no effect.

    Raises:
        AggregationError: as `aggregation_from`.
        ModeError: as `in_environment`, or there are other flags than the aggregation's.
    """
    given = in_environment()
    names = {"loss_aggregation", *(f"loss_aggregation_{name}" for name in _OF_AGGREGATION)}
    if others := given.keys() - names:
        raise ModeError(
            f"{VARIABLE} holds {' '.join(map(flag_of, sorted(others)))}; expected {FLAG} MODE, and "
            "flags of the aggregation only: this loop has no hook"
        )
    return aggregation_from(argparse.Namespace(**given))


def in_environment() -> dict[str, Any]:
    """The flags in `VARIABLE`, as `taken_from` gives them.

    Raises:
        ModeError: it holds anything else.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        given, others = taken_from(shlex.split(text))
    except ValueError as error:
        raise ModeError(f"{VARIABLE} is {text!r} ({error}); expected {FLAG} MODE") from None
    if others:
        raise ModeError(
            f"{VARIABLE} holds {' '.join(others)}; expected {FLAG} MODE and {FLAG}-* only"
        )
    return given


def taken_from(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Our flags among ``argv``, by the parser's names, and the other arguments in their order.

    Raises:
        ModeError: a flag lacks its value, or begins as ours do and is unknown.
    """
    parser = add_arguments(_Parser(add_help=False, allow_abbrev=False))
    found, others = parser.parse_known_args(argv)
    unknown = [x.partition("=")[0] for x in others if x.startswith(FLAG)]
    names = [flag_of(name) for name in vars(found)]
    # A script that ignores unknown flags would train as without the plugin.
    others_flags = (x.partition("=")[0] for x in others if x.startswith("--"))
    unknown += [flag for flag in others_flags if get_close_matches(flag, names, 1, _ALIKE)]
    if unknown:
        raise ModeError(f"unknown flag {unknown[0]}; expected one of {', '.join(names)}")
    defaults = vars(parser.parse_args([]))
    return {name: x for name, x in vars(found).items() if x != defaults[name]}, others


def read_batch_from(args: argparse.Namespace) -> ReadBatch | None:
    """The function that ``--loss-aggregation-batch`` names; None without it.

    Raises:
        FunctionError: it cannot be loaded.
    """
    path = _given(args).get("batch")
    return None if path is None else _load(f"{FLAG}-batch", path)


def _choice(given: Mapping[str, Any], name: str) -> str:
    """The value of the further flag ``name``, one of its `CHOICES`."""
    value = given.get(name, CHOICES[name][0])
    if value not in CHOICES[name]:
        flag = flag_of(f"loss_aggregation_{name}")
        raise ModeError(f"{flag} {value}; expected one of {', '.join(CHOICES[name])}")
    return str(value)


def _number(text: Any) -> float:
    try:
        return float(text)
    except ValueError:
        raise DivisorError(f"{FLAG}-divisor {text!r}; expected a finite number > 0") from None


def _load(flag: str, path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    if not module or not name:
        raise FunctionError(f"{flag} {path!r}; expected module:name")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the user's module raises
        raise FunctionError(
            f"{flag} {path!r} cannot be loaded ({error}); expected an importable module "
            "on PYTHONPATH and a function in it"
        ) from error
    if not callable(function):
        raise FunctionError(f"{flag} {path!r} is not callable; expected a function")
    return function
