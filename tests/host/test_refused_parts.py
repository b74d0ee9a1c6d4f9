"""What multi-token prediction and the losses of experts' routers cannot do exactly is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_loss_agg import CPLayout, Microbatch, Term
from megatron_loss_agg.mcore import MultiTokenPrediction, RouterLosses, read_batch
from tests.host import gpt, pipeline_parallel, scripts, whole
from tests.host.cases import Batch, Case, run
from tests.host.harness import MODELS, Topology
from tests.host.refusals import Row, assert_told, hook_of, thd
from tests.host.steps import aggregation, batches, sequences

# Multi-token prediction.
MTP = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.5}


def once_more(labels: bool, iterator: Any, model: Any) -> Any:
    """Calls the model again, as loops that take log-probabilities do; or with ``labels``."""
    losses, loss_func = scripts.with_labels(iterator, model)
    tokens = torch.zeros_like(loss_func.args[0], dtype=torch.int64)
    with torch.set_grad_enabled(labels):
        model(tokens, tokens, None, labels=tokens if labels else None)
    return losses, loss_func


def contiguous(iterator: Any, model: Any) -> Any:
    """Splits rows over context-parallel ranks in another way than the host moves labels."""
    _, size, rank = whole.context_parallel()
    batch = next(iterator)
    layout = CPLayout.contiguous(batch["tokens"].shape[1], size, rank)
    tokens, labels, mask = (layout.shard(batch[k]) for k in ("tokens", "labels", "loss_mask"))
    losses = model(tokens, gpt.positions_like(tokens), None, labels=labels, loss_mask=mask)
    return losses, partial(gpt.stock_loss_func, mask)


def alike(rank: int) -> Iterator[Any]:
    """Tells no split from another, of which the same weights are at depth 0 alone."""
    (batch,) = batches(((0, 2),), "bshd")
    return iter([{name: torch.ones_like(x) for name, x in batch.items()}])


def mtp(step: Any, says: str = "", cp: bool = False, terms: Any = "token_mean", **more: Any) -> Row:
    one = {
        "topology": "cp2" if cp else "dp1",
        "hook": hook_of(terms, extensions=[MultiTokenPrediction()]),
        "data": lambda rank: batches(((0, 2),) if cp else ((0,),), "bshd"),
        "number": 1,
        "model": MTP,
    }
    return Row(says, **{**one, "step": step, **more})


def of_terms(*names: str) -> Any:
    return partial(scripts.of_terms, names=names, step=scripts.with_labels)


UNMASKED = partial(scripts.with_labels, loss_mask=None)
NOT_MOVED = "HostError: are not the loss mask moved by the depth ... (MultiTokenPrediction())"
OF_MTP = {
    "MTP without layers": mtp(
        scripts.with_labels,
        "HostError: a model with mtp_num_layers=None",
        config={"mtp_num_layers": None},
    ),
    "MTP without a factor": mtp(
        scripts.with_labels,
        "HostError: mtp_num_layers=2, mtp_loss_scaling_factor=None",
        config={"mtp_loss_scaling_factor": None},
    ),
    "MTP without a mask": mtp(UNMASKED, NOT_MOVED),
    "MTP without labels": mtp(partial(scripts.with_labels, labels=None), NOT_MOVED),
    "MTP of two calls": mtp(
        partial(once_more, True),
        "HostError: losses of [24, 24, 24, 24, 24, 24] tokens ... (MultiTokenPrediction())",
    ),
    "MTP besides a call without losses": mtp(partial(once_more, False)),
    "MTP of contiguous parts": mtp(contiguous, NOT_MOVED, cp=True),
    "MTP of unknown parts": mtp(
        scripts.with_labels,
        "LayoutError: this rank's mask and tokens fit the splits",
        cp=True,
        data=alike,
    ),
    "MTP of a term that weighs nothing": mtp(
        of_terms(*"ab"),
        "ModeError: with the coefficient 0 of 'a', by which it multiplies MTP's",
        terms={"a": Term(aggregation("sum"), 0.0), "b": Term(aggregation("sum"))},
    ),
    "MTP of a term named as a depth": mtp(
        of_terms("a", "mtp_1 a"),
        "ReportError: the loss function reports 'mtp_1 a loss'",
        terms={"a": aggregation("sum"), "mtp_1 a": aggregation("sum")},
    ),
}

# Losses of experts' routers.
BALANCE = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}
EXPERTS = {**MODELS["moe"], **BALANCE}
PLACES = ((0, 1), (2, 3)), ((4, 6), (5,))  # of unequal size on the second data-parallel rank alone


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
    tokens, labels, mask, packed = gpt.local_batch(iter([batch]))
    places = gpt.positions_like(tokens)
    padding = places >= batch.get("length", tokens.shape[1])
    logits = model(tokens, places, None, packed_seq_params=packed, padding_mask=padding)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view_as(tokens), partial(gpt.stock_loss_func, mask)


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


def experts(says: str, reads: Any = read_batch, **options: Any) -> Row:
    hook = hook_of("token_mean", extensions=[RouterLosses()], read_batch=reads)
    return Row(says, **{"hook": hook, "data": thd(*PLACES), "model": EXPERTS, **options})


OF_EXPERTS = {
    "router losses over all ranks": experts(
        "HostError: global_aux_loss over 2 data-parallel ranks ... expected one, or aux_loss",
        model={**EXPERTS, "moe_router_load_balancing_type": "global_aux_loss"},
    ),
    "router losses without experts": experts(
        "HostError: with a model without experts; expected --num-experts: or drop it", model={}
    ),
    # Who finds it says what it is; the other has heard of it.
    "router losses of other tokens": experts(
        "PeerError: routers of another rank saw other tokens",
        reads=one_more_token,
        on_rank={1: "HostError: routers saw microbatches of [ ... routed_tokens="},
    ),
    "router losses that are not asked for": experts(
        "HostError: called config.moe_grad_scale_func 0 times in 2 forward passes; expected once",
        call={"schedule": without_the_function},
    ),
    "router losses of unequal microbatches": experts(
        "HostError: of different numbers of tokens over pipeline stages: [ ... on this data-par"
        " ... expected --calculate-per-token-loss",
        topology="pp2-dp2-distributed-overlap",
    ),
    "router losses of padding on parts": experts(
        "HostError: saw microbatches of [-1] tokens ... needs one tensor- and context-parallel",
        topology="cp2",
        step=telling_padding,
    ),
    "router losses of padding that counts": experts(
        "HostError: routers saw microbatches of [3, 17] tokens ... planned are [24]; expected ..."
        " Microbatch(routed_tokens=): without padding if the model gets a padding_mask",
        topology="dp1",
        data=then_padded,
        number=3,
        step=telling_padding,
        before=[{"forward_step_func": telling_padding}],
    ),
}


ROWS = {**OF_MTP, **OF_EXPERTS, "a good step": Row()}


@pytest.mark.parametrize("name", ROWS)
def test_what_a_part_cannot_do_exactly_is_refused_on_every_rank(name: str) -> None:
    assert_told(__name__, name)


@pytest.mark.parametrize("per_token", [False, True])
def test_padding_that_routers_leave_out_does_not_count(per_token: bool) -> None:
    padded = dataclasses.replace(PADDED, per_token=per_token)
    cut = dataclasses.replace(padded, batch=partial(of_length, padded=False))
    # Of the gradient without these losses: equal errors say that gradients are equal.
    (one,), (other,) = run(Topology(1, model="moe"), [padded, cut]).values()
    assert one.error == pytest.approx(other.error, rel=1e-13)
    assert one.error > 1e-3
