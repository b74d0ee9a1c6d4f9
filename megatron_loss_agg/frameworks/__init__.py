"""Adapters for frameworks with a training loop of their own: one file a framework, and no patch.

An adapter stands on an extension point of the framework, and multiplies the framework's summands by
`StepPlan.coefficients`. The aggregation is in the environment of the processes that train:

    MEGATRON_LOSS_AGG_FLAGS="--loss-aggregation prompt_mean"

Without the variable an adapter changes nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_loss_agg.aggregation import LossAggregation, Term
from megatron_loss_agg.describe import counts_in_words, formula, in_lines, title_and_weights
from megatron_loss_agg.errors import HostError, OptionError
from megatron_loss_agg.launch.flags import VARIABLE, aggregation_from_environment
from megatron_loss_agg.plan import StepPlan

__all__ = [
    "Setting",
    "aggregation_from_environment",
    "check_aggregation",
    "check_settings",
    "print_first_lines",
    "print_inactive",
    "read_aggregation",
    "required_release",
]

PACKAGES = {
    **{name: name for name in ("verl", "slime", "miles", "nemo_rl", "areal", "skyrl")},
    "ms_swift": "swift",
}
"""The package of each framework, by the name of its adapter, a module of this package."""

OFF = (None, False, "")
"""Values of a setting that is off."""


class Setting(NamedTuple):
    """A setting of a framework, and the values under which its adapter is exact."""

    name: str
    """A flag, or an attribute of the configuration, with dots between nested ones."""
    needed: str
    """The end of the sentence "NAME must be ..."."""
    allowed: Container[Any] = OFF
    remedy: str = f"Change it, or unset {VARIABLE}."
    """The second sentence of the error."""


_printed: set[str] = set()
"""Models whose first lines this process has printed, and "none" for `print_inactive`."""


def adapter_settings(name: str) -> str:
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
    if name != "ms_swift":  # its loop has a hook, and takes all flags
        aggregation_from_environment()
    adapter = importlib.import_module(f"{__name__}.{name}")
    settings: str = adapter.SETTINGS
    return settings


@contextmanager
def required_release(framework: str, oldest: str) -> Iterator[None]:
    """Raise HostError if the block does not find a name that it imports or looks up.

    The block names all that an adapter calls, overrides or replaces. Were a method renamed that an
    adapter overrides, the override would never run, and the framework's own mean would be trained.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise HostError(
            f"{framework} must be {oldest} or later, with its dependencies, got: {error}. Install such "
            f"a version of {framework}."
        ) from error


def check_settings(config: Any, *settings: Setting) -> None:
    """Raise HostError for the first setting whose value is not allowed; a missing one is None."""
    for setting in settings:
        value = config
        for key in setting.name.removeprefix("--").replace("-", "_").split("."):
            value = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
        if value not in setting.allowed:
            name, needed, _, remedy = setting
            raise HostError(f"{name} must be {needed}, got {value}. {remedy}")


def read_aggregation(
    framework: str, units: set[str], has_weights: bool = False
) -> LossAggregation | None:
    """The aggregation in the environment, checked; or None, which is printed once.

    The arguments are those of `check_aggregation`.
    """
    agg = aggregation_from_environment()
    if agg is None:
        print_inactive(framework)
    else:
        check_aggregation(agg, framework, units, has_weights)
    return agg


def check_aggregation(
    agg: LossAggregation, framework: str, units: set[str], has_weights: bool = False
) -> None:
    """Raise OptionError if the aggregation needs more than the framework's batches have.

    Args:
        units: the units that the adapter can group tokens by, besides the sample and the step.
        has_weights: the batches have weights of samples.
    """
    if missing := agg.units - {"all", "sample", *units}:
        raise OptionError(
            f"--loss-aggregation must group tokens by {' or '.join(['sample', *sorted(units)])} in "
            f"{framework}, got {', '.join(sorted(missing))} ({agg.label}). Choose another mode, such as "
            "token_mean or sample_mean."
        )
    if agg.sample_weights and not has_weights:
        raise OptionError(
            "--loss-aggregation-sample-weights needs weights, which these samples do not have, got "
            f"{agg.sample_weights}. Remove it."
        )


def print_inactive(framework: str) -> None:
    """Print once that an adapter has no aggregation, so that the framework's loss is trained."""
    if _is_first_print("none"):
        print(
            f"loss aggregation: none, since {VARIABLE} is not set in this process; {framework}'s loss "
            "is trained",
            flush=True,
        )


def print_first_lines(plan: StepPlan, model_name: str = "") -> None:
    """Print the aggregation and the counts of the first step, on rank 0 and once in a process.

    Args:
        plan: the plan of the first optimizer step.
        model_name: the model that is trained, such as ``critic``, where a process trains several.
    """
    if not _is_first_print(model_name):
        return
    agg, counts = plan.aggregation, plan.counts
    weight = formula(agg, None if plan.is_empty else counts)
    title, rows = title_and_weights({agg.mode: Term(agg)}, {agg.mode: weight}, model_name)
    print(in_lines(title, [*rows, ("counts", counts_in_words(counts))]), flush=True)


def _is_first_print(model_name: str) -> bool:
    """True once for each name, on rank 0 alone."""
    if model_name in _printed or (dist.is_initialized() and dist.get_rank() > 0):
        return False
    _printed.add(model_name)
    return True
