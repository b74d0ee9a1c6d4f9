"""Batches as data loaders make them, through the real host, against the fp64 reference.

Weights by sample and data sets; and Megatron's SFT data, whose loader stacks packs of one length:
their offsets are filled up with that length, and the last sample reaches to the pack's end.
"""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import default_collate

from tests import oracle
from tests.host import gpt
from tests.host.cases import Batch, Case, Expected, assert_exact
from tests.host.harness import TOPOLOGIES
from tests.host.reference import reference
from tests.host.scripts import by_sample
from tests.host.steps import Places, batch_of, sequences, weights_with

V = (0.5, 2.0, 1.0, 0.0, 0.25, 3.0, 1.0, 0.125, 1.5, 1.0)
DATASETS = (2, 0, 1, 2, 0, 5, 1, 1, 0, 2)  # 5: the sample without tokens is alone
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("dataset_mean", {}),
    ("dataset_mean", {"empty": "skip"}),
    ("dataset_mean", {"sample_weights": "count"}),
    ("token_mean", {"sample_weights": "count"}),
    ("sample_mean", {"sample_weights": "count"}),
    ("prompt_mean", {"sample_weights": "skip"}),
    ("microbatch_mean", {"sample_weights": "count"}),
]


def expected(case: Case) -> Expected:
    def sample(i: int, _: tuple[int, ...]) -> oracle.Sample:
        weight = V[i] if "sample_weights" in case.options else 1.0
        return dataclasses.replace(sequences()[i].sample, dataset=DATASETS[i], weight=weight)

    weights = weights_with(case.mode, case.places, sample, **case.options)
    return reference().gradient(weights), {f"{case.mode} loss": reference().loss(weights)}


def with_datasets(batch: Batch, of_mb: tuple[int, ...]) -> Batch:
    """As Megatron's loader collates its blended data sets; packs whose samples differ have our
    key.
    """
    ids = torch.tensor([DATASETS[i] for i in of_mb], dtype=torch.int16)
    packed = "cu_seqlens" in batch
    return batch | ({"dataset_ids": ids.long()} if packed else {"dataset_id": ids})


def with_weights(batch: Batch, of_mb: tuple[int, ...]) -> Batch:
    return by_sample(with_datasets(batch, of_mb), of_mb, sample_weights=V)


@pytest.mark.parametrize("layout, per_token", [("bshd", False), ("thd", True)])
def test_weights_by_sample_and_data_sets_are_exact(layout: str, per_token: bool) -> None:
    cases = [
        Case(
            mode,
            options,
            layout=layout,
            per_token=per_token,
            batch=with_weights if "sample_weights" in options else with_datasets,
        )
        for mode, options in OPTIONS
    ]
    assert_exact(TOPOLOGIES["dp2-cp2"], cases, expected)


LENGTH = 40  # of a pack: one item of the data set, which is padded at its end
PACKS = ((0, 1), (2, 3, 4), (5, 6, 7), (8, 9))
# Packs of one length, by data-parallel rank and microbatch; and how many are stacked.
STACKED: dict[str, tuple[str, Places, int]] = {
    "dp2-1": ("dp2", ((PACKS[0], PACKS[2]), (PACKS[1], PACKS[3])), 1),
    "dp2-2": ("dp2", ((PACKS[0] + PACKS[2],), (PACKS[1] + PACKS[3],)), 2),
    "cp2-2": ("cp2", ((PACKS[0] + PACKS[1], PACKS[2] + PACKS[3]),), 2),
}


def pack(places: tuple[int, ...]) -> dict[str, Tensor]:
    packed = batch_of([sequences()[i] for i in places], "thd")
    offsets = torch.full((LENGTH + 1,), LENGTH, dtype=torch.int32)
    offsets[: len(places)] = packed["cu_seqlens_padded"][:-1]
    padding = (0, LENGTH - packed["tokens"].numel())
    flat = {key: pad(packed[key][0], padding) for key in ("tokens", "labels", "loss_mask")}
    return {**flat, "cu_seqlens": offsets}


def stacked(_: Batch, of_mb: tuple[int, ...]) -> Batch:
    return default_collate([pack(places) for places in PACKS if set(places) <= set(of_mb)])


def forward_step(iterator: Any, model: Any) -> Any:
    """Several packs as the one long pack that the host calls its model with."""
    batch = next(iterator)
    ends = [row[: row.tolist().index(LENGTH) + 1] for row in batch["cu_seqlens"]]
    starts = torch.cat([torch.zeros(1), *(row[1:] + k * LENGTH for k, row in enumerate(ends))])
    rows = {key: batch[key].reshape(1, -1) for key in ("tokens", "labels", "loss_mask")}
    return gpt.forward_step(iter([{**rows, "cu_seqlens_padded": starts.int()}]), model)


@pytest.mark.parametrize("name", STACKED)
def test_stacked_packs_are_exact(name: str) -> None:
    topology, places, number = STACKED[name]
    way = {"batch": stacked, "step": forward_step, "call": {"micro_batch_size": number}}
    cases = [
        Case(mode, places=places, per_token=per_token, **way)
        for mode, per_token in product(("token_mean", "sample_mean"), (False, True))
    ]
    assert_exact(TOPOLOGIES[topology], cases)
