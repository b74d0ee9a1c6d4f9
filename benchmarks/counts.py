"""Counts of the work that the hook adds to a microbatch's loss in stock Megatron.

Unlike times, counts are the same on every machine. The following are counted, in a step other than
the first:

- kernel launches: operations with a result on the device, without views, allocations and copies
  from the host, but with Megatron's own scaling of the loss and the backward pass;
- uploads: copies from the host to the device;
- waits: operations for which the host waits for the device, such as reading a value;
- Python calls: of all Python functions, including torch's, inside the loss function that Megatron
  calls, without those of the CPU stand-in for a GPU (`mcore/cpu`). For stock Megatron, that is the
  script's loss function; the hook calls it, too.

A microbatch is any except the first of the step. The first one does more; its excess is a separate
figure, once per step.

The device is from `tests.device`: its tensors report an accelerator but are in the CPU's memory, so
that every branch is taken as on a GPU. It has no backward pass; that pass's operations are counted
on the CPU, where all of them are on tensors that would be on the device.
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
"""Number of samples, and of tokens in each; counts do not depend on them."""


def measure(results: Results) -> None:
    """Measure each layout in a new process, since torch cannot take the device back."""
    spawn = multiprocessing.get_context("spawn")
    for layout in LAYOUTS:
        with spawn.Pool(1) as pool:
            stock, hook = pool.apply(counts_of_steps, (layout,))
        for name in ("launches", "uploads", "waits", "calls"):
            goal = f"launches_{layout}" if name == "launches" else name
            what = name.replace("calls", "Python calls")
            added = (hook[name] - stock[name]) / (NUMBER - 1)
            results.add(f"{what} of a microbatch", layout, added, "more than stock", goal)
            once = hook[f"first_{name}"] - stock[f"first_{name}"] - added
            results.add(f"{what} once a step", layout, once, "more than stock")
        waits = hook["step_waits"] - stock["step_waits"]
        results.add("waits of a step", layout, waits, "more than stock", "step_waits")


def counts_of_steps(layout: str) -> tuple[Counter[str], Counter[str]]:
    """All counts of a step, for stock Megatron and for the hook."""
    log = contextlib.redirect_stdout(io.StringIO())
    with log, megatron.groups(), reruns_disabled():
        losses = CountedLosses(microbatch(*SHAPE, layout))
        works = losses.stock, losses.hooked()
        for work in works:
            work()
            work()  # the first steps have more checks
        counts = Counter(), Counter()
        for kind in ("calls", "backward", "forward"):
            losses.count_next(kind)
            for work, losses.counts in zip(works, counts, strict=True):
                work()
                losses.counts["step_waits"] += losses.take_waits()
    return counts


class CountedLosses(Losses):
    """Steps of losses that add one kind of work to ``counts``.

    Names of counts begin with ``first_`` for the step's first microbatch.
    """

    def __init__(self, batch: megatron.Batch) -> None:
        super().__init__(lambda: 0.0, batch, NUMBER)
        self.counts: Counter[str] = Counter()
        self._counted = ""
        self._prefix = ""

    def count_next(self, kind: str) -> None:
        """Count ``calls``, the ``backward`` pass, or the ``forward`` pass (on the device)."""
        self._counted = kind
        if kind == "forward":
            device.take()  # it cannot be given back
            device.Watch().__enter__()
            self.masks = [x.to(device.DEVICE) for x in self.masks]
            self.leaves = [x.detach().to(device.DEVICE).requires_grad_() for x in self.leaves]
            self.take_waits()

    def take_waits(self) -> int:
        """The number of waits since the last call."""
        number = len(device.waits)
        device.waits.clear()
        return number

    def loss(self, model: Any, output: Tensor, loss_func: Any, *call: Any) -> Tensor:
        self._prefix = "first_" if output is self.leaves[0] else ""
        if self._counted == "calls":
            loss_func = CountedCalls(loss_func, self.counts, f"{self._prefix}calls")
        if self._counted == "backward":
            with Operations():  # so that the graph is the same as on a device
                return super().loss(model, output, loss_func, *call)
        before = {name: len(getattr(device, name)) for name in ("launches", "uploads", "waits")}
        loss = super().loss(model, output, loss_func, *call)
        for name, number in before.items():
            self.counts[self._prefix + name] += len(getattr(device, name)) - number
        return loss

    def backward(self, loss: Tensor) -> None:
        if self._counted == "forward":
            return
        with Operations() as operations:
            super().backward(loss)
        if self._counted == "backward":
            self.counts[f"{self._prefix}launches"] += operations.but_views


class CountedCalls:
    """A loss function that adds the number of its Python calls to ``counts[name]``."""

    def __init__(self, function: Callable[..., Any], counts: Counter[str], name: str) -> None:
        self._function, self._counts, self._name = function, counts, name

    def __call__(self, output: Tensor) -> Any:
        sys.setprofile(self._count)
        try:
            return self._function(output)
        finally:
            sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        is_stand_in = "mcore/cpu/" in frame.f_code.co_filename
        if event == "call" and not is_stand_in:
            self._counts[self._name] += 1
