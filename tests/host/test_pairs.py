"""Losses by pair, as preference losses are, against one fp64 process.

A pair is two samples that follow one another. Its loss depends on the log-probabilities of both, so
the gradient of a token is the reference's, times the slope of the pair's loss, times its weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, log1p
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax, logsigmoid

from megatron_loss_agg import CPLayout, Microbatch, SequenceSum
from megatron_loss_agg.mcore import TokenLoss
from tests import oracle
from tests.host import gpt
from tests.host.cases import Case, Expected, assert_exact, covering
from tests.host.harness import TOPOLOGIES
from tests.host.reference import reference
from tests.host.steps import PROMPTS, Places, sequences
from tests.host.whole import context_parallel
from tests.oracle import Sample

BETA = 0.3
# Pairs by data-parallel rank and microbatch; of one pair, an answer has no tokens.
PLACES: dict[int, Places] = {
    1: (((0, 1), (2, 3, 4, 5, 8, 9), (6, 7)),),
    2: (((0, 1), (6, 7)), ((2, 3, 4, 5), (8, 9))),
}
MODES: dict[str, dict[str, Any]] = {
    "sample_mean": {},
    "prompt_mean": {},
    "nested_mean": {"levels": ("prompt", "sample")},
    "constant": {"divisor": 7.0},
}


def read(batch: dict[str, Tensor]) -> Microbatch:
    ids = batch["prompt_ids"][::2]
    return Microbatch(torch.ones(len(ids), 1), prompt_ids=ids)


def forward_step(data_iterator: Iterator[Any] | None, model: Any) -> tuple[Tensor, TokenLoss]:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    batch = gpt.received(data_iterator)
    tokens, labels, _, packed = gpt.local_batch(iter([batch]))
    output = model(tokens, gpt.positions_like(tokens), None, packed_seq_params=packed)
    group, size, rank = context_parallel()
    if packed is None:
        layout = CPLayout.bshd(batch["tokens"].shape[1], size, rank)
    else:
        layout = CPLayout.thd(batch["cu_seqlens_padded"], size, rank)
    offsets = {k: batch[k] for k in ("cu_seqlens", "cu_seqlens_padded") if k in batch}
    sums = SequenceSum(Microbatch(batch["loss_mask"], **offsets), layout, group)

    def compute(logits: Tensor) -> tuple[Tensor, dict[str, Any]]:
        logits = gather_from_tensor_model_parallel_region(logits)
        log_probs = log_softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        chosen, rejected = sums(log_probs).view(-1, 2).unbind(dim=1)
        return -logsigmoid(BETA * (chosen - rejected)), {}

    return output, TokenLoss(compute, torch.ones(len(batch["prompt_ids"]) // 2), "reduced_grad")


def expected(case: Case) -> Expected:
    step = [
        [[Sample((1.0,), prompt=PROMPTS[i]) for i in place[::2]] for place in rank]
        for rank in case.places
    ]
    weights = [
        w
        for rank in oracle.step_weights(case.mode, step, **case.options)
        for microbatch in rank
        for (w,) in microbatch
    ]
    order = [i for rank in case.places for place in rank for i in place]
    masks, losses = [s.sample.mask for s in sequences()], reference().losses
    pairs = zip(masks, losses, strict=True)
    log_prob = [-float(torch.tensor(m, dtype=x.dtype) @ x) for m, x in pairs]
    total, of_tokens = 0.0, []
    for (i, j), w in zip(zip(order[::2], order[1::2], strict=True), weights, strict=True):
        margin = BETA * (log_prob[i] - log_prob[j])
        total += w * log1p(exp(-margin))
        slope = w * BETA / (1 + exp(margin))  # of the token losses of the chosen answer
        of_tokens += [(i, [slope * m for m in masks[i]]), (j, [-slope * m for m in masks[j]])]
    return reference().gradient(of_tokens), {f"{case.mode} loss": total}


@pytest.mark.parametrize("name", ["dp1", "dp2-cp2", "cp2", "pp2", "tp2"])
def test_losses_by_pair_are_exact(name: str) -> None:
    topology = TOPOLOGIES[name]
    ranks = topology.data_parallel_size
    cases = [
        Case(
            mode,
            options,
            layout=layout,
            places=PLACES[ranks],
            per_token=per_token,
            hook={"read_batch": read},
            step=forward_step,
            times=2,  # the first step measures
        )
        for (mode, options), layout, per_token in covering(
            2, [*MODES.items()], ("thd", "bshd"), (False, True)
        )
    ]
    assert_exact(topology, cases, expected)
