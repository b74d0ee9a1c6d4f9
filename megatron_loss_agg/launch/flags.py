"""The plugin's flags, on the command line or in the environment, and their aggregation."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, NoReturn

from megatron_loss_agg.aggregation import (
    MODES,
    LossAggregation,
    aggregation_named,
    is_preset,
    takes_divisor,
    words_in,
)
from megatron_loss_agg.errors import OptionError
from megatron_loss_agg.turns import TURNS

FLAG = "--loss-aggregation"
VARIABLE = "MEGATRON_LOSS_AGG_FLAGS"
"""The environment variable with the flags, for use if another program owns the command line."""
_DASHES = "-\N{EN DASH}\N{EM DASH}"  # the last two occur in text copied from a page
_CUTOFF = 0.85
"""A flag is taken for a misspelt one of ours if its first two words are at least this similar
(difflib ratio) to "loss-aggregation". Megatron's flags score below 0.6."""
_OPTION_CUTOFF = 0.75
"""An option is suggested if the remaining words are at least this similar to it."""


class _Option(NamedTuple):
    """A further flag ``--loss-aggregation-NAME``; a switch if it has neither a value nor words."""

    help: str
    value: str | None = None  # how the help shows an arbitrary value
    words: tuple[str, ...] = ()  # the only allowed values
    default: str | None = None  # one of the words
    nargs: str | None = None  # as in argparse; the values are separated by commas or spaces
    type: Callable[[str], Any] = str


_ONLY_MODE = {"function": "custom", "levels": "nested_mean"}
"""Options that only a single mode takes."""
_MTP_MODES = tuple(
    name
    for name, mode in MODES.items()
    if mode.divisor == "refused" and name not in _ONLY_MODE.values()
)
"""The modes that need no further options."""
_COUNT_OR_SKIP = ("count", "skip")
_AGGREGATION_OPTIONS = {
    "divisor": _Option("the D of 'constant' and 'sum', a number above 0", "D", type=float),
    "levels": _Option(
        "for 'nested_mean': its units from outside to inside, such as prompt,rollout,sample",
        "UNIT",
        nargs="+",
    ),
    "empty": _Option(
        "whether groups without active tokens count (default: count, or the preset's choice)",
        words=_COUNT_OR_SKIP,
    ),
    "rejected": _Option(
        "whether samples that the batch key 'rejected' marks count in the denominators",
        words=_COUNT_OR_SKIP,
    ),
    "sample_weights": _Option(
        "whether the batch key 'sample_weights', and weights of data sets and of --sft lines, count in "
        "the denominators",
        words=_COUNT_OR_SKIP,
    ),
    "dataset_weights": _Option(
        "the weight of each data set, such as 0:0.5,1:2, by its place in the blend (batch key "
        "dataset_id); needs --loss-aggregation-sample-weights",
        "ID:WEIGHT",
        nargs="+",
    ),
    "function": _Option(
        "for 'custom': a function (samples) -> coefficient of each sample", "MODULE:NAME"
    ),
}
_HOOK_OPTIONS = {
    "also": _Option(
        "further modes or presets in which the loss is also reported", "MODE", nargs="+"
    ),
    "extension": _Option(
        "your own extensions (classes, or functions without arguments), which add to the loss or "
        "to the reports",
        "MODULE:NAME",
        nargs="+",
    ),
    "batch": _Option(
        "a function batch -> Microbatch, for batches that lack keys such as loss_mask",
        "MODULE:NAME",
    ),
    "sft_prompt_field": _Option(
        "with Megatron's --sft: the field of a line of JSON that holds its prompt id, or a list "
        "with one for each of its conversations",
        "NAME",
    ),
    "sft_weight_field": _Option(
        "with Megatron's --sft: the field of a line of JSON that holds its weight, or a list with "
        "one for each of its conversations; needs --loss-aggregation-sample-weights",
        "NAME",
    ),
    "sft_turns": _Option(
        "with Megatron's --sft: which of the assistant's turns carry loss: all, the last of each "
        "conversation, or each with a mask whose sum is 1 (default: all)",
        words=TURNS,
        default="all",
    ),
    "sft_turn_field": _Option(
        "with Megatron's --sft: the field of the assistant's messages that says whether they carry loss",
        "NAME",
    ),
    "split": _Option(
        "how the tokens of a batch lie on context-parallel ranks: zigzag inside every sequence, "
        "zigzag over the whole pack, or contiguous (default: zigzag; zigzag_pack with Megatron's "
        "--dataloader-inter-document-masking)",
        words=("zigzag", "zigzag_pack", "contiguous"),
    ),
    "empty_step": _Option(
        "what to do about a step without any token: train as Megatron does, end the run, or skip "
        "the optimizer (default: train)",
        words=("train", "error", "skip"),
        default="train",
    ),
    "mismatch": _Option(
        "what to do after the first step about losses that differ from the counted ones: end the "
        "run, or print the error and continue (default: stop)",
        words=("stop", "warn"),
        default="stop",
    ),
    "count": _Option(
        "when to count a step: before its first forward pass, from batches that are drawn ahead, "
        "or as it trains, with its denominator at its end (default: before)",
        words=("before", "end"),
        default="before",
    ),
    "evaluation": _Option(
        "forward-only calls of the schedule: reported as Megatron averages them, or aggregated in the "
        "same way as training (default: same in Megatron's own training loop, megatron in others)",
        words=("megatron", "same"),
    ),
    "report_datasets": _Option("report each data set of the step (batch key dataset_id)"),
    "report_weights": _Option(
        "report how unevenly samples weigh: their effective number, and the longest tenth's part"
    ),
    "audit": _Option(
        "measure Megatron's scaling for each new number of microbatches, and print it"
    ),
    "unmeasured": _Option(
        "whether to refuse a model whose scaling cannot be measured, or trust that it scales like "
        "Megatron's DDP (default: refuse)",
        words=("refuse", "trust"),
        default="refuse",
    ),
    "mtp": _Option(
        "losses of multi-token prediction: averaged as Megatron does, aggregated in the same way as "
        "the main loss, or in a mode of their own (default: megatron)",
        words=("megatron", "same", *_MTP_MODES),
        default="megatron",
    ),
}
_OPTIONS = _AGGREGATION_OPTIONS | _HOOK_OPTIONS

_REMOVED = {
    f"{FLAG}-moe": (
        "the losses of routers are now an example of an extension",
        f"Write {FLAG}-extension routers:RouterLosses, with examples/extensions of the repository on "
        "PYTHONPATH",
    ),
}
"""Flags of the previous version: the reason for their removal, and the remedy."""


class Parser(argparse.ArgumentParser):
    """Raises OptionError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message}. Correct this flag on the command line.")


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the plugin's flags as a separate group."""
    group = parser.add_argument_group("loss aggregation")
    group.add_argument(
        FLAG,
        metavar="MODE",
        help=f"mean over the whole optimizer step: {', '.join(MODES)}; or a preset such as "
        "verl/token-mean. Without it nothing changes.",
    )
    for name, option in _OPTIONS.items():
        if not (option.value or option.words):
            group.add_argument(_flag(name), action="store_true", help=option.help)
            continue
        group.add_argument(
            _flag(name),
            action="extend" if option.nargs else "store",
            metavar=option.value or "{" + ",".join(option.words) + "}",
            nargs=option.nargs,
            type=option.type,
            help=option.help,
        )
    return parser


def aggregation_from(args: argparse.Namespace) -> LossAggregation | None:
    """The aggregation that the flags ask for; None without ``--loss-aggregation``.

    Raises:
        AggregationError: a flag's value is bad, or conflicts with another flag.
    """
    return next(iter(aggregations_from(args)), None)


def aggregations_from(args: argparse.Namespace) -> list[LossAggregation]:
    """The aggregation of the loss, followed by those of ``--loss-aggregation-also``.

    Each takes the further flags that its mode supports. Empty without ``--loss-aggregation``.

    Raises:
        AggregationError: a flag's value is bad, or conflicts with another flag.
    """
    mode, values = getattr(args, "loss_aggregation", None), _values(args)
    if mode is None:
        if values:
            flag = _flag(next(iter(values)))
            raise OptionError(f"{flag} needs {FLAG}, got none. Add {FLAG} MODE, or remove {flag}.")
        return []
    modes = [mode, *values.get("also", [])]
    options: list[dict[str, Any]] = [{} for _ in modes]
    for name in (x for x in _AGGREGATION_OPTIONS if x in values):
        takers = [i for i, x in enumerate(modes) if _takes(x, name)]
        # An option that no mode takes goes to the mode of the loss, which refuses it with a reason.
        for i in takers or [0]:
            options[i][name] = values[name]
    return [_aggregation(*pair) for pair in zip(modes, options, strict=True)]


def hook_options(args: argparse.Namespace) -> dict[str, Any]:
    """By name, the values or defaults of the flags that set up the hook.

    Flags that take several values have lists.
    """
    values = _values(args)
    return {
        name: values.get(name, [] if x.nargs else x.default) for name, x in _HOOK_OPTIONS.items()
    }


def aggregation_from_environment(text: str | None = None) -> LossAggregation | None:
    """The aggregation that `VARIABLE` asks for; None without it. ``text``: as in `environment_flags`.

    For loops that apply `StepPlan.coefficients` themselves, in which other flags have no effect.

    Raises:
        AggregationError: as in `aggregation_from`, or the variable contains something else.
    """
    values = environment_flags(text)
    allowed = {"loss_aggregation", *(f"loss_aggregation_{name}" for name in _AGGREGATION_OPTIONS)}
    if without_effect := sorted(values.keys() - allowed):
        raise OptionError(
            f"{VARIABLE} must hold {FLAG} MODE and flags of the aggregation only, since this loop "
            f"has no hook, got {' '.join(map(_as_flag, without_effect))}. Remove them from "
            f"{VARIABLE}."
        )
    return aggregation_from(argparse.Namespace(**values))


def process_flags(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Our flags in ``argv`` or in the environment, and the other arguments, as in `parse_flags`."""
    values, others = parse_flags(argv)
    environment_values = environment_flags()
    if values and environment_values:
        flag = _as_flag(next(iter(values)))
        raise OptionError(
            f"The flags must be in {VARIABLE} or on the command line, got {flag} and {VARIABLE}. "
            f"Unset {VARIABLE}, or remove {flag}."
        )
    return values or environment_values, others


def environment_flags(text: str | None = None) -> dict[str, Any]:
    """The flags in `VARIABLE`, by the parser's names. The variable may contain nothing else.

    Args:
        text: the variable's value in another process; by default its value in this process.
    """
    text = os.environ.get(VARIABLE, "") if text is None else text
    try:
        words = shlex.split(text)
    except ValueError as error:  # no closing quotation
        raise OptionError(
            f"{VARIABLE} must hold flags with closed quotes, got {text!r}. Close them, or write "
            "flags without spaces in their values."
        ) from error
    several_flags = rf"{FLAG}[\w-]*( |=.* {FLAG})"
    if quoted := [word for word in words if re.match(several_flags, word)]:
        raise OptionError(
            f"{VARIABLE} must hold flags that are not quoted as a whole, got {quoted[0]!r} as one "
            f"word. Remove the inner quotes: {VARIABLE}='{quoted[0]}'."
        )
    values, others = parse_flags(words)
    if others:
        raise OptionError(
            f"{VARIABLE} must hold {FLAG} MODE and flags {FLAG}-... only, got "
            f"{' '.join(others)}. Remove it from {VARIABLE}."
        )
    return values


def parse_flags(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Our flags in ``argv``, by the parser's names, and the other arguments in order."""
    parser = add_arguments(
        Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    )
    values, others = parser.parse_known_args(argv)
    times = Counter(argument.partition("=")[0] for argument in argv)
    added_up = [_flag(name) for name, x in _HOOK_OPTIONS.items() if x.nargs]
    for flag in (FLAG, *map(_flag, _OPTIONS)):
        if times[flag] > 1 and flag not in added_up:
            raise OptionError(
                f"{flag} must be given once, got {times[flag]}. Remove all {flag} but one."
            )
    names = [FLAG, *map(_flag, _OPTIONS)]
    # A script that ignores unknown flags would train without the plugin if ours are misspelt.
    for flag in (x.partition("=")[0] for x in others if x.startswith((*_DASHES,))):
        _refuse_removed(flag)
        if nearest := _nearest(flag):
            raise OptionError(
                f"{flag} is not a flag of megatron_loss_agg. Write {nearest}, or another of "
                f"{', '.join(names)}."
            )
    return vars(values), others


def _nearest(flag: str) -> str | None:
    """Our flag that ``flag`` probably stands for; None if ``flag`` is another program's."""
    words = flag.strip(_DASHES).replace("_", "-").split("-")
    if not get_close_matches("-".join(words[:2]), [FLAG.strip(_DASHES)], 1, _CUTOFF):
        return None
    option = "-".join(words[2:])
    names = [name.replace("_", "-") for name in _OPTIONS]
    near = get_close_matches(option, names, 1, _OPTION_CUTOFF)
    near += [x for x in names if option and (x.startswith(option) or option.startswith(x))]
    return _flag(near[0]) if near else f"{FLAG} MODE"  # also for --loss-aggregation-mode


def load(flag: str, path: str) -> Callable[..., Any]:
    """The function or class at ``path`` (``module:name``), which is the value of ``flag``."""
    module, _, name = path.partition(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the user's module raises
        raise OptionError(
            f"{flag} must be module:name of a function or class that can be imported, got {path!r} "
            f"({error}). Put the module on PYTHONPATH or next to the script, or change {flag}."
        ) from error
    return function


def _flag(name: str) -> str:
    """The flag for the option ``name``."""
    return f"{FLAG}-{name.replace('_', '-')}"


def _as_flag(setting: str) -> str:
    """The flag that a parser, or a YAML file, stores as ``setting``."""
    return "--" + setting.replace("_", "-")


def _values(args: argparse.Namespace) -> dict[str, Any]:
    """The values of the further flags in ``args``, by their names in `_OPTIONS`; lists as words.

    They may come from Megatron's YAML file, so no parser has checked them.

    Raises:
        OptionError: a value is not one of the flag's words, or a setting is not one of ours.
    """
    names = ["loss_aggregation", *(f"loss_aggregation_{name}" for name in _OPTIONS)]
    for setting in vars(args):
        if setting.replace("-", "_").startswith("loss_aggregation") and setting not in names:
            _refuse_removed(_as_flag(setting))
            raise OptionError(
                f"{setting} is not a setting of megatron_loss_agg. Write one of "
                f"{', '.join(names)} in the YAML file."
            )
    values: dict[str, Any] = {
        name: getattr(args, f"loss_aggregation_{name}", None) for name in _OPTIONS
    }
    # Do not compare with ==, since a divisor of 0 equals False; it is refused later.
    values = {name: x for name, x in values.items() if x is not None and x is not False}
    for name, value in values.items():
        words = _OPTIONS[name].words
        if words and value not in words:
            raise OptionError(
                f"{_flag(name)} must be one of {', '.join(words)}, got {value!r}. "
                f"Change {_flag(name)}."
            )
        if _OPTIONS[name].nargs and not isinstance(value, Mapping):  # such as weights in YAML
            values[name] = words_in(value if isinstance(value, str) else " ".join(map(str, value)))
    return values


def _takes(mode: str, name: str) -> bool:
    """True if the mode or preset ``mode`` takes the option ``name`` of an aggregation."""
    if name == "divisor":
        return takes_divisor(mode)
    return mode == _ONLY_MODE.get(name, mode)


def _aggregation(mode: str, options: dict[str, Any]) -> LossAggregation:
    for name, only_mode in _ONLY_MODE.items():
        if name in options and is_preset(mode):
            raise OptionError(
                f"{_flag(name)} needs {FLAG} {only_mode}, got the preset {mode!r}. "
                f"Remove {_flag(name)}, or choose {FLAG} {only_mode}."
            )
    if "function" in options:
        options["function"] = load(_flag("function"), options["function"])
    return aggregation_named(mode, **options)


def _refuse_removed(flag: str) -> None:
    """Raise OptionError if this is a flag of the previous version."""
    if flag in _REMOVED:
        reason, remedy = _REMOVED[flag]
        raise OptionError(f"{flag} was removed: {reason}. {remedy}, and remove {flag}.")
