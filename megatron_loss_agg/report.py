"""Metrics that carry what their exact reduction over microbatches and ranks needs."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.collectives import Header, abandon_records, gather_records, tag_of
from megatron_loss_agg.errors import ReportError
from megatron_loss_agg.weights import weighted_sum


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

        Added up in fp32, and in fp64 where either is fp64, values are integers or flags, or weights
        are integers. Sums of integers are thereby exact up to 2^53.

        Args:
            values: any real dtype; not differentiated.
            weights: of the same shape, real and non-negative.

        Returns:
            sum and count as fp64 scalars, of this microbatch on this rank.

        Raises:
            ReportError: not two real tensors of one shape.
        """
        _check_tensors(values, weights)
        dtype = _summing_dtype(values.dtype, weights.dtype)
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
        """Over the positions where ``mask`` is not 0; an fp64 scalar.

        Args:
            values: any real dtype; not differentiated.
            mask: of the same shape, real.

        Raises:
            ReportError: not two real tensors of one shape.
        """
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
        """Over the positions where ``mask`` is not 0; an fp64 scalar.

        Args:
            values: any real dtype; not differentiated.
            mask: of the same shape, real.

        Raises:
            ReportError: not two real tensors of one shape.
        """
        return cls(_or_none(values, mask, torch.inf).amin())

    def __add__(self, other: object) -> Min:
        return Min(torch.minimum(self.min, other.min)) if isinstance(other, Min) else NotImplemented

    def value(self) -> Tensor:
        return self.min


Metric = Mean | Max | Min

METRICS_A_ROW = 32
COLUMNS = 3
"""Numbers of a metric: what adds up twice, and what the greatest is taken of."""


def reduce_reports(
    reports: Iterable[Mapping[str, Metric | Tensor]], group: dist.ProcessGroup | None
) -> dict[str, float]:
    """Every metric of a step, exact over its microbatches and ranks.

    In one collective for up to 32 metrics, and in two for any number. The first has the same size
    whatever a rank reports, so that none waits for another whose reports are bad or missing.

    Args:
        reports: one a microbatch, as Megatron's schedule returns them; a tensor of two is a
            (sum, count). The same names and kinds in each of them, and on every rank, in any order.
        group: the ranks whose reports these are: those of the last pipeline stage, that is the
            data-and-context-parallel group; None for one process. All of them must call this.

    Returns:
        by name, in alphabetical order; the same on every rank. Without any metric, nothing.

    Raises:
        ReportError: microbatches or ranks differ in their metrics, or a value is no metric here.
            Ranks that differ raise on every rank of ``group``.
        PeerError: another rank's reports are bad; every rank of ``group`` raises.
    """
    try:
        total = _over_microbatches(reports)
        # One copy from the device, whatever the kinds: three columns, of which each fills some.
        parts = [part for metric in total.values() for part in _columns(metric)]
        mine = torch.stack(parts).cpu() if parts else torch.zeros(0, dtype=torch.float64)
    except Exception:
        abandon_records(METRICS_A_ROW, COLUMNS, group)
        raise
    kinds = [f"{type(metric).__name__} {name!r}" for name, metric in total.items()]
    rows = gather_records(
        mine.view(-1, COLUMNS),
        METRICS_A_ROW,
        group,
        tag=tag_of(kinds),
        failure="bad metrics on rank(s) {} of the group",
        difference=functools.partial(_different_metrics, kinds),
    )
    reduced = zip(rows[..., 0].sum(0), rows[..., 1].sum(0), rows[..., 2].amax(0), strict=True)
    return {
        name: _value(metric, *columns)
        for (name, metric), columns in zip(total.items(), reduced, strict=True)
    }


def _different_metrics(kinds: list[str], headers: Sequence[Header]) -> ReportError:
    others = [rank for rank, header in enumerate(headers) if header.tag != tag_of(kinds)]
    return ReportError(
        f"this rank reports {', '.join(kinds) or 'nothing'}, and rank(s) {others} of the group "
        "other metrics; expected the same names and kinds on every rank"
    )


def _over_microbatches(reports: Iterable[Mapping[str, Metric | Tensor]]) -> dict[str, Metric]:
    """This rank's metrics of the step, sorted by name."""
    if not isinstance(reports, Iterable):
        raise ReportError(f"reports are a {type(reports).__name__}; expected a list of mappings")
    total: dict[str, Metric] = {}
    for i, report in enumerate(reports):
        if not isinstance(report, Mapping) or not all(isinstance(name, str) for name in report):
            raise ReportError(
                f"microbatch {i} reports {report!r}; expected a mapping of names to metrics"
            )
        metrics = {name: _metric(name, value) for name, value in report.items()}
        if i and metrics.keys() != total.keys():
            raise ReportError(
                f"microbatch {i} reports {sorted(metrics)} and the first {sorted(total)}; "
                "expected the same metrics of each"
            )
        total = {n: _added(n, total[n], m) for n, m in metrics.items()} if i else metrics
    return dict(sorted(total.items()))


def _or_none(values: Tensor, mask: Tensor, nothing: float) -> Tensor:
    """fp64 [values + 1]: ``nothing`` where the mask is 0, and once more, lest it be empty."""
    _check_tensors(values, mask)
    kept = values.detach().double().masked_fill(mask == 0, nothing).reshape(-1)
    return torch.cat([kept, kept.new_full((1,), nothing)])


def _summing_dtype(values: torch.dtype, weights: torch.dtype) -> torch.dtype:
    """fp32 where it is as exact as its input; flags are exact as weights, and add up as values."""
    floating = values.is_floating_point and (weights.is_floating_point or weights == torch.bool)
    wide = torch.float64 in (values, weights) or not floating
    return torch.float64 if wide else torch.float32


def _check_tensors(values: Any, weights: Any) -> None:
    if not isinstance(values, Tensor) or not isinstance(weights, Tensor):
        got = f"{type(values).__name__} and {type(weights).__name__}"
        raise ReportError(f"a metric of {got}; expected two tensors")
    if values.is_complex() or weights.is_complex():
        raise ReportError(
            f"a metric of {values.dtype} and {weights.dtype}; expected two real tensors"
        )
    if values.shape != weights.shape:
        raise ReportError(
            f"a metric of values {tuple(values.shape)} under a mask {tuple(weights.shape)}; "
            "expected the same shape"
        )


def _metric(name: str, value: Metric | Tensor) -> Metric:
    kind: type[Metric] = Mean
    parts: tuple[Tensor, ...] = ()
    if isinstance(value, (Mean, Max, Min)):
        kind, parts = type(value), tuple(vars(value).values())
    elif isinstance(value, Tensor) and value.numel() == 2:
        parts = value.detach().reshape(-1).unbind()
    if parts and all(_is_real_scalar(part) for part in parts):
        return kind(*(part.detach().double().reshape(()) for part in parts))
    raise ReportError(
        f"metric {name!r} is {value!r}; expected a Mean, Max or Min of scalars, or a tensor "
        "[sum, count]"
    )


def _is_real_scalar(part: object) -> bool:
    return isinstance(part, Tensor) and part.numel() == 1 and not part.is_complex()


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
