"""Installs the plugin in Megatron-Core and `megatron.training`, and uninstalls it."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron_loss_agg.errors import AggregationError
from megatron_loss_agg.launch import flags
from megatron_loss_agg.launch.effect import GivenFlags, host_args
from megatron_loss_agg.launch.once import print_uncaught_once, refuse
from megatron_loss_agg.launch.seams import seams
from megatron_loss_agg.mcore import LossHook
from megatron_loss_agg.mcore.extension import Extension
from megatron_loss_agg.mcore.extensions.audit import Audit
from megatron_loss_agg.mcore.extensions.datasets import DatasetReports
from megatron_loss_agg.mcore.extensions.distillation import Distillation, terms_from
from megatron_loss_agg.mcore.extensions.inexact import check_exact
from megatron_loss_agg.mcore.extensions.mtp import MultiTokenPrediction
from megatron_loss_agg.mcore.extensions.routers import RouterLosses
from megatron_loss_agg.mcore.host import STOCK, Loop, chunks_of
from megatron_loss_agg.mcore.reading.keys import ReadBatch, read_batch, with_factors
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
        AggregationError: a bad value, or flags that conflict.
    """
    aggregation = flags.aggregation_from(args)
    if aggregation is None:
        return None
    check_exact(args, args)
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
    if "factors" in given:
        read_batch = with_factors(read_batch, given["factors"])
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
    before the hook has run raises HostError. Does nothing if already installed.

    Args:
        prepare_parser: applied to Megatron's parser after Megatron has added its flags.
        make_hook: called once for Megatron's own training loop, before the model is built, and
            once for each model of other loops.
        watch_exit: end the process with code 2 if the flags have had no effect when it exits.
        launched: our flags, from the launcher. Flags that make no hook then end the script with one
            line and exit code 2 in place of a traceback.

    Returns:
        ``uninstall``, which restores every function and the command line, but not in loops that
        have kept one; a no-op if it was already installed.

    Raises:
        AggregationError: bad flags; raised before Megatron is imported.
        HostError: as `seams`.
    """
    given = launched or GivenFlags(sys.argv[1:])
    hook_from_args(argparse.Namespace(**given.values))
    found = seams()
    if hasattr(getattr(*found["schedule"][0]), STOCK):
        return lambda: None
    ours = _Ours(given, prepare_parser, make_hook, launched is not None)
    undo = contextlib.ExitStack()
    for name, places in found.items():
        for holder, of_host in places:
            undo.callback(setattr, holder, of_host, getattr(holder, of_host))
            _put(holder, of_host, getattr(ours, name))
    undo.callback(print_uncaught_once())
    undo.callback(ours.torch_steps.remove)
    undo.callback(setattr, sys, "argv", sys.argv)
    sys.argv = [*sys.argv[:1], *given.others]
    if watch_exit:
        atexit.register(given.fail_at_exit)
        undo.callback(atexit.unregister, given.fail_at_exit)
    return undo.close


def _put(holder: Any, name: str, ours: _Function) -> None:
    """Put ``ours`` in the place of a function of the host, which it gets first."""
    stock = getattr(holder, name)

    @functools.wraps(stock)
    def function(*args: Any, **kwargs: Any) -> Any:
        return ours(stock, *args, **kwargs)

    setattr(function, STOCK, (function, stock))
    setattr(holder, name, function)


@dataclass
class _Ours:
    """What is put in place of the host's functions. See `install`."""

    given: GivenFlags
    prepare_parser: Callable[[Any], Any]
    make_hook: MakeHook
    launched: bool

    def __post_init__(self) -> None:
        # A hook checks and measures the first step of one model.
        self._by_model: WeakKeyDictionary[Any, LossHook | None] = WeakKeyDictionary()
        self.torch_steps = register_optimizer_step_pre_hook(self.given.check_before_torch_step)

    def _hook(self, in_training_loop: bool) -> LossHook | None:
        args = host_args()
        vars(args).update(self.given.values)  # a YAML file may have replaced the command line
        try:
            return self.make_hook(args, in_training_loop)
        except AggregationError as error:
            if not self.launched:
                raise
            sys.exit(refuse(error))

    @functools.cached_property
    def _of_training(self) -> LossHook | None:
        return self._hook(in_training_loop=True)

    def schedule(self, stock: _Function, **arguments: Any) -> Any:
        chunk = chunks_of(arguments["model"])[0]
        if chunk not in self._by_model:
            self._by_model[chunk] = self._hook(in_training_loop=False)
        hook = self._by_model[chunk]
        return (stock if hook is None else self.given.noting(hook, stock))(**arguments)

    def construct_optimizer(self, stock: _Function, *args: Any, **kwargs: Any) -> None:
        # Megatron's optimizers step those of torch inside them, also to initialize their state.
        self.torch_steps.remove()
        stock(*args, **kwargs)

    def step(self, stock: _Function, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns for an empty step what Megatron's optimizers do on overflow."""
        self.given.check_before_step(optimizer)
        if self.given.skips_step:
            return False, None, None  # update_successful, grad_norm, num_zeros_in_grad
        return stock(optimizer, *args, **kwargs)

    def add_arguments(self, stock: _Function, parser: Any) -> Any:
        parser = self.prepare_parser(stock(parser))
        parser.set_defaults(**self.given.values)
        return parser

    def get_schedule(self, stock: _Function, *args: Any, **kwargs: Any) -> Any:
        schedule, hook = stock(*args, **kwargs), self._of_training
        return schedule if hook is None else self.given.noting(hook, schedule)

    def setup(self, stock: _Function, *args: Any, **kwargs: Any) -> Any:
        """Makes the model's hook first, since the model takes long, and bad flags are refused.

        Megatron makes another model in the same process after a fault (--inprocess-restart).
        """
        self._of_training = self._hook(in_training_loop=True)
        return stock(*args, **kwargs)
