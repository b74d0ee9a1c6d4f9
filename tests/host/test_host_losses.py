"""Losses that the host adds by itself keep the weight that it gives them without the plugin.

A gradient is linear in them: what turning one on adds to the gradient must be the same with and
without the plugin, under the same flags. Under the per-token flag a loop may return its routed
tokens for their weights, on which the aggregated loss does not depend.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_loss_agg import Microbatch
from megatron_loss_agg.mcore import read_batch
from tests.host.cases import Case, run, take
from tests.host.harness import EXACT, TOPOLOGIES, Topology, build_chunks, run_host_ranks
from tests.host.reference import Gradient, relative_error
from tests.host.refusals import Row, assert_told, hook_of, thd
from tests.host.scripts import with_labels
from tests.host.steps import N_MB, PLACES

pytestmark = pytest.mark.host

# Of a difference of two gradients, each exact to 1e-14; the loss is a tenth of it or more.
ROUNDING = 1e-13
# What turns each loss on, and what turns it off in a model of the same parameters.
ON_OFF: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "balance": ({"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}, {}),
    "z": ({"moe_z_loss_coeff": 0.1}, {}),
    "mtp": (
        {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 1.0},
        {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.0},
    ),
}
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


class Kept(NamedTuple):
    """A step under the plugin, and the forward step of the same loop without it."""

    name: str
    loss: str  # of `ON_OFF`
    case: Case
    stock: Any = with_labels


def rows(topology: Topology, names: tuple[str, ...]) -> list[Kept]:
    step = {"step": with_labels, "places": PLACES[topology.data_parallel_size]}
    found = []
    for name in names:
        if name in ON_OFF:
            for layout, flag in product(("thd", "bshd"), (False, True)):
                case = Case("prompt_mean", layout=layout, per_token=flag, **step)
                found.append(Kept(name, name, case))
        else:
            hook = {"read_batch": routed} if name == "routed" else {}
            case = Case("prompt_mean", per_token=True, hook=hook, **step)
            found.append(Kept(name, "balance", case, counts_routed_tokens))
    return found


def added(topology: Topology, row: Kept, hooked: bool) -> tuple[Gradient, float]:
    """What turning the loss on adds to this rank's gradient; and relative to all the rest."""
    from tests.host import gradients

    case = row.case if hooked else dataclasses.replace(row.case, step=row.stock, hooked=False)
    on, off = {}, {}
    for config, found in zip(ON_OFF[row.loss], (on, off), strict=True):
        chunks = build_chunks(topology, case.per_token, **config)
        take(case, topology, chunks)
        found.update(gradients.of(chunks))
    return {name: on[name] - g for name, g in off.items()}, relative_error(on, off)


def compare(topology: Topology, of_rows: list[Kept]) -> list[tuple[float, float]]:
    """Every rank, of each row: the error of what the loss adds, and how much it adds."""
    from tests.host import gpt

    gpt.initialize(**topology.sizes)
    found = []
    for row in of_rows:
        (stock, _), (ours, share) = (added(topology, row, hooked) for hooked in (False, True))
        found.append((relative_error(ours, stock), share))
    return found


@pytest.mark.parametrize(("name", "model"), LOSSES)
def test_the_plugin_leaves_the_hosts_loss_its_weight(name: str, model: str) -> None:
    topology = dataclasses.replace(TOPOLOGIES[name], model=model)
    of_rows = rows(topology, LOSSES[name, model])
    for rank in run_host_ranks(compare, topology.world_size, topology, of_rows, timeout=300):
        for row, (error, share) in zip(of_rows, rank, strict=True):
            assert share > 0.1, row.name
            # Without the routed tokens, the weight is another.
            assert error > 0.1 if row.name == "untold" else error <= ROUNDING, row.name


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
