"""All that a microbatch's loss costs: the script's loss function in the hook, and without it.

Both are called by Megatron's own schedule code, which also scales what they return.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.fake_groups import fake_call, fake_groups
from benchmarks.hook import recognised
from benchmarks.results import Results, ratios
from benchmarks.shapes import AGGREGATIONS, LAYOUTS, LOSS_FUNCTIONS, Shape
from megatron_loss_agg import StepPlan
from megatron_loss_agg.mcore.host import ParallelGroups
from megatron_loss_agg.mcore.step import Options, Step
from megatron_loss_agg.mcore.step_weights import StepWeights, Wanted

NUMBER = 8
"""Microbatches of a step."""


def measure(results: Results) -> None:
    """Of one rank: every shape and layout, in a step that is not the first one."""
    from megatron.core import rerun_state_machine as rerun

    # Megatron's default, to repeat rejected microbatches, makes its loss function slower.
    rerun.initialize_rerun_state_machine(mode=rerun.RerunMode.DISABLED)
    with fake_groups(1) as (alone,):
        for samples, length in LOSS_FUNCTIONS:
            for layout in LAYOUTS:
                _one_shape(results, Shape(samples, length, layout), alone)
    rerun.destroy_rerun_state_machine()


def _one_shape(results: Results, shape: Shape, groups: ParallelGroups) -> None:
    microbatches = [shape.microbatch() for _ in range(NUMBER)]
    masks = [m.loss_mask for m in microbatches]
    losses = [torch.randn(mask.shape, requires_grad=True) for mask in masks]
    plans = StepPlan.build_terms({"loss": AGGREGATIONS["prompt_mean"]}, microbatches)
    splits, model = recognised(groups), torch.nn.Identity()
    weights = StepWeights.of(plans, groups, splits, Wanted(masks=False))

    def forward_step(i: int) -> tuple[Tensor, Callable[..., Any]]:
        return model(losses[i]), functools.partial(checked_loss_func, masks[i])

    call = fake_call(groups, model, forward_step, NUMBER)
    options = Options(False, set(), None, None, False, reports_late=True)

    def hooked() -> None:
        step = Step(call, plans.terms, lambda: weights, splits, options)
        with contextlib.ExitStack() as stack:
            step.watch(stack)
            _schedule(step.forward_step, losses)
        step.finish()

    stock = functools.partial(_schedule, forward_step, losses)
    base, found = ratios(stock, {"hooked": hooked}, rounds=300)
    where = f"{shape.samples} x {shape.length} {shape.layout}, {NUMBER} microbatches"
    results.add("stock loss function", where, 1e6 * base / NUMBER, "us")
    what = "all of the hook's loss function"
    results.add(what, where, found["hooked"], "x stock", "loss_function")


def _schedule(forward_step: Callable[..., Any], losses: list[Tensor]) -> None:
    """Microbatch after microbatch, as Megatron's schedule goes without pipelining."""
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss

    config = SimpleNamespace(calculate_per_token_loss=False, timers=None)
    reports: list[Any] = []
    for i, leaf in enumerate(losses):
        leaf.grad = None
        output, of_output = forward_step(i)
        loss, _ = forward_step_calc_loss(
            None, output, of_output, config, None, False, len(losses), reports, 1, True
        )
        loss.backward()


def loss_func(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, Tensor, Any]:
    """The operations of Megatron's own: sum over the mask, number of tokens, report."""
    losses, mask = output_tensor.view(-1).float(), loss_mask.view(-1).float()
    loss = torch.sum(losses * mask)
    num_tokens = mask.sum().clone().detach().to(torch.int)
    report = torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


def checked_loss_func(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, Tensor, Any]:
    """`loss_func` with the checks that Megatron's script makes by default."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    loss, num_tokens, report = loss_func(loss_mask, output_tensor)
    machine = get_rerun_state_machine()
    for name, rejects in (("NaN", torch.isnan), ("Inf", torch.isinf)):
        message = f"found {name} in local forward loss calculation"
        machine.validate_result(loss, rejects, message, tolerance=0.0, fatal=True)
    return loss, num_tokens, report
