"""``python -m megatron_loss_agg [--cpu] SCRIPT [the script's own flags]``, doctor and explain."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from megatron_loss_agg.errors import AggregationError

USAGE = """\
usage: torchrun ... -m megatron_loss_agg [--cpu] SCRIPT [the script's own flags]
           --loss-aggregation MODE [--loss-aggregation-divisor D]
           [--loss-aggregation-empty {count,skip}] [--loss-aggregation-rejected {count,skip}]
           [--loss-aggregation-function MODULE:NAME] [--loss-aggregation-batch MODULE:NAME]
           [--loss-aggregation-empty-step {error,skip,step}] [--loss-aggregation-audit]
       python -m megatron_loss_agg doctor [-h] ...     does the plugin run here?
       python -m megatron_loss_agg explain [-h] ...    what does each mode weigh?

Runs a Megatron training script with exact loss aggregation. --cpu runs it without a GPU.
"""


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code; a bad flag is one line on stderr and code 2."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if args else 2
    try:
        outcome = _run(args)
    except AggregationError as error:
        from megatron_loss_agg.mcore import flags

        return flags.refuse(error)
    if isinstance(outcome, int):
        return outcome
    # Outside of the `try`: an error of the training keeps its traceback, since nothing else says
    # where it came from. Flags that only the script can parse are refused by `launch`.
    outcome()
    return 0


def _run(args: list[str]) -> int | Callable[[], Any]:
    """The exit code; or, where a script is to be started, what runs it."""
    if args[0] == "doctor":
        from megatron_loss_agg.mcore import doctor

        return doctor.main(args[1:])
    if args[0] == "explain":
        from megatron_loss_agg import explain

        return explain.main(args[1:])
    cpu = args[0] == "--cpu"
    script, *script_args = args[cpu:] or ["-h"]
    if script in ("-h", "--help"):
        print(USAGE)
        return 2 if args == ["--cpu"] else 0
    if script.startswith("-"):
        print(f"megatron_loss_agg: {script!r} before the script; {USAGE}", file=sys.stderr)
        return 2
    from megatron_loss_agg.mcore import launch

    return launch.prepare(script, script_args, cpu)


if __name__ == "__main__":
    sys.exit(main())
