"""Adapters for frameworks with their own training loops: one file per framework, and no patches.

An adapter uses an extension point of its framework and multiplies the terms of the framework's sums
by `StepPlan.coefficients`. The aggregation is set in the environment of the processes that train:

    MEGATRON_LOSS_AGG_FLAGS="--loss-aggregation prompt_mean"

Without the variable, an adapter changes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation, Term
from megatron_loss_agg.collectives import gather_objects
from megatron_loss_agg.describe import counts_in_words, formula, print_lines, title_and_weights
from megatron_loss_agg.frameworks.refusals import BATCHES, refused
from megatron_loss_agg.launch.flags import VARIABLE, aggregation_from_environment
from megatron_loss_agg.plan import StepPlan

__all__ = [
    "aggregation_from_environment",
    "check_aggregation",
    "is_installed",
    "print_first_lines",
    "print_inactive",
    "prompts_by_tokens",
    "read_aggregation",
    "required_release",
    "same_on_all_ranks",
]

_T = TypeVar("_T")

_printed: set[str] = set()
"""Models whose first lines this process has printed, and "none" for `print_inactive`."""


@contextmanager
def required_release(framework: str, package: str, oldest: str) -> Iterator[None]:
    """Raise HostError if the block does not find a name that it imports or looks up.

    The block names everything that an adapter calls, overrides or replaces. If a method that an
    adapter overrides were renamed, the override would never run, and the framework would train on
    its own mean.

    Args:
        package: the framework's package; a name missing from it means that its version is too old.
        oldest: the oldest version that has all names.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        module = _module_without_name(error, package)
        if module is None:
            raise
        is_missing = isinstance(error, ModuleNotFoundError) and module == package
        if is_missing or module.partition(".")[0] != package:
            raise refused("a module", error, framework=framework, module=module) from error
        raise refused("a newer version", error, framework=framework, oldest=oldest) from error


def _module_without_name(error: ImportError | AttributeError, package: str) -> str | None:
    """The module that lacks the name; None for another failure, such as of a shared library."""
    if isinstance(error, ImportError):
        return error.name
    if isinstance(error.obj, ModuleType):
        return error.obj.__name__
    return getattr(error.obj, "__module__", None) or package  # raised without the object


def is_installed(package: str) -> bool:
    """True if ``package`` can be imported and is more than a folder of that name on ``sys.path``."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def read_aggregation(
    framework: str, batch_kind: str | None = None, on_all_ranks: bool = False
) -> LossAggregation | None:
    """The aggregation in the environment, checked; or None, which is printed once.

    Args:
        batch_kind: as in `check_aggregation`; by default the framework's name.
        on_all_ranks: True if all ranks that train call this. They then check that all or none of
            them aggregate.
    """

    def read() -> LossAggregation | None:
        agg = aggregation_from_environment()
        if agg is not None:
            check_aggregation(agg, batch_kind or framework)
        return agg

    agg = same_on_all_ranks(read) if on_all_ranks else read()
    if agg is None:
        print_inactive(framework)
    return agg


def same_on_all_ranks(read: Callable[[], _T]) -> _T:
    """The result of ``read`` on this rank. All ranks must call.

    A rank without the variable would start training, while the others wait forever for its counts.

    Raises:
        OptionError: the result is empty on some ranks but not on others.
        PeerError: ``read`` failed on another rank.
    """
    results: list[_T] = []

    def is_aggregating() -> bool:
        results.append(read())
        return bool(results[0])

    ranks = gather_objects(is_aggregating, dist.group.WORLD, f"reading {VARIABLE}")
    if len({*ranks}) > 1:
        without = [rank for rank, is_on in enumerate(ranks) if not is_on]
        got = f"none on rank(s) {without} of {len(ranks)}"
        raise refused("ranks", got)
    return results[0]


def check_aggregation(agg: LossAggregation, batch_kind: str) -> None:
    """Raise OptionError if the aggregation needs more than a row of `BATCHES` provides.

    Args:
        batch_kind: a key of `BATCHES`.
    """
    batches = BATCHES[batch_kind]
    if missing := agg.units - {"all", "sample", *batches.units}:
        possible = " or ".join(["sample", *sorted(batches.units)])
        got = f"{', '.join(sorted(missing))} ({agg.label})"
        raise refused("units", got, units=possible, batches=batch_kind)
    if agg.sample_weights and not batches.has_weights:
        raise refused("weights", agg.sample_weights)


def prompts_by_tokens(tokens: Tensor, is_prompt: Tensor) -> list[str]:
    """An id for each row's prompt [rows]: a hash of the tokens [rows, tokens] that belong to it.

    For frameworks that do not send prompt ids. The hash is the same string on all ranks.
    """
    rows = zip(tokens.cpu(), is_prompt.cpu(), strict=True)
    prompts = (row[belongs].numpy().tobytes() for row, belongs in rows)
    return [hashlib.sha256(prompt).hexdigest() for prompt in prompts]


def print_inactive(framework: str) -> None:
    """Print once that an adapter has no aggregation and the framework's own loss is trained."""
    if _is_first_print("none"):
        print(
            f"loss aggregation: none, since {VARIABLE} is not set in this process; {framework}'s loss "
            "is trained",
            flush=True,
        )


def print_first_lines(plan: StepPlan, model_name: str = "") -> None:
    """Print the aggregation and the counts of the first step, on rank 0 and once per process.

    Args:
        plan: the plan of the first optimizer step.
        model_name: the model being trained, such as ``critic``, if a process trains several.
    """
    if not _is_first_print(model_name):
        return
    agg, counts = plan.aggregation, plan.counts
    weight = formula(agg, None if plan.is_empty else counts)
    title, rows = title_and_weights({agg.mode: Term(agg)}, {agg.mode: weight}, model_name)
    print_lines(title, [*rows, ("counts", counts_in_words(counts))])


def _is_first_print(model_name: str) -> bool:
    """True once for each name, only on rank 0."""
    if model_name in _printed or (dist.is_initialized() and dist.get_rank() > 0):
        return False
    _printed.add(model_name)
    return True
