"""Losses of experts' routers by the formula, under `RouterLosses`: over the whole step.

One fp64 process has the formula of each loss; on any layout and on both routes the gradient is that
of the aggregated loss and of these together.
"""

from __future__ import annotations

import dataclasses
import functools
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from routers import RouterLosses
from torch import Tensor

from megatron_loss_agg import Microbatch
from megatron_loss_agg.mcore import read_batch
from tests.host import gpt, pipeline_parallel
from tests.host.cases import Batch, Case, Expected, assert_exact
from tests.host.harness import MODELS, TOPOLOGIES, run_host_ranks
from tests.host.reference import Gradient, gradient_of, reference
from tests.host.refusals import Refusal, assert_told
from tests.host.steps import MULTIPLE, Places, batches, sequences

Microbatches = tuple[tuple[int, ...], ...]
COEFFICIENTS = {"aux_loss": 3.0, "seq_aux_loss": 2.0, "global_aux_loss": 4.0, "z_loss": 0.3}
# One microbatch has no active token. Packs have 12 to 40 tokens, rows 24 or 144; or all 144.
UNEQUAL = ((0, 1), (5,), (2, 3), (4, 6))
EQUAL = ((0, 1), (5, 2), (3, 7), (4, 6))
ONE, EQUAL_ONE = (UNEQUAL,), (EQUAL,)
TWO, ONE_AND_THREE = (UNEQUAL[:2], UNEQUAL[2:]), (UNEQUAL[:1], UNEQUAL[1:])


def router_hook(**options: Any) -> dict[str, Any]:
    """Arguments of a hook with an extension of its own."""
    return {"extensions": [RouterLosses()], **options}


def eightfold(loss: Tensor) -> Tensor:
    """The loss scale of half precision."""
    return loss * 8.0


def step(layout: str, per_token: bool, places: Places = ONE, **more: Any) -> Case:
    """A step with every kind of loss that can be exact on its data-parallel ranks."""
    balancing = ["aux_loss", "seq_aux_loss", *["global_aux_loss"] * (len(places) == 1)]
    config = {
        "moe_router_load_balancing_type": balancing,
        "moe_aux_loss_coeff": [COEFFICIENTS[kind] for kind in balancing],
        "moe_z_loss_coeff": COEFFICIENTS["z_loss"],
        **more.pop("config", {}),
    }
    options = {"hook": router_hook(), "config": config, **more}
    return Case("token_mean", layout=layout, per_token=per_token, places=places, **options)


def with_padding_mask(iterator: Any, model: Any) -> Any:
    """As scripts that call the model with a padding mask: tokens beyond a ``length``."""
    batch = gpt.received(iterator)
    tokens = gpt.layout_of(batch).shard(batch["tokens"])
    padding = gpt.positions_like(tokens) >= batch.get("length", tokens.shape[1])
    logits, labels, mask = gpt.outputs(batch, model, padding_mask=padding)
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return losses, partial(gpt.stock_loss_func, mask)


def without_padding(batch: Batch) -> Microbatch:
    return dataclasses.replace(read_batch(batch), routed_tokens=batch["length"])


def with_length(batch: Batch, indices: tuple[int, ...]) -> Batch:
    """One row, and the length that its sample has in a pack."""
    length = len(sequences()[indices[0]].tokens)
    return {**batch, "length": -(-length // MULTIPLE) * MULTIPLE}


def padded_step(per_token: bool) -> Case:
    return step(
        "bshd",
        per_token,
        places=(((0,), (1,), (4,)),),
        config={"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [3.0]},
        hook=router_hook(read_batch=without_padding),
        batch=with_length,
        step=with_padding_mask,
    )


PADDED = [padded_step(per_token) for per_token in (False, True)]
SCALED = {"config": {"grad_scale_func": eightfold}}
CASES: dict[str, list[Case]] = {
    "dp1": [
        step("thd", False, calls=(1, 2, 1)),
        step("thd", True, calls=(1, 2, 1)),
        step("bshd", False, **SCALED),
        step("bshd", True, **SCALED),
        # On a model that has had the formula: the host's own weights, with the flag.
        step("thd", True, hook={}),
        step("bshd", True, hook={}, **SCALED),
        *PADDED,
    ],
    "dp2": [
        *(step("bshd", route, TWO) for route in (False, True)),
        *(step("thd", route, ONE_AND_THREE) for route in (False, True)),
    ],
    "cp2": [step("thd", False), step("bshd", True)],
    "tp2-sp": [step("bshd", False), step("thd", True)],
    "pp2": [step("bshd", False, EQUAL_ONE), step("thd", True), step("thd", True, calls=(3, 1))],
    "vpp2": [step("bshd", False, EQUAL_ONE), step("thd", True)],
    "ep2": [step("thd", route, TWO) for route in (False, True)],
}


@functools.cache
def formula(model: str, layout: str, microbatches: Microbatches) -> dict[str, Gradient]:
    """By kind: the gradient of ``sum_k T_k / T * a_k`` over the step, without coefficient."""
    return run_host_ranks(on_one_rank, 1, MODELS[model], layout, microbatches)[0]


def on_one_rank(
    config: dict[str, Any], layout: str, microbatches: Microbatches
) -> dict[str, Gradient]:
    """One fp64 process, whose model gives its routers' inputs and weights alone."""
    gpt.initialize()
    model = gpt.build(**config)
    routers = [layer.mlp.router for layer in model.decoder.layers]
    inputs: list[Tensor] = []
    for router in routers:
        router.register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
    numbers: list[list[Tensor]] = [[] for _ in routers]  # of tokens by expert, of each microbatch
    total: dict[str, Any] = dict.fromkeys(COEFFICIENTS, 0.0)
    tokens, data = 0, batches(microbatches, layout)
    for _ in microbatches:
        ids, _, _, packed = gpt.local_batch(data)
        inputs.clear()
        with gpt.precision(model.config):
            model(ids, gpt.positions_like(ids), None, packed_seq_params=packed)
        tokens += ids.numel()
        for router, hidden, layer_numbers in zip(routers, inputs, numbers, strict=True):
            logits = hidden.transpose(0, 1) @ router.weight.T  # [rows, tokens, experts]
            for kind, loss in layer_losses(logits, router.topk, layer_numbers).items():
                total[kind] = total[kind] + ids.numel() * loss
    return {kind: gradient_of(x / tokens, model) for kind, x in total.items()}


def layer_losses(logits: Tensor, topk: int, numbers: list[Tensor]) -> dict[str, Tensor]:
    """By kind: ``a_k`` of one layer; ``numbers`` gets another entry."""
    probabilities = logits.softmax(dim=-1)
    chosen = torch.zeros_like(logits).scatter(-1, logits.topk(topk, dim=-1).indices, 1.0)
    flat = probabilities.flatten(0, 1)
    numbers.append(chosen.flatten(0, 1).sum(dim=0))
    slots = len(flat) * topk
    rows = zip(probabilities, chosen, strict=True)
    row_losses = [balance(p, c.mean(dim=0) / topk) for p, c in rows]
    return {
        "aux_loss": balance(flat, numbers[-1] / slots),
        "seq_aux_loss": torch.stack(row_losses).mean(),
        # The mean of this microbatch and those before, over this microbatch's tokens.
        "global_aux_loss": balance(flat, torch.stack(numbers).mean(dim=0) / slots),
        "z_loss": logits.logsumexp(dim=-1).square().mean(),
    }


def balance(probabilities: Tensor, fractions: Tensor) -> Tensor:
    """``E * sum_e f_e P_e`` of [tokens, E] probabilities."""
    return probabilities.shape[1] * (fractions * probabilities.mean(dim=0)).sum()


def expected(case: Case, model: str) -> Expected:
    layout = "thd" if case.batch is with_length else case.layout
    kind_gradients = formula(model, layout, sum(case.places, ()))
    kinds = [*case.config["moe_router_load_balancing_type"], "z_loss"]
    scale = 8.0 if "grad_scale_func" in case.config else 1.0
    weight = 1.0
    if not case.hook:  # with the flag, the host divides by active tokens: 84 in packs, 456 in rows
        weight = {"thd": 84 / 50, "bshd": 456 / 50}[case.layout]
    gradient = {
        name: scale
        * (g + weight * sum(COEFFICIENTS[kind] * kind_gradients[kind][name] for kind in kinds))
        for name, g in reference(model).gradient(case.weights).items()
    }
    return gradient, {}


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_the_formula(name: str) -> None:
    model = "moe-chunks" if name == "vpp2" else "moe"
    topology = dataclasses.replace(TOPOLOGIES[name], model=model)
    assert_exact(topology, CASES[name], partial(expected, model=model))


EXPERTS = {
    **MODELS["moe"],
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1.0,
}
REFUSED_PLACES = ((0, 1), (2, 3)), ((4, 6), (5,))  # rows: unequal on the second rank alone


def one_more_token(batch: Batch) -> Microbatch:
    """Than the model routes, for the last microbatch of all."""
    more = int(batch["prompt_ids"].tolist() == [sequences()[5].sample.prompt])
    return dataclasses.replace(read_batch(batch), routed_tokens=batch["tokens"].numel() + more)


def without_the_function(**arguments: Any) -> Any:
    """A schedule that does not ask for the weights."""
    arguments["model"][0].module.config.moe_grad_scale_func = None
    return pipeline_parallel.get_forward_backward_func()(**arguments)


def with_whole_length(batch: Batch, _: tuple[int, ...]) -> Batch:
    """No token is padding."""
    return {**batch, "length": batch["tokens"].numel()}


def refused(says: str, reads: Any = read_batch, topology: str = "dp2", **options: Any) -> Refusal:
    hook = router_hook(read_batch=reads)
    options = {"hook": hook, "places": REFUSED_PLACES, "config": EXPERTS, **options}
    return Refusal(says, Case("token_mean", **options), topology)


ROWS = {
    "over all ranks": refused(
        "HostError: needs aux_loss or seq_aux_loss, got global_aux_loss over 2 data-parallel ranks",
        config={**EXPERTS, "moe_router_load_balancing_type": "global_aux_loss"},
    ),
    "without experts": refused(
        "HostError: needs a model with experts, got one without. Set --num-experts", config={}
    ),
    # On one of two ranks alone.
    "of other tokens": refused(
        "HostError: routers must see microbatches of the planned [ ... routed_tokens=",
        reads=one_more_token,
    ),
    "that are not asked for": refused(
        "HostError: config.moe_grad_scale_func once in each of 2 forward passes ... got 0 calls",
        call={"schedule": without_the_function},
    ),
    "of unequal microbatches": refused(
        "HostError: over pipeline stages needs microbatches of one number of tokens ... got [ ... on"
        " a data-parallel rank. Set --calculate-per-token-loss",
        topology="pp2-dp2-distributed-overlap",
        layout="bshd",
    ),
    "of padding on parts": refused(
        "HostError: tokens, got [-1]. Give ... needs one tensor- and context-parallel rank",
        topology="cp2",
        step=with_padding_mask,
    ),
    "of padding that counts": refused(
        "HostError: routers must see microbatches of the planned [24] tokens, got [4, 20]. Give ..."
        " Microbatch(routed_tokens=) ... without padding if the model gets a padding_mask",
        topology="dp1",
        layout="bshd",
        places=PADDED[0].places,
        batch=with_length,
        step=with_padding_mask,
        after=dataclasses.replace(
            PADDED[0],
            batch=with_whole_length,
            config=EXPERTS,
            hook=router_hook(),
        ),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_what_cannot_be_done_exactly_is_refused_on_every_rank(name: str) -> None:
    assert_told(__name__, name)
