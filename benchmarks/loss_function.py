"""The cost of a microbatch's loss: the script's function in the hook, and in stock Megatron.

Megatron's schedule code calls both and scales their losses. The hook's time is measured from the
beginning of the schedule to the hook's return, including its checks and reports, but without the
planning before. Its step is not the first one.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks import megatron
from benchmarks.megatron import Batch
from benchmarks.memory import LiveBytes
from benchmarks.results import Results
from benchmarks.shapes import LAYOUTS, MODE, SMALL, microbatch
from megatron_loss_agg import StepPlan
from megatron_loss_agg.mcore import Call, Extension, LossHook, TokenLoss

NUMBER = 8
"""Microbatches of a step."""


def measure(results: Results, gpu: bool = False) -> None:
    """Measure every shape in rows and packs with fp32 masks, as from loaders; one also in bool."""
    with megatron.groups(gpu), reruns_disabled():
        for shape in results.shapes.losses:
            for layout in LAYOUTS:
                _one_shape(results, shape, layout, torch.float32)
                if shape == results.shapes.bool_mask:
                    _one_shape(results, shape, layout, torch.bool)


@contextlib.contextmanager
def reruns_disabled() -> Iterator[None]:
    """Turn off reruns of rejected microbatches, since they slow down Megatron's loss function."""
    from megatron.core import rerun_state_machine as rerun

    rerun.initialize_rerun_state_machine(mode=rerun.RerunMode.DISABLED)
    yield
    rerun.destroy_rerun_state_machine()


def _one_shape(results: Results, shape: tuple[int, int], layout: str, dtype: torch.dtype) -> None:
    batch = microbatch(*shape, layout)
    batch["loss_mask"] = batch["loss_mask"].to(dtype)
    step = Losses(results.clock, batch)
    rounds = 300 if batch["loss_mask"].numel() < 2**17 else 60
    base, ratio = results.ratio(step.stock, step.hooked(), rounds)
    where = f"{shape[0]} x {shape[1]} {layout}, {str(dtype).removeprefix('torch.')} mask"
    results.add("stock loss function", where, 1e6 * base / NUMBER, "us")
    goal = "small_rows" if layout == "rows" and shape[0] * shape[1] < SMALL else layout
    results.add("hook's loss function", where, ratio, "x stock", goal)
    if dtype == torch.bool or shape != results.shapes.losses[-1]:
        return
    plan_size = PlanSize()
    hooked = step.hooked(extensions=[plan_size])
    hooked()
    hooked()  # the first step has more checks
    peaks = []
    for work in (step.stock, hooked):
        with LiveBytes() as counted:
            work()
        peaks.append(counted.peak)
    results.add("peak memory of a step's losses", where, peaks[1] / peaks[0], "x stock")
    size = plan_size.bytes / (NUMBER * shape[0])
    results.add("plan handed on to other ranks", where, size, "B a sample", "handed_on")


class PlanSize(Extension):
    """Notes the size of a step's plan in the form that is sent to other ranks."""

    bytes = 0

    @contextlib.contextmanager
    def around(self, call: Call, plans: Mapping[str, StepPlan] | None) -> Iterator[None]:
        self.bytes = len(pickle.dumps(dict(plans or {})))
        yield


class Losses:
    """Steps of losses without a model: the losses are ``leaves``."""

    def __init__(
        self, clock: Callable[[], float], batch: Batch, microbatches: int = NUMBER, terms: int = 1
    ) -> None:
        from megatron.core.transformer.transformer_config import TransformerConfig

        self._clock, self._begin = clock, 0.0
        self._batch, self._terms = batch, terms
        self.masks = [batch["loss_mask"].clone().cuda() for _ in range(microbatches)]
        self.leaves = [torch.randn(mask.shape).cuda().requires_grad_() for mask in self.masks]
        self._model = torch.nn.Identity()
        self._model.config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        # Scaling is measured on the device of the model's parameters, so the model needs one.
        self._model.register_parameter("unused", torch.nn.Parameter(torch.zeros(1).cuda()))

    def stock(self) -> float:
        """Seconds of a step's losses in stock Megatron."""
        stock = functools.partial(stock_loss_func, terms=self._terms)
        return self.run(self._schedule, lambda mask: functools.partial(stock, mask))

    def hooked(self, **options: Any) -> Callable[[], float]:
        """The same, with a hook with these options."""
        names = [f"term {i}" for i in range(self._terms)]
        hook = LossHook(MODE if self._terms == 1 else dict.fromkeys(names, MODE), **options)

        def make_loss(mask: Tensor) -> Any:
            if self._terms == 1:
                return functools.partial(stock_loss_func, mask)
            return TokenLoss(lambda output: dict.fromkeys(names, output), mask)

        return functools.partial(self.run, hook.wrap(self._schedule), make_loss)

    def run(self, schedule: Callable[..., Any], make_loss: Callable[[Tensor], Any]) -> float:
        numbers = iter(range(len(self.masks)))

        def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
            next(data_iterator)
            i = next(numbers)
            return model(self.leaves[i]), make_loss(self.masks[i])

        schedule(
            forward_step_func=forward_step,
            data_iterator=iter([self._batch] * len(self.masks)),
            model=self._model,
            num_microbatches=len(self.masks),
        )
        return self._clock() - self._begin

    def _schedule(
        self, *, forward_step_func: Any, data_iterator: Any, model: Any, num_microbatches: int
    ) -> None:
        """Microbatch after microbatch, as in Megatron's schedule without pipelining."""
        self._begin = self._clock()
        reports: list[Any] = []
        for leaf in self.leaves:
            leaf.grad = None
            output, loss_func = forward_step_func(data_iterator, model)
            self.backward(self.loss(model, output, loss_func, num_microbatches, reports))

    def loss(
        self, model: Any, output: Tensor, loss_func: Any, num_microbatches: int, reports: list[Any]
    ) -> Tensor:
        """The scaled loss of a microbatch, by Megatron's code."""
        from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss

        call = (None, False, num_microbatches, reports, 1, True)
        loss, _ = forward_step_calc_loss(model, output, loss_func, model.config, *call)
        return loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()


def stock_loss_func(
    loss_mask: Tensor, output_tensor: Tensor, terms: int = 1
) -> tuple[Tensor, Tensor, Any]:
    """Megatron's loss function with its script's default checks, over ``terms`` terms."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    loss, num_tokens, report = megatron.loss_func(loss_mask, output_tensor)
    for _ in range(terms - 1):
        loss = loss + torch.sum(output_tensor.view(-1) * loss_mask.view(-1))
    machine = get_rerun_state_machine()
    for name, rejects in (("NaN", torch.isnan), ("Inf", torch.isinf)):
        message = f"found {name} in local forward loss calculation"
        machine.validate_result(loss, rejects, message, tolerance=0.0, fatal=True)
    return loss, num_tokens, report
