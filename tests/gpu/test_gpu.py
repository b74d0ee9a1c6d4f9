"""On a GPU: the values of the CPU, no wait, and capture in a CUDA graph."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron_loss_agg import CPLayout, LossAggregation, Microbatch, StepPlan, weighted_sum

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

MODES = ["token_mean", "sample_mean", "rollout_mean", "prompt_mean", "microbatch_mean"]
SAMPLES, LENGTH = 37, 24


def microbatch(layout: str, device: str) -> Microbatch:
    generator = torch.Generator().manual_seed(1)
    mask = (torch.rand(SAMPLES, LENGTH, generator=generator) < 0.6).double()
    ids = {"prompt_ids": torch.arange(SAMPLES) // 3, "rollout_ids": torch.arange(SAMPLES) // 2}
    ids = {name: x.to(device) for name, x in ids.items()}
    if layout == "bshd":
        return Microbatch(mask.to(device), **ids)
    starts = (LENGTH * torch.arange(SAMPLES + 1, dtype=torch.int32)).to(device)
    mask[:, -4:] = 0  # padding between the samples
    real = (LENGTH - 4) * torch.arange(SAMPLES + 1, dtype=torch.int32).to(device)
    return Microbatch(mask.view(-1).to(device), real, cu_seqlens_padded=starts, **ids)


def computed(mode: str, layout: str, device: str) -> tuple[Any, Any]:
    """Loss and gradient in fp64, with NaN wherever the mask is 0."""
    whole = microbatch(layout, device)
    generator = torch.Generator().manual_seed(2)
    losses = torch.randn(whole.loss_mask.shape, generator=generator, dtype=torch.float64).to(device)
    losses = losses.masked_fill(whole.loss_mask == 0, math.nan).requires_grad_()
    plan = StepPlan.build(LossAggregation(mode=mode), [whole])
    total = weighted_sum(plan.weights(0, torch.float64), losses)
    total.backward()
    return total.detach().cpu(), losses.grad.cpu()


@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize("mode", MODES)
def test_values_and_gradients_are_those_of_the_cpu(mode, layout):
    expected, got = computed(mode, layout, "cpu"), computed(mode, layout, "cuda")
    for x, y in zip(expected, got, strict=True):
        torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize("mode", MODES)
def test_a_microbatch_does_not_wait_for_the_gpu(mode, layout):
    whole = microbatch(layout, "cuda")
    plan = StepPlan.build(LossAggregation(mode=mode), [whole])
    losses = torch.zeros_like(whole.loss_mask, requires_grad=True)
    weighted_sum(plan.weights(0), losses).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        weighted_sum(plan.weights(0), losses).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_sum_can_be_captured_in_a_graph():
    whole = microbatch("thd", "cuda")
    w = StepPlan.build(LossAggregation(mode="prompt_mean"), [whole]).weights(0)
    losses = torch.ones_like(w, requires_grad=True)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            losses.grad = None
            weighted_sum(w, losses).backward()
    torch.cuda.current_stream().wait_stream(side)
    losses.grad = None
    with torch.cuda.graph(graph):
        weighted_sum(w, losses).backward()
    losses.grad.zero_()
    graph.replay()
    torch.testing.assert_close(losses.grad, w)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_packs_are_split_as_transformer_engine_splits_them(size):
    tex = pytest.importorskip("transformer_engine_torch")
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        lengths = 2 * size * torch.randint(1, 9, (7,), generator=generator)
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        for rank in range(size):
            given = offsets.cuda(), int(offsets[-1]), size, rank
            theirs = tex.thd_get_partitioned_indices(*given).cpu().long()
            assert torch.equal(theirs, CPLayout.thd(offsets, size, rank).index)
