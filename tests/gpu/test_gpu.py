"""On a GPU: the values of the CPU, no wait, and capture in a CUDA graph."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron_loss_agg import LossAggregation, Microbatch, StepPlan, weighted_sum

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
    from benchmarks.gpu.microbatch import captured

    whole = microbatch("thd", "cuda")
    plan = StepPlan.build(LossAggregation(mode="prompt_mean"), [whole])
    losses = torch.ones_like(whole.loss_mask, dtype=torch.float32, requires_grad=True)
    graph = captured(plan.weights(0), losses)
    losses.grad.zero_()
    graph.replay()
    torch.testing.assert_close(losses.grad, plan.weights(0))
