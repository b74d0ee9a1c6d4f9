"""On a GPU: a step's losses never wait, wherever its masks come from, and planning it does once."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.fake_groups import fake_call, fake_groups
from benchmarks.loss_function import loss_func
from megatron_loss_agg import LossAggregation, Microbatch, Term
from megatron_loss_agg.mcore.call_losses import Options, Step
from megatron_loss_agg.mcore.splits import Splits
from megatron_loss_agg.mcore.step_weights import StepWeights, Wanted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

GPU = "cuda"
NUMBER, SAMPLES, LENGTH = 3, 5, 64
TERMS = {"loss": Term(LossAggregation(mode="sample_mean"))}


@pytest.fixture(scope="module")
def groups() -> Iterator[Any]:
    with fake_groups(1) as (found,):
        yield found


def microbatch(layout: str, device: str) -> Microbatch:
    mask = (torch.arange(SAMPLES * LENGTH) % 3 > 0).float().to(device)
    ids = {"prompt_ids": torch.arange(SAMPLES, device=device)}
    if layout == "rows":
        return Microbatch(mask.view(SAMPLES, LENGTH), **ids)
    starts = LENGTH * torch.arange(SAMPLES + 1, dtype=torch.int32, device=device)
    return Microbatch(mask, starts, cu_seqlens_padded=starts, **ids)


def planned(groups: Any, layout: str, device: str) -> StepWeights:
    step = [microbatch(layout, device) for _ in range(NUMBER)]
    splits = Splits()
    splits.gathers.settle(True)
    return StepWeights.plan(lambda: step, TERMS, groups, splits, Wanted(masks=False))


def losses_of(groups: Any, weights: StepWeights, masks: list[Tensor]) -> list[Tensor]:
    """The gradients of a call's losses, whose reports and checks are made, too."""
    losses = [torch.ones_like(mask, requires_grad=True) for mask in masks]
    model, given = torch.nn.Identity(), iter(zip(losses, masks, strict=True))

    def forward_step() -> Any:
        output, mask = next(given)
        return model(output), functools.partial(loss_func, mask)

    call = fake_call(groups, model, forward_step, len(masks))
    options = Options(False, {loss_func.__code__}, None, None, False)
    step = Step(call, TERMS, lambda: weights, Splits(), options)
    before = torch.cuda.get_sync_debug_mode()
    with step._model_calls.watch():
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in masks:
                output, loss = step.forward_step()
                loss(output)[0].backward()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    step.finish()
    return [x.grad for x in losses]


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("layout", ["rows", "packs"])
def test_no_loss_of_a_step_waits_and_gradients_are_those_of_the_cpu(groups, layout, device):
    weights = planned(groups, layout, device)
    masks = [microbatch(layout, GPU).loss_mask for _ in range(NUMBER)]
    expected = planned(groups, layout, "cpu")
    for i, gradient in enumerate(losses_of(groups, weights, masks)):
        mask = masks[i].cpu()
        w = expected.choose(i, {"loss": mask}, None, Splits(), True)["loss"]
        made = NUMBER * w.made_for(mask, torch.float32).view(mask.shape)
        torch.testing.assert_close(gradient.cpu(), made)


@pytest.mark.parametrize("layout", ["rows", "packs"])
def test_planning_masks_on_the_gpu_waits_once(groups, layout):
    planned(groups, layout, GPU)
    step = [microbatch(layout, GPU) for _ in range(NUMBER)]
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            StepWeights.plan(lambda: step, TERMS, groups, Splits(), Wanted(masks=False))
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert len([w for w in waits if "called a synchronizing" in str(w.message)]) == 1
