"""The command-line flags, and how to read them into what the hook is made of."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, NoReturn

from megatron_loss_agg.aggregation import MODES, LossAggregation, Term, named_terms
from megatron_loss_agg.errors import (
    AggregationError,
    DivisorError,
    FunctionError,
    InputError,
    ModeError,
)
from megatron_loss_agg.mcore.extension import Extension
from megatron_loss_agg.mcore.extensions.audit import Audit
from megatron_loss_agg.mcore.extensions.datasets import DatasetReports
from megatron_loss_agg.mcore.extensions.distillation import Distillation, terms_from
from megatron_loss_agg.mcore.extensions.mtp import MultiTokenPrediction
from megatron_loss_agg.mcore.extensions.routers import RouterLosses
from megatron_loss_agg.mcore.host import Loop
from megatron_loss_agg.mcore.reading.keys import ReadBatch
from megatron_loss_agg.mcore.reading.late import check_possible, read_samples

FLAG = "--loss-aggregation"
VARIABLE = "MEGATRON_LOSS_AGG_FLAGS"
"""The environment variable that holds flags where another program owns the command line."""
_ALIKE = 0.85
"""Of 1, how alike a misspelt flag is to one of ours; Megatron's own are below 0.7."""

_OPTIONS: dict[str, tuple[str | tuple[str, ...] | None, str]] = {
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
        ("batch", "model"),
        "who makes the loss mask: the batch brings it, or the model makes it in its forward pass, "
        "as in pretrain_vlm.py (default: batch)",
    ),
    "empty_step": (
        ("step", "error", "skip"),
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
        ("refuse", "trust"),
        "a model whose averaging cannot be measured ends the run, or is taken to average as "
        "Megatron's DDP does (default: refuse)",
    ),
    "mtp": (
        ("host", "same"),
        "losses of multi-token prediction are averaged by the host, or aggregated as the loss is "
        "(default: host)",
    ),
    "moe": (
        ("host", "step"),
        "the auxiliary losses of routers (MoE) keep Megatron's own weights, or are averaged over "
        "the whole step by tokens, on any layout (default: host)",
    ),
}
"""Value and help of each further flag. None: it takes no value; a tuple: one of these words."""
_OF_AGGREGATION = ("divisor", "empty", "rejected", "sample_weights", "function")
"""Those that say what is computed; the others are the hook's."""


class Parser(argparse.ArgumentParser):
    """Raises InputError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


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
        group.add_argument(flag_of(f"loss_aggregation_{name}"), help=text, **kind)
    return parser


def flag_of(name: str) -> str:
    """The flag that a parser stores as ``name``."""
    return "--" + name.replace("_", "-")


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The values of the further flags that are given, by the names of `_OPTIONS`."""
    values = {name: getattr(args, f"loss_aggregation_{name}", None) for name in _OPTIONS}
    return {name: x for name, x in values.items() if x is not None and x is not False}


class Settings(NamedTuple):
    """What the flags ask for: arguments of `LossHook`."""

    aggregation: LossAggregation | Mapping[str, Term | LossAggregation]
    read_batch: ReadBatch | None  # None: as the loop reads batches without the flags
    extensions: list[Extension]
    empty_step: str
    loop: Loop


def settings_from(args: argparse.Namespace, in_training_loop: bool = False) -> Settings | None:
    """The flags' values, checked; None without ``--loss-aggregation``.

    Args:
        args: the parsed flags; Megatron's say what its teacher, log and evaluation do.
        in_training_loop: whether Megatron's own training loop asks.

    Raises:
        AggregationError: a flag's value is bad, cannot be loaded, or conflicts with another flag.
    """
    aggregation = aggregation_from(args)
    if aggregation is None:
        return None
    given = _given(args)
    words = {n: _word(given, n) for n, (value, _) in _OPTIONS.items() if isinstance(value, tuple)}
    terms = terms_from(args, aggregation)
    loop = Loop(in_training_loop, in_training_loop and getattr(args, "sft", False))
    log_interval = getattr(args, "log_interval", 1) if loop.of_megatron else 1
    repeat, trust = "audit" in given, words["unmeasured"] == "trust"
    extensions: list[Extension] = [
        *([MultiTokenPrediction()] if words["mtp"] == "same" else []),
        *([RouterLosses()] if words["moe"] == "step" else []),
        *([Distillation()] if terms is not aggregation else []),
        *([DatasetReports(log_interval)] if "report_datasets" in given else []),
        *([Audit(repeat=repeat, trust=trust)] if repeat or trust else []),
    ]
    read = _load(f"{FLAG}-batch", given["batch"]) if "batch" in given else None
    if words["mask"] == "model":
        check_possible(
            named_terms(terms if isinstance(terms, Mapping) else {aggregation.label: aggregation}),
            needs={need for x in extensions for need in x.needs},
            empty_step=words["empty_step"],
            averages_quotients=loop.averages_quotients,
        )
        read = read or read_samples
    return Settings(terms, read, extensions, words["empty_step"], loop)


def aggregation_from(args: argparse.Namespace) -> LossAggregation | None:
    """The aggregation that the flags ask for; None without ``--loss-aggregation``.

    Raises:
        AggregationError: a flag's value is bad, or conflicts with another flag.
    """
    mode = getattr(args, "loss_aggregation", None)
    given = _given(args)
    if mode is None:
        for name, value in given.items():
            shown = "" if value is True else f" {value}"
            flag = flag_of(f"loss_aggregation_{name}")
            raise ModeError(f"{flag}{shown} without {FLAG}; give a mode, or drop it")
        return None
    options = {name: given[name] for name in _OF_AGGREGATION if name in given}
    if "divisor" in options:
        try:
            options["divisor"] = float(given["divisor"])
        except ValueError:
            text = f"{FLAG}-divisor {given['divisor']!r}; expected a finite number > 0"
            raise DivisorError(text) from None
    if "function" in options:
        options["function"] = _load(f"{FLAG}-function", options["function"])
    elif mode == "custom":
        raise FunctionError(f"{FLAG} custom without {FLAG}-function; expected module:name there")
    try:
        if "/" not in mode:
            return LossAggregation(mode=mode, **options)
        if "function" in options:
            raise FunctionError(f"preset {mode!r}; only 'custom' takes one")
        return LossAggregation.preset(mode, **options)
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
        InputError: a flag lacks its value.
        ModeError: one is unknown, and begins as ours do or nearly so.
    """
    parser = add_arguments(Parser(add_help=False, allow_abbrev=False))
    found, others = parser.parse_known_args(argv)
    names = [flag_of(name) for name in vars(found)]
    # A script that ignores unknown flags would train as without the plugin.
    for flag in (x.partition("=")[0] for x in others if x.startswith("--")):
        least = 0.0 if flag.startswith(FLAG) else _ALIKE
        if nearest := get_close_matches(flag, names, 1, least):
            raise ModeError(
                f"unknown flag {flag}; expected {nearest[0]}, or another of {', '.join(names)}"
            )
    defaults = vars(parser.parse_args([]))
    return {name: x for name, x in vars(found).items() if x != defaults[name]}, others


def _word(given: Mapping[str, Any], name: str) -> str:
    """The value of the further flag ``name``, one of its words."""
    words = _OPTIONS[name][0] or ()
    value: str = given.get(name, words[0])
    if value not in words:
        flag = flag_of(f"loss_aggregation_{name}")
        raise ModeError(f"{flag} {value}; expected one of {', '.join(words)}")
    return value


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
