"""``python -m megatron_loss_agg [--cpu] SCRIPT [script flags]``, ``doctor`` and ``explain``."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_loss_agg.errors import AggregationError, OptionError
from megatron_loss_agg.microbatch import Microbatch

if TYPE_CHECKING:
    from megatron_loss_agg.launch.effect import FlagUse

COMMANDS = """\
other commands:
  python -m megatron_loss_agg doctor [-h] ...     check whether the plugin works here
  python -m megatron_loss_agg explain [-h] ...    show how each mode weights the samples of a step
  python -m megatron_loss_agg --version
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code; bad flags are one line on stderr and code 2.

    Raises:
        Exception: whatever the script raises, with its traceback.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        if args[:1] == ["doctor"]:
            from megatron_loss_agg.frameworks.installation import FRAMEWORKS, examined
            from megatron_loss_agg.launch import doctor

            in_drivers = {name: framework.in_driver for name, framework in FRAMEWORKS.items()}
            return doctor.main(args[1:], examined, in_drivers)
        if args[:1] == ["explain"]:
            from megatron_loss_agg import explain

            return explain.main(args[1:], _read_data)
        if args == ["--version"]:
            from megatron_loss_agg import __version__

            print(f"megatron-loss-agg {__version__}")
            return 0
        cpu = args[:1] == ["--cpu"]
        command = args[1:] if cpu else args
        if not command or command[0] in ("-h", "--help"):
            print(_help(), end="")
            return 0 if command else 2
        use = _install(command, cpu)
    except AggregationError as error:
        from megatron_loss_agg.launch.effect import refuse

        return refuse(error)
    return _run_script(command[0], use)  # an error in training keeps its traceback


def _install(command: list[str], cpu: bool) -> FlagUse:
    """Install the plugin for a script and its flags; with ``cpu``, Megatron runs without a GPU.

    Raises:
        OptionError: there is no such script.
        AggregationError: as `install`.
    """
    script, *script_args = command
    if not Path(script).is_file():
        raise OptionError(
            f"SCRIPT must be a file, got {script!r}. Write [--cpu] SCRIPT [script flags]."
        )
    sys.argv = [script, *script_args]
    sys.path[0] = str(Path(script).resolve().parent)  # as `python SCRIPT` does

    from megatron_loss_agg.launch import flags
    from megatron_loss_agg.launch.effect import FlagUse
    from megatron_loss_agg.launch.install import install

    use = FlagUse(script_args)
    prepare_parser = flags.add_arguments
    if cpu:
        from megatron_loss_agg.mcore import cpu as megatron_on_cpu

        megatron_on_cpu.enable()

        def prepare_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            return flags.add_arguments(megatron_on_cpu.set_default_flags(parser))

    install(prepare_parser, watch_exit=False, launcher=use)
    return use


def _run_script(script: str, use: FlagUse) -> int:
    """Run ``script`` as ``python SCRIPT`` would; return 0 if it succeeded and used our flags."""
    from torch.distributed.elastic.multiprocessing.errors import record

    from megatron_loss_agg.launch.effect import refuse

    try:
        record(runpy.run_path)(script, run_name="__main__")  # so that torchrun names the root cause
    except SystemExit as end:
        if end.code:
            raise
    error = use.error_at_exit()
    return 0 if error is None else refuse(error)


def _read_data(flags: Sequence[str], number: int) -> Iterator[Microbatch]:
    """The first rows of a run's training data; imports Megatron, which `explain` alone does not."""
    from megatron_loss_agg.launch import data

    return data.read(flags, number)


def _help() -> str:
    from megatron_loss_agg.launch import flags

    parser = argparse.ArgumentParser(
        prog="torchrun ... -m megatron_loss_agg [--cpu] SCRIPT [script flags]",
        description="Run a Megatron training script with exact loss aggregation; "
        "with --cpu, without a GPU.",
        epilog=COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    return flags.add_arguments(parser).format_help()


if __name__ == "__main__":
    sys.exit(main())
