"""Adapters for frameworks with a training loop of their own: one file a framework, and no patch.

An adapter stands on an extension point of the framework, and multiplies what the framework sums by
`StepPlan.coefficients`. The aggregation is in the environment of the processes that train:

    MEGATRON_LOSS_AGG_FLAGS="--loss-aggregation prompt_mean"

Without the variable an adapter changes nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from megatron_loss_agg.aggregation import LossAggregation, Term
from megatron_loss_agg.describe import counts_in_words, formula, in_lines, title_and_weights
from megatron_loss_agg.errors import HostError, OptionError
from megatron_loss_agg.launch.flags import VARIABLE, aggregation_from_environment
from megatron_loss_agg.plan import StepPlan

__all__ = [
    "aggregation_from_environment",
    "check_names",
    "check_samples",
    "print_first_lines",
    "print_none",
]

PACKAGES = {
    **{name: name for name in ("verl", "slime", "miles", "nemo_rl", "areal", "skyrl")},
    "ms_swift": "swift",
}
"""The adapters, which are modules of this package, and the packages of their frameworks."""

_printed: set[str] = set()
"""The models whose first lines this process has printed, and "none" for `print_none`."""


def settings_of(name: str) -> str:
    """The lines that select the adapter of this framework.

    Raises:
        HostError: there is no such framework, or it lacks the adapter's extension point.
        OptionError: bad flags in the environment.
    """
    if importlib.util.find_spec(PACKAGES[name]) is None:
        raise HostError(
            f"{name} must be installed in this Python, or its checkout be on PYTHONPATH, got neither. "
            "Give the Python that trains."
        )
    if name != "ms_swift":  # whose loop has a hook, and takes all flags
        aggregation_from_environment()
    adapter = importlib.import_module(f"{__name__}.{name}")
    settings: str = adapter.SETTINGS
    return settings


def check_names(framework: str, versions: str, names: Iterable[tuple[Any, str]]) -> None:
    """Raise HostError unless the framework has what its adapter overrides or replaces.

    Were a method renamed, the one that overrides it would never be called.

    Args:
        versions: those that have all names, in words.
        names: pairs of a class or module and the name of its attribute.
    """
    for holder, name in names:
        if not hasattr(holder, name):
            raise HostError(
                f"{framework}'s {holder.__name__} must have {name}, as {versions}, got none. Install "
                f"such a version of {framework}."
            )


def check_samples(agg: LossAggregation) -> None:
    """Raise OptionError if the aggregation needs more of samples than prompts and rollouts."""
    if others := sorted({*agg.by_id} - {"prompt", "rollout"}):
        raise OptionError(
            f"samples must be grouped by prompt or rollout, got {', '.join(others)}. Choose another "
            "mode (--loss-aggregation)."
        )
    if agg.sample_weights:
        raise OptionError(
            "--loss-aggregation-sample-weights needs weights, which these samples do not have, got "
            f"{agg.sample_weights}. Remove it."
        )


def print_none(whose: str) -> None:
    """Print once that an adapter runs without an aggregation, and ``whose`` loss is trained."""
    if not _must_print("none"):
        return
    print(
        f"loss aggregation: none, since {VARIABLE} is not set in this process; {whose} loss is trained",
        flush=True,
    )


def print_first_lines(plan: StepPlan, who: str = "") -> None:
    """Print the aggregation and the counts of the first step, on rank 0 and once in a process.

    Args:
        plan: of the first optimizer step.
        who: the model that is trained, such as ``critic``, where a process trains several.
    """
    if not _must_print(who):
        return
    agg, counts = plan.aggregation, plan.counts
    weight = formula(agg, None if plan.is_empty else counts)
    title, rows = title_and_weights({agg.mode: Term(agg)}, {agg.mode: weight}, who)
    print(in_lines(title, [*rows, ("counts", counts_in_words(counts))]), flush=True)


def _must_print(who: str) -> bool:
    """Whether this is rank 0, and its process has not printed of ``who`` yet."""
    if who in _printed or (dist.is_initialized() and dist.get_rank() > 0):
        return False
    _printed.add(who)
    return True
