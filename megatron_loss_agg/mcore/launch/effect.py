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
from weakref import WeakSet

from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron_loss_agg.errors import HostError, ModeError
from megatron_loss_agg.mcore.hook import Hook
from megatron_loss_agg.mcore.host import chunks_of
from megatron_loss_agg.mcore.launch import flags
from megatron_loss_agg.mcore.launch.once import refuse

_HOW_TO_USE = (
    "expected a loop that calls what Megatron-Core's get_forward_backward_func() returns, in this "
    "process, after install() and without a LossHook of its own"
)


class GivenFlags:
    """The plugin's flags of this process, and what became of them.

    Args:
        argv: arguments of the script, among which they are.
        in_environment: those that the environment holds instead.

    Attributes:
        values: what was given, by the parser's names.
        others: the other arguments, in their order.
        skips_step: whether the next optimizer's step is to be skipped, since it is empty.

    Raises:
        ModeError: they are in both places.
    """

    def __init__(self, argv: Sequence[str], in_environment: dict[str, Any] | None = None) -> None:
        on_command_line, self.others = flags.taken_from(argv)
        if on_command_line and in_environment:
            raise ModeError(
                f"{flags.VARIABLE} is set, and {_first(on_command_line)} is on the command line; "
                "expected flags in one of the two places"
            )
        self.values = on_command_line or in_environment or {}
        self.skips_step = False
        self._asks_for_help = not {"-h", "--help"}.isdisjoint(argv)
        self._called = self._has_trained = False
        self._trained: WeakSet[Any] = WeakSet()  # models
        self._host_steps = False

    def watch(self) -> Callable[[], None]:
        """Take the flags off the command line, and check torch's optimizers.

        Returns:
            a function that undoes it.
        """
        argv = sys.argv
        sys.argv = [*argv[:1], *self.others]
        handle = register_optimizer_step_pre_hook(self.check_before_torch_step)

        def give_back() -> None:
            handle.remove()
            sys.argv = argv

        return give_back

    def complete(self, args: Any) -> None:
        """Add to the host's parsed flags ``args`` what they lack.

        Raises:
            HostError: they hold another value than was given.
        """
        for name, value in self.values.items():
            found = getattr(args, name, None)
            if found is None or found is False:
                setattr(args, name, value)
            elif not _is_same(found, value):
                raise HostError(
                    f"{flags.flag_of(name)} {value} was given, and the script's parsed flags have "
                    f"{found}; expected the same: drop one of them"
                )

    def noting(self, hook: Hook, schedule: Callable[..., Any]) -> Callable[..., Any]:
        """``schedule``, wrapped by a hook that was made from the flags, whose calls are noted."""
        hooked = hook.wrap(schedule)

        @functools.wraps(hooked)
        def noted(**arguments: Any) -> Any:
            trains = not (arguments.get("forward_only") or arguments.get("collect_non_loss_data"))
            self.note_call(chunks_of(arguments["model"])[0] if trains else None)
            result = hooked(**arguments)
            if trains:
                self.skips_step = hook.step_is_empty
            return result

        return noted

    def note_call(self, trained: Any) -> None:
        """A call goes through a hook.

        Args:
            trained: the model that it trains; None: it is forward-only.

        Raises:
            HostError: empty steps are to be skipped, and several models train in this process.
        """
        self._called = True
        if trained is None:
            return
        self._has_trained = True
        self._trained.add(trained)
        if len(self._trained) > 1 and self.values.get("loss_aggregation_empty_step") == "skip":
            raise HostError(
                f"--loss-aggregation-empty-step skip, and {len(self._trained)} models train in "
                "this process: whose optimizer steps is unknown; expected one model: choose error "
                "or step"
            )

    def leave_steps_to_host(self) -> None:
        """One of Megatron's optimizers exists: only its own steps are checked from now on.

        It may step the optimizers inside it to initialize their state.
        """
        self._host_steps = True

    def check_before_torch_step(self, optimizer: Any, *_: Any) -> None:
        """As `check_before_step`, for an optimizer of torch, whose steps cannot be skipped."""
        if self._host_steps:
            return
        self.check_before_step(optimizer)
        if self.skips_step:
            raise HostError(
                f"{type(optimizer).__name__} is about to step without any token; expected one of "
                "Megatron's optimizers for --loss-aggregation-empty-step skip: choose error or step"
            )

    def check_before_step(self, optimizer: Any) -> None:
        """Raise HostError if the flags should have taken effect by this optimizer's step."""
        if self.values and not self._has_trained:
            raise HostError(
                f"{_first(self.values)} has no effect: {type(optimizer).__name__} is about to "
                "step, and no forward-backward call that trains has gone through the plugin; "
                + _HOW_TO_USE
            )

    def error_at_exit(self) -> HostError | None:
        """The error of a script that ends now; None if the flags took effect, or had nothing to do.

        Megatron's own loop makes no step if its checkpoint is of the last iteration already. It
        sets ``do_train`` in its flags.
        """
        idle = self._asks_for_help or hasattr(host_args(), "do_train")
        if not self.values or self._called or idle:
            return None
        return HostError(
            f"{_first(self.values)} had no effect: the script made no step through the plugin; "
            + _HOW_TO_USE
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


def _first(values: dict[str, Any]) -> str:
    name, value = next(iter(values.items()))
    return f"{flags.flag_of(name)} {value}"


def _is_same(found: Any, value: Any) -> bool:
    """Whether a value was kept; a YAML file holds numbers, the command line text."""
    try:
        return float(found) == float(value)
    except (TypeError, ValueError):
        return str(found) == str(value)


def host_args() -> Any:
    """Megatron's parsed flags; empty ones in a script that does not use its parser."""
    host = sys.modules.get("megatron.training.global_vars")
    try:
        return argparse.Namespace() if host is None else host.get_args()
    except AssertionError:  # they are not initialized
        return argparse.Namespace()
