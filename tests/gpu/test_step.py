"""On a GPU: a step's losses never wait, wherever its masks come from, and planning it does once."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks import megatron
from benchmarks.loss_function import Losses
from benchmarks.shapes import MODE, microbatch
from megatron_loss_agg import Microbatch, StepPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

NUMBER = 3
SHAPE = 16, 64  # samples, tokens of each


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    with megatron.groups(gpu=True):
        yield


class Strict:
    """A schedule in which waiting for the GPU is an error; keeps the waits before it."""

    def __init__(self) -> None:
        self.mode = "default"
        self.seen: list[Any] = []
        self.waits_before = 0

    def __call__(
        self, *, forward_step_func: Any, data_iterator: Any, model: Any, num_microbatches: int
    ) -> None:
        self.waits_before = sum("synchronizing CUDA" in str(w.message) for w in self.seen)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode(self.mode)
        try:
            for _ in range(num_microbatches):
                output, loss_func = forward_step_func(data_iterator, model)
                loss_func(output)[0].backward()
        finally:
            torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("layout", ["rows", "packs"])
def test_no_loss_waits_and_gradients_are_those_of_the_cpu(layout, device):
    from megatron_loss_agg.mcore import LossHook

    batch = microbatch(*SHAPE, layout)
    w = StepPlan.build(MODE, [Microbatch(**batch)] * NUMBER).weights(0)
    step = Losses(time.perf_counter, {name: x.to(device) for name, x in batch.items()}, NUMBER)
    strict = Strict()
    schedule = LossHook(MODE).wrap(strict)

    def run() -> None:
        for leaf in step.leaves:
            leaf.grad = None
        step.run(schedule, lambda mask: partial(megatron.loss_func, mask))

    run()  # the first step compares more, and may wait for it
    strict.mode = "error"
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as strict.seen:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert strict.waits_before == (device == "cuda")
    for leaf in step.leaves:
        torch.testing.assert_close(leaf.grad.cpu(), NUMBER * w)
