"""The work of a microbatch's loss in the hook beside stock Megatron's, by counts.

Unlike times they are the same on every machine. Counted are an ordinary later step's

- kernel launches: operations whose result lies on the device, without views, allocations and
  copies from the host. Megatron's own scaling of the loss and the backward pass count, too;
- uploads: copies from the host to the device;
- waits: operations for which the host waits for the device, as for a value that it reads;
- Python calls: of any Python functions, torch's too, inside the loss function that Megatron calls,
  without those of the CPU stand-in for a GPU (`mcore/cpu`). Stock's are those of the script's own
  loss function, which the hook calls, too.

The device is the one of `tests.device`: tensors in the memory of the CPU that say that they lie on an
accelerator, so that every branch is that of a GPU. It has no backward pass, whose operations are
counted on the CPU; there all of them are of tensors that would lie on the device.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor

from benchmarks import megatron
from benchmarks.loss_function import Losses, reruns_disabled
from benchmarks.results import Results
from benchmarks.shapes import LAYOUTS, microbatch
from tests import device
from tests.core.operations import Operations

NUMBER = 4
"""Microbatches of a step."""
SHAPE = 8, 128
"""Samples, and tokens of each; counts are the same for any."""


def measure(results: Results) -> None:
    """By layout, in a process of its own: torch cannot take the device back."""
    spawn = multiprocessing.get_context("spawn")
    for layout in LAYOUTS:
        with spawn.Pool(1) as pool:
            stock, hook = pool.apply(counts_of_steps, (layout,))
        added = {name: number - stock[name] for name, number in hook.items()}
        for name in ("launches", "uploads", "waits", "calls"):
            goal = f"launches_{layout}" if name == "launches" else name
            what = f"{name.replace('calls', 'Python calls')} added to a microbatch"
            results.add(what, layout, added[name] / NUMBER, "more than stock", goal)
        results.add(
            "waits added to a step", layout, added["step_waits"], "more than stock", "step_waits"
        )
        results.add("uploads added to a step", layout, added["step_uploads"], "more than stock")


def counts_of_steps(layout: str) -> tuple[Counter[str], Counter[str]]:
    """All counts of a step, stock Megatron's and the hook's."""
    log = contextlib.redirect_stdout(io.StringIO())
    with log, megatron.groups(), reruns_disabled():
        losses = CountedLosses(microbatch(*SHAPE, layout))
        works = losses.stock, losses.hooked()
        counts = Counter(), Counter()
        for work in works:
            work()
            work()  # not the first step, which has more checks
        for work, count in zip(works, counts, strict=True):
            losses.counts = count
            work()
        losses.move_to_device()
        with device.Watch():
            for work, count in zip(works, counts, strict=True):
                losses.counts = count
                device.waits.clear()
                device.uploads.clear()
                work()
                count["step_waits"] = len(device.waits)
                count["step_uploads"] = len(device.uploads)
    return counts


class CountedLosses(Losses):
    """Steps of losses whose work is added to ``counts``."""

    def __init__(self, batch: megatron.Batch) -> None:
        super().__init__(lambda: 0.0, batch, NUMBER)
        self.counts: Counter[str] = Counter()
        self._is_on_device = False

    def move_to_device(self) -> None:
        device.take()
        self.masks = [x.to(device.DEVICE) for x in self.masks]
        self.leaves = [x.detach().to(device.DEVICE).requires_grad_() for x in self.leaves]
        self._is_on_device = True

    def loss(self, model: Any, output: Tensor, loss_func: Any, *call: Any) -> Tensor:
        if not self._is_on_device:
            return super().loss(model, output, CountedCalls(loss_func, self.counts), *call)
        before = {name: len(getattr(device, name)) for name in ("launches", "uploads", "waits")}
        loss = super().loss(model, output, loss_func, *call)
        for name, number in before.items():
            self.counts[name] += len(getattr(device, name)) - number
        return loss

    def backward(self, loss: Tensor) -> None:
        if self._is_on_device:
            return
        with Operations() as operations:
            loss.backward()
        self.counts["launches"] += operations.but_views


class CountedCalls:
    """A loss function whose calls of Python functions are added to ``counts``."""

    def __init__(self, function: Callable[..., Any], counts: Counter[str]) -> None:
        self._function, self._counts = function, counts

    def __call__(self, output: Tensor) -> Any:
        sys.setprofile(self._count)
        try:
            return self._function(output)
        finally:
            sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            is_stand_in = "mcore/cpu/" in frame.f_code.co_filename
            self._counts["stand_in_calls" if is_stand_in else "calls"] += 1
