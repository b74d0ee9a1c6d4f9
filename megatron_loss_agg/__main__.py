"""``python -m megatron_loss_agg [--cpu] SCRIPT [script flags]``, ``doctor`` and ``explain``."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from megatron_loss_agg.errors import AggregationError, OptionError
from megatron_loss_agg.microbatch import Microbatch

if TYPE_CHECKING:
    from megatron_loss_agg.launch.effect import FlagUse

_EXPLAIN = "show how modes and stock Megatron weight samples"
_OTHER_COMMANDS = f"""\
other commands:
  python -m megatron_loss_agg doctor [-h] ...     check whether the plugin works here
  python -m megatron_loss_agg explain [-h] ...    {_EXPLAIN}
  python -m megatron_loss_agg --version
"""
_WITHOUT_ARGUMENTS = f"""\
megatron_loss_agg: exact loss aggregation for Megatron-Core, over the whole optimizer step
  torchrun ... -m megatron_loss_agg SCRIPT ... --loss-aggregation MODE   train (--help: all flags)
  python -m megatron_loss_agg doctor    check whether the plugin works here
  python -m megatron_loss_agg explain   {_EXPLAIN}
docs: README.md and docs/start.md of its repository
"""
_LAUNCHER = Path(__file__).parent / "launch"


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code; bad flags are one line on stderr and code 2.

    Raises:
        Exception: whatever the script raises, with its traceback.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        if args[:1] == ["doctor"]:
            from megatron_loss_agg.frameworks.installation import FRAMEWORKS, examine_framework
            from megatron_loss_agg.launch import doctor

            in_drivers = {name: framework.in_driver for name, framework in FRAMEWORKS.items()}
            return doctor.main(args[1:], examine_framework, in_drivers)
        if args[:1] == ["explain"]:
            from megatron_loss_agg import explain

            return explain.main(args[1:], _read_data)
        if args == ["--version"]:
            from megatron_loss_agg import __version__

            print(f"megatron-loss-agg {__version__}")
            return 0
        cpu = args[:1] == ["--cpu"]
        command = args[1:] if cpu else args
        if not command:
            print(_WITHOUT_ARGUMENTS, end="")
            return 2
        if command[0] in ("-h", "--help"):
            print(_help(), end="")
            return 0
        use = _install(command, cpu)
    except AggregationError as error:
        from megatron_loss_agg.launch.effect import refuse

        return refuse(error)
    return _run_script(command[0], use)  # an error in training keeps its traceback


def _install(command: list[str], cpu: bool) -> FlagUse:
    """Install the plugin for a script and its flags; with ``cpu``, Megatron runs without a GPU.

    Raises:
        OptionError: the script does not exist.
        AggregationError: see `install`.
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
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    from megatron_loss_agg.launch.effect import refuse

    torchrun, show = get_error_handler(), sys.excepthook
    torchrun.initialize()

    def show_frames_of_script(kind: Any, error: BaseException, trace: TracebackType | None) -> None:
        trace = _script_frames(trace, script)
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = show_frames_of_script
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    except Exception as error:
        error.__traceback__ = _script_frames(error.__traceback__, script)
        torchrun.record_exception(error)  # so that torchrun names the root cause
        raise
    error_at_exit = use.error_at_exit()
    return 0 if error_at_exit is None else refuse(error_at_exit)


def _script_frames(trace: TracebackType | None, script: str) -> TracebackType | None:
    """``trace`` from the first frame of ``script`` on, without the launcher's frames.

    The last frame is always kept, since it raised the error.
    """
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    files = [frame.tb_frame.f_code.co_filename for frame in frames]
    if script not in files:
        return None
    first = files.index(script)
    callers = [
        frame
        for frame, file in zip(frames[first:-1], files[first:-1], strict=True)
        if Path(file).parent != _LAUNCHER
    ]
    shown = [*callers, frames[-1]]
    for frame, following in pairwise(shown):
        frame.tb_next = following
    return shown[0]


def _read_data(flags: Sequence[str], number: int) -> Iterator[Microbatch]:
    """The first rows of a run's training data. Imports Megatron, unlike `explain` itself."""
    from megatron_loss_agg.launch import data

    return data.read(flags, number)


def _help() -> str:
    from megatron_loss_agg.launch import flags

    parser = argparse.ArgumentParser(
        prog="torchrun ... -m megatron_loss_agg [--cpu] SCRIPT [script flags]",
        description="Run a Megatron training script with exact loss aggregation; "
        "with --cpu, without a GPU.",
        epilog=_OTHER_COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    return flags.add_arguments(parser).format_help()


if __name__ == "__main__":
    sys.exit(main())
