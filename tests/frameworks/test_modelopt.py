"""ModelOpt's distillation at its pinned version: its default is exact, the rest refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.host.harness import EXACT, TOPOLOGIES, Topology, error_of, run_host_ranks
from tests.host.reference import Gradient, relative_error
from tests.host.steps import weights_of
from tests.host.test_distillation import MODE, PLACES, by_hand, step, teacher
from tests.peers.standins import use_peers

pytestmark = pytest.mark.host

STANDINS = (
    "accelerate datasets huggingface_hub ninja pandas pulp pynvml regex requests rich safetensors "
    "scipy transformers"
)
FLAGS = ("--loss-aggregation", MODE, "--export-kd-teacher-load", "teacher")
TOP_K = {"logit_kl_topk": 5}


def distilled(topology: Topology, per_token: bool, **settings: Any) -> tuple[Any, dict[str, Any]]:
    """The student as ModelOpt makes it with its ``settings``, and its parameters by their names."""
    import modelopt.torch.distill as mtd
    import modelopt.torch.distill.plugins.megatron as plugin

    from tests.host import gpt, gradients

    student = gpt.build(torch.float64, per_token, **topology.config)
    of_teacher = teacher(**topology.config)
    names = {id(parameter): name for name, parameter in gradients.parts(student)}
    config = plugin.DistillationConfig(**settings)
    config = plugin.setup_distillation_config(config, student.config, of_teacher.config)
    losses = {"criterion": config.criterion, "loss_balancer": config.loss_balancer}
    model = mtd.convert(student, mode=[("kd_loss", {"teacher_model": of_teacher, **losses})])
    plugin.adjust_distillation_model_for_mcore(model, config)
    return model, {names[id(p)]: p for p in model.parameters() if id(p) in names}


def one_step(
    topology: Topology, layout: str, per_token: bool, settings: Any, means: bool = False
) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
    """The student's parameters after the step, and what is reported."""
    use_peers(STANDINS)
    from tests.host import gpt

    gpt.initialize(**topology.sizes)
    model, parameters = distilled(topology, per_token, **settings)

    def forward_step(data_iterator: Any, wrapped: Any) -> tuple[Tensor, Callable[..., Any]]:
        losses, stock = gpt.forward_step(data_iterator, wrapped)
        return losses, partial(loss_func, *stock.args, model=model, means=means)

    chunks, places = [gpt.data_parallel(model)], PLACES[topology.data_parallel_size]
    return parameters, step(chunks, places, layout, *FLAGS, forward_step=forward_step)


def loss_func(loss_mask: Tensor, output_tensor: Tensor, model: Any, means: bool) -> Any:
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


def masked_sum(mask: Tensor, given: Any) -> Tensor:
    from megatron.core import parallel_state

    losses, is_part, _ = given if isinstance(given, tuple) else (given, False, False)
    total = (losses.reshape(-1) * mask.reshape(-1)).sum()
    if is_part:
        group = parallel_state.get_tensor_model_parallel_group()
        torch.distributed.all_reduce(total, group=group)
    return total


def expected(ranks: int, top_k: bool = False) -> Any:
    """Gradient and losses of the teacher's loss alone."""
    weights = weights_of(MODE, PLACES[ranks])
    return by_hand(weights, weights, alpha=1.0, kl="top" if top_k else "full")


def on_host(topology: Topology, layout: str, settings: Any, whole: Gradient) -> list[Any]:
    """Without the per-token flag and with it: the gradient's error, and what is reported."""
    from tests.host import gpt, gradients

    seen = []
    for per_token in (False, True):
        parameters, reports = one_step(topology, layout, per_token, settings)
        found = {name: p.main_grad for name, p in parameters.items()}
        expected = {name: gradients.part_of(whole[name], p) for name, p in parameters.items()}
        numbers = {name: gpt.reported(reports, name) for name in sorted(reports[0])}
        seen.append((relative_error(found, expected), numbers))
    return seen


@pytest.mark.parametrize(
    ("name", "layout", "settings"),
    [("dp2", "bshd", {}), ("cp2", "thd", {}), ("tp2", "bshd", {}), ("dp1", "thd", TOP_K)],
)
def test_the_loss_on_logits_is_exact(name: str, layout: str, settings: Any) -> None:
    topology = TOPOLOGIES[name]
    gradient, numbers = expected(topology.data_parallel_size, bool(settings))
    wanted = {key: numbers[key] for key in ("kd loss", "loss", f"{MODE} loss", "lm loss")}
    for rank in run_host_ranks(on_host, topology.world_size, topology, layout, settings, gradient):
        for error, reported in rank:
            assert error <= EXACT
            assert {key: reported[key] for key in wanted} == pytest.approx(wanted, rel=EXACT)


FINAL = "decoder.final_layernorm"
REFUSED: dict[str, list[tuple[str, bool, dict[str, Any]]]] = {
    "dp1": [
        ("of ModelOpt a sum, not a mean, with skip_lm_loss on", False, {"skip_lm_loss": False}),
        (
            "computed 2 distillation losses; expected one",
            False,
            {"intermediate_layer_pairs": [(FINAL, FINAL)]},
        ),
        ("a sum, not a mean, with skip_lm_loss on (Megatron-LM 0.15", True, {}),
    ],
    "tp2": [("whose gather adds up their equal gradients", False, TOP_K)],
}
"""By topology: words of the error, whether the loss function returns means, and settings."""


def refusals(name: str) -> list[str | None]:
    return [
        error_of(one_step, TOPOLOGIES[name], "bshd", False, settings, means)
        for _, means, settings in REFUSED[name]
    ]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_weighted_sum_of_tokens_is_refused(name: str) -> None:
    for said in run_host_ranks(refusals, TOPOLOGIES[name].world_size, name):
        for error, (words, _, _) in zip(said, REFUSED[name], strict=True):
            assert error is not None and error.startswith("HostError: ")
            assert words in error, error
