"""Installs the plugin in Megatron-Core and `megatron.training`, and uninstalls it."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from megatron_loss_agg.mcore import effect, flags
from megatron_loss_agg.mcore.batches import ReadBatch, read_batch
from megatron_loss_agg.mcore.distillation import terms_from
from megatron_loss_agg.mcore.hook import LossHook
from megatron_loss_agg.mcore.host import STOCK, chunks_of
from megatron_loss_agg.mcore.host_flags import check_host_flags
from megatron_loss_agg.mcore.seams import Seam, seams
from megatron_loss_agg.mcore.summary import without_perplexities

__all__ = ["hook_from_args", "install"]

_Function = Callable[..., Any]
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
    log_interval = getattr(args, "log_interval", 1) if in_training_loop else 1
    return _HookOfFlags(
        terms_from(args, settings.aggregation),
        settings.read_batch or read_batch,
        audit=settings.audit,
        evaluates_by_microbatch=in_training_loop and getattr(args, "sft", False),
        in_training_loop=in_training_loop,
        report_datasets=settings.report_datasets and log_interval,
        **settings.choices,
    )


class _HookOfFlags(LossHook):
    """Says when the flags take effect."""

    def wrap(self, forward_backward: _Function) -> _Function:
        hooked = super().wrap(forward_backward)

        @functools.wraps(hooked)
        def noted(**arguments: Any) -> Any:
            trains = not (arguments.get("forward_only") or arguments.get("collect_non_loss_data"))
            effect.given.note_call(chunks_of(arguments["model"])[0] if trains else None)
            result = hooked(**arguments)
            if trains:
                effect.given.skips_step = self.step_is_empty
            return result

        return noted


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
        make_hook: makes a hook, or None without ``--loss-aggregation``; called once for Megatron's
            own training loop, before the model is built, and once for each model of other loops.
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
    # A hook checks and measures the first step of one model.
    by_model: WeakKeyDictionary[Any, LossHook | None] = WeakKeyDictionary()

    def of_model(model: Any) -> LossHook | None:
        chunk = chunks_of(model)[0]
        if effect.given is not given:  # uninstalled, but the loop has kept a schedule
            return None
        if chunk not in by_model:
            by_model[chunk] = make_hook(effect.host_args(), False)
        return by_model[chunk]

    @functools.cache
    def of_training() -> LossHook | None:
        return make_hook(effect.host_args(), True)

    wrapped = {seam: _hooked_schedule(seam.function, of_model) for seam in found.schedules}
    wrapped[found.optimizer] = _after(given.leave_steps_to_host, found.optimizer.function)
    wrapped |= {seam: _checked_step(seam.function, given) for seam in found.steps}
    if found.training is not None:
        add_arguments, get_schedule, setup, say = found.training
        wrapped[add_arguments] = _adding_ours(add_arguments.function, prepare_parser)
        wrapped[get_schedule] = _schedule_of_training(get_schedule.function, of_training)
        # Refuses bad flags before the model is built, which takes long.
        wrapped[setup] = _after(of_training, setup.function)
        if say is not None:
            wrapped[say] = _without_perplexities(say.function, of_training)
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


def _hooked_schedule(schedule: _Function, hook_of: Callable[[Any], LossHook | None]) -> _Function:
    @functools.wraps(schedule)
    def hooked(**arguments: Any) -> Any:
        ours = hook_of(arguments["model"])
        return (schedule if ours is None else ours.wrap(schedule))(**arguments)

    setattr(hooked, STOCK, (hooked, schedule))
    return hooked


def _schedule_of_training(get: _Function, hook: Callable[[], LossHook | None]) -> _Function:
    @functools.wraps(get)
    def get_hooked_schedule(*args: Any, **kwargs: Any) -> Any:
        schedule, ours = get(*args, **kwargs), hook()
        return schedule if ours is None else ours.wrap(schedule)

    return get_hooked_schedule


def _without_perplexities(say: _Function, hook: Callable[[], LossHook | None]) -> _Function:
    @functools.wraps(say)
    def say_without_perplexities(message: str, *args: Any, **kwargs: Any) -> Any:
        ours = hook() if isinstance(message, str) and " PPL: " in message else None
        if ours is not None:
            message = without_perplexities(message, ours.reported)
        return say(message, *args, **kwargs)

    return say_without_perplexities


def _adding_ours(add_arguments: _Function, prepare_parser: Callable[[Any], Any]) -> _Function:
    @functools.wraps(add_arguments)
    def add_arguments_with_ours(parser: Any) -> Any:
        parser = prepare_parser(add_arguments(parser))
        parser.set_defaults(**effect.given.values)
        return parser

    return add_arguments_with_ours


def _checked_step(step: _Function, given: effect.GivenFlags) -> _Function:
    """An optimizer's ``step``, which returns for an empty step what it does on overflow."""

    @functools.wraps(step)
    def checked_step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        given.check_before_step(optimizer)
        if given.skips_step:
            return False, None, None  # update_successful, grad_norm, num_zeros_in_grad
        return step(optimizer, *args, **kwargs)

    return checked_step
