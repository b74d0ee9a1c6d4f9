"""``python -m megatron_loss_agg [--cpu] SCRIPT [script flags]``, ``doctor`` and ``explain``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence

from megatron_loss_agg.errors import AggregationError
from megatron_loss_agg.microbatch import Microbatch

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
        outcome = _run(args)
    except AggregationError as error:
        from megatron_loss_agg.launch.once import refuse

        return refuse(error)
    if isinstance(outcome, int):
        return outcome
    return outcome()  # outside the `try`, so that an error in training keeps its traceback


def _run(args: list[str]) -> int | Callable[[], int]:
    """The exit code, or a function that runs the script."""
    if args[:1] == ["doctor"]:
        from megatron_loss_agg.launch import doctor

        return doctor.main(args[1:])
    if args[:1] == ["explain"]:
        from megatron_loss_agg import explain

        return explain.main(args[1:], _read_data)
    if args == ["--version"]:
        from megatron_loss_agg import __version__

        print(f"megatron-loss-agg {__version__}")
        return 0
    cpu = args[:1] == ["--cpu"]
    command = args[cpu:]
    if not command or command[0] in ("-h", "--help"):
        print(_help(), end="")
        return 0 if command else 2
    from megatron_loss_agg.launch import script

    return script.prepare(command[0], command[1:], cpu)


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
