"""Planning a step: how its time grows, everybody's samples, and what a plan keeps."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

from benchmarks.fake_groups import fake_groups
from benchmarks.results import Results, least_seconds
from benchmarks.shapes import (
    AGGREGATIONS,
    GROWTH,
    LARGE_PLAN,
    LAYOUTS,
    PLAN,
    many_microbatches,
    rows_of_rank,
)
from megatron_loss_agg import LossAggregation, StepPlan, collectives, exchange
from megatron_loss_agg.counts import LocalTerm
from megatron_loss_agg.mcore.host import ParallelGroups
from megatron_loss_agg.mcore.splits import Splits
from megatron_loss_agg.mcore.step_weights import StepWeights, Wanted
from megatron_loss_agg.samples import Samples


def measure(results: Results) -> None:
    """Plans, their exchange and their memory; needs no process group to exist."""
    _plans(results)
    for layout in LAYOUTS:
        _growth(results, layout)
    _large_step(results)
    with fake_groups(1) as (alone,):
        for layout in LAYOUTS:
            _memory(results, layout, alone)


def _plans(results: Results) -> None:
    samples, length, number = PLAN
    plans = {}
    for layout in LAYOUTS:
        step = many_microbatches(samples, length, number, layout)
        where = f"{samples} x {length} {layout}, {number} microbatches"
        for name in ("token_mean", "prompt_mean"):
            plans[name, where] = functools.partial(StepPlan.build, AGGREGATIONS[name], step)
    for (name, where), seconds in zip(plans, least_seconds([*plans.values()], 40), strict=True):
        results.add(f"plan, {name}", where, 1e3 * seconds, "ms", "plan_ms")


def _growth(results: Results, layout: str) -> None:
    """How the time of a plan grows with its samples, its microbatches and its terms."""
    for what, sizes in GROWTH.items():
        taken = least_seconds([_plan_of(layout, **{what: size}) for size in sizes], 15)
        for size, seconds in zip(sizes, taken, strict=True):
            results.add("plan of prompt_mean", f"{size:,} {what}, {layout}", 1e3 * seconds, "ms")
        linear = taken[-2] * sizes[-1] / sizes[-2]
        where = f"{sizes[-2]:,} to {sizes[-1]:,} {what}, {layout}"
        results.add("growth of a plan", where, taken[-1] / linear, "of linear growth", "growth")


def _plan_of(
    layout: str, samples: int = 64, microbatches: int = 1, terms: int = 1
) -> Callable[[], object]:
    step = many_microbatches(samples * microbatches, 16, microbatches, layout)
    aggregations = {f"term {i}": AGGREGATIONS["prompt_mean"] for i in range(terms)}
    return functools.partial(StepPlan.build_terms, aggregations, step)


def _large_step(results: Results) -> None:
    """One rank's own work: the other ranks' rows are made beforehand, and not gathered."""
    samples, prompts, ranks = LARGE_PLAN
    aggregation = LossAggregation(mode="prompt_mean")
    samples_of_ranks = [Samples.of_microbatches(rows_of_rank(rank)) for rank in range(ranks)]
    local = [LocalTerm(aggregation, x, None) for x in samples_of_ranks]
    header = collectives.Header(failed=False, records=1, tag=0)
    records = [torch.tensor([term.record()], dtype=torch.float64) for term in local]
    capacity = exchange.TERMS_CAPACITY
    totals = torch.stack([collectives.padded_row(header, r, capacity) for r in records])
    packed = [term.table.packed(["prompt", "microbatch"]).view(-1) for term in local]
    payload = torch.nn.utils.rnn.pad_sequence(packed, batch_first=True)

    def gathered(row: Tensor, group: object) -> Tensor:
        return totals if row.numel() == totals.shape[1] else payload

    mine = rows_of_rank(0)
    with contextlib.ExitStack() as stack:
        for module in (collectives, exchange):
            stack.enter_context(mock.patch.object(module, "all_gather", gathered))
        stack.enter_context(mock.patch.object(collectives, "ranks_of", return_value=ranks))
        plan = StepPlan.build(aggregation, mine)
        (taken,) = least_seconds([lambda: StepPlan.build(aggregation, mine)], 5)
    assert plan.counts.samples == samples // ranks * ranks
    assert plan.counts.prompts is not None and plan.counts.prompts <= prompts
    where = f"{samples:,} samples, {prompts:,} prompts, {ranks} ranks"
    results.add("plan of one rank, gather simulated", where, taken, "s", "large_plan_s")
    received = (totals.nbytes + payload.nbytes) / 2**20
    results.add("received by one rank", where, received, "MiB", "payload_mb")
    sent = (totals[0].nbytes + payload[0].nbytes) / 2**20
    results.add("sent by one rank", where, sent, "MiB", "payload_mb")


def _memory(results: Results, layout: str, alone: ParallelGroups) -> None:
    """Beyond what came in, of a rank that holds the whole sequences.

    Of a plan, also beyond its copies of that.
    """
    samples, length, number = PLAN
    terms = {name: {"loss": AGGREGATIONS[name]} for name in ("prompt_mean", "custom")}
    three = ("policy", "kl", "entropy")
    terms["3 terms of prompt_mean"] = dict.fromkeys(three, AGGREGATIONS["prompt_mean"])
    step = many_microbatches(samples, length, number, layout)
    vector = 4 * sum(m.loss_mask.numel() for m in step)
    for name, aggregations in terms.items():
        plans = StepPlan.build_terms(aggregations, step)
        make = functools.partial(StepWeights.of, plans, alone, Splits(), Wanted(masks=False))
        weights = make()
        where = f"{samples} x {length} {layout}, {name}"
        (made,) = least_seconds([make], 5)
        results.add("weights before the step", where, 1e3 * made, "ms")
        given = kept_bytes(step)
        numbers = (kept_bytes([plans, step]) - 2 * given) / (8 * samples * len(plans))
        results.add("kept by the plan", where, numbers, "fp64 by sample, term", "kept_by_sample")
        vectors = (kept_bytes([weights, step]) - given) / vector
        results.add("kept by the weights", where, vectors, "fp32 vectors", "kept_vectors")


def kept_bytes(root: object) -> int:
    """Bytes of all tensors that ``root`` leads to, each storage once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors(root)}
    return sum(storages.values())


def _tensors(root: object) -> Iterator[Tensor]:
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        x = waiting.pop()
        if id(x) in seen or isinstance(x, type) or callable(x):
            continue
        seen.add(id(x))
        if isinstance(x, Tensor):
            yield x
        else:
            waiting.extend(gc.get_referents(x))
