"""Installs the plugin in Megatron-Core and `megatron.training`, and uninstalls it."""

from __future__ import annotations

import argparse
import atexit
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron_loss_agg.errors import AggregationError
from megatron_loss_agg.mcore import LossHook
from megatron_loss_agg.mcore.extension import Extension
from megatron_loss_agg.mcore.extensions.audit import Audit
from megatron_loss_agg.mcore.extensions.datasets import DatasetReports
from megatron_loss_agg.mcore.extensions.distillation import Distillation, terms_from
from megatron_loss_agg.mcore.extensions.first_line import without_perplexities
from megatron_loss_agg.mcore.extensions.mtp import MultiTokenPrediction
from megatron_loss_agg.mcore.extensions.routers import RouterLosses
from megatron_loss_agg.mcore.host import STOCK, Loop, chunks_of
from megatron_loss_agg.mcore.launch import flags
from megatron_loss_agg.mcore.launch.effect import GivenFlags, host_args
from megatron_loss_agg.mcore.launch.host_flags import check_host_flags
from megatron_loss_agg.mcore.launch.once import print_uncaught_once, refuse
from megatron_loss_agg.mcore.launch.seams import Seam, seams
from megatron_loss_agg.mcore.reading.keys import ReadBatch, read_batch
from megatron_loss_agg.mcore.reading.late import check_possible, read_samples

_Function = Callable[..., Any]
MakeHook = Callable[[Any, bool], LossHook | None]
"""(Megatron's parsed flags, whether Megatron's own training loop asks) -> its hook."""


def hook_from_args(
    args: Any, in_training_loop: bool = False, read_batch: ReadBatch = read_batch
) -> LossHook | None:
    """The hook for Megatron's parsed flags; None without ``--loss-aggregation``.

    Args:
        args: Megatron's parsed flags, ours among them.
        in_training_loop: whether Megatron's own training loop will use it.
        read_batch: reads batches without ``--loss-aggregation-batch``.

    Raises:
        AggregationError: a bad value, or flags that conflict; see `check_host_flags`.
    """
    aggregation = flags.aggregation_from(args)
    if aggregation is None:
        return None
    check_host_flags(args)
    given = flags.given(args)
    terms = terms_from(args, aggregation)
    loop = Loop(in_training_loop, in_training_loop and getattr(args, "sft", False))
    log_interval = getattr(args, "log_interval", 1) if in_training_loop else 1
    repeat, trust = "audit" in given, flags.word(args, "unmeasured") == "trust"
    extensions: list[Extension] = [
        *([MultiTokenPrediction()] if flags.word(args, "mtp") == "same" else []),
        *([RouterLosses()] if flags.word(args, "moe") == "step" else []),
        *([Distillation()] if terms is not aggregation else []),
        *([DatasetReports(log_interval)] if "report_datasets" in given else []),
        *([Audit(repeat=repeat, trust=trust)] if repeat or trust else []),
    ]
    late = flags.word(args, "mask") == "model"
    if "batch" in given:
        read_batch = flags.load(f"{flags.FLAG}-batch", given["batch"])
    elif late:
        read_batch = read_samples
    empty_step = flags.word(args, "empty_step")
    hook = LossHook(
        terms, read_batch=read_batch, extensions=extensions, empty_step=empty_step, loop=loop
    )
    if late:
        check_possible(
            hook.terms,
            needs={need for x in extensions for need in x.needs},
            empty_step=empty_step,
            averages_quotients=loop.averages_quotients,
        )
    return hook


def install(
    prepare_parser: Callable[[Any], Any] = flags.add_arguments,
    make_hook: MakeHook = hook_from_args,
    watch_exit: bool = True,
    launched: GivenFlags | None = None,
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
        launched: our flags, from the launcher. Flags that make no hook then end the script with one
            line and exit code 2: inside it, an error would become a traceback.

    Returns:
        ``uninstall``, which restores every function and the command line; a no-op if it was already
        installed.

    Raises:
        AggregationError: a flag's value is bad, or flags are both in the environment and on the
            command line; raised before Megatron is imported.
        HostError: as `seams`.
    """
    given = launched or GivenFlags(sys.argv[1:])
    hook_from_args(argparse.Namespace(**given.values))
    found = seams()
    if hasattr(found.schedules[0].function, STOCK):
        return lambda: None
    argv = sys.argv
    sys.argv = [*argv[:1], *given.others]
    restore_hook = print_uncaught_once()
    torch_steps = register_optimizer_step_pre_hook(given.check_before_torch_step)
    if watch_exit:
        atexit.register(given.fail_at_exit)

    def made(in_training_loop: bool) -> LossHook | None:
        args = host_args()
        vars(args).update(given.values)  # a YAML file may have replaced the command line
        try:
            return make_hook(args, in_training_loop)
        except AggregationError as error:
            if launched is None:
                raise
            sys.exit(refuse(error))

    # A hook checks and measures the first step of one model.
    by_model: WeakKeyDictionary[Any, LossHook | None] = WeakKeyDictionary()

    def of_model(model: Any) -> LossHook | None:
        chunk = chunks_of(model)[0]
        if chunk not in by_model:
            by_model[chunk] = made(False)
        return by_model[chunk]

    @functools.cache
    def of_training() -> LossHook | None:
        return made(True)

    wrapped = {x: _hooked_schedule(x.function, of_model, given) for x in found.schedules}
    # Megatron's optimizers step those of torch inside them, also to initialize their state.
    wrapped[found.optimizer] = _after(torch_steps.remove, found.optimizer.function)
    wrapped |= {x: _checked_step(x.function, given) for x in found.steps}
    if found.training is not None:
        add_arguments, get_schedule, setup, say = found.training
        wrapped[add_arguments] = _adding_ours(add_arguments.function, prepare_parser, given)
        wrapped[get_schedule] = _schedule_of_training(get_schedule.function, of_training, given)
        # Refuses bad flags before the model is built, which takes long.
        wrapped[setup] = _after(of_training, setup.function)
        if say is not None:
            wrapped[say] = _without_perplexities(say.function, of_training)
    originals = _put(wrapped)

    def uninstall() -> None:
        _put(originals)
        atexit.unregister(given.fail_at_exit)
        torch_steps.remove()
        restore_hook()
        sys.argv = argv

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


def _hooked_schedule(
    schedule: _Function, hook_of: Callable[[Any], LossHook | None], given: GivenFlags
) -> _Function:
    @functools.wraps(schedule)
    def hooked(**arguments: Any) -> Any:
        ours = hook_of(arguments["model"])
        return (schedule if ours is None else given.noting(ours, schedule))(**arguments)

    setattr(hooked, STOCK, (hooked, schedule))
    return hooked


def _schedule_of_training(
    get: _Function, hook: Callable[[], LossHook | None], given: GivenFlags
) -> _Function:
    @functools.wraps(get)
    def get_hooked_schedule(*args: Any, **kwargs: Any) -> Any:
        schedule, ours = get(*args, **kwargs), hook()
        return schedule if ours is None else given.noting(ours, schedule)

    return get_hooked_schedule


def _without_perplexities(say: _Function, hook: Callable[[], LossHook | None]) -> _Function:
    @functools.wraps(say)
    def say_without_perplexities(message: str, *args: Any, **kwargs: Any) -> Any:
        ours = hook() if isinstance(message, str) and " PPL: " in message else None
        if ours is not None:
            message = without_perplexities(message, ours.reported)
        return say(message, *args, **kwargs)

    return say_without_perplexities


def _adding_ours(
    add_arguments: _Function, prepare_parser: Callable[[Any], Any], given: GivenFlags
) -> _Function:
    @functools.wraps(add_arguments)
    def add_arguments_with_ours(parser: Any) -> Any:
        parser = prepare_parser(add_arguments(parser))
        parser.set_defaults(**given.values)
        return parser

    return add_arguments_with_ours


def _checked_step(step: _Function, given: GivenFlags) -> _Function:
    """An optimizer's ``step``, which returns for an empty step what it does on overflow."""

    @functools.wraps(step)
    def checked_step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        given.check_before_step(optimizer)
        if given.skips_step:
            return False, None, None  # update_successful, grad_norm, num_zeros_in_grad
        return step(optimizer, *args, **kwargs)

    return checked_step
