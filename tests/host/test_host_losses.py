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
from tests.host.cases import Case, refusals, run, take
from tests.host.harness import EXACT, TOPOLOGIES, Topology, build_chunks, run_host_ranks
from tests.host.reference import Gradient, relative_error
from tests.host.scripts import with_labels
from tests.host.steps import PLACES

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


class Row(NamedTuple):
    """A step under the plugin, and the forward step of the same loop without it."""

    name: str
    loss: str  # of `ON_OFF`
    case: Case
    stock: Any = with_labels


def rows(topology: Topology, names: tuple[str, ...]) -> list[Row]:
    step = {"step": with_labels, "places": PLACES[topology.data_parallel_size]}
    found = []
    for name in names:
        if name in ON_OFF:
            for layout, flag in product(("thd", "bshd"), (False, True)):
                case = Case("prompt_mean", layout=layout, per_token=flag, **step)
                found.append(Row(name, name, case))
        else:
            hook = {"read_batch": routed} if name == "routed" else {}
            case = Case("prompt_mean", per_token=True, hook=hook, **step)
            found.append(Row(name, "balance", case, counts_routed_tokens))
    return found


def added(topology: Topology, row: Row, hooked: bool) -> tuple[Gradient, float]:
    """What turning the loss on adds to this rank's gradient; and relative to all the rest."""
    from tests.host import gradients

    case = row.case if hooked else dataclasses.replace(row.case, step=row.stock, hooked=False)
    on, off = {}, {}
    for config, found in zip(ON_OFF[row.loss], (on, off), strict=True):
        chunks = build_chunks(topology, case.per_token, **config)
        take(case, topology, chunks)
        found.update(gradients.of(chunks))
    return {name: on[name] - g for name, g in off.items()}, relative_error(on, off)


def compare(topology: Topology, of_rows: list[Row]) -> list[tuple[float, float]]:
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


# Each of the 8 microbatches of two ranks; the per-token flag; what is said.
NUMBERS: dict[str, tuple[Any, bool, tuple[str, ...]]] = {
    "most": (partial(routed, number=2**28 - 1), True, ()),
    "too many": (
        partial(routed, number=2**28),
        True,
        ("HostError: a step of 2147483648 tokens", "as int32", "turn the flag off"),
    ),
    "too many without the flag": (partial(routed, number=2**28), False, ()),
    "none": (partial(routed, number=0), True, ()),
    "some": (some, True, ("StepError: 2 of a step's 8 microbatches have routed_tokens", "or none")),
    "negative": (partial(routed, number=-1), True, ("routed_tokens=-1; expected an int >= 0",)),
}


def test_numbers_that_the_host_cannot_count_are_refused_on_every_rank() -> None:
    cases = {
        name: Case("prompt_mean", per_token=flag, hook={"read_batch": read})
        for name, (read, flag, _) in NUMBERS.items()
    }
    for rank in refusals(TOPOLOGIES["dp2"], cases):
        for name, (*_, texts) in NUMBERS.items():
            assert (rank[name] is None) is (not texts), (name, rank[name])
            assert [text for text in texts if text not in str(rank[name])] == [], rank[name]
