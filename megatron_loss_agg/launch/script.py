"""Runs an unmodified script with the plugin installed."""

from __future__ import annotations

import argparse
import functools
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

from megatron_loss_agg.errors import OptionError
from megatron_loss_agg.launch import flags
from megatron_loss_agg.launch.effect import GivenFlags
from megatron_loss_agg.launch.install import install
from megatron_loss_agg.launch.once import refuse


def prepare(script: str, script_args: list[str], cpu: bool) -> Callable[[], int]:
    """Install the plugin for ``script``; ``cpu``: and run Megatron on CPU over gloo.

    Returns:
        a function that runs the script as ``python script ...`` would, and returns its exit code.

    Raises:
        OptionError: ``script`` is not a file.
        AggregationError: as `install`.
    """
    if not Path(script).is_file():
        raise OptionError(f"{script!r} is not a file; expected [--cpu] SCRIPT [script flags]")
    sys.argv = [script, *script_args]
    sys.path[0] = str(Path(script).resolve().parent)
    given = GivenFlags(script_args)
    if cpu:
        from megatron_loss_agg.mcore.cpu import enable

        enable()
    install(_add_cpu_arguments if cpu else flags.add_arguments, watch_exit=False, launched=given)
    return functools.partial(_run, script, given)


def _run(script: str, given: GivenFlags) -> int:
    """Run ``script``; return 0 if it succeeded and used our flags."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        if leaving.code:
            raise
    error = given.error_at_exit()
    return 0 if error is None else refuse(error)


def _add_cpu_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    from megatron_loss_agg.mcore.cpu import set_default_flags

    return flags.add_arguments(set_default_flags(parser))
