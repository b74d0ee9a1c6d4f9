"""Fail the run if ``--loss-aggregation`` never took effect.

A script can compute its loss without Megatron's schedule. It would then silently train on its usual
loss.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from megatron_loss_agg.errors import AggregationError, HostError
from megatron_loss_agg.launch import flags
from megatron_loss_agg.mcore import LossHook

BAD_START = 2
"""The exit code of a run with bad flags, or with flags that had no effect."""


class FlagUse:
    """The plugin's flags in this process, and how they were used so far.

    Args:
        argv: the arguments of the script, including the plugin's flags unless the environment has
            them.

    Attributes:
        values: the flags' values, by the parser's names.
        other_arguments: the arguments of the script without the plugin's flags, in order.
        has_megatron_optimizer: True once this process has made a Megatron optimizer. Megatron then
            steps torch's optimizers, even before training, to initialize their state.

    Raises:
        OptionError: a flag is bad.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self.values, self.other_arguments = flags.process_flags(argv)
        self.has_megatron_optimizer = False
        self._asks_for_help = not {"-h", "--help"}.isdisjoint(argv)
        self._schedule_was_called = False
        self._training_hook: LossHook | None = None  # the hook of the last training call

    @property
    def mode(self) -> str | None:
        """The value of ``--loss-aggregation``, which may also come from Megatron's YAML file."""
        mode = self.values.get("loss_aggregation")
        return mode or getattr(megatron_args(), "loss_aggregation", None)

    @property
    def skips_optimizer(self) -> bool:
        """True if the optimizer should skip its next step, since no token was active."""
        return self._training_hook is not None and self._training_hook.step_is_empty

    def recorded(self, hook: LossHook, hooked: Callable[..., Any]) -> Callable[..., Any]:
        """The schedule ``hooked``, which has the loss of ``hook``, with its calls recorded."""

        @functools.wraps(hooked)
        def schedule(**arguments: Any) -> Any:
            self._schedule_was_called = True
            if not (arguments.get("forward_only") or arguments.get("collect_non_loss_data")):
                self._record_training(hook)
            return hooked(**arguments)

        return schedule

    def _record_training(self, hook: LossHook) -> None:
        if hook.empty_step == "skip" and self._training_hook not in (None, hook):
            raise HostError(
                f"{flags.FLAG}-empty-step skip needs a single model that trains in this process, "
                "to know whose optimizer to skip, got several. Choose "
                f"{flags.FLAG}-empty-step error or train."
            )
        self._training_hook = hook

    def check_before_step(self, optimizer: Any) -> None:
        """Raise HostError if the flags should have taken effect before ``optimizer`` steps."""
        if self._training_hook is None and self.mode:
            raise self._no_effect(
                f"{type(optimizer).__name__} is about to step, but no forward-backward call has "
                "trained through the plugin"
            )

    def check_before_torch_step(self, optimizer: Any, *_: Any) -> None:
        """`check_before_step` for a torch optimizer, whose step cannot be skipped."""
        if self.has_megatron_optimizer:
            return
        self.check_before_step(optimizer)
        if self.skips_optimizer:
            raise HostError(
                f"{flags.FLAG}-empty-step skip needs one of Megatron's optimizers, got "
                f"{type(optimizer).__name__}, which is about to step without any token. Choose "
                f"{flags.FLAG}-empty-step error or train."
            )

    def error_at_exit(self) -> HostError | None:
        """The error for a script that ends now if its flags had no effect; None if all is well.

        All is also well if the run had nothing to do: Megatron's loop makes no step if its
        checkpoint is from the last iteration. That loop sets ``do_train`` in its flags.
        """
        had_nothing_to_do = self._asks_for_help or hasattr(megatron_args(), "do_train")
        if self._schedule_was_called or had_nothing_to_do or not self.mode:
            return None
        return self._no_effect("the script trained nothing through the plugin")

    def _no_effect(self, reason: str) -> HostError:
        return HostError(
            f"{flags.FLAG} {self.mode} has no effect: {reason}. Call what Megatron-Core's "
            "get_forward_backward_func() returns, after install() and without a LossHook of the "
            f"script's own, or remove {flags.FLAG}."
        )

    def fail_at_exit(self) -> None:
        """At exit, end the process with code `BAD_START` if the flags have had no effect."""
        ended_with_an_error = getattr(sys, "last_value", None) is not None
        error = None if ended_with_an_error else self.error_at_exit()
        if error is not None:
            code = refuse(error)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # an exception in an atexit function does not change the exit code


def refuse(error: AggregationError) -> int:
    """Print ``error`` as one line and return the exit code."""
    print(f"megatron_loss_agg: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return BAD_START


def megatron_args() -> Any:
    """Megatron's parsed flags; none in a script that does not use Megatron's parser."""
    global_vars = sys.modules.get("megatron.training.global_vars")
    try:
        return argparse.Namespace() if global_vars is None else global_vars.get_args()
    except AssertionError:  # they are not initialized
        return argparse.Namespace()
