"""The doctor's check of the flags of a launch script: what a run would say about them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_loss_agg.aggregation import BY_ID, Term
from megatron_loss_agg.errors import AggregationError, HostError, InputError
from megatron_loss_agg.mcore import effect, flags
from megatron_loss_agg.mcore.install import hook_from_args
from megatron_loss_agg.mcore.late_masks import check_host
from megatron_loss_agg.mcore.moe import check_config
from megatron_loss_agg.mcore.mtp import number_of_depths
from megatron_loss_agg.mcore.packages import Finding, one_line
from megatron_loss_agg.mcore.seams import seams


class _Parser(argparse.ArgumentParser):
    """Raises on a bad flag instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def check_flags(script_flags: Sequence[str], with_host: bool) -> Finding:
    """The first thing that a run with these flags, or those of the environment, would refuse.

    Args:
        with_host: whether ``megatron.training`` can be imported, to read Megatron's own flags.
    """
    script = script_flags[0] if script_flags else "--"
    if not script.startswith("-") and not Path(script).is_file():
        text = f"{script} is not a file; expected the path of a training script, or flags alone"
        return Finding("FAIL", "flags", text)
    parser: argparse.ArgumentParser = _Parser(add_help=False, allow_abbrev=False)
    try:
        training = seams().training if with_host else None
        if training is not None:
            parser = training.add_arguments.function(parser)
        given = effect.GivenFlags(script_flags, flags.in_environment())
        args, others = parser.parse_known_args(given.others)
        given.complete(args)
        hook, settings = hook_from_args(args, in_training_loop=True), flags.settings_from(args)
    except AggregationError as error:
        return Finding("FAIL", "flags", one_line(error))
    if hook is None or settings is None:
        text = f"without {flags.FLAG} the plugin does nothing; add {flags.FLAG} MODE"
        return Finding("WARN", "flags", text)
    mode = args.loss_aggregation
    if training is None:
        text = f"{mode}; Megatron's own flags not checked: megatron.training cannot be imported"
        return Finding("WARN", "flags", text)
    try:
        _check_model(hook.terms, settings.choices, args)
    except HostError as error:
        text = f"{mode}; refused if the model is as these flags say: {one_line(error)}"
        return Finding("WARN", "flags", text)
    unknown = [flag for flag in others if flag.startswith("--") and flag != "--cpu"]
    if unknown:
        text = f"{mode}; Megatron has no {', '.join(unknown)}: valid only if the script adds them"
        return Finding("WARN", "flags", text)
    units = {u for t in hook.terms.values() for u in (t.aggregation.within, t.aggregation.across)}
    needs = [f"{unit}_ids" for unit in BY_ID if unit in units]
    read = f"; the batches must have {' and '.join(needs)}" if needs else ""
    return Finding("OK", "flags", f"{mode}, and no other flag conflicts with it{read}")


def _check_model(
    terms: Mapping[str, Term], choices: Mapping[str, str], args: argparse.Namespace
) -> None:
    """Raise HostError where the first step of a model built from ``args`` would.

    The model may be another: scripts, checkpoints and YAML files set what these flags do not.
    """
    if choices["mtp"] == "same":
        number_of_depths(args)
    config = _config(args)
    if choices["moe"] == "step":
        check_config(config, ranks=1)
    if choices["mask"] == "model":
        check_host(terms, args.calculate_per_token_loss, config)


def _config(args: argparse.Namespace) -> Any:
    """``args`` under the names of the model's configuration, as far as the checks read it."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    values = {name: _one(value) for name, value in vars(args).items()}
    if hasattr(TransformerConfig, "moe_grad_scale_func"):
        values["moe_grad_scale_func"] = None
    return argparse.Namespace(**values, num_moe_experts=values.get("num_experts"))


def _one(value: Any) -> Any:
    """The element of a list of one, as Megatron takes flags that may be given several values."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value
