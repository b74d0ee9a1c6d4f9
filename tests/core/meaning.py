"""A step as tensors, what it means in plain loops, and what is allowed: that, or a refusal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_loss_agg import CPLayout, LossAggregation, Microbatch, StepPlan, weighted_sum
from tests import oracle
from tests.oracle import Sample

F64 = torch.float64
MODES = sorted(oracle.INNER)
UNITS = ("prompt", "rollout", "dataset")
LAYOUTS = ("thd", "thd_row", "thd_padded", "bshd")
LARGEST = 3.4028234663852886e38  # of fp32
# Three roundings: of the mask, of the coefficient and of their product; bf16 rounds once more.
ROUNDING = {F64: 2e-14, torch.float32: 4 * 2.0**-24, torch.bfloat16: 2.0**-8}
SMALLEST = {F64: 2.0**-1074, torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133}


def aggregation(mode: str, **options: Any) -> LossAggregation:
    """With a divisor of 4 where the mode takes one."""
    divisor = 4.0 if mode in ("constant", "sum") else None
    return LossAggregation(**{"mode": mode, "divisor": divisor, **options})


def lay(
    samples: Sequence[Sample], layout: str, multiple: int = 1, weighted: bool = False
) -> dict[str, Any]:
    """Arguments of a `Microbatch`; every sequence is padded to a multiple of ``multiple``.

    With weights if one is not 1, or ``weighted``.
    """
    lengths = [len(s.mask) for s in samples]
    padded = [-(-n // multiple) * multiple for n in lengths]
    gap = multiple if layout == "thd_padded" else 0
    if layout == "bshd":
        padded = [max([multiple, *padded])] * len(samples)
    starts = [0, *accumulate(n + gap for n in padded)]
    mask = torch.zeros(starts[-1] + gap, dtype=F64)
    for start, sample in zip(starts, samples, strict=False):
        mask[start : start + len(sample.mask)] = torch.tensor(sample.mask, dtype=F64)
    given: dict[str, Any] = {"loss_mask": mask}
    if layout == "bshd":
        given["loss_mask"] = mask.view(len(samples), -1) if samples else mask.view(0, multiple)
    elif layout == "thd_row":
        given["loss_mask"] = mask.unsqueeze(0)
    if layout != "bshd":
        real = [0, *accumulate(lengths)]
        given["cu_seqlens"] = torch.tensor(real, dtype=torch.int32)
        if starts != real or gap:
            given["cu_seqlens_padded"] = torch.tensor(starts, dtype=torch.int32)
    for unit in UNITS:
        ids = [getattr(s, unit) for s in samples]
        given[f"{unit}_ids"] = torch.tensor(ids, dtype=torch.int64)
    if weighted or any(s.weight != 1 for s in samples):
        given["sample_weights"] = torch.tensor([s.weight for s in samples], dtype=F64)
    return given


def names_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Ids of a microbatch by other names, under which an aggregation may group as well."""
    return {"task": given.get("prompt_ids"), "session": given.get("rollout_ids")}


def microbatch_of(given: Mapping[str, Any]) -> Microbatch:
    return Microbatch(**given, ids=names_of(given))


def cp_layout(given: Mapping[str, Any], cp: int, rank: int) -> CPLayout:
    """A microbatch as a context-parallel rank sees it."""
    if "cu_seqlens" not in given:
        return CPLayout.bshd(given["loss_mask"].shape[-1], cp, rank)
    return CPLayout.thd(given.get("cu_seqlens_padded", given["cu_seqlens"]), cp, rank)


def listed(x: Any) -> list[float]:
    """All numbers of a tensor, or of a nest of lists."""
    if isinstance(x, Tensor):
        return [float(value) for value in x.detach().reshape(-1).tolist()]
    return [value for part in x for value in listed(part)] if isinstance(x, list) else [float(x)]


def assert_same(got: Any, wanted: Any, rounding: float, smallest: float = 0) -> None:
    """Each number is near rounding error, and so is their sum, which denormal numbers escape."""
    error = size = 0.0
    for x, y in zip(listed(got), listed(wanted), strict=True):
        off = abs(x - y)
        assert off <= rounding * abs(y) + smallest, f"{x!r}, and the oracle {y!r}"
        error, size = error + max(off - smallest, 0.0), size + abs(y)
    assert error <= rounding * size


@dataclass(frozen=True)
class Read:
    """One microbatch, read in plain loops; AssertionError for what must have been refused."""

    samples: list[Sample]
    places: list[list[int]]  # of each sample's tokens in the flattened mask
    rejected: list[bool]  # of each sample
    shape: tuple[int, ...]  # of the mask
    starts: list[int] | None  # of the samples in a pack, and its end
    values: list[float]  # of the flattened mask
    routed: int | None  # tokens, if it says them
    units: set[str]  # that it has ids of

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Read:
        """From the keyword arguments of a `Microbatch`."""
        values = listed(given["loss_mask"])
        assert all(0 <= m <= LARGEST for m in values), "values of the mask"
        places = _places(given, len(values))
        outside = {*range(len(values))}.difference(*places)
        assert not any(values[t] for t in outside), "a mask on padding"
        number = len(places)
        by_sample = [[tuple(values[t] for t in p) for p in places]]
        by_sample += [_by_sample(given.get(f"{unit}_ids"), number, 0) for unit in UNITS]
        by_sample.append(_by_sample(given.get("sample_weights"), number, 1.0))
        samples = [Sample(*of_sample) for of_sample in zip(*by_sample, strict=True)]
        assert all(0 <= s.weight < math.inf for s in samples), "sample weights"
        offsets = _offsets(given)
        return cls(
            samples,
            places,
            rejected=_by_sample(given.get("rejected"), number, False),
            shape=tuple(given["loss_mask"].shape),
            starts=None if offsets is None else offsets[1],
            values=values,
            routed=given.get("routed_tokens"),
            units={unit for unit in UNITS if given.get(f"{unit}_ids") is not None or not number},
        )

    @property
    def sums(self) -> list[float]:
        """The mask sum of each sample."""
        return [sum(s.mask) for s in self.samples]

    @property
    def active(self) -> int:
        """Positions with a nonzero mask."""
        return sum(x != 0 for x in self.values)

    @property
    def model_tokens(self) -> int:
        return self.active if self.routed is None else self.routed

    def counted(self, agg: LossAggregation) -> list[Sample]:
        """The samples that are in the denominators."""
        pairs = zip(self.samples, self.rejected, strict=True)
        return [s for s, gone in pairs if not (gone and agg.rejected == "skip")]

    def laid(self, agg: LossAggregation, by_sample: list[list[float]]) -> list[float]:
        """The weight of every position, from those of the samples that count."""
        weights, left = [0.0] * len(self.values), iter(by_sample)
        for places, gone in zip(self.places, self.rejected, strict=True):
            of_sample = [] if gone and agg.rejected == "skip" else next(left)
            for t, w in zip(places, of_sample, strict=False):
                weights[t] = 0.0 if gone else w
        return weights


def _offsets(given: Mapping[str, Any]) -> tuple[list[int], list[int]] | None:
    """Of a pack: of the real tokens, and where its samples start."""
    real, padded = given.get("cu_seqlens"), given.get("cu_seqlens_padded")
    if real is None:
        return None
    has_samples = len(real) > 1  # a filler's padded offsets may be anything
    return real.tolist(), (real if padded is None or not has_samples else padded).tolist()


def _places(given: Mapping[str, Any], tokens: int) -> list[list[int]]:
    offsets = _offsets(given)
    if offsets is None:
        rows, width = given["loss_mask"].shape
        return [[*range(s * width, (s + 1) * width)] for s in range(rows)]
    real, starts = offsets
    lengths = [b - a for a, b in pairwise(real)]
    assert real[0] == starts[0] == 0, "offsets"
    for (a, b), n in zip(pairwise(starts), lengths, strict=True):
        assert 0 <= n <= b - a and a + n <= tokens, "offsets"
    return [[*range(a, a + n)] for a, n in zip(starts, lengths, strict=False)]


def _by_sample(given: Any, number: int, default: Any) -> list[Any]:
    if given is None:
        return [default] * number
    assert not isinstance(given, str), "no sequence"
    values = given.tolist() if isinstance(given, Tensor) else list(given)
    assert len(values) == number, "not one for each sample"
    return values


Step = Sequence[Sequence[Read]]  # by rank and microbatch


def counted_step(agg: LossAggregation, step: Step) -> oracle.Step:
    return [[m.counted(agg) for m in rank] for rank in step]


def whole_step(step: Step) -> oracle.Step:
    """With the samples that do not count."""
    return [[m.samples for m in rank] for rank in step]


def options_of(agg: LossAggregation) -> dict[str, Any]:
    """Of the functions of `oracle`."""
    return {
        "levels": agg.levels or (),
        "empty": agg.empty,
        "count": agg.count,
        "sample_weights": agg.sample_weights,
    }


def expected_weights(agg: LossAggregation, step: Step) -> list[list[list[float]]]:
    """The weight of every position of every mask, by rank and microbatch."""
    divisor = None if agg.divisor is None else float(agg.divisor)
    of_samples = oracle.step_weights(
        agg.mode, counted_step(agg, step), divisor=divisor, **options_of(agg)
    )
    return [
        [m.laid(agg, weights) for m, weights in zip(rank, of_rank, strict=True)]
        for rank, of_rank in zip(step, of_samples, strict=True)
    ]


def assert_plans(plans: Mapping[str, StepPlan], step: Step, rank: int = 0) -> None:
    """Everything that the plans of a step say to one rank is what the whole step means."""
    units = {unit for plan in plans.values() for unit in plan.aggregation.by_id}
    for plan in plans.values():
        assert_counts(plan, step)
        assert_samples(plan, step, units)
        wanted = expected_weights(plan.aggregation, step)[rank]
        assert [*plan.sizes] == [len(read.samples) for read in step[rank]]
        assert [*plan.sequences] == [None] * len(step[rank])
        for i, (read, weights) in enumerate(zip(step[rank], wanted, strict=True)):
            assert_tokens(plan, i, read)
            assert_same(plan.mask_sums(i), read.sums, 1e-13)
            by_sample = [sum(weights[t] for t in places) for places in read.places]
            assert_same(plan.coefficients(i) * plan.mask_sums(i), by_sample, 1e-13)
            assert_weights(plan, i, read.shape, weights)
            assert_loss(plan, i, read.shape, weights)
            for unit in plan.ids_S:
                where = slice(*[sum(plan.sizes[:n]) for n in (i, i + 1)])
                assert plan.ids(unit, i).tolist() == plan.ids_S[unit][where].tolist()


def assert_tokens(plan: StepPlan, i: int, read: Read) -> None:
    """Shape and numbers of tokens of a microbatch."""
    shape = plan.shapes[i]
    assert shape.mask == read.shape
    assert (None if shape.starts is None else shape.starts.tolist()) == read.starts
    assert plan.model_tokens[i] == read.model_tokens


def assert_weights(plan: StepPlan, i: int, shape: tuple[int, ...], wanted: list[float]) -> None:
    for dtype, rounding in ROUNDING.items():
        w = plan.weights(i, dtype)
        assert (w.dtype, w.shape, w.requires_grad) == (dtype, shape, False)
        assert_same(w, wanted, rounding, SMALLEST[dtype])
        assert dtype != torch.bfloat16 or torch.equal(w, plan.weights(i).to(dtype))
    advantages = torch.linspace(-2, 2, len(wanted), dtype=F64)
    scaled = [a * x for a, x in zip(listed(advantages), wanted, strict=True)]
    advantages = advantages.masked_fill(torch.tensor(wanted) == 0, math.nan).view(shape)
    assert_same(plan.scaled_advantages(i, advantages), scaled, 2e-14)


def assert_loss(plan: StepPlan, i: int, shape: tuple[int, ...], wanted: list[float]) -> None:
    """The sum of a microbatch, and its gradient: NaN is no loss where nothing counts."""
    x = torch.linspace(1, 2, len(wanted), dtype=F64)
    parts = [w * a for w, a in zip(wanted, listed(x), strict=True)]
    losses = x.masked_fill(torch.tensor(wanted) == 0, math.nan).view(shape).requires_grad_()
    total = weighted_sum(plan.weights(i, F64), losses)
    total.backward()
    assert_same(losses.grad, wanted, ROUNDING[F64], SMALLEST[F64])
    room = 1e-13 * sum(map(abs, parts)) + 1e-44
    assert total.item() == pytest.approx(sum(parts), rel=0, abs=room)


def assert_samples(plan: StepPlan, step: Step, units: set[str]) -> None:
    """The table of all ranks' samples, the same on every rank, with ids of ``units`` at least."""
    table, reads = plan.samples, [m for of_rank in step for m in of_rank]
    assert table is not None
    assert_same(table.mask_sum, [x for m in reads for x in m.sums], 1e-13)
    assert table.weight.tolist() == [s.weight for m in reads for s in m.samples]
    assert table.rejected.tolist() == [x for m in reads for x in m.rejected]
    assert table.microbatch.tolist() == [k for k, m in enumerate(reads) for _ in m.samples]
    assert table.microbatches == len(reads)
    assert table.active_tokens.tolist() == [m.active for m in reads]
    assert table.model_tokens.tolist() == [m.model_tokens for m in reads]
    with_ids = {unit for unit in UNITS if all(unit in m.units for m in reads)}
    assert {*plan.ids_S} == {*table.ids} == with_ids | units
    whole = whole_step(step)
    for unit in ("all", "microbatch", "sample", *table.ids):
        keys = [oracle.key_of(unit, *x) for x in oracle.samples_of(whole)]
        groups, sums = table.groups(unit), oracle.mask_sums(whole, unit)
        # One group for each key, and one key for each group.
        pairs = {*zip(groups.group_S.tolist(), keys, strict=True)}
        assert len(pairs) == len({*keys}) == len(groups.ids_G)
        by_sample = groups.sums(table.mask_sum)[groups.group_S]
        assert_same(by_sample, [sums[key] for key in keys], 1e-13)
        if unit in table.ids and all(isinstance(key, int) for key in keys):  # and not hashed
            assert table.ids[unit].tolist() == keys


def assert_counts(plan: StepPlan, step: Step) -> None:
    """Counts are those of the whole step."""
    counts, agg = plan.counts, plan.aggregation
    of_step, reads = counted_step(agg, step), [m for of_rank in step for m in of_rank]
    of_all = [(s, gone) for m in reads for s, gone in zip(m.samples, m.rejected, strict=True)]
    assert_same(counts.tokens, sum(oracle.mask_sums(of_step, "sample").values()), 1e-13)
    assert_same(counts.all_tokens, sum(sum(s.mask) for s, _ in of_all), 1e-13)
    assert_same(counts.accepted_tokens, sum(sum(s.mask) for s, gone in of_all if not gone), 1e-13)
    assert plan.is_empty == (not any(any(s.mask) for s, gone in of_all if not gone))
    assert counts.samples == oracle.number_of(of_step, "sample")
    assert counts.rejected_samples == sum(gone for _, gone in of_all)
    assert counts.microbatches == len(reads)
    for unit in UNITS:
        with_ids = all(unit in m.units for m in reads)
        number = oracle.number_of(of_step, unit) if with_ids else None
        assert getattr(counts, f"{unit}s") == number
    _, units = oracle.shares_and_units(agg.mode, of_step, **options_of(agg))
    if agg.weighted != "all" or counts.tokens:  # there is no mean weight of no tokens
        assert_same(counts.across, units, 1e-13)
    assert counts.active_tokens == sum(m.active for m in reads)
    assert counts.model_tokens == sum(m.model_tokens for m in reads)
