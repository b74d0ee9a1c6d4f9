"""Metrics that reduce exactly over microbatches and ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megatron_loss_agg.collectives import gather_objects
from megatron_loss_agg.errors import DataError
from megatron_loss_agg.tensors import check_tensors, is_plain
from megatron_loss_agg.weighted_sum import weighted_sum

__all__ = ["Max", "Mean", "Metric", "Min", "Sum", "reduce_reports"]


@dataclass(frozen=True)
class Mean:
    """A mean as (sum, count); both are added over microbatches and ranks before dividing."""

    sum: Tensor
    """``sum w * v`` of a microbatch on this rank, an fp64 scalar."""
    count: Tensor
    """``sum w``, likewise."""

    @classmethod
    def of(cls, values: Tensor, weights: Tensor) -> Mean:
        """``sum w * v`` over ``sum w``; values of weight 0 are ignored, even NaN.

        With a mask as weights this is the mean over the mask's tokens; with `StepPlan.weights`, the
        plan's own average. Values that several ranks have, such as rewards under context
        parallelism, count once per rank in both sums, which leaves the mean unchanged.

        Sums are in fp64 if either input is fp64, the values are integers or bool, or the weights
        are integers (sums of integers are exact up to 2^53); otherwise in fp32.

        Args:
            values: any real dtype; detached.
            weights: of the same shape, real and non-negative.

        Raises:
            DataError: not two real tensors of the same shape.
        """
        check_tensors(DataError, "real", values=values, weights=weights)
        dtype = _sum_dtype(values.dtype, weights.dtype)
        weights = weights.to(dtype)
        total = weighted_sum(weights, values.detach().to(dtype))
        return cls(total.double(), weights.sum().double())

    def value(self) -> Tensor:
        """``sum / count``; 0 if nothing was counted."""
        return torch.where(self.count == 0, torch.zeros_like(self.sum), self.sum / self.count)

    def pair(self) -> Tensor:
        """[sum, count], the form that Megatron's training loop expects in a report."""
        return torch.stack([self.sum, self.count])


@dataclass(frozen=True)
class Sum:
    """A sum over microbatches and ranks."""

    sum: Tensor
    """``sum w * v``, a scalar."""

    @classmethod
    def of(cls, values: Tensor, weights: Tensor) -> Sum:
        """``sum w * v``; values of weight 0 are ignored, even NaN.

        With the weights of the loss (``TokenLoss(report=)``), the values are aggregated like the
        losses. Dtypes, arguments and errors are as in `Mean.of`.
        """
        return cls(Mean.of(values, weights).sum)

    def value(self) -> Tensor:
        """The sum."""
        return self.sum


_T = TypeVar("_T", bound="_Extreme")


@dataclass(frozen=True)
class _Extreme:
    extreme: Tensor
    """A scalar."""
    _nothing: ClassVar[float]

    @classmethod
    def of(cls: type[_T], values: Tensor, mask: Tensor) -> _T:
        """The extreme over the positions where ``mask`` is not 0, in fp64.

        Raises:
            DataError: not two real tensors of the same shape.
        """
        check_tensors(DataError, "real", values=values, mask=mask)
        masked = values.detach().double().masked_fill(mask == 0, cls._nothing).reshape(-1)
        # Pad by one value, so that the reduction is never over nothing.
        return cls(_REDUCTIONS[cls](pad(masked, (0, 1), value=cls._nothing), 0))

    def value(self) -> Tensor:
        """The extreme."""
        return self.extreme


class Max(_Extreme):
    """A maximum; -inf if nothing was counted."""

    _nothing = -math.inf


class Min(_Extreme):
    """A minimum; inf if nothing was counted."""

    _nothing = math.inf


Metric = Mean | Sum | Max | Min
"""The kinds of metric that `reduce_reports` accepts."""

_REDUCTIONS: Mapping[type[Any], Callable[[Tensor, int], Tensor]] = {
    Mean: torch.sum,
    Sum: torch.sum,
    Max: torch.amax,
    Min: torch.amin,
}
"""The reduction of several metrics of one kind: [metrics, fields] -> [fields]."""


def reduce_reports(
    reports: Iterable[Mapping[str, Metric | Tensor]], group: dist.ProcessGroup | None
) -> dict[str, float]:
    """Every metric of a step, exact over its microbatches and ranks, in two collectives.

    No rank hangs if another's reports are bad or missing.

    Args:
        reports: one per microbatch, as returned by Megatron's schedule; a tensor of two elements is
            (sum, count). All reports on all ranks must have the same names and kinds, in any order.
        group: the ranks to reduce over (the data- and context-parallel group of the last pipeline
            stage), all of which must call; None for one process.

    Returns:
        values by name, sorted, the same on all ranks; empty if there are no metrics.

    Raises:
        DataError: microbatches or ranks differ in their metrics, or a value is not a metric. If
            ranks differ, every rank of ``group`` raises.
        PeerError: another rank's reports are bad; raised on every other rank of ``group``.
    """
    ranks = gather_objects(lambda: _over_microbatches(reports), group, "reading its reports")
    in_words = [
        ", ".join(f"{kind.__name__} {name!r}" for name, kind in kinds.items()) or "nothing"
        for kinds, _ in ranks
    ]
    if len({*in_words}) > 1:
        raise DataError(
            f"all ranks must report the same metrics, got {' and '.join(dict.fromkeys(in_words))}. "
            "Report the same names and kinds on every rank."
        )
    kinds, _ = ranks[0]
    sizes = [len(fields(kind)) for kind in kinds.values()]
    rows = torch.tensor([values for _, values in ranks], dtype=torch.float64)
    columns = rows.split(sizes, dim=1)
    return {
        name: float(kind(*_REDUCTIONS[kind](values, 0)).value())
        for (name, kind), values in zip(kinds.items(), columns, strict=True)
    }


def _over_microbatches(
    reports: Iterable[Mapping[str, Metric | Tensor]],
) -> tuple[dict[str, type[Metric]], list[float]]:
    """This rank's metrics of the step, sorted: kinds by name, and the fields of all of them."""
    step_reports = list(reports)
    by_name: defaultdict[str, list[tuple[type[Metric], Tensor]]] = defaultdict(list)
    for report in step_reports:
        for name, value in report.items():
            by_name[name].append(_kind_and_fields(name, value))
    kinds, reduced = {}, []
    for name, metrics in sorted(by_name.items()):
        kind, *others = {kind for kind, _ in metrics}
        if others or len(metrics) != len(step_reports):
            got = " or ".join(sorted({kind.__name__ for kind, _ in metrics}))
            raise DataError(
                f"metric {name!r} must be of one kind and in every microbatch, got a {got} in "
                f"{len(metrics)} of {len(step_reports)} microbatches. Report it in each."
            )
        kinds[name] = kind
        reduced.append(_REDUCTIONS[kind](torch.stack([values for _, values in metrics]), 0))
    # Put all metrics in one tensor, so that they are copied from the device once.
    return kinds, torch.cat(reduced).tolist() if reduced else []


def _kind_and_fields(name: str, value: Metric | Tensor) -> tuple[type[Metric], Tensor]:
    kind: type[Metric] = Mean
    scalars: list[Tensor] = []
    if isinstance(value, Metric):
        kind, scalars = type(value), [*vars(value).values()]
    elif is_plain(value) and value.numel() == 2:
        scalars = [*value.reshape(-1)]
    if not scalars or not all(is_plain(x) and x.numel() == 1 for x in scalars):
        raise DataError(
            f"metric {name!r} must be a Mean, Sum, Max or Min of scalars, or a tensor [sum, "
            f"count], got {value!r}. Make it with Mean.of(values, weights)."
        )
    return kind, torch.stack([x.detach().double().reshape(()) for x in scalars])


def _sum_dtype(values: torch.dtype, weights: torch.dtype) -> torch.dtype:
    floating = values.is_floating_point and (weights.is_floating_point or weights == torch.bool)
    return torch.float32 if floating and torch.float64 not in (values, weights) else torch.float64
