"""Installs the plugin in `megatron.training`, and uninstalls it."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_loss_agg.errors import HostError
from megatron_loss_agg.mcore import effect, flags
from megatron_loss_agg.mcore.batches import read_batch
from megatron_loss_agg.mcore.hook import LossHook
from megatron_loss_agg.mcore.host_flags import check_host_flags

__all__ = ["Seam", "hook_from_args", "install", "seams"]


class Seam(NamedTuple):
    """A public function of the host that is wrapped, and the module where the host finds it."""

    module: Any
    name: str

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(self.module, self.name)


def seams() -> tuple[Seam, Seam, Seam]:
    """What `install` wraps: Megatron's parser, choice of schedule, and optimizer setup.

    Raises:
        HostError: one of them is missing, or has other parameters.
    """
    from megatron.training import arguments, training

    return (
        _seam(arguments, "add_megatron_arguments", "parser"),
        _seam(training, "get_forward_backward_func"),
        _seam(training, "setup_model_and_optimizer"),
    )


def hook_from_args(args: Any) -> LossHook | None:
    """The hook for Megatron's parsed flags; None without ``--loss-aggregation``.

    Raises:
        AggregationError: a bad value, or flags that conflict; see `check_host_flags`.
        HostError: ``args`` lack a flag of the command line.
    """
    effect.given.check_kept(args)
    settings = flags.settings_from(args)
    if settings is None:
        return None
    check_host_flags(args)
    return _HookOfFlags(
        settings.aggregation,
        settings.read_batch or read_batch,
        audit=settings.audit,
        unmeasured=settings.unmeasured,
        evaluates_by_microbatch=getattr(args, "sft", False),
        empty_step=settings.empty_step,
        in_training_loop=True,
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


_MARK = "adds_loss_aggregation"


def install(
    prepare_parser: Callable[[Any], Any] = flags.add_arguments,
    make_hook: Callable[[Any], LossHook | None] = hook_from_args,
    watch_exit: bool = True,
) -> Callable[[], None]:
    """Add the flags to Megatron's parser, and the hook to its training and evaluation.

    Without ``--loss-aggregation`` the host's behaviour does not change. With it, an optimizer that
    steps before the hook has run raises HostError. Does nothing if already installed, for example
    by the launcher of a patched script.

    Args:
        prepare_parser: applied to Megatron's parser after Megatron has added its flags.
        make_hook: Megatron's parsed flags -> hook, or None without ``--loss-aggregation``; called
            once, before the model is built.
        watch_exit: end the process with exit code 2 if the flags of its command line have had no
            effect when the script ends.

    Returns:
        ``uninstall``, which restores every function; a no-op if it was already installed.

    Raises:
        HostError: as `seams`.
    """
    originals = [(seam, seam.function) for seam in seams()]
    add_arguments, get_forward_backward, setup = (function for _, function in originals)
    if getattr(add_arguments, _MARK, False):
        return lambda: None
    stop_watching = effect.watch(sys.argv[1:])
    if watch_exit:
        effect.fail_at_exit()

    @functools.wraps(add_arguments)
    def add_arguments_with_ours(parser: Any) -> Any:
        return prepare_parser(add_arguments(parser))

    setattr(add_arguments_with_ours, _MARK, True)

    @functools.cache
    def hook() -> LossHook | None:
        from megatron.training import get_args

        return make_hook(get_args())

    @functools.wraps(get_forward_backward)
    def get_hooked_forward_backward(*args: Any, **kwargs: Any) -> Any:
        forward_backward, ours = get_forward_backward(*args, **kwargs), hook()
        return forward_backward if ours is None else ours.wrap(forward_backward)

    @functools.wraps(setup)
    def checked_setup(*args: Any, **kwargs: Any) -> Any:
        ours = hook()  # refuse bad flags before the model is built, which takes long
        with effect.given.setting_up():
            model, optimizer, scheduler = setup(*args, **kwargs)
        if optimizer is not None and ours is not None and ours.empty_step == "skip":
            optimizer.step = _step_unless_empty(optimizer.step, ours)
        return model, optimizer, scheduler

    wrapped = (add_arguments_with_ours, get_hooked_forward_backward, checked_setup)
    for (seam, _), function in zip(originals, wrapped, strict=True):
        setattr(seam.module, seam.name, function)

    def uninstall() -> None:
        stop_watching()
        for seam, function in originals:
            setattr(seam.module, seam.name, function)

    return uninstall


def _step_unless_empty(step: Callable[..., Any], hook: LossHook) -> Callable[..., Any]:
    """The optimizer's ``step``, which returns for an empty step what it does on overflow."""

    @functools.wraps(step)
    def step_unless_empty(*args: Any, **kwargs: Any) -> Any:
        if hook.step_is_empty:
            return False, None, None  # update_successful, grad_norm, num_zeros_in_grad
        return step(*args, **kwargs)

    return step_unless_empty


def _seam(module: Any, name: str, *parameters: str) -> Seam:
    seam = Seam(module, name)
    try:
        found = list(inspect.signature(seam.function).parameters)
    except AttributeError:
        raise HostError(_unfit(f"{module.__name__} has no {name}")) from None
    if found[: len(parameters)] != list(parameters):
        raise HostError(_unfit(f"{module.__name__}.{name} takes {found}"))
    return seam


def _unfit(what: str) -> str:
    from megatron.core import __version__

    return (
        f"megatron-core {__version__}: {what}; expected the seams of Megatron-Core 0.14 to 0.19: "
        "install one of these, or wrap forward_backward with LossHook yourself"
    )
