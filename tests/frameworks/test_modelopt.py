"""ModelOpt's distillation at its pinned version: its default is exact, the rest refused by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.host import gpt, gradients, parallel_state
from tests.host import test_distillation as distillation
from tests.host.harness import EXACT, TOPOLOGIES, Topology, error_of, run_host_ranks
from tests.host.reference import Gradient, relative_error
from tests.host.steps import weights_of
from tests.peers.standins import needs_peers, use_peers

pytestmark = [pytest.mark.extended, needs_peers]

STANDINS = (
    "accelerate datasets huggingface_hub ninja pandas pulp pynvml regex requests rich safetensors "
    "scipy transformers"
)
PLACES, MODE = distillation.PLACES, distillation.MODE
FLAGS = ("--export-kd-teacher-load", "teacher")
TOP_K = {"logit_kl_topk": 5}


def one_step(
    topology: Topology, layout: str, per_token: bool, means: bool = False, **settings: Any
) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
    """The student's parameters after a step of ModelOpt's model, and the reports."""
    use_peers(STANDINS)
    import modelopt.torch.distill as mtd
    import modelopt.torch.distill.plugins.megatron as plugin

    gpt.initialize(**topology.sizes)
    student = gpt.build(torch.float64, per_token, **topology.config)
    teacher = distillation.teacher(**topology.config)
    names = {id(parameter): name for name, parameter in gradients.parts(student)}
    config = plugin.DistillationConfig(**settings)
    config = plugin.setup_distillation_config(config, student.config, teacher.config)
    losses = {"criterion": config.criterion, "loss_balancer": config.loss_balancer}
    model = mtd.convert(student, mode=[("kd_loss", {"teacher_model": teacher, **losses})])
    plugin.adjust_distillation_model_for_mcore(model, config)

    def forward_step(data_iterator: Any, wrapped: Any) -> tuple[Tensor, Callable[..., Any]]:
        losses, stock = gpt.forward_step(data_iterator, wrapped)
        return losses, partial(loss_func, *stock.args, model=model, means=means)

    chunks, places = [gpt.data_parallel(model)], PLACES[topology.data_parallel_size]
    reports = distillation.step(chunks, places, layout, *FLAGS, forward_step=forward_step)
    return {names[id(p)]: p for p in model.parameters() if id(p) in names}, reports


def loss_func(loss_mask: Tensor, output_tensor: Tensor, model: Any, means: bool) -> Any:
    """In the form of Megatron-LM's for ModelOpt; ``means`` are of its releases before 0.15."""
    language, tokens = masked_sum(loss_mask, output_tensor), loss_mask.sum().int()
    losses = model.compute_kd_loss(
        student_loss=language, loss_reduction_fn=partial(masked_sum, loss_mask)
    )
    if means:
        return losses["kd_loss"] / tokens, {"lm loss": language / tokens}
    report = torch.cat([x.detach().view(1) for x in (language, tokens)])
    return losses["kd_loss"], tokens, {"lm loss": report}


def masked_sum(mask: Tensor, results: Any) -> Tensor:
    losses, is_part, _ = results if isinstance(results, tuple) else (results, False, False)
    total = (losses.reshape(-1) * mask.reshape(-1)).sum()
    if is_part:
        group = parallel_state.get_tensor_model_parallel_group()
        torch.distributed.all_reduce(total, group=group)
    return total


def expected(ranks: int, top_k: bool = False) -> Any:
    """Gradient and losses of the teacher's loss alone."""
    weights = weights_of(MODE, PLACES[ranks])
    return distillation.by_hand(weights, weights, alpha=1.0, kl="top" if top_k else "full")


# Of a step that is exact: the layout, and settings.
STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2": ("bshd", {}),
    "cp2": ("thd", {}),
    "tp2": ("bshd", {}),
    "dp1": ("thd", TOP_K),
}
FINAL = "decoder.final_layernorm"
# Settings of steps that are refused, and words of the error.
REFUSED: dict[str, dict[str, dict[str, Any]]] = {
    "dp1": {
        "of ModelOpt a sum, not a mean, with skip_lm_loss on": {"skip_lm_loss": False},
        "a sum, not a mean, with skip_lm_loss on (Megatron-LM 0.15": {"means": True},
        "must compute one distillation loss, got 2": {"intermediate_layer_pairs": [(FINAL, FINAL)]},
    },
    "tp2": {"whose gather adds up their equal gradients": TOP_K},
}


@functools.cache
def results(name: str) -> tuple[dict[str, float], list[Any]]:
    """The expected results of the exact step, and those of all ranks."""
    topology = TOPOLOGIES[name]
    whole, numbers = expected(topology.data_parallel_size, name == "dp1")
    return numbers, run_host_ranks(on_host, topology.world_size, name, whole)


def on_host(name: str, whole: Gradient) -> tuple[list[Any], list[str | None]]:
    """The gradient's error and the reports, by per-token flag; and the refusals."""
    topology, (layout, settings), steps = TOPOLOGIES[name], STEPS[name], []
    for per_token in (False, True):
        parameters, reports = one_step(topology, layout, per_token, **settings)
        got = {key: p.main_grad for key, p in parameters.items()}
        parts = {key: gradients.part_of(whole[key], p) for key, p in parameters.items()}
        numbers = {key: gpt.reported(reports, key) for key in sorted(reports[0])}
        steps.append((relative_error(got, parts), numbers))
    refused = REFUSED.get(name, {}).values()
    return steps, [error_of(one_step, topology, "bshd", False, **settings) for settings in refused]


@pytest.mark.parametrize("name", STEPS)
def test_the_loss_on_logits_is_exact(name: str) -> None:
    numbers, ranks = results(name)
    wanted = {key: numbers[key] for key in ("kd loss", "loss", f"{MODE} loss", "lm loss")}
    for steps, _ in ranks:
        for error, reported in steps:
            assert error <= EXACT
            assert {key: reported[key] for key in wanted} == pytest.approx(wanted, rel=EXACT)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_weighted_sum_of_tokens_is_refused(name: str) -> None:
    for _, errors in results(name)[1]:
        for error, words in zip(errors, REFUSED[name], strict=True):
            assert error is not None and error.startswith("HostError: ")
            assert words in error, error
