"""Runs an unmodified Megatron script with the plugin in place."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

from megatron_loss_agg.errors import InputError
from megatron_loss_agg.mcore import flags


def launch(script: str, script_args: list[str], cpu: bool) -> None:
    """Run ``script`` as ``__main__`` with ``script_args``, as ``python script ...`` would.

    Args:
        cpu: real Megatron on a CPU over gloo, for trials and tests.

    Raises:
        AggregationError: a flag of ours is bad; before Megatron is imported.
    """
    if not Path(script).is_file():
        raise InputError(f"{script!r} is not a file; expected the path of a training script")
    sys.argv = [script, *script_args]
    sys.path[0] = str(Path(script).resolve().parent)
    ours = flags.add_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    flags.settings_from(ours.parse_known_args(script_args)[0])
    prepare_parser = _enable_cpu() if cpu else flags.add_arguments
    from megatron_loss_agg.mcore.install import install

    install(prepare_parser)
    runpy.run_path(script, run_name="__main__")


def _enable_cpu() -> Callable[[argparse.ArgumentParser], argparse.ArgumentParser]:
    from megatron_loss_agg.mcore import cpu

    cpu.enable()

    def prepare_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return flags.add_arguments(cpu.set_default_flags(parser))

    return prepare_parser
