"""A step of ModelOpt's distillation on the real host; for the ranks alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from tests.host import distillation, gpt, gradients
from tests.host.harness import Topology
from tests.host.reference import Gradient, relative_error
from tests.host.steps import Places
from tests.peers.standins import use_peers

use_peers(
    "accelerate datasets huggingface_hub ninja pandas pulp pynvml regex requests rich safetensors "
    "scipy transformers"
)

import modelopt.torch.distill as mtd  # noqa: E402
import modelopt.torch.distill.plugins.megatron as plugin  # noqa: E402

FLAGS = ("--loss-aggregation", "sample_mean", "--export-kd-teacher-load", "teacher")


def distilled(topology: Topology, per_token: bool, **settings: Any) -> Any:
    """The student as ModelOpt makes it, and the names of its parameters."""
    student = gpt.build(torch.float64, per_token, **topology.config)
    teacher = distillation.teacher(**topology.config)
    names = {id(parameter): name for name, parameter in gradients.parts(student)}
    config = plugin.DistillationConfig(**settings)
    config = plugin.setup_distillation_config(config, student.config, teacher.config)
    mode = {
        "teacher_model": teacher,
        "criterion": config.criterion,
        "loss_balancer": config.loss_balancer,
    }
    model = mtd.convert(student, mode=[("kd_loss", mode)])
    plugin.adjust_distillation_model_for_mcore(model, config)
    return model, {names[id(p)]: p for p in model.parameters() if id(p) in names}


def masked_sum(mask: Tensor, given: Any) -> Tensor:
    losses, is_part, _ = given if isinstance(given, tuple) else (given, False, False)
    total = (losses.reshape(-1) * mask.reshape(-1)).sum()
    if is_part:
        dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
    return total


def loss_func(loss_mask: Tensor, output_tensor: Tensor, model: Any, means: bool = False) -> Any:
    """In the form of Megatron-LM's for ModelOpt; with ``means`` of its earlier releases."""
    language, tokens = masked_sum(loss_mask, output_tensor), loss_mask.sum().int()
    divisor = tokens if means else 1

    def reduce(given: Any) -> Tensor:
        return masked_sum(loss_mask, given) / divisor

    total = model.compute_kd_loss(student_loss=language / divisor, loss_reduction_fn=reduce)
    total = total["kd_loss"]
    if means:
        return total, {"lm loss": language / divisor}
    report = torch.cat([x.detach().view(1) for x in (language, tokens)])
    return total, tokens, {"lm loss": report}


def step(
    topology: Topology, places: Places, layout: str, per_token: bool, means: bool, settings: Any
) -> tuple[Any, list[dict[str, Tensor]]]:
    """One step: the student's parameters, and what is reported."""
    model, parameters = distilled(topology, per_token, **settings)

    def forward_step(data_iterator: Any, wrapped: Any) -> tuple[Tensor, Callable[..., Any]]:
        losses, stock = gpt.forward_step(data_iterator, wrapped)
        return losses, partial(loss_func, *stock.args, model=model, means=means)

    chunks = [gpt.data_parallel(model)]
    reports = distillation.step(chunks, places, layout, *FLAGS, forward_step=forward_step)
    return parameters, reports


def error_and_reports(
    topology: Topology, places: Places, layout: str, per_token: bool, settings: Any, whole: Gradient
) -> tuple[float, dict[str, float]]:
    """Of one step: the gradient's error, and what is reported."""
    parameters, reports = step(topology, places, layout, per_token, False, settings)
    found = {name: p.main_grad for name, p in parameters.items()}
    expected = {name: gradients.part_of(whole[name], p) for name, p in parameters.items()}
    numbers = {name: gpt.reported(reports, name) for name in sorted(reports[0])}
    return relative_error(found, expected), numbers
