"""Weights by sample and data sets through the real host, against the fp64 reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron_loss_agg.mcore import LossHook
from tests import oracle
from tests.host.harness import EXACT, run_host_ranks
from tests.host.reference import reference
from tests.host.steps import N_MB, PLACES, Weights, aggregation, batch_of, sequences
from tests.oracle import Sample

pytestmark = pytest.mark.host

V = (0.5, 2.0, 1.0, 0.0, 0.25, 3.0, 1.0, 0.125, 1.5, 1.0)
DATASETS = (2, 0, 1, 2, 0, 5, 1, 1, 0, 2)  # 5: the sample without tokens is alone
# Mode and options.
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "data sets": ("dataset_mean", {}),
    "data sets with tokens": ("dataset_mean", {"empty": "skip"}),
    "tokens": ("token_mean", {"sample_weights": "count"}),
    "samples": ("sample_mean", {"sample_weights": "count"}),
    "prompts": ("prompt_mean", {"sample_weights": "skip"}),
    "microbatches": ("microbatch_mean", {"sample_weights": "count"}),
    "both": ("dataset_mean", {"sample_weights": "count"}),
}


def sample(i: int, options: dict[str, Any]) -> Sample:
    weight = V[i] if "sample_weights" in options else 1.0
    return dataclasses.replace(sequences()[i].sample, dataset=DATASETS[i], weight=weight)


def expected_weights(mode: str, options: dict[str, Any]) -> Weights:
    step = [[[sample(i, options) for i in place] for place in rank] for rank in PLACES[2]]
    nested = oracle.step_weights(mode, step, **options)
    order = [i for rank in PLACES[2] for place in rank for i in place]
    return list(zip(order, [w for rank in nested for mb in rank for w in mb], strict=True))


def batch(place: tuple[int, ...], layout: str, options: dict[str, Any]) -> dict[str, Any]:
    found = batch_of([sequences()[i] for i in place], layout)
    ids = torch.tensor([DATASETS[i] for i in place], dtype=torch.int16)
    # As Megatron's loader collates its blended data sets; of packs whose samples differ, our key.
    found |= {"dataset_id": ids} if layout == "bshd" else {"dataset_ids": ids.long()}
    if "sample_weights" in options:
        found["sample_weights"] = torch.tensor([V[i] for i in place])
    return found


def errors_on_host(layout: str, per_token: bool, expected: dict[str, Any]) -> dict[str, float]:
    from tests.host import gpt, gradients

    gpt.initialize(cp=2)
    ddp = gpt.ddp_model(per_token)
    errors = {}
    for name, (mode, options) in LOSSES.items():
        data = iter([batch(place, layout, options) for place in PLACES[2][gpt.data_rank()]])
        gpt.run_step(LossHook(aggregation(mode, **options)), ddp, data, N_MB)
        errors[name] = gradients.error(ddp, expected[name])
    return errors


@pytest.mark.parametrize(("layout", "per_token"), [("bshd", False), ("thd", True)])
def test_weights_by_sample_and_data_sets_are_exact(layout, per_token):
    expected = {
        name: reference().gradient(expected_weights(*of_loss)) for name, of_loss in LOSSES.items()
    }
    for rank in run_host_ranks(errors_on_host, 4, layout, per_token, expected):
        assert rank.keys() == LOSSES.keys()
        assert max(rank.values()) <= EXACT, rank
