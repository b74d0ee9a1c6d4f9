"""The hook's work on one microbatch, against ``(x * w).sum()`` forward and backward."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.fake_groups import fake_groups
from benchmarks.results import Results, ratios
from benchmarks.shapes import AGGREGATIONS, CONTEXT_PARALLEL, LAYOUTS, MICROBATCHES, Shape
from megatron_loss_agg import Microbatch, StepPlan, weighted_sum
from megatron_loss_agg.mcore.host import ParallelGroups
from megatron_loss_agg.mcore.local_weights import LocalWeights
from megatron_loss_agg.mcore.splits import Splits
from megatron_loss_agg.mcore.step_weights import StepWeights, Wanted
from megatron_loss_agg.report import Mean

Work = Callable[[], object]


def measure(results: Results) -> None:
    """Every shape, layout and number of context-parallel ranks; needs no process group to exist."""
    with fake_groups(*CONTEXT_PARALLEL) as by_size:
        for groups in by_size:
            for layout in LAYOUTS:
                for samples, length in MICROBATCHES:
                    _one_shape(results, Shape(samples, length, layout), groups)


def _one_shape(results: Results, shape: Shape, groups: ParallelGroups) -> None:
    cp = dist.get_world_size(groups.cp)
    whole = shape.microbatch()
    (layout,) = recognised(groups).layouts(whole, groups).values()
    mask = whole.loss_mask if layout is None else layout.shard(whole.loss_mask)
    losses = torch.randn(mask.shape, requires_grad=True)
    weights = {name: local_weights_of(agg, whole, groups) for name, agg in AGGREGATIONS.items()}
    w = weights["token_mean"].made_for(mask, torch.float32).view(mask.shape)
    works = {name: functools.partial(hook, of, mask, losses) for name, of in weights.items()}
    poisoned = losses.detach().masked_fill(mask == 0, math.nan).requires_grad_()
    works["NaN where masked"] = functools.partial(hook, weights["token_mean"], mask, poisoned)
    works["metric"] = functools.partial(Mean.of, losses, w)
    rounds = 25 if mask.numel() > 100_000 else 60
    least = functools.partial(floor, w, losses)
    base, found = ratios(least, works, rounds)
    where = f"{shape.samples} x {shape.length} {shape.layout} cp{cp}"
    results.add("floor", where, 1e6 * base, "us")
    for name in AGGREGATIONS:
        results.add(f"hook, {name}", where, found[name], "x floor", "hook")
    results.add("hook, NaN where masked", where, found["NaN where masked"], "x floor")
    results.add("a further metric", where, found["metric"], "x floor", "metric")
    if cp == 1:
        slow: dict[str, Work] = {"loop over samples": functools.partial(loop, whole, losses)}
        slow["padded matrix"] = functools.partial(padded, whole, losses)
        for name, ratio in ratios(least, slow, rounds=1, warm_up=1)[1].items():
            results.add(name, where, ratio, "x floor")


def local_weights_of(
    aggregation: object, whole: Microbatch, groups: ParallelGroups
) -> LocalWeights:
    plans = StepPlan.build_terms({"loss": aggregation}, [whole])  # type: ignore[dict-item]
    step = StepWeights.of(plans, groups, recognised(groups), Wanted(masks=False))
    (weights,) = step.terms["loss"][0].values()
    return weights


def recognised(groups: ParallelGroups) -> Splits:
    """What a hook knows after its first step."""
    splits = Splits()
    splits.gathers.settle(dist.get_world_size(groups.cp) == 1)
    splits.narrow(False, {"zigzag": []}, [])
    splits.narrow(True, {"zigzag inside every sequence": []}, [])
    return splits


def floor(w: Tensor, losses: Tensor) -> None:
    """The least that a weighted loss can cost, with weights that are given."""
    losses.grad = None
    (losses * w).sum().backward()


def hook(weights: LocalWeights, mask: Tensor, losses: Tensor) -> None:
    """What `Step` does of a microbatch's loss: weights, NaN-safe sum, and its gradient."""
    losses.grad = None
    w = weights.made_for(mask, torch.float32)
    weighted_sum(w, losses.reshape(-1)).backward()


def loop(whole: Microbatch, losses: Tensor) -> None:
    """Mean of masked means, a sample at a time."""
    losses.grad = None
    if whole.cu_seqlens is None:
        samples = zip(losses, whole.loss_mask, strict=True)
    else:
        lengths = whole.cu_seqlens.diff().tolist()
        samples = zip(losses.split(lengths), whole.loss_mask.split(lengths), strict=True)
    means = [(x * m).sum() / m.sum().clamp(min=1) for x, m in samples]
    torch.stack(means).mean().backward()


def padded(whole: Microbatch, losses: Tensor) -> None:
    """The same on a matrix of rows; of a pack, padded to its longest sample."""
    losses.grad = None
    x, m = losses, whole.loss_mask
    if whole.cu_seqlens is not None:
        lengths = whole.cu_seqlens.diff()
        longest = int(lengths.max())
        shift = torch.arange(len(lengths)) * longest - whole.cu_seqlens[:-1]
        place = torch.arange(m.numel()) + shift.repeat_interleave(lengths)
        empty = losses.new_zeros(len(lengths) * longest)
        x, m = (empty.index_copy(0, place, t).view(-1, longest) for t in (x, m))
    ((x * m).sum(1) / m.sum(1).clamp(min=1)).mean().backward()
