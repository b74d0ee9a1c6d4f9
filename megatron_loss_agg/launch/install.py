"""Replaces Megatron functions, so that every loop on its schedules uses the hook from the flags."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron_loss_agg.aggregation import LossAggregation
from megatron_loss_agg.errors import AggregationError, HostError, OptionError
from megatron_loss_agg.launch import flags, sft
from megatron_loss_agg.launch.effect import FlagUse, megatron_args, refuse
from megatron_loss_agg.mcore import (
    DatasetReports,
    Extension,
    LossHook,
    MTPAggregation,
    WeightReports,
    read_batch,
    with_ids,
)
from megatron_loss_agg.mcore.batches import ReadBatch
from megatron_loss_agg.mcore.call import ORIGINAL, model_chunks
from megatron_loss_agg.mcore.checks.before import check_settings

Schedule = Callable[..., Any]
MakeHook = Callable[[Any, bool], LossHook | None]
"""Makes the hook from Megatron's parsed flags, and True if it is for Megatron's training loop."""


def hook_from_args(
    args: Any, in_training_loop: bool = False, read_batch: ReadBatch = read_batch
) -> LossHook | None:
    """The hook for Megatron's parsed flags; None without ``--loss-aggregation``.

    Args:
        args: Megatron's parsed flags, including ours.
        in_training_loop: True if the hook is for Megatron's training loop.
        read_batch: reads batches if ``--loss-aggregation-batch`` is not set.

    Raises:
        AggregationError: a bad value, or flags that conflict.
    """
    aggregations = flags.aggregations_from(args)
    if not aggregations:
        return None
    check_settings(args, args)
    aggregation, *also = aggregations
    options = flags.hook_options(args)
    if options["empty_step"] == "skip" and getattr(args, "optimizer_cuda_graph", False):
        raise OptionError(
            f"{flags.FLAG}-empty-step must not be skip with --optimizer-cuda-graph, which replays the "
            "optimizer's step, got both. Choose train or error, or drop --optimizer-cuda-graph."
        )
    if options["batch"]:
        read_batch = flags.load(f"{flags.FLAG}-batch", options["batch"])
    settings = {}
    sft_options = sft.SFTOptions.of(args)
    if sft_options.flags:
        sft_options.check(args, options["batch"], aggregation)
        read_batch = sft_options.reader()
        settings["sft"] = sft_options.in_words
    # The user's extensions come first: they may change the loss, and should get it without MTP.
    extensions = [_user_extension(path) for path in options["extension"]]
    if options["extension"]:
        settings["extension"] = " ".join(options["extension"])
    if options["report_datasets"]:
        extensions.append(DatasetReports())
    if options["report_weights"]:
        extensions.append(WeightReports())
    if options["mtp"] != "megatron":
        extensions.append(MTPAggregation(_mtp_aggregation(options["mtp"], aggregation)))
        settings["mtp"] = options["mtp"]
    # In other loops, forward-only calls may compute something other than a loss.
    evaluation = options["evaluation"] or ("same" if in_training_loop else "megatron")
    return LossHook(
        aggregation,
        read_batch=read_batch,
        split=options["split"] or _megatron_split(args),
        also=also,
        extensions=extensions,
        empty_step=options["empty_step"],
        mismatch=options["mismatch"],
        count=options["count"],
        aggregate_evaluation=evaluation == "same",
        prefetch=in_training_loop and options["count"] == "before",
        audit=bool(options["audit"]),
        trust_unmeasured=options["unmeasured"] == "trust",
        settings=settings,
    )


def _user_extension(path: str) -> Extension:
    """The extension made by the class or function at ``path`` (``module:name``).

    Raises:
        OptionError: the result is not an extension.
    """
    flag = f"{flags.FLAG}-extension"
    make = flags.load(flag, path)
    try:
        extension = make()
    except Exception as error:  # whatever the user's code raises
        raise OptionError(
            f"{flag} must be a class or function that is called without arguments, got {path} with "
            f"{type(error).__name__}: {error}. Name a function that makes the extension."
        ) from error
    if not isinstance(extension, Extension):
        raise OptionError(
            f"{flag} must make an Extension, got {path}, which makes a {type(extension).__name__}. "
            "Derive its class from megatron_loss_agg.mcore.Extension."
        )
    return extension


def _mtp_aggregation(mode: str, aggregation: LossAggregation) -> LossAggregation | None:
    """MTP's ``mode`` with the other options of the main loss; None: use the main loss's own."""
    if mode == "same":
        return None
    unset: dict[str, Any] = dict.fromkeys(("divisor", "count", "levels", "function", "name"))
    return replace(aggregation, mode=mode, **unset)


def _megatron_split(args: Any) -> str | None:
    """The split that Megatron's ``get_batch`` uses with these flags; None: the default."""
    splits_pack = getattr(args, "dataloader_inter_document_masking", False)
    return "zigzag_pack" if splits_pack and not getattr(args, "sft", False) else None


def install(
    prepare_parser: Callable[[Any], Any] = flags.add_arguments,
    make_hook: MakeHook = hook_from_args,
    watch_exit: bool = True,
    launcher: FlagUse | None = None,
) -> Callable[[], None]:
    """Hook the schedule and the optimizers of every loop on Megatron-Core in this process.

    Our flags are removed from the command line (``sys.argv``), or read from the environment
    variable ``MEGATRON_LOSS_AGG_FLAGS``, and added to Megatron's parser if the script uses it.
    Without ``--loss-aggregation``, Megatron's behaviour does not change. With it, an optimizer that
    steps before the hook has run raises HostError. Does nothing if already installed.

    Args:
        prepare_parser: applied to Megatron's parser after Megatron has added its flags.
        make_hook: called once for Megatron's training loop, before the model is built, and once for
            each model in other loops.
        watch_exit: end the process with code 2 if the flags have had no effect when it exits.
        launcher: the launcher's record of the flags and their use. Flags that fail to make a hook
            then end the script with one line and exit code 2, instead of a traceback.

    Returns:
        a function ``uninstall``, which restores every function and the command line. Loops that
        have already imported a function keep ours. It does nothing if the plugin was already
        installed.

    Raises:
        AggregationError: bad flags; raised before Megatron is imported.
        HostError: as in `replacements`.
    """
    use = launcher or FlagUse(sys.argv[1:])
    hook_from_args(argparse.Namespace(**use.values))
    table = replacements()
    if any(hasattr(getattr(row.holder, row.name), ORIGINAL) for row in table):
        return lambda: None
    plugin = Plugin(use, prepare_parser, make_hook, exit_on_error=launcher is not None)
    undo = contextlib.ExitStack()
    for holder, name, method in table:
        original = getattr(holder, name)
        setattr(holder, name, _replacement(original, functools.partial(method, plugin)))
        undo.callback(setattr, holder, name, original)
    undo.callback(register_optimizer_step_pre_hook(use.check_before_torch_step).remove)
    undo.callback(setattr, sys, "argv", sys.argv)
    sys.argv = [*sys.argv[:1], *use.other_arguments]
    if watch_exit:
        atexit.register(use.fail_at_exit)
        undo.callback(atexit.unregister, use.fail_at_exit)
    return undo.close


def _replacement(original: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement for ``original`` that calls ``method`` with it and its arguments."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return method(original, *args, **kwargs)

    setattr(function, ORIGINAL, (function, original))
    return function


class Plugin:
    """The functions that replace Megatron's; each gets Megatron's function and its arguments.

    Args:
        use: records how the flags are used.
        prepare_parser: see `install`.
        make_hook: see `install`.
        exit_on_error: if the flags fail to make a hook, end the process with one line and exit
            code 2.
    """

    def __init__(
        self,
        use: FlagUse,
        prepare_parser: Callable[[Any], Any],
        make_hook: MakeHook,
        exit_on_error: bool,
    ) -> None:
        self._use = use
        self._prepare_parser = prepare_parser
        self._make_hook = make_hook
        self._exit_on_error = exit_on_error
        self._hooked_in_training_loop: Callable[[Schedule], Schedule] | None = None
        # One hook per model, since a hook checks and measures the first step of its model.
        self._hooked_by_model: WeakKeyDictionary[Any, Callable[[Schedule], Schedule]]
        self._hooked_by_model = WeakKeyDictionary()

    def _new_hook(self, in_training_loop: bool) -> Callable[[Schedule], Schedule]:
        """Make a hook from the flags; return a function that hooks schedules, each of them once.

        Without ``--loss-aggregation``, that function returns the schedule unchanged.
        """
        args = megatron_args()
        # Set our flags again, since Megatron's YAML file replaces the command line.
        vars(args).update(self._use.values)
        try:
            hook = self._make_hook(args, in_training_loop)
        except AggregationError as error:
            if not self._exit_on_error:
                raise
            sys.exit(refuse(error))

        @functools.cache
        def hooked(schedule: Schedule) -> Schedule:
            return schedule if hook is None else self._use.recorded(hook, hook.wrap(schedule))

        return hooked

    def run_schedule(self, schedule: Schedule, **arguments: Any) -> Any:
        """Run the schedule of a loop other than Megatron's; each of its models has its own hook."""
        first_chunk = model_chunks(arguments["model"])[0]
        if first_chunk not in self._hooked_by_model:
            self._hooked_by_model[first_chunk] = self._new_hook(in_training_loop=False)
        return self._hooked_by_model[first_chunk](schedule)(**arguments)

    def make_optimizer(self, init: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._use.has_megatron_optimizer = True
        init(*args, **kwargs)

    def step_optimizer(
        self, step: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Step, or skip an empty step, returning the same as Megatron's optimizers on overflow."""
        self._use.check_before_step(optimizer)
        if self._use.skips_optimizer:
            return False, None, None  # update_successful, grad_norm, num_zeros_in_grad
        return step(optimizer, *args, **kwargs)

    def read_pack(
        self, get_item: Callable[..., Any], dataset: Any, index: int
    ) -> Mapping[str, Any]:
        """Return a pack of Megatron's SFT data, with the columns and mask from the flags."""
        item, args = get_item(dataset, index), megatron_args()
        options = sft.SFTOptions.of(args)
        aggregate_evaluation = getattr(args, "loss_aggregation_evaluation", None) != "megatron"
        if not options.flags or not (aggregate_evaluation or dataset.index_split.name == "train"):
            return item
        return options.read_item(item, dataset, index)

    def add_arguments(self, add_megatron_arguments: Callable[[Any], Any], parser: Any) -> Any:
        parser = self._prepare_parser(add_megatron_arguments(parser))
        parser.set_defaults(**self._use.values)
        return parser

    def set_up_model(self, setup: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make the hook before the model, so that bad flags fail before the slow construction.

        Megatron makes another model in the same process after a fault (--inprocess-restart).
        """
        self._hooked_in_training_loop = self._new_hook(in_training_loop=True)
        return setup(*args, **kwargs)

    def wrap_data_iterator(self, wrap: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """With ``--loss-aggregation``, add sample ids to the packs of Megatron's schedulers."""
        return (with_ids(wrap) if self._use.mode else wrap)(*args, **kwargs)

    def get_schedule(self, get: Callable[..., Schedule], *args: Any, **kwargs: Any) -> Schedule:
        """Return the schedule of Megatron's training loop; all of its models share one hook."""
        if self._hooked_in_training_loop is None:
            self._hooked_in_training_loop = self._new_hook(in_training_loop=True)
        return self._hooked_in_training_loop(get(*args, **kwargs))


class Replacement(NamedTuple):
    """A row of the table of `replacements`."""

    holder: Any  # a module or class of Megatron
    name: str  # of its public function
    method: Callable[..., Any]  # of `Plugin`, which replaces it


def replacements() -> list[Replacement]:
    """The functions of Megatron that `install` replaces, each with ours.

    Without `megatron.training` there are fewer; scripts that need it raise their own error.

    Raises:
        HostError: Megatron lacks one of these functions.
    """
    from megatron.core import __version__
    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from megatron.core.pipeline_parallel import schedules

    table = [
        # The results of `get_forward_backward_func`, which other modules may have imported already.
        Replacement(schedules, "forward_backward_no_pipelining", Plugin.run_schedule),
        Replacement(
            schedules, "forward_backward_pipelining_with_interleaving", Plugin.run_schedule
        ),
        Replacement(
            schedules, "forward_backward_pipelining_without_interleaving", Plugin.run_schedule
        ),
        Replacement(MegatronOptimizer, "__init__", Plugin.make_optimizer),
    ]
    for cls in _subclasses(MegatronOptimizer):
        if "step" in vars(cls):
            table.append(Replacement(cls, "step", Plugin.step_optimizer))
    with contextlib.suppress(ImportError):
        from megatron.training import arguments, training

        table += [
            Replacement(arguments, "add_megatron_arguments", Plugin.add_arguments),
            Replacement(training, "setup_model_and_optimizer", Plugin.set_up_model),
            Replacement(training, "get_forward_backward_func", Plugin.get_schedule),
        ]
        if hasattr(training, "wrap_data_iterator"):  # not in any release
            table.append(Replacement(training, "wrap_data_iterator", Plugin.wrap_data_iterator))
        from megatron.training.datasets.sft_dataset import SFTDataset

        table.append(Replacement(SFTDataset, "__getitem__", Plugin.read_pack))
    for holder, name, _ in table:
        if not hasattr(holder, name):
            raise HostError(
                f"{holder.__name__} of megatron-core {__version__} has no {name}. Install "
                "Megatron-Core 0.14 to 0.19, or wrap the schedule with LossHook yourself and "
                f"remove {flags.FLAG}."
            )
    return table


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
