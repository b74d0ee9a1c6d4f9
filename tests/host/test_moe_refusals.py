"""Where `RouterLosses` cannot be exact, every rank says so; and padding that routers leave out."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_loss_agg import Microbatch
from megatron_loss_agg.mcore import LossHook, RouterLosses, read_batch
from tests.host.harness import (
    TOPOLOGIES,
    Topology,
    build_chunks,
    data_for,
    error_of,
    run_host_ranks,
)
from tests.host.reference import relative_error
from tests.host.steps import Places, aggregation, batch_of, sequences

pytestmark = pytest.mark.host
if not version("megatron-core").startswith("0.19."):
    pytest.skip("see test_moe_releases", allow_module_level=True)

PLACES: dict[int, Places] = {
    1: (((0, 1), (5,)),),
    2: (((0, 1), (2, 3)), ((4, 6), (5,))),  # of unequal size on the second rank alone
}
BALANCE = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}


def run(
    topology: Topology,
    losses: dict[str, Any],
    hook: LossHook,
    per_token: bool = False,
    **options: Any,
) -> None:
    """One step of this rank."""
    from tests.host import gpt

    config = {**topology.config, **losses}
    chunks = build_chunks(dataclasses.replace(topology, config=config), per_token)
    places = PLACES[topology.data_parallel_size]
    data = data_for(topology, places, "thd")
    gpt.run_step(hook, chunks, data, len(places[0]), **options)


def hook(read: Any = read_batch) -> LossHook:
    return LossHook(aggregation("token_mean"), read_batch=read, extensions=[RouterLosses()])


def routed(batch: dict[str, Tensor]) -> Microbatch:
    """One token more than the model routes, for the last microbatch of all."""
    more = int(batch["prompt_ids"].tolist() == [sequences()[5].sample.prompt])
    return dataclasses.replace(read_batch(batch), routed_tokens=batch["tokens"].numel() + more)


def with_padding_mask(data_iterator: Iterator[Any], model: Any) -> Any:
    from tests.host import gpt

    tokens, _, mask, packed = gpt.local_batch(data_iterator)
    padding = torch.zeros_like(tokens, dtype=torch.bool)
    arguments = {"packed_seq_params": packed, "padding_mask": padding}
    logits = model(tokens, gpt.positions_like(tokens), None, **arguments)
    return logits.sum(dim=-1), partial(gpt.stock_loss_func, mask)


def without_the_function(**arguments: Any) -> Any:
    """A schedule that does not ask for the weights."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    arguments["model"][0].module.config.moe_grad_scale_func = None
    return get_forward_backward_func()(**arguments)


def errors(topology: Topology, name: str) -> dict[str, str | None]:
    """A rank: what each step raises."""
    from tests.host import gpt

    dense = dataclasses.replace(topology, model="dense")
    gpt.initialize(**topology.sizes)
    losses = {**BALANCE, "moe_router_load_balancing_type": "global_aux_loss"}
    found = {}

    def note(what: str, *args: Any, **options: Any) -> None:
        found[what] = error_of(run, *args, **options)

    if name == "dp2":
        note("global", topology, losses, hook())
        note("dense", dense, {}, hook())
        note("other tokens", topology, BALANCE, hook(read=routed))
        note("not asked", topology, BALANCE, hook(), schedule=without_the_function)
    if name == "pp2-dp2":
        note("unequal", topology, BALANCE, hook())
    if name == "cp2":
        note("padding", topology, BALANCE, hook(), forward_step_func=with_padding_mask)
    return found


TEXTS = {
    "global": "global_aux_loss over 2 data-parallel ranks, .* expected one, or aux_loss",
    "dense": "with a model without experts; expected --num-experts: or drop it",
    "other tokens": r"routers saw microbatches of \[\d+\] tokens, planned are .*routed_tokens=|"
    "routers of another rank saw other tokens",
    "not asked": "called config.moe_grad_scale_func 0 times in 2 forward passes; expected once",
    "unequal": r"^HostError: .* of different numbers of tokens over pipeline stages: \[\d+.*\] on "
    r"this data-parallel rank.*expected --calculate-per-token-loss",
    "padding": r"saw microbatches of \[-1\] tokens, .* needs one tensor- and context-parallel rank",
}


RANKS = {
    "dp2": TOPOLOGIES["dp2"],
    "pp2-dp2": dataclasses.replace(TOPOLOGIES["pp2"], world_size=4),
    "cp2": TOPOLOGIES["cp2"],
}


@pytest.mark.parametrize("name", RANKS)
def test_what_cannot_be_exact_is_refused_on_every_rank(name: str) -> None:
    topology = dataclasses.replace(RANKS[name], model="moe")
    ranks = run_host_ranks(errors, topology.world_size, topology, name)
    for rank in ranks:
        assert rank
        for what, error in rank.items():
            assert error is not None, what
            assert re.search(TEXTS[what], error), error
    # Who finds it says what it is; the other has heard of it.
    assert len({rank["other tokens"] for rank in ranks if "other tokens" in rank}) in (0, 2)


def rows(padded: bool) -> Iterator[dict[str, Any]]:
    """Microbatches of one row, padded or as long as its sample."""
    for sequence in (sequences()[i] for i in (0, 1, 4)):
        batch: dict[str, Any] = batch_of([sequence], "bshd")
        length = len(sequence.tokens)
        if not padded:
            batch = {key: x[:, :length] if x.dim() == 2 else x for key, x in batch.items()}
        yield {**batch, "length": length}


def forward_rows(data_iterator: Iterator[Any], model: Any) -> Any:
    """As scripts that tell the routers which tokens are padding."""
    from tests.host import gpt

    batch = next(data_iterator)
    tokens = batch["tokens"]
    padding = torch.arange(tokens.shape[1]).unsqueeze(0) >= batch["length"]
    logits = model(tokens, gpt.positions_like(tokens), None, padding_mask=padding)
    losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return losses.view_as(tokens), partial(gpt.stock_loss_func, batch["loss_mask"])


def told(batch: dict[str, Any]) -> Microbatch:
    return dataclasses.replace(read_batch(batch), routed_tokens=batch["length"])


def of_padding() -> tuple[list[float], str | None]:
    """By route: how far the gradient of padded rows is from that of unpadded ones; and what a
    second step says that is not told how many tokens are no padding.
    """
    from tests.host import gpt, gradients

    gpt.initialize()
    topology = dataclasses.replace(TOPOLOGIES["dp1"], model="moe")
    topology = dataclasses.replace(topology, config={**BALANCE, "moe_z_loss_coeff": 0.3})
    distances = []
    for per_token in (False, True):
        chunks = build_chunks(topology, per_token)
        found = []
        for padded in (False, True):
            gpt.run_step(hook(read=told), chunks, rows(padded), 3, forward_step_func=forward_rows)
            found.append(gradients.of(chunks))
        distances.append(relative_error(found[1], found[0]))
    one = hook()  # its first step has no padding
    no_padding = ({**batch, "length": batch["tokens"].numel()} for batch in rows(True))
    gpt.run_step(one, chunks, no_padding, 3, forward_step_func=forward_rows)
    untold = error_of(gpt.run_step, one, chunks, rows(True), 3, forward_step_func=forward_rows)
    return distances, untold


def test_padding_that_routers_leave_out_does_not_count() -> None:
    ((distances, untold),) = run_host_ranks(of_padding, 1)
    assert max(distances) <= 1e-13
    assert untold is not None
    assert (
        "routers saw microbatches of [3, 17] tokens" in untold
        and "planned are [24]; expected" in untold
    )
    assert "Microbatch(routed_tokens=): without padding if the model gets a" in untold
