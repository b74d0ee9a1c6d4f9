"""What a microbatch's loss costs: the script's loss function in the hook, and in stock Megatron.

Both are called by Megatron's own schedule code, which also scales what they return. The hook's time
is that from the schedule's begin to the hook's return, with its checks and reports, and without the
planning before; its step is not the first one.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import megatron
from benchmarks.memory import LiveBytes
from benchmarks.results import Results
from benchmarks.shapes import LAYOUTS, LOSSES, microbatch
from megatron_loss_agg import weighted_sum
from megatron_loss_agg.mcore import Extension, LossHook

NUMBER = 8
"""Microbatches of a step."""


def measure(results: Results, gpu: bool = False) -> None:
    """Every shape in rows and packs, with masks in fp32 as loaders give them; one in bool, too."""
    device = "cuda" if gpu else "cpu"  # without the stand-in for a GPU, which takes time
    with megatron.groups(device):
        from megatron.core import rerun_state_machine as rerun

        # Megatron's default, to repeat rejected microbatches, makes its loss function slower.
        rerun.initialize_rerun_state_machine(mode=rerun.RerunMode.DISABLED)
        for shape in results.shapes.losses:
            for layout in LAYOUTS:
                _one_shape(results, shape, layout, torch.float32, device)
                if shape == results.shapes.bool_mask:
                    _one_shape(results, shape, layout, torch.bool, device)
        rerun.destroy_rerun_state_machine()


def _one_shape(
    results: Results, shape: tuple[int, int], layout: str, dtype: torch.dtype, device: str
) -> None:
    batch = microbatch(*shape, layout)
    batch["loss_mask"] = batch["loss_mask"].to(dtype)
    step = Losses(results.clock, batch, device)
    kept = Kept()
    hooked = step.hooked(extensions=[kept])
    rounds = 300 if batch["loss_mask"].numel() < 2**17 else 60
    base, ratio = results.ratio(step.stock, step.hooked(), rounds)
    where = f"{shape[0]} x {shape[1]} {layout}, {str(dtype).removeprefix('torch.')} mask"
    results.add("stock loss function", where, 1e6 * base / NUMBER, "us")
    results.add("hook's loss function", where, ratio, "x stock", layout)
    if dtype == torch.bool:
        return
    hooked()
    hooked()  # not the first step
    floor, weighed = kept.works()
    _, ratio = results.ratio(
        lambda: results.seconds(floor), lambda: results.seconds(weighed), rounds
    )
    if shape == results.shapes.losses[-1]:
        _of_step(results, where, step.stock, hooked, kept)
    goal = "floors" if layout == "packs" else ""
    results.add("weights and weighted sum", where, ratio, "x (x * w).sum()", goal)


def _of_step(
    results: Results,
    where: str,
    stock: Callable[[], float],
    hooked: Callable[[], float],
    kept: Kept,
) -> None:
    with LiveBytes() as of_stock:
        stock()
    with LiveBytes() as of_hook:
        hooked()
    results.add("peak memory of a step's losses", where, of_hook.peak / of_stock.peak, "x stock")
    size = len(pickle.dumps(kept.last.plan)) / results.shapes.losses[-1][0] / NUMBER
    results.add("plan handed on to other ranks", where, size, "B a sample", "handed_on")


class Kept(Extension):
    """Keeps what the hook hands to its extensions last."""

    def __init__(self) -> None:
        self.last: Any = None

    @contextlib.contextmanager
    def around(self, call: Any, plan: Any) -> Iterator[Callable[[Any], None]]:
        yield functools.partial(setattr, self, "last")

    def works(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """A weighted sum, forward and backward: with weights that are given, and with its own."""
        (local,), (mask,) = self.last.local.values(), self.last.masks.values()
        (w,) = self.last.weights.values()
        losses = torch.randn_like(w, requires_grad=True)

        def floor() -> None:
            losses.grad = None
            (losses * w).sum().backward()

        def weighed() -> None:
            losses.grad = None
            weighted_sum(local.weights(mask, torch.float32), losses).backward()

        return floor, weighed


class Losses:
    """A step of losses that no model has to compute; calls return the seconds that they took."""

    def __init__(self, clock: Callable[[], float], batch: dict[str, Tensor], device: str) -> None:
        from megatron.core.transformer.transformer_config import TransformerConfig

        self._clock, self._begin = clock, 0.0
        self._batch = batch
        self._masks = [batch["loss_mask"].to(device, copy=True) for _ in range(NUMBER)]
        self._leaves = [
            torch.randn(mask.shape, device=device, requires_grad=True) for mask in self._masks
        ]
        self._model = torch.nn.Identity()
        self._model.config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        # The audit puts its probe where the model's parameters are.
        self._model.register_parameter("unused", torch.nn.Parameter(torch.zeros(1, device=device)))

    def stock(self) -> float:
        return self._run(self._schedule)

    def hooked(self, **options: Any) -> Callable[[], float]:
        hook = LossHook(LOSSES["prompt_mean"], **options)
        return functools.partial(self._run, hook.wrap(self._schedule))

    def _run(self, schedule: Callable[..., Any]) -> float:
        schedule(
            forward_step_func=self._forward_step,
            data_iterator=iter([self._batch] * NUMBER),
            model=self._model,
            num_microbatches=NUMBER,
        )
        return self._clock() - self._begin

    def _forward_step(self, data_iterator: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
        self._i += 1
        next(data_iterator)
        return model(self._leaves[self._i]), functools.partial(
            checked_loss_func, self._masks[self._i]
        )

    def _schedule(
        self, *, forward_step_func: Any, data_iterator: Any, model: Any, num_microbatches: int
    ) -> None:
        """Microbatch after microbatch, as Megatron's goes without pipelining."""
        from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss

        self._begin, self._i = self._clock(), -1
        reports: list[Any] = []
        for leaf in self._leaves:
            leaf.grad = None
            output, of_output = forward_step_func(data_iterator, model)
            loss, _ = forward_step_calc_loss(
                model,
                output,
                of_output,
                model.config,
                None,
                False,
                num_microbatches,
                reports,
                1,
                True,
            )
            loss.backward()


def checked_loss_func(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, Tensor, Any]:
    """Megatron's with the checks that its script makes by default."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    loss, num_tokens, report = megatron.loss_func(loss_mask, output_tensor)
    machine = get_rerun_state_machine()
    for name, rejects in (("NaN", torch.isnan), ("Inf", torch.isinf)):
        message = f"found {name} in local forward loss calculation"
        machine.validate_result(loss, rejects, message, tolerance=0.0, fatal=True)
    return loss, num_tokens, report
