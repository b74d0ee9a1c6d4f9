"""Installs the plugin in Megatron-Core and `megatron.training`, and uninstalls it."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from megatron_loss_agg.mcore import effect, flags
from megatron_loss_agg.mcore.batches import ReadBatch, read_batch
from megatron_loss_agg.mcore.hook import LossHook
from megatron_loss_agg.mcore.host import STOCK
from megatron_loss_agg.mcore.host_flags import check_host_flags
from megatron_loss_agg.mcore.seams import Seam, seams

__all__ = ["hook_from_args", "install"]

_Function = Callable[..., Any]
_GetHook = Callable[[bool], LossHook | None]

MakeHook = Callable[[Any, bool], LossHook | None]
"""(Megatron's parsed flags, whether Megatron's own training loop asks) -> its hook."""


def hook_from_args(
    args: Any, in_training_loop: bool = False, read_batch: ReadBatch = read_batch
) -> LossHook | None:
    """The hook for Megatron's parsed flags; None without ``--loss-aggregation``.

    Args:
        args: Megatron's parsed flags; those of this process that they lack are added to them.
        in_training_loop: see `LossHook`.
        read_batch: reads batches without ``--loss-aggregation-batch``.

    Raises:
        AggregationError: a bad value, or flags that conflict; see `check_host_flags`.
        HostError: ``args`` disagree with the command line.
    """
    effect.given.complete(args)
    settings = flags.settings_from(args)
    if settings is None:
        return None
    check_host_flags(args)
    return _HookOfFlags(
        settings.aggregation,
        settings.read_batch or read_batch,
        audit=settings.audit,
        unmeasured=settings.unmeasured,
        evaluates_by_microbatch=in_training_loop and getattr(args, "sft", False),
        empty_step=settings.empty_step,
        in_training_loop=in_training_loop,
    )


class _HookOfFlags(LossHook):
    """Says when the flags take effect."""

    def wrap(self, forward_backward: _Function) -> _Function:
        return _after(effect.given.mark_used, super().wrap(forward_backward))


def install(
    prepare_parser: Callable[[Any], Any] = flags.add_arguments,
    make_hook: MakeHook = hook_from_args,
    watch_exit: bool = True,
) -> Callable[[], None]:
    """Hook the schedule and the optimizers of every loop on Megatron-Core in this process.

    Our flags are taken off the command line (``sys.argv``), or from the environment variable
    ``MEGATRON_LOSS_AGG_FLAGS``, and added to Megatron's parser, if the script uses it. Without
    ``--loss-aggregation`` the host's behaviour does not change. With it, an optimizer that steps
    before the hook has run raises HostError. Does nothing if already installed, for example by the
    launcher of a patched script.

    Args:
        prepare_parser: applied to Megatron's parser after Megatron has added its flags.
        make_hook: makes the hook, or None without ``--loss-aggregation``; called once for
            Megatron's own training loop, before the model is built, and once for other loops, when
            they first call a schedule.
        watch_exit: end the process with exit code 2 if the flags have had no effect when the script
            ends.

    Returns:
        ``uninstall``, which restores every function and the command line; a no-op if it was already
        installed.

    Raises:
        AggregationError: a flag's value is bad; raised before Megatron is imported.
        ModeError: the environment variable holds other flags than ours, or there are flags on the
            command line, too.
        HostError: as `seams`.
    """
    given = effect.GivenFlags(sys.argv[1:], flags.in_environment())
    flags.settings_from(argparse.Namespace(**given.values))
    found = seams()
    if hasattr(found.schedules[0].function, STOCK):
        return lambda: None
    give_back = effect.take(given)
    if watch_exit:
        effect.fail_at_exit()
    hooks: dict[bool, LossHook | None] = {}

    def hook(in_training_loop: bool) -> LossHook | None:
        if in_training_loop not in hooks:
            hooks[in_training_loop] = make_hook(effect.host_args(), in_training_loop)
        return hooks[in_training_loop]

    def skips() -> bool:
        return any(made.step_is_empty for made in hooks.values() if made is not None)

    wrapped = {seam: _hooked_schedule(seam.function, hook) for seam in found.schedules}
    wrapped[found.optimizer] = _after(given.leave_steps_to_host, found.optimizer.function)
    wrapped |= {seam: _checked_step(seam.function, skips) for seam in found.steps}
    if found.training is not None:
        add_arguments, get_schedule, setup = found.training
        wrapped[add_arguments] = _adding_ours(add_arguments.function, prepare_parser)
        wrapped[get_schedule] = _schedule_of_training(get_schedule.function, hook)
        # Refuses bad flags before the model is built, which takes long.
        wrapped[setup] = _after(functools.partial(hook, True), setup.function)
    originals = _put(wrapped)

    def uninstall() -> None:
        give_back()
        _put(originals)

    return uninstall


def _put(functions: Mapping[Seam, _Function]) -> dict[Seam, _Function]:
    """Put functions in the host's place; return the host's."""
    replaced = {seam: seam.function for seam in functions}
    for seam, function in functions.items():
        setattr(seam.holder, seam.name, function)
    return replaced


def _after(first: Callable[[], Any], function: _Function) -> _Function:
    """``function``, which calls ``first`` before it does anything."""

    @functools.wraps(function)
    def called_after(*args: Any, **kwargs: Any) -> Any:
        first()
        return function(*args, **kwargs)

    return called_after


def _hooked_schedule(schedule: _Function, hook: _GetHook) -> _Function:
    @functools.wraps(schedule)
    def hooked(**arguments: Any) -> Any:
        ours = hook(False)
        return (schedule if ours is None else ours.wrap(schedule))(**arguments)

    setattr(hooked, STOCK, schedule)
    return hooked


def _schedule_of_training(get: _Function, hook: _GetHook) -> _Function:
    @functools.wraps(get)
    def get_hooked_schedule(*args: Any, **kwargs: Any) -> Any:
        schedule, ours = get(*args, **kwargs), hook(True)
        return schedule if ours is None else ours.wrap(schedule)

    return get_hooked_schedule


def _adding_ours(add_arguments: _Function, prepare_parser: Callable[[Any], Any]) -> _Function:
    @functools.wraps(add_arguments)
    def add_arguments_with_ours(parser: Any) -> Any:
        parser = prepare_parser(add_arguments(parser))
        parser.set_defaults(**effect.given.values)
        return parser

    return add_arguments_with_ours


def _checked_step(step: _Function, skips: Callable[[], bool]) -> _Function:
    """An optimizer's ``step``, which returns for an empty step what it does on overflow."""

    @functools.wraps(step)
    def checked_step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        effect.given.check_before_step(optimizer)
        if skips():
            return False, None, None  # update_successful, grad_norm, num_zeros_in_grad
        return step(optimizer, *args, **kwargs)

    return checked_step
