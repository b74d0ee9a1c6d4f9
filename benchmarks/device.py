"""On a GPU: time and kernel launches of one microbatch's loss, and its capture in a CUDA graph."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.hook import floor
from benchmarks.results import Results
from benchmarks.shapes import AGGREGATIONS, LAYOUTS, MICROBATCHES, Shape
from megatron_loss_agg import Microbatch, StepPlan, weighted_sum


def measure(results: Results) -> None:
    torch.cuda.set_device(0)
    for layout in LAYOUTS:
        for samples, length in MICROBATCHES:
            where = f"{samples} x {length} {layout}"
            whole = on_gpu(Shape(samples, length, layout).microbatch())
            plan = StepPlan.build(AGGREGATIONS["prompt_mean"], [whole])
            losses = torch.randn(whole.loss_mask.shape, device="cuda", requires_grad=True)
            work = functools.partial(hook, plan, losses)
            least = functools.partial(floor, plan.weights(0), losses)
            results.add("floor", where, microseconds(least), "us")
            results.add("hook", where, microseconds(work), "us")
            results.add("floor, launches", where, launches(least), "kernels")
            results.add("hook, launches", where, launches(work), "kernels")
            graph = captured(plan, losses)
            results.add("hook in a CUDA graph", where, microseconds(graph.replay), "us")


def on_gpu(whole: Microbatch) -> Microbatch:
    starts = None if whole.cu_seqlens is None else whole.cu_seqlens.cuda()
    assert whole.prompt_ids is not None
    return Microbatch(whole.loss_mask.cuda(), starts, whole.prompt_ids.cuda())


def hook(plan: StepPlan, losses: Tensor) -> None:
    """Weights, NaN-safe sum and gradient, none of which waits for the GPU."""
    losses.grad = None
    weighted_sum(plan.weights(0), losses).backward()


def microseconds(function: Callable[[], object], rounds: int = 50) -> float:
    """Median over rounds, from an idle GPU to an idle GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    taken = []
    for i in range(rounds + 5):
        torch.cuda.synchronize()
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        if i >= 5:
            taken.append(1e3 * begin.elapsed_time(end))
    return statistics.median(taken)


def launches(function: Callable[[], object]) -> int:
    """Kernels and copies that the GPU ran."""
    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        function()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in seen.events())


def captured(plan: StepPlan, losses: Tensor) -> torch.cuda.CUDAGraph:
    """A graph of the sum and its gradient; weights are made outside, once for each step."""
    w = plan.weights(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            losses.grad = None
            weighted_sum(w, losses).backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    losses.grad = None
    with torch.cuda.graph(graph):
        weighted_sum(w, losses).backward()
    return graph
