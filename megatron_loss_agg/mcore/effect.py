"""Whether the flags on the command line take effect; a run in which they do not has to fail.

A host can drop them (``--yaml-cfg`` replaces all flags), and a script can parse its own flags or
take its schedule elsewhere. Such a run would train on the stock loss without a word.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron_loss_agg.errors import HostError
from megatron_loss_agg.mcore import flags

_HOW_TO_USE = (
    "expected Megatron's own training loop, or a loop of your own that calls "
    "hook_from_args(args).wrap(get_forward_backward_func()) of megatron_loss_agg.mcore.install"
)


class GivenFlags:
    """The plugin's flags on this process's command line, and what became of them.

    Args:
        argv: the script's arguments.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        parser = flags.add_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
        given, defaults = vars(parser.parse_known_args(argv)[0]), vars(parser.parse_args([]))
        self._values = {name: x for name, x in given.items() if x != defaults[name]}
        self._asks_for_help = not {"-h", "--help"}.isdisjoint(argv)
        self._args: Any = None  # of the host, once a hook is made from them
        self._used = False
        self._setting_up = False

    def __bool__(self) -> bool:
        return bool(self._values)

    def check_kept(self, args: Any) -> None:
        """Raise HostError unless the host's parsed flags ``args`` hold what was given."""
        for name, value in self._values.items():
            found = getattr(args, name, None)
            if _is_same(found, value):
                continue
            if getattr(args, "yaml_cfg", None) is not None:
                how = f"add '{name}: {value}' to the file of --yaml-cfg, which replaces all flags"
            else:
                how = "parse the command line with Megatron's parser, and leave the flag as it is"
            raise HostError(
                f"{flags.flag_of(name)} {value} was given, and the script's parsed flags have "
                f"{found}; expected the same there: {how}"
            )
        self._args = args

    def mark_used(self) -> None:
        """A forward-backward call goes through a hook that was made from the flags."""
        self._used = True

    @contextlib.contextmanager
    def setting_up(self) -> Iterator[None]:
        """Allow steps that initialize an optimizer's state, as Megatron's offloading does."""
        self._setting_up = True
        try:
            yield
        finally:
            self._setting_up = False

    def check_before_step(self, optimizer: Any, *_: Any) -> None:
        """Raise HostError if the flags should have taken effect by this optimizer's step."""
        if self._values and not self._used and not self._setting_up:
            raise HostError(
                f"{self._first} has no effect: {type(optimizer).__name__} is about to step, and no "
                f"forward-backward call has gone through the plugin; {_HOW_TO_USE}"
            )

    def error_at_exit(self) -> HostError | None:
        """The error of a script that ends now; None if the flags took effect, or had nothing to do.

        Megatron's own loop makes no step if its checkpoint is of the last iteration already. It
        sets ``do_train`` in its flags.
        """
        idle = self._asks_for_help or hasattr(self._args, "do_train")
        if not self._values or self._used or idle:
            return None
        read = "did not read it" if self._args is None else "made no step through the plugin"
        return HostError(f"{self._first} had no effect: the script {read}; {_HOW_TO_USE}")

    @property
    def _first(self) -> str:
        name, value = next(iter(self._values.items()))
        return f"{flags.flag_of(name)} {value}"


given = GivenFlags([])
"""Of the process; `watch` sets it."""


def _is_same(found: Any, value: Any) -> bool:
    """Whether a value was kept; a YAML file holds numbers, the command line text."""
    try:
        return float(found) == float(value)
    except (TypeError, ValueError):
        return str(found) == str(value)


def watch(argv: Sequence[str]) -> Callable[[], None]:
    """Watch the flags in ``argv`` from now on; return a function that stops it."""
    global given
    given = GivenFlags(argv)
    if not given:
        return lambda: None
    handle = register_optimizer_step_pre_hook(given.check_before_step)

    def stop() -> None:
        global given
        given = GivenFlags([])
        handle.remove()

    return stop


def fail_at_exit() -> None:
    """End the process with exit code 2 if the flags have had no effect when the script ends."""
    atexit.register(_fail)


def _fail() -> None:
    failed = getattr(sys, "last_value", None) is not None
    error = None if failed else given.error_at_exit()
    if error is not None:
        code = flags.refuse(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # an exception in this place would not change the exit code
