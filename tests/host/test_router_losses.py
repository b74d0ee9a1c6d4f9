"""Losses that the host adds by itself: by its own weights, or by the formula under `RouterLosses`.

A gradient is linear in them: what turning one on adds to the gradient is compared, with that of the
host without the plugin under the same flags; or with the formula in one fp64 process, on any layout
and on both routes. Under the per-token flag a loop may return its routed tokens for the weights of
the host's losses, on which the aggregated loss does not depend.
"""

from __future__ import annotations

import dataclasses
import functools
from functools import partial
from importlib.metadata import version
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_loss_agg import Microbatch
from megatron_loss_agg.mcore import RouterLosses, read_batch
from tests.host.cases import Case, run, take
from tests.host.harness import (
    EXACT,
    MODELS,
    TOPOLOGIES,
    Topology,
    build_chunks,
    run_host_ranks,
)
from tests.host.reference import Gradient, relative_error
from tests.host.refusals import Row, assert_told, hook_of, thd
from tests.host.scripts import with_labels
from tests.host.steps import N_MB, PLACES, batches

pytestmark = pytest.mark.host
has_the_formula = pytest.mark.skipif(
    not version("megatron-core").startswith("0.19."),
    reason="RouterLosses is refused: see test_dataset_reports",
)

Config = dict[str, Any]
# Of a difference of two gradients, each exact to 1e-14; the loss is a tenth of it or more.
ROUNDING = 1e-12


def added(topology: Topology, case: Case, on: Config, off: Config) -> tuple[Gradient, float]:
    """What turning a loss on adds to this rank's gradient; and relative to all the rest."""
    from tests.host import gradients

    found: list[Gradient] = []
    for config in (on, off):
        chunks = build_chunks(topology, case.per_token, **config)
        for module in (m for ddp in chunks for m in ddp.modules()):
            if getattr(module, "global_tokens_per_expert", None) is not None:
                # The host's running mean is in fp32.
                module.global_tokens_per_expert = module.global_tokens_per_expert.double()
        take(case, topology, chunks)
        assert getattr(chunks[0].module.config, "moe_grad_scale_func", None) is None
        found.append(gradients.of(chunks))
    with_it, without = found
    return {name: with_it[name] - g for name, g in without.items()}, relative_error(*found)


# The host's own weights.

# What turns each loss on, and what turns it off in a model of the same parameters.
ON_OFF: dict[str, tuple[Config, Config]] = {
    "balance": ({"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}, {}),
    "z": ({"moe_z_loss_coeff": 0.1}, {}),
    "mtp": (
        {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 1.0},
        {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.0},
    ),
}
# Topology and model; "routed" and "untold": with the number of routed tokens, and without.
LOSSES = {
    ("ep2", "moe"): ("balance", "z", "routed", "untold"),
    ("cp2", "moe"): ("balance", "routed", "untold"),
    ("tp2-sp", "moe"): ("balance",),
    **{(name, "dense"): ("mtp",) for name in ("dp2", "cp2", "pp2", "tp2")},
}


def routed(batch: dict[str, Tensor], number: int | None = None) -> Microbatch:
    """With the number of tokens that the model is called with, or another."""
    number = batch["tokens"].numel() if number is None else number
    return dataclasses.replace(read_batch(batch), routed_tokens=number)


def counts_routed_tokens(data_iterator: Any, model: Any) -> Any:
    """The loop without the plugin: it returns this rank's routed tokens."""
    losses, loss_func = with_labels(data_iterator, model)

    def counted(output: Tensor) -> Any:
        loss, _, report = loss_func(output)
        return loss, torch.tensor(output.numel(), dtype=torch.int), report

    return losses, counted


Kept = tuple[str, Case, Case]
"""What is kept; a step under the plugin, and of the same loop without it."""


def kept(topology: Topology, names: tuple[str, ...]) -> list[Kept]:
    found: list[Kept] = []
    for name in names:
        counts = name not in ON_OFF
        ways = [("thd", True)] if counts else product(("thd", "bshd"), (False, True))
        for layout, flag in ways:
            places = PLACES[topology.data_parallel_size]
            way = {"layout": layout, "per_token": flag, "places": places, "step": with_labels}
            ours = Case(
                "prompt_mean", hook={"read_batch": routed} if name == "routed" else {}, **way
            )
            step = counts_routed_tokens if counts else with_labels
            found.append((name, ours, dataclasses.replace(ours, step=step, hooked=False)))
    return found


def compare(topology: Topology, rows: list[Kept]) -> list[tuple[float, float]]:
    """Every rank, of each row: the error of what the loss adds, and how much it adds."""
    from tests.host import gpt

    gpt.initialize(**topology.sizes)
    found = []
    for name, *cases in rows:
        on_off = ON_OFF.get(name, ON_OFF["balance"])
        (ours, share), (stock, _) = (added(topology, case, *on_off) for case in cases)
        found.append((relative_error(ours, stock), share))
    return found


@pytest.mark.parametrize(("name", "model"), LOSSES)
def test_the_plugin_leaves_the_hosts_loss_its_weight(name: str, model: str) -> None:
    topology = dataclasses.replace(TOPOLOGIES[name], model=model)
    rows = kept(topology, LOSSES[name, model])
    for rank in run_host_ranks(compare, topology.world_size, topology, rows, timeout=300):
        for (loss, *_), (error, share) in zip(rows, rank, strict=True):
            assert share > 0.1, loss
            # Without the routed tokens, the weight is another.
            assert error > 0.1 if loss == "untold" else error <= ROUNDING, loss


@pytest.mark.parametrize("name", ["cp2", "ep2"])
def test_the_aggregated_loss_does_not_depend_on_the_routed_tokens(name: str) -> None:
    topology = dataclasses.replace(TOPOLOGIES[name], model="moe")
    places = PLACES[topology.data_parallel_size]
    case = Case("prompt_mean", places=places, per_token=True, hook={"read_batch": routed})
    assert max(rank.error for rank in run(topology, [case])[case]) <= EXACT


def some(batch: dict[str, Tensor]) -> Microbatch:
    """Routed tokens for packs of several samples alone, which both data-parallel ranks have."""
    several = batch["prompt_ids"].numel() > 1
    return routed(batch) if several else read_batch(batch)


def counted(read: Any, says: str = "", per_token: bool = True) -> Row:
    hook, data = hook_of(read_batch=read), thd(*PLACES[2])
    return Row(says, hook=hook, data=data, number=N_MB, per_token=per_token)


# Each of the 8 microbatches of two ranks.
ROWS = {
    "the most": counted(partial(routed, number=2**28 - 1)),
    "too many": counted(
        partial(routed, number=2**28),
        "HostError: a step of 2147483648 tokens ... as int32 ... turn the flag off",
    ),
    "too many without the flag": counted(partial(routed, number=2**28), per_token=False),
    "none": counted(partial(routed, number=0)),
    "some": counted(some, "StepError: 2 of a step's 8 microbatches have routed_tokens ... or none"),
    "negative": counted(
        partial(routed, number=-1), "MaskError: routed_tokens=-1; expected an int >= 0"
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_numbers_that_the_host_cannot_count_are_refused_on_every_rank(name: str) -> None:
    assert_told(__name__, name)


# The formula.

Microbatches = tuple[tuple[int, ...], ...]
Formula = tuple[str, Microbatches, int]
"""How samples are laid out; the samples of each microbatch; the number of layers."""

COEFFICIENTS = {"aux_loss": 3.0, "seq_aux_loss": 2.0, "global_aux_loss": 4.0, "z_loss": 0.3}
# One microbatch has no active token. Packs have 12 to 40 tokens, rows 24 or 144; or all 144.
UNEQUAL = ((0, 1), (5,), (2, 3), (4, 6))
EQUAL = ((0, 1), (5, 2), (3, 7), (4, 6))
LOCAL = ("aux_loss", "seq_aux_loss", "z_loss")
ALL = (*LOCAL, "global_aux_loss")
BOTH = (False, True)


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

    def configs(self, layers: int) -> tuple[Config, Config]:
        """Of the model with the losses, and without."""
        off: Config = {"num_layers": layers}
        if self.scales:
            off["grad_scale_func"] = eightfold
        balancing = [kind for kind in self.kinds if kind != "z_loss"]
        on = (
            {**off, "moe_z_loss_coeff": COEFFICIENTS["z_loss"]}
            if "z_loss" in self.kinds
            else {**off}
        )
        if balancing:
            on["moe_router_load_balancing_type"] = balancing
            on["moe_aux_loss_coeff"] = [COEFFICIENTS[kind] for kind in balancing]
        return on, off

    def case(self, data_parallel_size: int, **hook: Any) -> Case:
        places = (self.microbatches,)
        if data_parallel_size == 2:
            places = self.microbatches[: self.cut], self.microbatches[self.cut :]
        way = {"layout": self.layout, "per_token": self.per_token, "calls": self.calls}
        return Case("token_mean", places=places, hook=hook, **way)


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
    return run.layout, run.microbatches, 4 if name == "vpp2" else 2


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
    models = {n: gpt.build(num_layers=n, **MODELS["moe"]) for n in {n for _, _, n in wanted}}
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


def errors(
    topology: Topology, layers: int, wanted: dict[Run, Gradient], extensions: list[Any]
) -> list[float]:
    """A rank, of each run: the error of what the losses add to the gradient."""
    from tests.host import gpt, gradients

    gpt.initialize(**topology.sizes)
    found = []
    for one, whole in wanted.items():
        case = one.case(topology.data_parallel_size, extensions=extensions)
        ours, _ = added(topology, case, *one.configs(layers))
        scale = 8.0 if one.scales else 1.0
        expected = {
            name: scale * gradients.part_of(whole[name], p)
            for ddp in build_chunks(topology, one.per_token, num_layers=layers)
            for name, p in gradients.parts(ddp.module)
        }
        found.append(relative_error(ours, expected))
    return found


def worst_errors(name: str, runs: list[Run], *extensions: Any) -> dict[Run, float]:
    """Of each run, over all ranks."""
    topology = dataclasses.replace(TOPOLOGIES[name], model="moe")
    wanted = {}
    for one in runs:
        by_kind = formulas()[formula_of(name, one)]
        names = by_kind["z_loss"]
        wanted[one] = {n: torch.stack([by_kind[k][n] for k in one.kinds]).sum(dim=0) for n in names}
    given = topology, 4 if name == "vpp2" else 2, wanted, [*extensions]
    ranks = run_host_ranks(errors, topology.world_size, *given, timeout=300)
    return dict(zip(runs, map(max, zip(*ranks, strict=True)), strict=True))


@has_the_formula
@pytest.mark.parametrize("name", RUNS)
def test_the_gradient_is_that_of_the_formula(name: str) -> None:
    for one, error in worst_errors(name, RUNS[name], RouterLosses()).items():
        assert error <= ROUNDING, one


@has_the_formula
def test_the_hosts_own_weights_are_others() -> None:
    """``T / N`` times the formula's under the flag; without it, each microbatch weighs as much."""
    of_host = worst_errors("dp1", [run for run in RUNS["dp1"] if run.kinds == ALL])
    # Tokens in packs, and in rows, over the 50 active ones.
    assert of_host[Run("thd", True)] == pytest.approx(84 / 50 - 1)
    assert of_host[Run("bshd", True, scales=True)] == pytest.approx(456 / 50 - 1)
    assert min(of_host[Run("thd", False)], of_host[Run("bshd", False, scales=True)]) > 0.01
