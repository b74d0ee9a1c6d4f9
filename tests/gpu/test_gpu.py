"""On a GPU: the values of the CPU, no wait, and capture in a CUDA graph."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks import megatron, shapes
from benchmarks.loss_function import Losses
from megatron_loss_agg import CPLayout, LossAggregation, Microbatch, StepPlan, weighted_sum

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

MODES = ["token_mean", "sample_mean", "rollout_mean", "prompt_mean", "microbatch_mean"]
SAMPLES, LENGTH = 37, 24
every_mode = pytest.mark.parametrize("mode", MODES)
every_layout = pytest.mark.parametrize("layout", ["bshd", "thd"])


@contextmanager
def synchronizing(what: str) -> Iterator[None]:
    """Waiting for the GPU raises (``error``) or warns (``warn``)."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(what)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


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


def loss_and_gradient(mode: str, layout: str, device: str) -> tuple[Any, Any]:
    """In fp64, with NaN wherever the mask is 0; computed twice, the second time without a wait."""
    whole = microbatch(layout, device)
    generator = torch.Generator().manual_seed(2)
    losses = torch.randn(whole.loss_mask.shape, generator=generator, dtype=torch.float64).to(device)
    losses = losses.masked_fill(whole.loss_mask == 0, math.nan).requires_grad_()
    plan = StepPlan.build(LossAggregation(mode=mode), [whole])
    for kind in ("default", "error"):
        losses.grad = None
        with synchronizing(kind):
            total = weighted_sum(plan.weights(0, torch.float64), losses)
            total.backward()
    return total.detach().cpu(), losses.grad.cpu()


@every_layout
@every_mode
def test_values_and_gradients_are_those_of_the_cpu_and_nobody_waits(mode: str, layout: str) -> None:
    expected, got = (loss_and_gradient(mode, layout, device) for device in ("cpu", "cuda"))
    for x, y in zip(expected, got, strict=True):
        torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-15)


def test_the_sum_can_be_captured_in_a_graph() -> None:
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
def test_packs_are_split_as_transformer_engine_splits_them(size: int) -> None:
    tex = pytest.importorskip("transformer_engine_torch")
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        lengths = 2 * size * torch.randint(1, 9, (7,), generator=generator)
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        for rank in range(size):
            given = offsets.cuda(), int(offsets[-1]), size, rank
            theirs = tex.thd_get_partitioned_indices(*given).cpu().long()
            assert torch.equal(theirs, CPLayout.thd(offsets, size, rank).index)


@pytest.fixture(scope="module")
def groups() -> Iterator[None]:
    with megatron.groups(gpu=True):
        yield


class Schedule:
    """Calls the forward step and ``backward``; waits are as told, and those before it are kept."""

    def __init__(self) -> None:
        self.waiting = "default"
        self.seen: list[Any] = []
        self.waits_before = 0

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
    ) -> None:
        self.waits_before = sum("synchronizing CUDA" in str(w.message) for w in self.seen)
        with synchronizing(self.waiting):
            for _ in range(num_microbatches):
                output, loss_func = forward_step_func(data_iterator, model)
                loss_func(output)[0].backward()


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("layout", ["rows", "packs"])
def test_a_step_waits_once_if_its_masks_are_on_the_gpu_and_never_in_its_losses(
    layout: str, device: str
) -> None:
    from megatron_loss_agg.mcore import LossHook

    number, batch = 3, shapes.microbatch(16, 64, layout)
    w = StepPlan.build(shapes.MODE, [Microbatch(**batch)] * number).weights(0)
    step = Losses(time.perf_counter, {name: x.to(device) for name, x in batch.items()}, number)
    inner = Schedule()
    schedule = LossHook(shapes.MODE).wrap(inner)

    def run() -> None:
        for leaf in step.leaves:
            leaf.grad = None
        step.run(schedule, lambda mask: partial(megatron.loss_func, mask))

    run()  # the first step compares more, and may wait for it
    inner.waiting = "error"
    with synchronizing("warn"), warnings.catch_warnings(record=True) as inner.seen:
        warnings.simplefilter("always")
        run()
    assert inner.waits_before == (device == "cuda")
    for leaf in step.leaves:
        torch.testing.assert_close(leaf.grad.cpu(), number * w)
