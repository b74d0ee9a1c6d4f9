"""Planning a step: counting, merging everybody's groups, and what a plan keeps."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor

from benchmarks.fake_groups import fake_groups
from benchmarks.results import Results, least_seconds
from benchmarks.shapes import (
    AGGREGATIONS,
    LARGE_PLAN,
    LAYOUTS,
    MORE_PLANS,
    PLAN,
    many_microbatches,
    rows_of_rank,
)
from megatron_loss_agg import LossAggregation, Microbatch, StepPlan, collectives, counts, groups
from megatron_loss_agg.masks import MaskSums
from megatron_loss_agg.mcore.host import ParallelGroups
from megatron_loss_agg.mcore.splits import Splits
from megatron_loss_agg.mcore.step_weights import StepWeights, Wanted
from megatron_loss_agg.samples import Samples


def measure(results: Results) -> None:
    """Plans, their exchange and their memory; needs no process group to exist."""
    _plans(results)
    _large_step(results)
    with fake_groups(1) as (alone,):
        for layout in LAYOUTS:
            _memory(results, layout, alone)


def _plans(results: Results) -> None:
    plans = {}
    for layout in LAYOUTS:
        for shape in (PLAN, *MORE_PLANS):
            samples, length, number = shape
            step = many_microbatches(samples, length, number, layout)
            where = f"{samples} x {length} {layout}, {number} microbatches"
            for name in ("token_mean", "prompt_mean"):
                build = functools.partial(StepPlan.build, AGGREGATIONS[name], step)
                plans[name, where, "plan_ms" if shape == PLAN else ""] = build
    taken = least_seconds([*plans.values()], 40)
    for (name, where, goal), seconds in zip(plans, taken, strict=True):
        results.add(f"plan, {name}", where, 1e3 * seconds, "ms", goal)


def _large_step(results: Results) -> None:
    """One rank's own work: the other ranks' rows are made beforehand, and not gathered."""
    samples, prompts, ranks = LARGE_PLAN
    aggregation = LossAggregation(mode="prompt_mean")
    local = [_local_counts(aggregation, rows_of_rank(rank)) for rank in range(ranks)]
    header = collectives.Header(failed=False, records=1, tag=0)
    records = [torch.tensor([c.record()], dtype=torch.float64) for c in local]
    capacity = counts.TERMS_CAPACITY
    totals = torch.stack([collectives.padded_row(header, r, capacity) for r in records])
    size = 2 * max(c.groups["prompt"].ids.numel() for c in local)
    payload = torch.stack([groups.packed_groups([c.groups["prompt"]], size) for c in local])

    def gathered(row: Tensor, group: object) -> Tensor:
        return totals if row.numel() == totals.shape[1] else payload

    mine = rows_of_rank(0)
    with contextlib.ExitStack() as stack:
        for module in (collectives, groups):
            stack.enter_context(mock.patch.object(module, "all_gather", gathered))
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


def _local_counts(
    aggregation: LossAggregation, microbatches: list[Microbatch]
) -> counts.LocalCounts:
    samples = Samples.of_microbatches(microbatches, MaskSums.read(microbatches))
    return counts.LocalCounts(aggregation, samples, None)


def _memory(results: Results, layout: str, alone: ParallelGroups) -> None:
    """Beyond the masks and ids that came in, of a rank that holds the whole sequences."""
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
        kept = {"plan": kept_bytes([plans, step]), "weights": kept_bytes([weights, step])}
        for what, number_of in kept.items():
            vectors = (number_of - kept_bytes(step)) / vector
            results.add(f"kept by the {what}", where, vectors, "fp32 vectors", "kept_vectors")


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
