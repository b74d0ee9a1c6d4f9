"""Under the per-token flag a loop may return its routed tokens, for the losses of the host's own.

What turning the router's loss on adds to the gradient is then what it adds to that loop without the
plugin; the aggregated loss does not depend on the number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_loss_agg import Microbatch
from megatron_loss_agg.mcore import LossHook, read_batch
from tests.host.harness import (
    EXACT,
    TOPOLOGIES,
    Topology,
    build_chunks,
    data_for,
    error_of,
    run_host_ranks,
)
from tests.host.reference import reference, relative_error
from tests.host.steps import N_MB, PLACES, aggregation, weights_of
from tests.host.test_auxiliary_losses import ON_OFF, ROUNDING, forward_step

pytestmark = pytest.mark.host


def routed(batch: dict[str, Tensor], number: int | None = None) -> Microbatch:
    """With the number of tokens that the model is called with, or another."""
    number = batch["tokens"].numel() if number is None else number
    return dataclasses.replace(read_batch(batch), routed_tokens=number)


def stock_step(data_iterator: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
    """The loop without the plugin: it returns this rank's routed tokens."""
    losses, loss_func = forward_step(data_iterator, model)

    def counted(output: Tensor) -> Any:
        loss, _, report = loss_func(output)
        return loss, torch.tensor(output.numel(), dtype=torch.int), report

    return losses, counted


def compare(topology: Topology, expected: Any) -> tuple[float, float, float]:
    """Every rank: the errors of what the router's loss adds to the gradient, of the rest of it, and
    of what it adds where the plugin is not told the routed tokens.
    """
    from tests.host import gpt, gradients

    gpt.initialize(**topology.sizes)

    def gradient(config: dict[str, Any], hook: LossHook | None, step: Any) -> Any:
        chunks = build_chunks(
            dataclasses.replace(topology, config={**topology.config, **config}), True
        )
        data = data_for(topology, PLACES[topology.data_parallel_size], "thd")
        gpt.run_step(hook, chunks, data, N_MB, forward_step_func=step)
        return gradients.of(chunks), gradients.error(chunks, expected)

    def added(make_hook: Any, step: Any) -> tuple[Any, float]:
        (on, _), (off, error) = (
            gradient(config, make_hook(), step) for config in ON_OFF["balance"]
        )
        return {name: on[name] - g for name, g in off.items()}, error

    agg = aggregation("prompt_mean")
    stock, _ = added(lambda: None, stock_step)
    ours, error = added(partial(LossHook, agg, read_batch=routed), forward_step)
    untold, _ = added(partial(LossHook, agg), forward_step)
    return relative_error(ours, stock), error, relative_error(untold, stock)


@pytest.mark.parametrize("name", ["cp2", "ep2"])
def test_routed_tokens_keep_the_weight_of_the_routers_loss(name: str) -> None:
    topology = dataclasses.replace(TOPOLOGIES[name], model="moe")
    weights = weights_of("prompt_mean", PLACES[topology.data_parallel_size])
    expected = reference("moe").gradient(weights)
    for added, error, untold in run_host_ranks(compare, 2, topology, expected, timeout=300):
        assert added <= ROUNDING
        assert error <= EXACT
        assert untold > 0.1


def some(batch: dict[str, Tensor]) -> Microbatch:
    """Routed tokens for packs of several samples alone, which both data-parallel ranks have."""
    several = batch["prompt_ids"].numel() > 1
    return routed(batch) if several else read_batch(batch)


NUMBERS = {
    # Each of the 8 microbatches of two ranks.
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


def errors_on_host() -> dict[str, str | None]:
    """Every rank, DP 2: the error of each of `NUMBERS`."""
    from tests.host import gpt

    gpt.initialize()
    models = {per_token: gpt.ddp_model(per_token) for per_token in (False, True)}

    def run(read: Any, per_token: bool) -> None:
        data = data_for(TOPOLOGIES["dp2"], PLACES[2], "thd")
        gpt.run_step(
            LossHook(aggregation("prompt_mean"), read_batch=read), models[per_token], data, N_MB
        )

    return {name: error_of(run, *given) for name, (*given, _) in NUMBERS.items()}


def test_numbers_that_the_host_cannot_count_are_refused_on_every_rank() -> None:
    for rank in run_host_ranks(errors_on_host, 2):
        for name, (*_, texts) in NUMBERS.items():
            assert (rank[name] is None) is (not texts), (name, rank[name])
            assert [text for text in texts if text not in str(rank[name])] == [], rank[name]
