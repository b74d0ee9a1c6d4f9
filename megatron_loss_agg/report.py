"""Metrics that carry what their exact reduction over microbatches and ranks needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.errors import ReportError
from megatron_loss_agg.exchange import gather_rows
from megatron_loss_agg.loss import weighted_sum


@dataclass(frozen=True)
class Mean:
    """A mean as its (sum, count): over microbatches and ranks both add up, and then divide."""

    sum: Tensor
    count: Tensor

    @classmethod
    def of(cls, values: Tensor, weights: Tensor) -> Mean:
        """``sum w * v`` over ``sum w``; values of weight 0 are left out, whatever they are.

        With a mask for weights this is the mean over its tokens; with `StepPlan.weights` values are
        averaged as that plan weighs them. Values that several ranks hold alike, such as rewards
        under context parallelism, count once a rank above and below, which changes nothing.

        Args:
            values: any dtype; not differentiated.
            weights: of the same shape, non-negative.
        """
        _check_shapes(values, weights)
        dtype = torch.promote_types(torch.promote_types(values.dtype, weights.dtype), torch.float32)
        weights = weights.to(dtype)
        total = weighted_sum(weights, values.detach().to(dtype))
        return cls(total.double(), weights.sum().double())

    def __add__(self, other: object) -> Mean:
        if not isinstance(other, Mean):
            return NotImplemented
        return Mean(self.sum + other.sum, self.count + other.count)

    def value(self) -> Tensor:
        """``sum / count``; 0 where nothing was counted."""
        return torch.where(self.count == 0, torch.zeros_like(self.sum), self.sum / self.count)

    def pair(self) -> Tensor:
        """[sum, count], as Megatron's training loop takes a report."""
        return torch.stack([self.sum, self.count])


@dataclass(frozen=True)
class Max:
    """A maximum; -inf of nothing."""

    max: Tensor

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Max:
        """Over the positions where ``mask`` is not 0; of the same shape."""
        return cls(_or_none(values, mask, -torch.inf).amax())

    def __add__(self, other: object) -> Max:
        return Max(torch.maximum(self.max, other.max)) if isinstance(other, Max) else NotImplemented

    def value(self) -> Tensor:
        return self.max


@dataclass(frozen=True)
class Min:
    """A minimum; inf of nothing."""

    min: Tensor

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Min:
        """Over the positions where ``mask`` is not 0; of the same shape."""
        return cls(_or_none(values, mask, torch.inf).amin())

    def __add__(self, other: object) -> Min:
        return Min(torch.minimum(self.min, other.min)) if isinstance(other, Min) else NotImplemented

    def value(self) -> Tensor:
        return self.min


Metric = Mean | Max | Min


def reduce_reports(
    reports: Sequence[Mapping[str, Metric | Tensor]], group: dist.ProcessGroup | None
) -> dict[str, float]:
    """Every metric of a step, exact over its microbatches and ranks, in one collective.

    Args:
        reports: one a microbatch, as Megatron's schedule returns them; a tensor of two is a
            (sum, count). The same names and kinds in each of them, and on every rank.
        group: the ranks whose reports these are: those of the last pipeline stage, that is the
            data-and-context-parallel group; None for one process.

    Raises:
        ReportError: microbatches differ in their metrics, or a value is no metric.
    """
    total: dict[str, Metric] = {}
    for i, report in enumerate(reports):
        metrics = {name: _metric(name, value) for name, value in report.items()}
        if i and metrics.keys() != total.keys():
            raise ReportError(
                f"microbatch {i} reports {sorted(metrics)} and the first {sorted(total)}; "
                "expected the same metrics of each"
            )
        total = {n: _added(n, total[n], m) for n, m in metrics.items()} if i else metrics
    if not total:
        return {}
    total = dict(sorted(total.items()))
    # Three columns each, of which a kind fills one or two: one row a rank, whatever the kinds.
    parts = [part for metric in total.values() for part in _columns(metric)]
    tag = crc32(repr([(name, type(metric)) for name, metric in total.items()]).encode())
    row = torch.cat([torch.stack(parts).double().cpu(), torch.tensor([tag], dtype=torch.float64)])
    gathered = gather_rows(row, group)
    if bool((gathered[:, -1] != gathered[0, -1]).any()):
        raise ReportError(
            f"this rank reports {list(total)} and another rank other metrics; expected the same "
            "names and kinds on every rank"
        )
    rows = gathered[:, :-1].view(-1, len(total), 3)
    reduced = zip(rows[..., 0].sum(0), rows[..., 1].sum(0), rows[..., 2].amax(0), strict=True)
    return {
        name: _value(metric, *columns)
        for (name, metric), columns in zip(total.items(), reduced, strict=True)
    }


def _or_none(values: Tensor, mask: Tensor, nothing: float) -> Tensor:
    """fp64 [values + 1]: ``nothing`` where the mask is 0, and once more, lest it be empty."""
    _check_shapes(values, mask)
    kept = values.detach().double().masked_fill(mask == 0, nothing).reshape(-1)
    return torch.cat([kept, kept.new_full((1,), nothing)])


def _check_shapes(values: Any, weights: Any) -> None:
    if not isinstance(values, Tensor) or not isinstance(weights, Tensor):
        got = f"{type(values).__name__} and {type(weights).__name__}"
        raise ReportError(f"a metric of {got}; expected two tensors")
    if values.shape != weights.shape:
        raise ReportError(
            f"a metric of values {tuple(values.shape)} under a mask {tuple(weights.shape)}; "
            "expected the same shape"
        )


def _metric(name: str, value: Metric | Tensor) -> Metric:
    if isinstance(value, (Mean, Max, Min)) and all(x.numel() == 1 for x in _columns(value)):
        return value
    if isinstance(value, Tensor) and value.numel() == 2:
        return Mean(*value.detach().double().reshape(-1))
    raise ReportError(
        f"metric {name!r} is {value!r}; expected a Mean, Max or Min of scalars, or a tensor "
        "[sum, count]"
    )


def _added(name: str, first: Metric, second: Metric) -> Metric:
    if type(first) is not type(second):
        kinds = f"{type(first).__name__} and {type(second).__name__}"
        raise ReportError(f"metric {name!r} is {kinds} in different microbatches; expected one")
    return first + second


def _columns(metric: Metric) -> tuple[Tensor, Tensor, Tensor]:
    if isinstance(metric, Mean):
        return metric.sum, metric.count, torch.zeros_like(metric.sum)
    extreme = metric.max if isinstance(metric, Max) else -metric.min
    return torch.zeros_like(extreme), torch.zeros_like(extreme), extreme


def _value(metric: Metric, total: Tensor, count: Tensor, extreme: Tensor) -> float:
    if isinstance(metric, Mean):
        return float(Mean(total, count).value())
    return float(extreme if isinstance(metric, Max) else -extreme)
