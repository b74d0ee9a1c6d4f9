"""Auxiliary losses of routers under `RouterLosses`, against the formula in one fp64 process.

The gradient is linear in them: what turning them on adds to it must be that of the formula, on any
layout and on both routes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, NamedTuple

import pytest
import torch

from megatron_loss_agg.mcore import LossHook, RouterLosses, read_batch
from tests.host.harness import MODELS, TOPOLOGIES, Topology, build_chunks, data_for, run_host_ranks
from tests.host.reference import Gradient, relative_error
from tests.host.router_losses import COEFFICIENTS, Case, Microbatches, gradients_of
from tests.host.steps import Places, aggregation, batches

pytestmark = pytest.mark.host
if not version("megatron-core").startswith("0.19."):
    pytest.skip("see test_moe_releases", allow_module_level=True)

EXACT = 1e-12  # of a difference of two gradients
# One microbatch has no active token. Packs have 12 to 40 tokens, rows 24 or 144; or all 144.
UNEQUAL = ((0, 1), (5,), (2, 3), (4, 6))
EQUAL = ((0, 1), (5, 2), (3, 7), (4, 6))
LOCAL = ("aux_loss", "seq_aux_loss", "z_loss")
ALL = (*LOCAL, "global_aux_loss")


class Run(NamedTuple):
    """One step, with the losses and without."""

    layout: str
    per_token: bool
    microbatches: Microbatches = UNEQUAL
    kinds: tuple[str, ...] = ALL
    calls: tuple[int, ...] = ()  # microbatches of each call of the step
    loss_scale: float = 1.0
    cut: int = 2  # microbatches of the first of two data-parallel ranks


BOTH = (False, True)
RUNS: dict[str, list[Run]] = {
    "dp1": [
        *(Run("thd", route) for route in BOTH),
        *(Run("thd", route, calls=(1, 2, 1)) for route in BOTH),
        *(Run("bshd", False, kinds=(kind,)) for kind in ALL),
        *(Run("bshd", route, loss_scale=8.0) for route in BOTH),
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


def case_of(name: str, run: Run) -> Case:
    return run.layout, run.microbatches, name == "vpp2"


@functools.cache
def formula() -> dict[Case, dict[str, Gradient]]:
    cases = dict.fromkeys(case_of(name, run) for name, runs in RUNS.items() for run in runs)
    return run_host_ranks(gradients_of, 1, list(cases), MODELS["moe"])[0]


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


def built(chosen: Topology, per_token: bool, kinds: tuple[str, ...]) -> list[Any]:
    """This rank's model chunks, with these losses."""
    config = {**chosen.config, **turned_on(kinds)}
    chunks = build_chunks(dataclasses.replace(chosen, config=config), per_token)
    for module in (m for ddp in chunks for m in ddp.modules()):
        if getattr(module, "global_tokens_per_expert", None) is not None:
            # The host's running mean is in fp32.
            module.global_tokens_per_expert = module.global_tokens_per_expert.double()
    return chunks


def step_of(chosen: Topology, run: Run, chunks: list[Any], hook: LossHook) -> Gradient:
    """This rank's gradient of the step."""
    from tests.host import gpt, gradients

    microbatches, cut = run.microbatches, run.cut
    places: Places = (microbatches,)
    if chosen.data_parallel_size == 2:
        places = microbatches[:cut], microbatches[cut:]
    mine = places[gpt.data_rank()]
    data = data_for(chosen, places, run.layout)
    if run.loss_scale != 1:
        chunks[0].module.config.grad_scale_func = lambda loss: loss * run.loss_scale
    if run.calls:
        with hook.step([read_batch(batch) for batch in batches(mine, run.layout)]):
            for i, number in enumerate(run.calls):
                gpt.run_step(hook, chunks, data, number, zero_grad=i == 0)
    else:
        gpt.run_step(hook, chunks, data, len(mine))
    assert chunks[0].module.config.moe_grad_scale_func is None
    return {name: g / run.loss_scale for name, g in gradients.of(chunks).items()}


def errors(
    chosen: Topology, wanted: dict[Run, Gradient], with_host: bool
) -> dict[Run, dict[str, float]]:
    """A rank: of what the losses add to the gradient, over all parameters and over experts alone;
    and of what they add by the host's own weights.
    """
    from tests.host import gpt, gradients

    gpt.initialize(**chosen.sizes)
    without: dict[Any, Gradient] = {}
    found = {}
    for run, whole in wanted.items():

        def added(run: Run, parts: list[Any], off: Gradient) -> Gradient:
            hook = LossHook(aggregation("token_mean"), extensions=parts)
            on = step_of(chosen, run, built(chosen, run.per_token, run.kinds), hook)
            return {name: on[name] - g for name, g in off.items()}

        key = run._replace(kinds=(), calls=(), loss_scale=1.0)
        chunks = built(chosen, run.per_token, ())
        if key not in without:
            without[key] = step_of(chosen, key, chunks, LossHook(aggregation("token_mean")))
        expected = {
            name: gradients.part_of(whole[name], p)
            for ddp in chunks
            for name, p in gradients.parts(ddp.module)
        }
        ours = added(run, [RouterLosses()], without[key])
        found[run] = {"all": relative_error(ours, expected)}
        # The last layer's are not reached by any router's loss.
        experts = {n: g for n, g in expected.items() if "experts" in n and g.any()}
        if experts:
            found[run]["experts"] = relative_error(ours, experts)
        if with_host:
            found[run]["host"] = relative_error(added(run, [], without[key]), expected)
    return found


def found(name: str, runs: list[Run], with_host: bool = False) -> Iterator[dict[str, float]]:
    """Of every rank and run."""
    chosen = dataclasses.replace(TOPOLOGIES[name], model="moe")
    if name == "vpp2":
        chosen = dataclasses.replace(chosen, config={**chosen.config, "num_layers": 4})
    wanted = {}
    for run in runs:
        by_kind = formula()[case_of(name, run)]
        names = by_kind["z_loss"]
        wanted[run] = {n: torch.stack([by_kind[k][n] for k in run.kinds]).sum(dim=0) for n in names}
    for rank in run_host_ranks(errors, chosen.world_size, chosen, wanted, with_host):
        assert list(rank) == runs
        yield from rank.values()


@pytest.mark.parametrize("name", RUNS)
def test_the_gradient_is_that_of_the_formula(name: str) -> None:
    for of_run in found(name, RUNS[name]):
        assert max(of_run.values()) <= EXACT


def test_means_over_tokens_and_rows_do_not_depend_on_the_microbatches() -> None:
    one = tuple(sum(EQUAL, ()))
    cases: list[Case] = [("bshd", EQUAL, False), ("bshd", (one,), False)]
    many, single = run_host_ranks(gradients_of, 1, cases, MODELS["moe"])[0].values()
    for kind in ALL:
        error = relative_error(many[kind], single[kind])
        assert (error <= EXACT) is (kind in ("seq_aux_loss", "z_loss")), (kind, error)


def test_the_hosts_own_weights_are_others() -> None:
    """``T / N`` times the formula's under the flag; without it, each microbatch weighs as much."""
    runs = [Run("thd", True), Run("bshd", True), Run("thd", False), Run("bshd", False)]
    packs, rows, *others = (of_run["host"] for of_run in found("dp1", runs, True))
    # Tokens in packs, and in rows, over the 50 active ones.
    assert packs == pytest.approx(84 / 50 - 1)
    assert rows == pytest.approx(456 / 50 - 1)
    assert min(others) > 0.01
