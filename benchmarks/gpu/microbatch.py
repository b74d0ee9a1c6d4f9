"""On a GPU: time and kernel launches of one microbatch's loss, and its capture in a CUDA graph."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.fake_groups import fake_groups
from benchmarks.gpu.evidence import Evidence
from benchmarks.hook import floor, hook, local_weights_of
from benchmarks.shapes import AGGREGATIONS, LAYOUTS, MICROBATCHES, Shape
from megatron_loss_agg import weighted_sum
from megatron_loss_agg.mcore.host import ParallelGroups


def measure(
    evidence: Evidence, shapes: Sequence[tuple[int, int]] = MICROBATCHES, kernels: bool = True
) -> None:
    """Every shape and layout; ``kernels``: their number too, which a stand-in for a GPU lacks.

    Needs no process group to exist.
    """
    torch.cuda.set_device(0)
    with fake_groups(1) as (alone,):
        for layout in LAYOUTS:
            for samples, length in shapes:
                _one_shape(evidence, Shape(samples, length, layout), alone, kernels)


def _one_shape(evidence: Evidence, shape: Shape, groups: ParallelGroups, kernels: bool) -> None:
    """A data loader's masks are on the CPU, and so is the plan; a script's mask is on the GPU."""
    whole = shape.microbatch()
    weights = local_weights_of(AGGREGATIONS["prompt_mean"], whole, groups)
    mask = whole.loss_mask.cuda()
    losses = torch.randn(mask.shape, device="cuda", requires_grad=True)
    w = weights.made_for(mask, torch.float32).view(mask.shape)
    least = functools.partial(floor, w, losses)
    work = functools.partial(hook, weights, mask, losses)
    where = f"{shape.samples} x {shape.length} {shape.layout}"
    base, taken = microseconds(least, work)
    evidence.add("floor", where, base, "us")
    evidence.add("hook", where, taken, "us")
    evidence.add("hook", where, taken / base, "x floor", "hook_on_gpu")
    if kernels:
        evidence.add("floor, launches", where, launches(least), "kernels")
        evidence.add("hook, launches", where, launches(work), "kernels")
        (replayed,) = microseconds(captured(w, losses).replay)
        evidence.add("hook in a CUDA graph", where, replayed, "us")


def microseconds(*functions: Callable[[], object], rounds: int = 50) -> list[float]:
    """Median of each over rounds in which all run."""
    taken: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds + 5):
        for function, found in zip(functions, taken, strict=True):
            found.append(1e3 * milliseconds(function))
    return [statistics.median(found[5:]) for found in taken]


def milliseconds(function: Callable[[], object]) -> float:
    """From an idle GPU to an idle GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def launches(function: Callable[[], object]) -> int:
    """Kernels and copies that the GPU ran."""
    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        function()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in seen.events())


def captured(w: Tensor, losses: Tensor) -> torch.cuda.CUDAGraph:
    """A graph of the sum and its gradient; weights are made outside, once for each step."""
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
