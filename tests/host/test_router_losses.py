"""Auxiliary losses of routers under `RouterLosses`, against the formula in one fp64 process.

The gradient is linear in them: what turning them on adds to it must be that of the formula, on any
layout and on both routes.
"""

from __future__ import annotations

import dataclasses
import functools
from importlib.metadata import version
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_loss_agg.mcore import RouterLosses
from tests.host.cases import Case, take
from tests.host.harness import MODELS, TOPOLOGIES, Topology, build_chunks, run_host_ranks
from tests.host.reference import Gradient, relative_error
from tests.host.steps import batches

pytestmark = pytest.mark.host
if not version("megatron-core").startswith("0.19."):
    pytest.skip("see test_moe_releases", allow_module_level=True)

Microbatches = tuple[tuple[int, ...], ...]
Formula = tuple[str, Microbatches, bool]
"""How samples are laid out; the samples of each microbatch; of the model with four layers?"""

COEFFICIENTS = {"aux_loss": 3.0, "seq_aux_loss": 2.0, "global_aux_loss": 4.0, "z_loss": 0.3}
EXACT = 1e-12  # of a difference of two gradients
# One microbatch has no active token. Packs have 12 to 40 tokens, rows 24 or 144; or all 144.
UNEQUAL = ((0, 1), (5,), (2, 3), (4, 6))
EQUAL = ((0, 1), (5, 2), (3, 7), (4, 6))
LOCAL = ("aux_loss", "seq_aux_loss", "z_loss")
ALL = (*LOCAL, "global_aux_loss")


def eightfold(loss: Tensor) -> Tensor:
    """The loss scale of half precision."""
    return loss * 8.0


class Run(NamedTuple):
    """One step, with the losses and without."""

    layout: str
    per_token: bool
    microbatches: Microbatches = UNEQUAL
    kinds: tuple[str, ...] = ALL
    calls: tuple[int, ...] = ()  # microbatches of each call of the step
    scales: bool = False
    cut: int = 2  # microbatches of the first of two data-parallel ranks

    def case(self, topology: Topology, kinds: tuple[str, ...]) -> Case:
        places = (self.microbatches,)
        if topology.data_parallel_size == 2:
            places = self.microbatches[: self.cut], self.microbatches[self.cut :]
        return Case(
            "token_mean",
            layout=self.layout,
            per_token=self.per_token,
            places=places,
            config=turned_on(kinds) | ({"grad_scale_func": eightfold} if self.scales else {}),
            calls=self.calls,
        )


BOTH = (False, True)
RUNS: dict[str, list[Run]] = {
    "dp1": [
        *(Run("thd", route) for route in BOTH),
        *(Run("thd", route, calls=(1, 2, 1)) for route in BOTH),
        *(Run("bshd", False, kinds=(kind,)) for kind in ALL),
        *(Run("bshd", route, scales=True) for route in BOTH),
    ],
    "dp2": [
        *(Run("bshd", route, kinds=LOCAL) for route in BOTH),
        *(Run("thd", route, kinds=LOCAL, cut=1) for route in BOTH),
    ],
    "cp2": [Run("thd", False), Run("bshd", True)],
    "tp2-sp": [Run("bshd", False), Run("thd", True)],
    "pp2": [Run("bshd", False, EQUAL), Run("thd", True), Run("thd", True, calls=(3, 1))],
    "vpp2": [Run("bshd", False, EQUAL), Run("thd", True)],
    "ep2": [Run("thd", route, kinds=LOCAL) for route in BOTH],
}


def formula_of(name: str, run: Run) -> Formula:
    return run.layout, run.microbatches, name == "vpp2"


@functools.cache
def formulas() -> dict[Formula, dict[str, Gradient]]:
    wanted = dict.fromkeys(formula_of(name, run) for name, runs in RUNS.items() for run in runs)
    return run_host_ranks(formula_gradients, 1, list(wanted))[0]


def formula_gradients(wanted: list[Formula]) -> dict[Formula, dict[str, Gradient]]:
    """One fp64 process, by formula and kind: the gradient of ``sum_k T_k / T * a_k``.

    The model gives its routers' inputs and weights alone.
    """
    from tests.host import gpt

    gpt.initialize()
    models = {
        deep: gpt.build(**MODELS["moe"], **({"num_layers": 4} if deep else {}))
        for deep in {deep for _, _, deep in wanted}
    }
    return {x: _gradients(models[x[2]], *x[:2]) for x in wanted}


def _gradients(model: Any, layout: str, microbatches: Microbatches) -> dict[str, Gradient]:
    from tests.host import gpt

    names, parameters = zip(*model.named_parameters(), strict=True)
    routers = [layer.mlp.router for layer in model.decoder.layers]
    inputs: list[Tensor] = []
    hooks = [r.register_forward_pre_hook(lambda _, x: inputs.append(x[0])) for r in routers]
    numbers: list[list[Tensor]] = [[] for _ in routers]  # of tokens by expert, of each microbatch
    total: dict[str, Any] = dict.fromkeys(COEFFICIENTS, 0.0)
    tokens, data = 0, batches(microbatches, layout)
    for _ in microbatches:
        ids, _, _, packed = gpt.local_batch(data)
        inputs.clear()
        with gpt.precision(model.config):
            model(ids, gpt.positions_like(ids), None, packed_seq_params=packed)
        tokens += ids.numel()
        for router, given, of_layer in zip(routers, inputs, numbers, strict=True):
            logits = given.transpose(0, 1) @ router.weight.T  # [rows, tokens, experts]
            for kind, loss in _losses(logits, router.topk, of_layer).items():
                total[kind] = total[kind] + ids.numel() * COEFFICIENTS[kind] * loss
    for hook in hooks:
        hook.remove()
    options: Any = {"retain_graph": True, "materialize_grads": True}
    return {
        kind: dict(zip(names, torch.autograd.grad(x / tokens, parameters, **options), strict=True))
        for kind, x in total.items()
    }


def _losses(logits: Tensor, topk: int, numbers: list[Tensor]) -> dict[str, Tensor]:
    """By kind: ``a_k`` of one layer, without coefficient; ``numbers`` gets another entry."""
    probabilities = logits.softmax(dim=-1)
    chosen = torch.zeros_like(logits).scatter(-1, logits.topk(topk, dim=-1).indices, 1.0)
    flat = probabilities.flatten(0, 1)
    numbers.append(chosen.flatten(0, 1).sum(dim=0))
    slots = len(flat) * topk
    rows = zip(probabilities, chosen, strict=True)
    return {
        "aux_loss": _switch(flat, numbers[-1] / slots),
        "seq_aux_loss": torch.stack([_switch(p, c.mean(dim=0) / topk) for p, c in rows]).mean(),
        # The mean of this microbatch and those before, over this microbatch's tokens.
        "global_aux_loss": _switch(flat, torch.stack(numbers).mean(dim=0) / slots),
        "z_loss": logits.logsumexp(dim=-1).square().mean(),
    }


def _switch(probabilities: Tensor, fractions: Tensor) -> Tensor:
    """``E * sum_e f_e P_e`` of [tokens, E] probabilities."""
    return probabilities.shape[1] * (fractions * probabilities.mean(dim=0)).sum()


def turned_on(kinds: tuple[str, ...]) -> dict[str, Any]:
    """The model's configuration for these losses."""
    balancing = [kind for kind in kinds if kind != "z_loss"]
    config: dict[str, Any] = {}
    if balancing:
        config["moe_router_load_balancing_type"] = balancing
        config["moe_aux_loss_coeff"] = [COEFFICIENTS[kind] for kind in balancing]
    if "z_loss" in kinds:
        config["moe_z_loss_coeff"] = COEFFICIENTS["z_loss"]
    return config


def gradient_of(topology: Topology, run: Run, kinds: tuple[str, ...], parts: list[Any]) -> Gradient:
    """This rank's, of the step with the losses ``kinds`` under the extensions ``parts``."""
    from tests.host import gradients

    case = dataclasses.replace(run.case(topology, kinds), hook={"extensions": parts})
    chunks = build_chunks(topology, case.per_token, **case.config)
    for module in (m for ddp in chunks for m in ddp.modules()):
        if getattr(module, "global_tokens_per_expert", None) is not None:
            # The host's running mean is in fp32.
            module.global_tokens_per_expert = module.global_tokens_per_expert.double()
    take(case, topology, chunks)
    assert chunks[0].module.config.moe_grad_scale_func is None  # of the call alone
    scale = 8.0 if run.scales else 1.0
    return {name: g / scale for name, g in gradients.of(chunks).items()}


def errors(topology: Topology, wanted: dict[Run, Gradient]) -> list[dict[str, float]]:
    """A rank, of each run: of what the losses add to the gradient, over all parameters and over
    experts alone; and of what they add by the host's own weights.
    """
    from tests.host import gpt, gradients

    gpt.initialize(**topology.sizes)
    found = []
    for run, whole in wanted.items():
        off = gradient_of(topology, run, (), [])
        expected = {
            name: gradients.part_of(whole[name], p)
            for ddp in build_chunks(topology, run.per_token)
            for name, p in gradients.parts(ddp.module)
        }
        # The last layer's are not reached by any router's loss.
        experts = {n: g for n, g in expected.items() if "experts" in n and g.any()}
        of_run = {}
        for weights, parts in (("ours", [RouterLosses()]), ("host", [])):
            on = gradient_of(topology, run, run.kinds, parts)
            added = {name: on[name] - g for name, g in off.items()}
            of_run[weights] = relative_error(added, expected)
            if experts:
                of_run[f"{weights}, of experts"] = relative_error(added, experts)
        found.append(of_run)
    return found


@functools.cache
def found(name: str) -> dict[Run, list[dict[str, float]]]:
    """The errors of each run, by rank."""
    topology = dataclasses.replace(TOPOLOGIES[name], model="moe")
    if name == "vpp2":
        topology = dataclasses.replace(topology, config={**topology.config, "num_layers": 4})
    wanted = {}
    for run in RUNS[name]:
        by_kind = formulas()[formula_of(name, run)]
        names = by_kind["z_loss"]
        wanted[run] = {n: torch.stack([by_kind[k][n] for k in run.kinds]).sum(dim=0) for n in names}
    ranks = run_host_ranks(errors, topology.world_size, topology, wanted, timeout=300)
    return dict(zip(wanted, map(list, zip(*ranks, strict=True)), strict=True))


@pytest.mark.parametrize("name", RUNS)
def test_the_gradient_is_that_of_the_formula(name: str) -> None:
    for run, ranks in found(name).items():
        for of_rank in ranks:
            ours = [error for weights, error in of_rank.items() if weights.startswith("ours")]
            assert max(ours) <= EXACT, run


def test_means_over_tokens_and_rows_do_not_depend_on_the_microbatches() -> None:
    one = tuple(sum(EQUAL, ()))
    wanted: list[Formula] = [("bshd", EQUAL, False), ("bshd", (one,), False)]
    many, single = run_host_ranks(formula_gradients, 1, wanted)[0].values()
    for kind in ALL:
        error = relative_error(many[kind], single[kind])
        assert (error <= EXACT) is (kind in ("seq_aux_loss", "z_loss")), (kind, error)


def test_the_hosts_own_weights_are_others() -> None:
    """``T / N`` times the formula's under the flag; without it, each microbatch weighs as much."""
    of_host = {run: ranks[0]["host"] for run, ranks in found("dp1").items() if run.kinds == ALL}
    # Tokens in packs, and in rows, over the 50 active ones.
    assert of_host[Run("thd", True)] == pytest.approx(84 / 50 - 1)
    assert of_host[Run("bshd", True, scales=True)] == pytest.approx(456 / 50 - 1)
    assert min(of_host[Run("thd", False)], of_host[Run("bshd", False, scales=True)]) > 0.01
