"""Runs an unmodified Megatron script with the plugin in place."""

from __future__ import annotations

import argparse
import functools
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_loss_agg.errors import AggregationError, InputError
from megatron_loss_agg.mcore import flags
from megatron_loss_agg.mcore.hook import LossHook
from megatron_loss_agg.mcore.install import hook_from_args, install


def prepare(script: str, script_args: list[str], cpu: bool) -> Callable[[], Any]:
    """Install the plugin for ``script`` with ``script_args``.

    Args:
        cpu: real Megatron on a CPU over gloo, for trials and tests.

    Returns:
        what runs the script as ``__main__``, as ``python script ...`` would. A flag of Megatron
        that does not go with ours ends it with one line and exit code 2, before it builds a model.

    Raises:
        AggregationError: a flag of ours is bad, before Megatron is imported; or this Megatron has
            other seams than the plugin knows.
    """
    if not Path(script).is_file():
        raise InputError(f"{script!r} is not a file; expected the path of a training script")
    sys.argv = [script, *script_args]
    sys.path[0] = str(Path(script).resolve().parent)
    ours = flags.add_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    flags.settings_from(ours.parse_known_args(script_args)[0])
    prepare_parser = _enable_cpu() if cpu else flags.add_arguments
    install(prepare_parser, _hook_or_exit)
    return functools.partial(runpy.run_path, script, run_name="__main__")


def _hook_or_exit(args: Any) -> LossHook | None:
    """The hook that Megatron's parsed flags ask for.

    Only the script can parse them, so they are refused in the middle of its run, from where
    nothing but an exit is as short as a refusal before it.
    """
    try:
        return hook_from_args(args)
    except AggregationError as error:
        sys.exit(flags.refuse(error))


def _enable_cpu() -> Callable[[argparse.ArgumentParser], argparse.ArgumentParser]:
    from megatron_loss_agg.mcore import cpu

    cpu.enable()

    def prepare_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return flags.add_arguments(cpu.set_default_flags(parser))

    return prepare_parser
