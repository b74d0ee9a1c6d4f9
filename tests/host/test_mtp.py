"""Losses of multi-token prediction, aggregated as the main loss is, against one fp64 process."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_loss_agg import CPLayout, Term
from megatron_loss_agg.mcore import MultiTokenPrediction, read_batch
from tests.frameworks.harness import text_of
from tests.host import gpt, whole
from tests.host.cases import Batch, Case, run
from tests.host.harness import EXACT, TOPOLOGIES, run_host_ranks
from tests.host.reference import Gradient, gradient_of
from tests.host.refusals import Row, assert_told, hook_of
from tests.host.scripts import of_terms, with_labels
from tests.host.steps import (
    N_MB,
    PLACES,
    Sequence,
    Weights,
    aggregation,
    batch_of,
    batches,
    factored,
    sequences,
    weights_of,
    with_factors,
)

RELEASE = tuple(map(int, version("megatron-core").split(".")[:2]))
DEPTHS, FACTOR = 2, 0.5
CONFIG = {"mtp_num_layers": DEPTHS, "mtp_loss_scaling_factor": FACTOR}
METHOD = "compute_language_model_loss"
HOOK = {"extensions": [MultiTokenPrediction()]}
WITH_FACTORS = {
    "hook": {**HOOK, "read_batch": partial(read_batch, factors="factors")},
    "batch": with_factors,
}


def case(layout: str, per_token: bool, mode: str, masks: str = "01", **more: Any) -> Case:
    given = {"layout": layout, "per_token": per_token, "masks": masks, "config": CONFIG}
    return Case(mode, **{"step": with_labels, "hook": HOOK, **given, **more})


def whole_texts(batch: Batch, of_mb: tuple[int, ...]) -> Batch:
    """Sequences with their last label as one more token, which has no target."""
    layout = "thd" if "cu_seqlens" in batch else "bshd"
    return batch_of([with_last_label(sequences()[i]) for i in of_mb], layout)


def with_last_label(s: Sequence) -> Sequence:
    mask = (*s.sample.mask, 0.0)
    return Sequence(text_of(s), F.pad(s.labels, (0, 1)), dataclasses.replace(s.sample, mask=mask))


def without_labels(iterator: Any, model: Any) -> Any:
    """The model gives logits, and has the mask by token; as loops of reinforcement learning do."""
    batch = gpt.received(iterator)
    of_tokens = batch | {"loss_mask": batch["loss_mask"].roll(1, dims=-1)}
    *_, mask_of_tokens, _ = gpt.part_of(of_tokens)
    logits, labels, mask = gpt.outputs(batch, model, loss_mask=mask_of_tokens)
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return losses, partial(gpt.stock_loss_func, mask)


UNLABELLED = {"step": without_labels, "batch": whole_texts}
QUARTER = {"token_mean": Term(aggregation("token_mean"), coefficient=0.25)}
CASES = {
    # With "single" masks most context-parallel ranks have no token of most depths.
    "cp2": {
        "tokens of packs": case("thd", False, "token_mean"),
        "single tokens of packs": case("thd", True, "prompt_mean", "single"),
        "fractions": case("bshd", True, "token_mean", "fractional"),
        "single tokens": case("bshd", False, "prompt_mean", "single"),
        "custom": case("thd", False, "custom"),
        "custom of fractions": case("bshd", True, "custom", "fractional"),
        "factors of packs": case("thd", True, "prompt_mean", **WITH_FACTORS),
        "factors of rows": case("bshd", False, "prompt_mean", **WITH_FACTORS),
        "custom and factors": case("thd", False, "custom", **WITH_FACTORS),
        "second step": case("bshd", True, "prompt_mean", times=2),
        "packs without labels": case("thd", False, "prompt_mean", **UNLABELLED),
        "rows without labels": case("bshd", True, "token_mean", **UNLABELLED),
        "evaluation": case("bshd", True, "prompt_mean", call={"forward_only": True}),
    },
    "dp2": {
        "packs": case("thd", True, "token_mean"),
        "rows": case("bshd", False, "prompt_mean"),
        "packs without labels": case("thd", True, "prompt_mean", **UNLABELLED),
        "several calls": case("bshd", True, "prompt_mean", calls=(1, N_MB - 1)),
        "coefficient": case("bshd", False, "token_mean", terms=QUARTER),
        # The last one, on a model that has had the extension: the host's losses are its own again.
        "host": case("bshd", False, "token_mean", hook={}),
    },
    "pp2": {"packs": case("thd", True, "prompt_mean"), "rows": case("bshd", False, "token_mean")},
    "tp2": {"packs": case("thd", False, "prompt_mean"), "rows": case("bshd", True, "token_mean")},
}


Step = list[tuple[str, Weights]]


def oracle(step: Step) -> list[tuple[Gradient, list[float]]]:
    gpt.initialize()
    return alone(gpt.build(**CONFIG), step)


def alone(model: Any, step: Step) -> list[tuple[Gradient, list[float]]]:
    """One process that runs every sample alone: gradient, and the weighted sum at each depth.

    At depth d, the logits of position t predict label t + d, with the weight of that label.
    """
    found = []
    for masks, weights in step:
        sums = [torch.zeros((), dtype=torch.float64) for _ in range(DEPTHS + 1)]
        for i, of_sample in weights:
            sequence, w = sequences(masks)[i], torch.tensor(of_sample, dtype=torch.float64)
            for depth, logits in enumerate(logits_of(model, sequence)):
                kept = max(len(w) - depth, 0)
                losses = F.cross_entropy(logits[:kept], sequence.labels[depth:], reduction="none")
                sums[depth] = sums[depth] + (w[depth:] * losses).sum()
        loss = sums[0] + FACTOR / DEPTHS * sum(sums[1:])
        found.append((gradient_of(loss, model), [float(x) for x in sums]))
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


def loss_of(case: Case) -> tuple[str, str, bool]:
    return case.mode, case.masks, case.batch is with_factors


@functools.cache
def references() -> dict[tuple[str, str, bool], tuple[Gradient, list[float]]]:
    wanted = sorted({loss_of(case) for cases in CASES.values() for case in cases.values()})
    step = []
    for mode, masks, has_factors in wanted:
        weights = weights_of(mode, PLACES[1], masks)
        step.append((masks, factored(weights) if has_factors else weights))
    return dict(zip(wanted, run_host_ranks(oracle, 1, step, timeout=200)[0], strict=True))


def supported() -> tuple[bool, bool]:
    """Whether this release moves labels inside the sequences of a pack; others refuse packs.

    And whether it takes labels from the tokens; the MTP of others needs labels.
    """
    from megatron.core.transformer import multi_token_prediction as host

    process = getattr(host, "process_mtp_loss", None)
    return (
        "packed_seq_params" in inspect.signature(host.roll_tensor).parameters,
        process is not None and "input_ids" in inspect.signature(process).parameters,
    )


@pytest.mark.parametrize("name", CASES)
def test_losses_are_aggregated_as_the_main_loss(name: str) -> None:
    topology, ((takes_packs, makes_labels),) = TOPOLOGIES[name], run_host_ranks(supported, 1)
    cases = {
        kind: dataclasses.replace(case, places=PLACES[topology.data_parallel_size])
        for kind, case in CASES[name].items()
        if (takes_packs or case.layout != "thd") and (makes_labels or case.batch is None)
    }
    expected, sums = zip(*(references()[loss_of(c)] for c in cases.values()), strict=True)
    gradients = list(expected)
    for i, kind in enumerate(cases):
        if kind == "coefficient":
            gradients[i] = {parameter: 0.25 * g for parameter, g in gradients[i].items()}
    found = run(topology, list(cases.values()), gradients)
    for (kind, case), of_depths in zip(cases.items(), sums, strict=True):
        wanted = dict(zip(("", "mtp_1 ", "mtp_2 "), of_depths, strict=True))
        wanted = {f"{depth}{case.mode} loss": loss for depth, loss in wanted.items()}
        if kind == "coefficient":
            total = of_depths[0] + FACTOR / DEPTHS * sum(of_depths[1:])
            wanted["loss"] = 0.25 * total
        for error, reports in found[case]:
            aggregated = {key: x for key, x in reports.items() if key != "lm loss"}
            if kind in ("evaluation", "host"):
                # The host's own are means of microbatches; NaN before 0.17: one has no token.
                assert not error <= (0.2 if kind == "host" else 0.99)
                assert aggregated.keys() == {f"{case.mode} loss"}
                continue
            assert error <= EXACT, kind
            if reports:
                assert aggregated == pytest.approx(wanted, rel=1e-13), kind
        assert reports  # of the last rank, which is on the last stage


def once_more(labels: bool, iterator: Any, model: Any) -> Any:
    """Calls the model again, as loops that take log-probabilities do; or with ``labels``."""
    losses, loss_func = with_labels(iterator, model)
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


def telling_nothing(rank: int) -> Iterator[Any]:
    """Tells no split from another, of which the same weights are at depth 0 alone."""
    (batch,) = batches(((0, 2),), "bshd")
    return iter([{name: torch.ones_like(x) for name, x in batch.items()}])


def refused(
    step: Any, says: str = "", cp: bool = False, terms: Any = "token_mean", **more: Any
) -> Row:
    one = {
        "topology": "cp2" if cp else "dp1",
        "hook": hook_of(terms, extensions=[MultiTokenPrediction()]),
        "data": lambda rank: batches(((0, 2),) if cp else ((0,),), "bshd"),
        "number": 1,
        "model": CONFIG,
    }
    return Row(says, **{**one, "step": step, **more})


UNMASKED = partial(with_labels, loss_mask=None)
NOT_MOVED = "HostError: are not the loss mask moved by the depth ... (MultiTokenPrediction())"
ROWS = {
    "without layers": refused(
        with_labels, "HostError: a model with mtp_num_layers=None", config={"mtp_num_layers": None}
    ),
    "without a factor": refused(
        with_labels,
        "HostError: mtp_num_layers=2, mtp_loss_scaling_factor=None",
        config={"mtp_loss_scaling_factor": None},
    ),
    "without a mask": refused(UNMASKED, NOT_MOVED),
    "without labels": refused(partial(with_labels, labels=None), NOT_MOVED),
    "of two calls": refused(
        partial(once_more, True),
        "HostError: losses of [24, 24, 24, 24, 24, 24] tokens ... (MultiTokenPrediction())",
    ),
    "besides a call without losses": refused(partial(once_more, False)),
    "of contiguous parts": refused(contiguous, NOT_MOVED, cp=True),
    "of unknown parts": refused(
        with_labels,
        "LayoutError: this rank's mask and tokens fit the splits",
        cp=True,
        data=telling_nothing,
    ),
    "of a term that weighs nothing": refused(
        partial(of_terms, names="ab", step=with_labels),
        "ModeError: with the coefficient 0 of 'a', by which it multiplies MTP's",
        terms={"a": Term(aggregation("sum"), 0.0), "b": Term(aggregation("sum"))},
    ),
    "of a term named as a depth": refused(
        partial(of_terms, names=("a", "mtp_1 a"), step=with_labels),
        "ReportError: the loss function reports 'mtp_1 a loss'",
        terms={"a": aggregation("sum"), "mtp_1 a": aggregation("sum")},
    ),
}

if RELEASE < (0, 19):  # whose MTP needs labels in every call
    del ROWS["without labels"], ROWS["besides a call without losses"]


@pytest.mark.parametrize("name", ROWS)
def test_what_cannot_be_done_exactly_is_refused_on_every_rank(name: str) -> None:
    assert_told(__name__, name)
