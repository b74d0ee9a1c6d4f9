"""The plugin's flags of this process, and whether they take effect; a run where they do not fails.

A script can compute its loss without Megatron's schedule. Such a run would train on the stock loss
without a word.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from megatron_loss_agg.errors import HostError, OptionError
from megatron_loss_agg.launch import flags
from megatron_loss_agg.launch.once import refuse
from megatron_loss_agg.mcore.hook import Hook


class GivenFlags:
    """The plugin's flags of this process, and what became of them.

    Args:
        argv: arguments of the script, among which they are, if the environment holds none.

    Attributes:
        values: what was given, by the parser's names.
        others: the other arguments, in their order.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self.values, self.others = flags.taken_from(argv)
        held = flags.in_environment()
        if self.values and held:
            raise OptionError(
                f"{flags.VARIABLE} is set, and {flags.flag_of(next(iter(self.values)))} is on the "
                "command line; expected flags in one of the two places"
            )
        self.values |= held
        self._asks_for_help = not {"-h", "--help"}.isdisjoint(argv)
        self._called = False
        self._trains: Hook | None = None

    @property
    def _asked(self) -> str | None:
        """The aggregation, of our own flags or of a YAML file that Megatron has read."""
        given = self.values.get("loss_aggregation")
        return given or getattr(host_args(), "loss_aggregation", None)

    @property
    def skips_step(self) -> bool:
        """Whether the next optimizer's step is to be skipped, since it is empty."""
        return self._trains is not None and self._trains.step_is_empty

    def noting(self, hook: Hook, schedule: Callable[..., Any]) -> Callable[..., Any]:
        """``schedule``, wrapped by a hook that was made from the flags, whose calls are noted."""
        hooked = hook.wrap(schedule)

        @functools.wraps(hooked)
        def noted(**arguments: Any) -> Any:
            self._called = True
            if not (arguments.get("forward_only") or arguments.get("collect_non_loss_data")):
                self._note_training(hook)
            return hooked(**arguments)

        return noted

    def _note_training(self, hook: Hook) -> None:
        if hook.empty_step == "skip" and self._trains not in (None, hook):
            raise HostError(
                "--loss-aggregation-empty-step skip, and several models train in this process; "
                "expected one, since whose optimizer steps is unknown: choose error or step"
            )
        self._trains = hook

    def check_before_step(self, optimizer: Any) -> None:
        """Raise HostError if the flags should have taken effect by this optimizer's step."""
        if self._trains is None and self._asked:
            raise self._no_effect(
                f"{type(optimizer).__name__} is about to step, and no forward-backward call has "
                "trained through the plugin"
            )

    def check_before_torch_step(self, optimizer: Any, *_: Any) -> None:
        """As `check_before_step`, for an optimizer of torch, whose steps cannot be skipped."""
        self.check_before_step(optimizer)
        if self.skips_step:
            raise HostError(
                f"{type(optimizer).__name__} is about to step without any token; expected one of "
                "Megatron's for --loss-aggregation-empty-step skip: choose error or step"
            )

    def error_at_exit(self) -> HostError | None:
        """The error of a script that ends now; None if the flags took effect, or had nothing to do.

        Megatron's own loop makes no step if its checkpoint is of the last iteration already. It
        sets ``do_train`` in its flags.
        """
        idle = self._asks_for_help or hasattr(host_args(), "do_train")
        if self._called or idle or not self._asked:
            return None
        return self._no_effect("the script made no step through the plugin")

    def _no_effect(self, why: str) -> HostError:
        return HostError(
            f"{flags.FLAG} {self._asked} has no effect: {why}; expected a loop "
            "that calls what Megatron-Core's get_forward_backward_func() returns, after install() "
            "and without a LossHook of its own"
        )

    def fail_at_exit(self) -> None:
        """End the process, at its exit, with code 2 if the flags have had no effect."""
        failed = getattr(sys, "last_value", None) is not None
        error = None if failed else self.error_at_exit()
        if error is not None:
            code = refuse(error)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # an exception in this place would not change the exit code


def host_args() -> Any:
    """Megatron's parsed flags; empty ones in a script that does not use its parser."""
    host = sys.modules.get("megatron.training.global_vars")
    try:
        return argparse.Namespace() if host is None else host.get_args()
    except AssertionError:  # they are not initialized
        return argparse.Namespace()
