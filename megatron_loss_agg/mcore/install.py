"""Installs the plugin in Megatron-Core and `megatron.training`, and uninstalls it."""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from megatron_loss_agg.errors import HostError
from megatron_loss_agg.mcore import effect, flags
from megatron_loss_agg.mcore.batches import ReadBatch, read_batch
from megatron_loss_agg.mcore.hook import LossHook
from megatron_loss_agg.mcore.host import STOCK
from megatron_loss_agg.mcore.host_flags import check_host_flags

__all__ = ["Seam", "Seams", "hook_from_args", "install", "seams"]

MakeHook = Callable[[Any, bool], LossHook | None]
"""(Megatron's parsed flags, whether Megatron's own training loop asks) -> its hook."""


class Seam(NamedTuple):
    """A public function of the host that is wrapped, and the module or class that holds it."""

    holder: Any
    name: str

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(self.holder, self.name)

    def __str__(self) -> str:
        return f"{self.holder.__name__}.{self.name}"


class Seams(NamedTuple):
    """What `install` wraps."""

    schedules: list[Seam]  # what `get_forward_backward_func` returns, to whoever imported it
    optimizer: Seam
    steps: list[Seam]  # of every optimizer class
    training: list[Seam]  # Megatron's parser, choice of schedule, and setup; or nothing


def seams() -> Seams:
    """What `install` wraps in the host that is importable; without `megatron.training` its core.

    Raises:
        HostError: a function is missing, or has other parameters.
    """
    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from megatron.core.pipeline_parallel import schedules

    variants = ("no_pipelining", "pipelining_with_interleaving", "pipelining_without_interleaving")
    classes = [cls for cls in _subclasses(MegatronOptimizer) if "step" in vars(cls)]
    return Seams(
        [_seam(schedules, f"forward_backward_{variant}") for variant in variants],
        _seam(MegatronOptimizer, "__init__", "self"),
        [_seam(cls, "step", "self") for cls in classes],
        _seams_of_training(),
    )


def _seams_of_training() -> list[Seam]:
    try:
        arguments = importlib.import_module("megatron.training.arguments")
        training = importlib.import_module("megatron.training.training")
    except ImportError:  # a script that needs it will say why
        return []
    return [
        _seam(arguments, "add_megatron_arguments", "parser"),
        _seam(training, "get_forward_backward_func"),
        _seam(training, "setup_model_and_optimizer"),
    ]


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


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
        HostError: ``args`` say otherwise than the command line.
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

    def wrap(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        hooked = super().wrap(forward_backward)

        @functools.wraps(hooked)
        def wrapped(**arguments: Any) -> Any:
            effect.given.mark_used()
            return hooked(**arguments)

        return wrapped


_installed = False


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
        HostError: as `seams`.
        AggregationError: a flag's value is bad; raised before Megatron is imported.
        ModeError: the environment variable holds other flags than ours, or there are flags on the
            command line, too.
    """
    global _installed
    if _installed:
        return lambda: None
    given = effect.GivenFlags.of_process(sys.argv[1:])
    flags.settings_from(argparse.Namespace(**given.values))
    found = seams()
    give_back = effect.take(given)
    if watch_exit:
        effect.fail_at_exit()
    made: list[LossHook] = []

    @functools.cache
    def hook(in_training_loop: bool) -> LossHook | None:
        ours = make_hook(_host_args(), in_training_loop)
        made.extend([] if ours is None else [ours])
        return ours

    def skips() -> bool:
        return any(ours.step_is_empty for ours in made)

    wrapped = {seam: _hooked_schedule(seam.function, hook) for seam in found.schedules}
    wrapped[found.optimizer] = _known_optimizer(found.optimizer.function)
    wrapped |= {seam: _checked_step(seam.function, skips) for seam in found.steps}
    if found.training:
        parser, get_schedule, setup = found.training
        wrapped[parser] = _parser_with_ours(parser.function, prepare_parser)
        wrapped[get_schedule] = _schedule_of_training(get_schedule.function, hook)
        wrapped[setup] = _checked_setup(setup.function, hook)
    originals = {seam: seam.function for seam in wrapped}
    for seam, function in wrapped.items():
        setattr(seam.holder, seam.name, function)
    _installed = True

    def uninstall() -> None:
        global _installed
        _installed = False
        give_back()
        for seam, function in originals.items():
            setattr(seam.holder, seam.name, function)

    return uninstall


_GetHook = Callable[[bool], LossHook | None]


def _hooked_schedule(schedule: Callable[..., Any], hook: _GetHook) -> Callable[..., Any]:
    @functools.cache
    def ours() -> Callable[..., Any]:
        made = hook(False)
        return schedule if made is None else made.wrap(schedule)

    @functools.wraps(schedule)
    def hooked(**arguments: Any) -> Any:
        return ours()(**arguments)

    setattr(hooked, STOCK, schedule)
    return hooked


def _schedule_of_training(get: Callable[..., Any], hook: _GetHook) -> Callable[..., Any]:
    @functools.wraps(get)
    def get_hooked_schedule(*args: Any, **kwargs: Any) -> Any:
        schedule, ours = get(*args, **kwargs), hook(True)
        return schedule if ours is None else ours.wrap(schedule)

    return get_hooked_schedule


def _checked_setup(setup: Callable[..., Any], hook: _GetHook) -> Callable[..., Any]:
    @functools.wraps(setup)
    def checked_setup(*args: Any, **kwargs: Any) -> Any:
        hook(True)  # refuse bad flags before the model is built, which takes long
        return setup(*args, **kwargs)

    return checked_setup


def _parser_with_ours(
    add_arguments: Callable[..., Any], prepare_parser: Callable[[Any], Any]
) -> Callable[..., Any]:
    @functools.wraps(add_arguments)
    def add_arguments_with_ours(parser: Any) -> Any:
        parser = prepare_parser(add_arguments(parser))
        parser.set_defaults(**effect.given.values)
        return parser

    return add_arguments_with_ours


def _known_optimizer(initialize: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(initialize)
    def initialize_known(*args: Any, **kwargs: Any) -> None:
        effect.given.leave_steps_to_host()
        initialize(*args, **kwargs)

    return initialize_known


def _checked_step(step: Callable[..., Any], skips: Callable[[], bool]) -> Callable[..., Any]:
    """An optimizer's ``step``, which returns for an empty step what it does on overflow."""

    @functools.wraps(step)
    def checked_step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        effect.given.check_before_step(optimizer)
        if skips():
            return False, None, None  # update_successful, grad_norm, num_zeros_in_grad
        return step(optimizer, *args, **kwargs)

    return checked_step


def _host_args() -> Any:
    """Megatron's parsed flags; empty ones in a script that does not use its parser."""
    host = sys.modules.get("megatron.training.global_vars")
    try:
        return argparse.Namespace() if host is None else host.get_args()
    except AssertionError:  # they are not initialized
        return argparse.Namespace()


def _seam(holder: Any, name: str, *parameters: str) -> Seam:
    seam = Seam(holder, name)
    try:
        found = list(inspect.signature(seam.function).parameters)
    except AttributeError:
        raise HostError(_unfit(f"{holder.__name__} has no {name}")) from None
    if found[: len(parameters)] != list(parameters):
        raise HostError(_unfit(f"{seam} takes {found}"))
    return seam


def _unfit(what: str) -> str:
    from megatron.core import __version__

    return (
        f"megatron-core {__version__}: {what}; expected the seams of Megatron-Core 0.14 to 0.19: "
        "install one of these, or wrap forward_backward with LossHook yourself"
    )
