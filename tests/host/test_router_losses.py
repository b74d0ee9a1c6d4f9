"""Losses of experts' routers by the formula, under `RouterLosses`: over the whole step.

One fp64 process has the formula of each loss; on any layout and on both routes the gradient is that
of the aggregated loss and of these together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_loss_agg import Microbatch
from megatron_loss_agg.mcore import RouterLosses, read_batch
from tests.host import gpt, pipeline_parallel
from tests.host.cases import Batch, Case, assert_exact, run
from tests.host.harness import EXACT, MODELS, TOPOLOGIES, Topology, run_host_ranks
from tests.host.reference import Gradient, gradient_of, reference
from tests.host.refusals import Row, assert_told, hook_of, thd
from tests.host.steps import batches, sequences

has_the_formula = pytest.mark.skipif(
    not version("megatron-core").startswith("0.19."),
    reason="RouterLosses is refused: see test_dataset_reports",
)

Config = dict[str, Any]
BOTH = (False, True)


Microbatches = tuple[tuple[int, ...], ...]
Formula = tuple[str, str, Microbatches]
"""The model; how samples are laid out; the samples of each microbatch."""

COEFFICIENTS = {"aux_loss": 3.0, "seq_aux_loss": 2.0, "global_aux_loss": 4.0, "z_loss": 0.3}
# One microbatch has no active token. Packs have 12 to 40 tokens, rows 24 or 144; or all 144.
UNEQUAL = ((0, 1), (5,), (2, 3), (4, 6))
EQUAL = ((0, 1), (5, 2), (3, 7), (4, 6))
LOCAL = ("aux_loss", "seq_aux_loss", "z_loss")
ALL = (*LOCAL, "global_aux_loss")


def eightfold(loss: Tensor) -> Tensor:
    """The loss scale of half precision."""
    return loss * 8.0


class Run(NamedTuple):
    """One step with these losses."""

    layout: str
    per_token: bool
    microbatches: Microbatches = UNEQUAL
    kinds: tuple[str, ...] = ALL
    calls: tuple[int, ...] = ()  # microbatches of each call of the step
    scales: bool = False
    cut: int = 2  # microbatches of the first of two data-parallel ranks

    def case(self, topology: Topology, **hook: Any) -> Case:
        places = (self.microbatches,)
        if topology.data_parallel_size == 2:
            places = self.microbatches[: self.cut], self.microbatches[self.cut :]
        balancing = [kind for kind in self.kinds if kind != "z_loss"]
        config: Config = {"grad_scale_func": eightfold} if self.scales else {}
        if "z_loss" in self.kinds:
            config["moe_z_loss_coeff"] = COEFFICIENTS["z_loss"]
        if balancing:
            config["moe_router_load_balancing_type"] = balancing
            config["moe_aux_loss_coeff"] = [COEFFICIENTS[kind] for kind in balancing]
        way = {"layout": self.layout, "per_token": self.per_token, "calls": self.calls}
        return Case("token_mean", places=places, hook=hook, config=config, **way)

    def gradient(self, topology: Topology, factor: float = 1.0) -> Gradient:
        """Of the whole step; of its router losses, ``factor`` times the formula's."""
        weights = self.case(topology).weights
        of_kinds = formulas()[topology.model, self.layout, self.microbatches]
        scale = 8.0 if self.scales else 1.0
        return {
            name: scale * (g + factor * sum(of_kinds[kind][name] for kind in self.kinds))
            for name, g in reference(topology.model).gradient(weights).items()
        }


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


ROUTERS = {"extensions": [RouterLosses()]}


def topology_of(name: str) -> Topology:
    return dataclasses.replace(TOPOLOGIES[name], model="deep-moe" if name == "vpp2" else "moe")


@functools.cache
def formulas() -> dict[Formula, dict[str, Gradient]]:
    wanted = dict.fromkeys(
        (topology_of(name).model, run.layout, run.microbatches)
        for name, runs in RUNS.items()
        for run in runs
    )
    return run_host_ranks(formula_gradients, 1, list(wanted))[0]


def formula_gradients(wanted: list[Formula]) -> dict[Formula, dict[str, Gradient]]:
    """One fp64 process, by formula and kind: the gradient of ``sum_k T_k / T * a_k``.

    The model gives its routers' inputs and weights alone.
    """
    gpt.initialize()
    models = {name: gpt.build(**MODELS[name]) for name in {name for name, *_ in wanted}}
    return {formula: _gradients(models[formula[0]], *formula[1:]) for formula in wanted}


def _gradients(model: Any, layout: str, microbatches: Microbatches) -> dict[str, Gradient]:
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
    return {kind: gradient_of(x / tokens, model) for kind, x in total.items()}


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


@has_the_formula
@pytest.mark.parametrize("name", RUNS)
def test_the_gradient_is_that_of_the_formula(name: str) -> None:
    topology = topology_of(name)
    expected = {one.case(topology, **ROUTERS): (one.gradient(topology), {}) for one in RUNS[name]}
    assert_exact(topology, [*expected], expected.__getitem__)


# ``T / N`` times the formula's under the flag: tokens in packs, and in rows, over the active ones.
# Without it, each microbatch weighs as much.
OF_HOST = {
    Run("thd", True): 84 / 50,
    Run("bshd", True, scales=True): 456 / 50,
    Run("thd", False): None,
    Run("bshd", False, scales=True): None,
}


@has_the_formula
def test_the_hosts_own_weights_are_others_also_on_a_model_that_had_the_formulas() -> None:
    topology = topology_of("dp1")
    before = [one.case(topology, **ROUTERS) for one in OF_HOST]
    own = [one.case(topology) for one in OF_HOST]
    gradients = [one.gradient(topology, factor or 1.0) for one, factor in OF_HOST.items()]
    found = run(topology, before + own, 2 * gradients)
    for case, factor in zip(own, OF_HOST.values(), strict=True):
        ((error, _),) = found[case]
        assert error <= EXACT if factor else error > 0.01, case


BALANCE = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}
EXPERTS = {**MODELS["moe"], **BALANCE}
REFUSED_PLACES = ((0, 1), (2, 3)), ((4, 6), (5,))  # unequal on the second data-parallel rank alone


def one_more_token(batch: Batch) -> Microbatch:
    """Than the model routes, for the last microbatch of all."""
    more = int(batch["prompt_ids"].tolist() == [sequences()[5].sample.prompt])
    return dataclasses.replace(read_batch(batch), routed_tokens=batch["tokens"].numel() + more)


def without_the_function(**arguments: Any) -> Any:
    """A schedule that does not ask for the weights."""
    arguments["model"][0].module.config.moe_grad_scale_func = None
    return pipeline_parallel.get_forward_backward_func()(**arguments)


def telling_padding(iterator: Any, model: Any) -> Any:
    """As scripts that tell the routers which tokens are padding: those beyond a ``length``."""
    batch = gpt.received(iterator)
    tokens = gpt.layout_of(batch).shard(batch["tokens"])
    padding = gpt.positions_like(tokens) >= batch.get("length", tokens.shape[1])
    logits, labels, mask = gpt.outputs(batch, model, padding_mask=padding)
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return losses, partial(gpt.stock_loss_func, mask)


def without_padding(batch: Batch) -> Microbatch:
    return dataclasses.replace(read_batch(batch), routed_tokens=batch["length"])


def of_length(batch: Batch, of_mb: tuple[int, ...], padded: bool = True) -> Batch:
    """One row, padded or as long as its sample."""
    length = len(sequences()[of_mb[0]].tokens)
    if not padded:
        batch = {key: x[:, :length] if x.dim() == 2 else x for key, x in batch.items()}
    return {**batch, "length": length}


PADDED = Case(
    "token_mean",
    layout="bshd",
    places=(((0,), (1,), (4,)),),
    config={**BALANCE, "moe_z_loss_coeff": 0.3},
    hook={"extensions": [RouterLosses()], "read_batch": without_padding},
    batch=of_length,
    step=telling_padding,
)


def then_padded(rank: int) -> Iterator[Batch]:
    """A step in which nothing is said to be padding, and one with padding."""
    yield from ({**batch, "length": batch["tokens"].numel()} for batch in PADDED.data(0))
    yield from PADDED.data(0)


def refused(says: str, reads: Any = read_batch, **options: Any) -> Row:
    hook = hook_of("token_mean", extensions=[RouterLosses()], read_batch=reads)
    return Row(says, **{"hook": hook, "data": thd(*REFUSED_PLACES), "model": EXPERTS, **options})


ROWS = {
    "over all ranks": refused(
        "HostError: global_aux_loss over 2 data-parallel ranks ... expected one, or aux_loss",
        model={**EXPERTS, "moe_router_load_balancing_type": "global_aux_loss"},
    ),
    "without experts": refused(
        "HostError: with a model without experts; expected --num-experts: or drop it", model={}
    ),
    # Who finds it says what it is; the other has heard of it.
    "of other tokens": refused(
        "PeerError: routers of another rank saw other tokens",
        reads=one_more_token,
        on_rank={1: "HostError: routers saw microbatches of [ ... routed_tokens="},
    ),
    "that are not asked for": refused(
        "HostError: called config.moe_grad_scale_func 0 times in 2 forward passes; expected once",
        call={"schedule": without_the_function},
    ),
    "of unequal microbatches": refused(
        "HostError: of different numbers of tokens over pipeline stages: [ ... on this data-par"
        " ... expected --calculate-per-token-loss",
        topology="pp2-dp2-distributed-overlap",
    ),
    "of padding on parts": refused(
        "HostError: saw microbatches of [-1] tokens ... needs one tensor- and context-parallel",
        topology="cp2",
        step=telling_padding,
    ),
    "of padding that counts": refused(
        "HostError: routers saw microbatches of [3, 17] tokens ... planned are [24]; expected ..."
        " Microbatch(routed_tokens=): without padding if the model gets a padding_mask",
        topology="dp1",
        data=then_padded,
        number=3,
        step=telling_padding,
        before=[{"forward_step_func": telling_padding}],
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_what_cannot_be_done_exactly_is_refused_on_every_rank(name: str) -> None:
    assert_told(__name__, name)


@pytest.mark.parametrize("per_token", [False, True])
def test_padding_that_routers_leave_out_does_not_count(per_token: bool) -> None:
    padded = dataclasses.replace(PADDED, per_token=per_token)
    cut = dataclasses.replace(padded, batch=partial(of_length, padded=False))
    # Of the gradient without these losses: equal errors say that gradients are equal.
    (one,), (other,) = run(Topology(1, model="moe"), [padded, cut]).values()
    assert one.error == pytest.approx(other.error, rel=1e-13)
    assert one.error > 1e-3
