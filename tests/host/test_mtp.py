"""Losses of multi-token prediction, aggregated by weights of their own, against one fp64 process."""

from __future__ import annotations

import dataclasses
import functools
from functools import partial
from importlib.metadata import version
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_loss_agg import CPLayout, Microbatch, Term
from megatron_loss_agg.mcore import MTPAggregation, read_batch
from tests.host import gpt
from tests.host.cases import Batch, Call, Case, Expected, assert_exact
from tests.host.harness import MODELS, TOPOLOGIES
from tests.host.reference import Reference, gradient_of_sum, references
from tests.host.refusals import Refusal, assert_told
from tests.host.scripts import gathered, of_terms, with_labels
from tests.host.steps import (
    N_MB,
    PLACES,
    Sequence,
    aggregation,
    batch_of,
    sequences,
    weights_of,
)

RELEASE = tuple(map(int, version("megatron-core").split(".")[:2]))
TAKES_PACKS = RELEASE >= (0, 16)  # moves labels inside the sequences of a pack
MAKES_LABELS = RELEASE >= (0, 19)  # of tokens, where a call has no labels
DEPTHS, FACTOR = 2, 0.5
CONFIG = {"mtp_num_layers": DEPTHS, "mtp_loss_scaling_factor": FACTOR}
METHOD = "compute_language_model_loss"


def case(layout: str, per_token: bool, mode: str, masks: str = "01", **more: Any) -> Case:
    hook = {"extensions": [MTPAggregation()]}
    way = {"layout": layout, "per_token": per_token, "masks": masks, "config": CONFIG}
    return Case(mode, **{"step": with_labels, "hook": hook, **way, **more})


def in_mode(mode: str) -> dict[str, Any]:
    """MTP's losses in a mode of their own."""
    return {"hook": {"extensions": [MTPAggregation(aggregation(mode))]}}


def mode_of_mtp(case: Case) -> str:
    (extension,) = case.hook["extensions"]
    return extension.aggregation.mode if extension.aggregation else case.mode


def whole_texts(batch: Batch, of_mb: tuple[int, ...]) -> Batch:
    """Sequences with their last label as one more token, which has no target."""
    layout = "thd" if "cu_seqlens" in batch else "bshd"
    return batch_of([with_last_label(sequences()[i]) for i in of_mb], layout)


def with_last_label(s: Sequence) -> Sequence:
    text = torch.cat([s.tokens, s.labels[-1:]])
    mask = (*s.sample.mask, 0.0)
    return Sequence(text, F.pad(s.labels, (0, 1)), dataclasses.replace(s.sample, mask=mask))


def without_labels(iterator: Any, model: Any) -> Any:
    """The model gives logits, and has the mask by token; as loops of reinforcement learning do."""
    batch = gpt.received(iterator)
    of_tokens = batch | {"loss_mask": batch["loss_mask"].roll(1, dims=-1)}
    *_, mask_of_tokens, _ = gpt.part_of(of_tokens)
    logits, labels, mask = gpt.outputs(batch, model, loss_mask=mask_of_tokens)
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return losses, partial(gpt.stock_loss_func, mask)


def with_real_offsets(iterator: Any, model: Any) -> Any:
    """Calls the model with the offsets of unpadded sequences, by which it shifts labels."""
    batch = gpt.received(iterator)
    tokens, labels, mask, packed = gpt.part_of(batch)
    packed.cu_seqlens_q = batch["cu_seqlens"]
    arguments = {"packed_seq_params": packed, "labels": labels, "loss_mask": mask}
    losses = model(tokens, gpt.positions_like(tokens), None, **arguments)
    return losses, partial(gpt.stock_loss_func, mask)


def without_prompts(batch: Batch, _: tuple[int, ...]) -> Batch:
    return {key: x for key, x in batch.items() if key != "prompt_ids"}


def by_sequence(batch: Batch) -> Microbatch:
    """A reader of losses by sample."""
    return Microbatch.of_samples(len(batch["tokens"]), sequences=read_batch(batch))


GATHERED = partial(gathered, step=with_labels)
UNLABELLED = {"step": without_labels, "batch": whole_texts}
QUARTER = {"token_mean": Term(aggregation("token_mean"), multiplier=0.25)}
CASES = {
    # With "single" masks most context-parallel ranks have no token of most depths.
    "cp2": [
        case("thd", True, "prompt_mean", "single"),
        case("bshd", False, "prompt_mean", "single"),
        case("bshd", True, "token_mean", "fractional"),
        case("thd", False, "custom"),
        case("bshd", True, "custom", "fractional"),
        case("bshd", True, "prompt_mean", times=2),
        case("thd", False, "prompt_mean", **UNLABELLED),
        case("bshd", True, "token_mean", **UNLABELLED),
        case("thd", True, "prompt_mean", step=GATHERED),
        case("bshd", False, "prompt_mean", step=GATHERED),
        case("thd", True, "prompt_mean", **in_mode("token_mean")),
        case("bshd", False, "token_mean", "fractional", **in_mode("rollout_mean"), times=2),
    ],
    "dp2": [
        case("thd", True, "token_mean"),
        case("bshd", False, "prompt_mean"),
        case("thd", True, "prompt_mean", **UNLABELLED),
        case("bshd", True, "prompt_mean", calls=(1, N_MB - 1)),
        case("bshd", False, "prompt_mean", calls=(1, N_MB - 1)),
        case("bshd", False, "token_mean", terms=QUARTER),
        case("bshd", True, "prompt_mean", call={"forward_only": True}),
        case("bshd", True, "sample_sum", calls=(1, N_MB - 1), **in_mode("sample_mean")),
        case("bshd", False, "token_mean", terms=QUARTER, **in_mode("prompt_mean")),
    ],
    "pp2": [
        case("thd", True, "prompt_mean"),
        case("bshd", False, "token_mean"),
        case("thd", False, "token_mean", **in_mode("prompt_mean")),
    ],
    "vpp2": [case("thd", True, "prompt_mean"), case("bshd", False, "token_mean")],
    "tp2": [
        case("thd", False, "prompt_mean"),
        case("bshd", True, "token_mean"),
        case("thd", True, "prompt_mean", **in_mode("token_mean")),
    ],
}


def losses_of(model: Any, sequence: Sequence) -> dict[str, Tensor]:
    """Of each target, at depth d by the logits of d positions before; 0 where there are none."""
    found = {}
    for depth, logits in enumerate(logits_of(model, sequence)):
        kept = max(len(logits) - depth, 0)
        losses = F.cross_entropy(logits[:kept], sequence.labels[depth:], reduction="none")
        found[f"mtp_{depth} " if depth else ""] = F.pad(losses, (len(logits) - kept, 0))
    return found


def logits_of(model: Any, sequence: Any) -> list[Tensor]:
    """[tokens, vocabulary] of the main head, then of each depth; no loss of the host's is used."""
    seen: list[Tensor] = []

    def see(labels: Tensor, logits: Tensor) -> Tensor:
        seen.append(logits.squeeze(1))
        return torch.zeros_like(labels, dtype=torch.float64)

    setattr(model, METHOD, see)
    tokens = sequence.tokens.unsqueeze(0)
    arguments = {"labels": tokens, "loss_mask": torch.ones_like(tokens)}
    with gpt.precision(model.config):
        model(tokens, gpt.positions_like(tokens), None, **arguments)
    delattr(model, METHOD)
    return [seen[-1], *seen[:-1]]


@functools.cache
def of_depths(model: str) -> dict[str, Reference]:
    return references(losses_of, **MODELS[model], **CONFIG)


def expected(case: Case, model: str) -> Expected:
    """Every depth has the weights that its targets have in the main loss, in the mode of MTP."""
    multiplier = case.terms[case.mode].multiplier if case.terms else 1.0
    parts, reports, total = [], {}, 0.0
    for depth, reference in of_depths(model).items():
        factor = multiplier * (FACTOR / DEPTHS if depth else 1.0)
        mode = mode_of_mtp(case) if depth else case.mode
        weights = weights_of(mode, case.places, case.masks)
        parts.append((factor, reference, weights))
        loss = reference.loss(weights)
        total += factor * loss
        reports[f"{depth}{mode} loss"] = loss
    if case.terms:
        reports["loss"] = total
    if case.call:  # an evaluation, which has the main loss alone
        reports = {f"{case.mode} loss": reports[f"{case.mode} loss"]}
    return gradient_of_sum(*parts), reports


@pytest.mark.parametrize("name", CASES)
def test_losses_are_aggregated_as_the_main_loss_or_in_their_own_mode(name: str) -> None:
    topology = TOPOLOGIES[name]
    cases = [
        dataclasses.replace(case, places=PLACES[topology.data_parallel_size])
        for case in CASES[name]
        if (TAKES_PACKS or case.layout != "thd") and (MAKES_LABELS or case.step is with_labels)
    ]
    assert_exact(topology, cases, partial(expected, model=topology.model))


def once_more(labels: bool, iterator: Any, model: Any) -> Any:
    """Calls the model again, as loops that take log-probabilities do; or with ``labels``."""
    losses, loss_func = with_labels(iterator, model)
    tokens = torch.zeros_like(loss_func.args[0], dtype=torch.int64)
    with torch.set_grad_enabled(labels):
        model(tokens, tokens, None, labels=tokens if labels else None)
    return losses, loss_func


def apart(iterator: Any, model: Any) -> Any:
    """A loss whose gradient does not pass where Megatron adds MTP's: nothing shows its masks."""
    losses, loss_func = with_labels(iterator, model)
    return losses.detach() + 0 * next(model.parameters()).sum(), loss_func


def contiguous(iterator: Any, model: Any) -> Any:
    """Splits rows over context-parallel ranks in another way than the host moves labels."""
    batch = next(iterator)
    place = dist.get_world_size(), dist.get_rank()
    layout = CPLayout.contiguous(batch["tokens"].shape[1], *place)
    tokens, labels, mask = (layout.shard(batch[k]) for k in ("tokens", "labels", "loss_mask"))
    losses = model(tokens, gpt.positions_like(tokens), None, labels=labels, loss_mask=mask)
    return losses, partial(gpt.stock_loss_func, mask)


def under_plans(hook: Any, model: Any, call: Call) -> None:
    """A call whose schedule makes plans of forward passes."""
    with mock.patch.dict(vars(model.config), overlap_moe_expert_parallel_comm=True):
        call(1)


def refused(step: Any, says: str = "", cp: bool = False, **more: Any) -> Refusal:
    places = (((0, 2) if cp else (0,),),)
    way = {"layout": "bshd", "places": places, **more}
    of_step = case(mode="token_mean", per_token=False, step=step, **way)
    return Refusal(says, of_step, "cp2" if cp else "dp1")


UNMASKED = partial(with_labels, loss_mask=None)
NOT_SHIFTED = (
    "HostError: must shift the batch's loss mask by each depth of MTP ... loss_mask= ... for packs "
    "with the padded, not the real, offsets as cu_seqlens_q ... (MTPAggregation)"
)
ROWS = {
    "without layers": refused(
        with_labels, "HostError: got mtp_num_layers=None ... Set --mtp-num-layers", config={}
    ),
    "without a factor": refused(
        with_labels,
        "HostError: got mtp_num_layers=2 and mtp_loss_scaling_factor=None",
        config={**CONFIG, "mtp_loss_scaling_factor": None},
    ),
    "without a mask": refused(UNMASKED, NOT_SHIFTED),
    "without labels": refused(partial(with_labels, labels=None), NOT_SHIFTED),
    "of two calls": refused(
        partial(once_more, True),
        "HostError: got losses of [24, 24, 24, 24, 24, 24]. Call the model once ... (MTPAggregation)",
    ),
    "besides a call without losses": refused(partial(once_more, False)),
    **(
        {
            "of packs by real offsets": refused(
                with_real_offsets, NOT_SHIFTED, layout="thd", places=(((1, 3, 0),),)
            )
        }
        if TAKES_PACKS
        else {}
    ),
    "of losses by sample": refused(
        with_labels,
        "HostError: needs masks of tokens, got microbatches with losses by sample",
        hook={"extensions": [MTPAggregation()], "read_batch": by_sequence},
    ),
    "of a schedule of plans": refused(
        with_labels,
        "HostError: --loss-aggregation-mtp (MTPAggregation) needs the model's own forward pass ... got "
        "--overlap-moe-expert-parallel-comm. Drop",
        run=under_plans,
    ),
    "beside a loss that is not of the model's output": refused(apart, NOT_SHIFTED),
    "of contiguous parts": refused(contiguous, NOT_SHIFTED, cp=True),
    "of a term that weighs nothing": refused(
        partial(of_terms, names="ab", step=with_labels),
        "OptionError: multiplier, which also multiplies MTP's losses, got 0 for 'a'. Change it",
        terms={"a": Term(aggregation("sum"), 0.0), "b": Term(aggregation("sum"))},
    ),
    "in a mode by ids that batches lack": Refusal(
        "PeerError: another rank cannot aggregate the losses of MTP. Fix",
        case(
            *("bshd", False, "token_mean"),
            batch=without_prompts,
            places=PLACES[1],
            **in_mode("prompt_mean"),
        ),
        "pp2",
        {1: "DataError: mode 'prompt_mean' groups by prompt ... no prompt_ids"},
    ),
    "of a term named as a depth": refused(
        partial(of_terms, names=("a", "mtp_1 a"), step=with_labels),
        "DataError: reports must have different names, got ['mtp_1 a loss'] twice",
        terms={"a": aggregation("sum"), "mtp_1 a": aggregation("sum")},
    ),
}

if not MAKES_LABELS:
    del ROWS["without labels"], ROWS["besides a call without losses"]


@pytest.mark.parametrize("name", ROWS)
def test_what_cannot_be_done_exactly_is_refused_on_every_rank(name: str) -> None:
    assert_told(__name__, name)
