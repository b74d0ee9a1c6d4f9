"""Batches with more than masks, through the real host, against the fp64 reference.

Weights by sample and data sets; padding microbatches; and Megatron's SFT data, whose loader stacks
packs of one length: their offsets are filled up with that length, and the last sample reaches to the
pack's end.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import default_collate

from tests import oracle
from tests.host import gpt, scripts
from tests.host.cases import Batch, Case, Expected, assert_exact
from tests.host.harness import TOPOLOGIES
from tests.host.reference import reference
from tests.host.steps import (
    PLACES,
    Places,
    batch_of,
    sequences,
    weights_of,
    weights_with,
)

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
    ("prompt_mean", {"rejected": "count"}),
    ("sample_mean", {"rejected": "count"}),
    ("prompt_mean", {"rejected": "skip"}),
    ("sample_mean", {"rejected": "skip"}),
]
REJECTED = [i % 3 == 0 for i in range(len(V))]


def expected(case: Case) -> Expected:
    def sample(i: int, _: tuple[int, ...]) -> oracle.Sample:
        weight = V[i] if "sample_weights" in case.options else 1.0
        return dataclasses.replace(sequences()[i].sample, dataset=DATASETS[i], weight=weight)

    options, places = {**case.options}, case.places
    rejects = options.pop("rejected", None)
    if rejects == "skip":
        places = tuple(
            tuple(tuple(i for i in of_mb if not REJECTED[i]) for of_mb in rank) for rank in places
        )
    weights = weights_with(case.mode, places, sample, **options)
    if rejects:
        weights = [(i, w) for i, w in weights if not REJECTED[i]]
    return reference().gradient(weights), {f"{case.mode} loss": reference().loss(weights)}


# As Megatron's loader collates its blended data sets; packs of several have our key.
LAYOUTS = [("bshd", False, "dataset_id"), ("thd", True, "dataset_ids")]


def test_weights_by_sample_rejected_ones_and_data_sets_are_exact() -> None:
    cases = []
    for (mode, options), (layout, per_token, ids) in zip(OPTIONS, cycle(LAYOUTS), strict=False):
        keys = {"sample_weights": V, "rejected": REJECTED}
        given = {ids: DATASETS, **{x: keys[x] for x in keys if x in options}}
        batch = partial(scripts.by_sample, **given)
        cases.append(Case(mode, options, layout=layout, per_token=per_token, batch=batch))
    assert_exact(TOPOLOGIES["dp2-cp2"], cases, expected)


# Of a data set that the step lacks, too. Sample 5 is alone in data set 5, and has no token.
WEIGHT_OF = {0: 0.5, 1: 2.0, 2: 0.0, 5: 3.0, 9: 7.0}
OF_DATASETS = [
    ("token_mean", "count", False),
    ("token_mean", "skip", True),
    ("sample_mean", "count", True),
    ("prompt_mean", "count", False),
    ("dataset_mean", "count", False),
    ("constant", "skip", False),
    ("microbatch_mean", "count", True),
]


def of_weighted_datasets(case: Case) -> Expected:
    """A sample weighs what its data set does, times its own weight if the batch has one."""
    assert isinstance(case.batch, partial)
    options = {key: x for key, x in case.options.items() if key != "dataset_weights"}
    if case.mode == "constant":
        options["divisor"] = 7.0  # as of `aggregation`
    own = case.batch.keywords.get("sample_weights", [1.0] * len(V))

    def sample(i: int, _: tuple[int, ...]) -> oracle.Sample:
        d = DATASETS[i]
        weight = own[i] * WEIGHT_OF[d]
        return dataclasses.replace(sequences()[i].sample, dataset=d, weight=weight)

    weights = weights_with(case.mode, case.places, sample, **options)
    return reference().gradient(weights), {f"{case.mode} loss": reference().loss(weights)}


@pytest.mark.parametrize("name", ["dp2-cp2", "pp2-cp2"])
def test_weights_of_data_sets_multiply_those_of_samples(name: str) -> None:
    topology, cases = TOPOLOGIES[name], []
    for (mode, counting, weighs), (layout, flag, ids) in zip(
        OF_DATASETS, cycle(LAYOUTS), strict=False
    ):
        options = {"sample_weights": counting, "dataset_weights": WEIGHT_OF}
        batch = partial(
            scripts.by_sample, **{ids: DATASETS}, **({"sample_weights": V} if weighs else {})
        )
        way = {"layout": layout, "per_token": flag, "batch": batch}
        cases.append(Case(mode, options, places=PLACES[topology.data_parallel_size], **way))
    assert_exact(topology, cases, of_weighted_datasets)


def test_an_evaluation_of_one_data_set_without_ids_has_the_plain_mean() -> None:
    options = {"sample_weights": "count", "dataset_weights": {0: 0.5}}
    case = Case("sample_mean", options, call={"forward_only": True})
    weights = weights_of("sample_mean", case.places)
    reports = {"sample_mean loss": reference().loss(weights)}
    assert_exact(TOPOLOGIES["dp2"], [case], lambda _: (reference().gradient(weights), reports))


def test_an_evaluation_may_read_data_sets_without_a_weight() -> None:
    # As a blend of validation data does, which may have more of them. Their weight is 1.
    weight_of = {d: w for d, w in WEIGHT_OF.items() if d in (0, 2)}
    options = {"sample_weights": "count", "dataset_weights": weight_of}
    batch = partial(scripts.by_sample, dataset_id=DATASETS)
    case = Case("sample_mean", options, layout="bshd", batch=batch, call={"forward_only": True})

    def sample(i: int, _: tuple[int, ...]) -> oracle.Sample:
        d = DATASETS[i]
        weight = weight_of.get(d, 1.0)
        return dataclasses.replace(sequences()[i].sample, dataset=d, weight=weight)

    weights = weights_with("sample_mean", case.places, sample, sample_weights="count")
    reports = {"sample_mean loss": reference().loss(weights)}
    assert_exact(TOPOLOGIES["dp2"], [case], lambda _: (reference().gradient(weights), reports))


def without_ids(batch: Batch, of_mb: tuple[int, ...]) -> Batch:
    """A microbatch of padding alone has no samples, and hence no ids."""
    ids = () if of_mb else ("prompt_ids", "rollout_ids")
    return {key: x for key, x in batch.items() if key not in ids}


# Of data-parallel ranks; the second one may have nothing else.
PADDED: list[Places] = [(((0, 1), ()), ((2,), (3, 4))), (((0, 1), (2,)), ((), ()))]


@pytest.mark.parametrize("name", ["dp2", "dp2-cp2"])
def test_microbatches_of_padding_alone_need_no_ids(name: str) -> None:
    modes = ("token_mean", "prompt_mean", "rollout_mean")
    cases = [
        Case(mode, places=places, per_token=flag, batch=without_ids)
        for mode, places, flag in product(modes, PADDED, (False, True))
    ]
    assert_exact(TOPOLOGIES[name], cases)


LENGTH = 40  # of a pack: one item of the data set, which is padded at its end
PACKS = ((0, 1), (2, 3, 4), (5, 6, 7), (8, 9))
# Packs of one length: how many are stacked, by data-parallel rank and microbatch.
STACKED: dict[str, dict[int, Places]] = {
    "dp2": {
        1: ((PACKS[0], PACKS[2]), (PACKS[1], PACKS[3])),
        2: ((PACKS[0] + PACKS[2],), (PACKS[1] + PACKS[3],)),
    },
    "cp2": {2: ((PACKS[0] + PACKS[1], PACKS[2] + PACKS[3]),)},
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
    way = {"batch": stacked, "step": forward_step}
    cases = [
        Case(mode, places=places, per_token=per_token, call={"micro_batch_size": number}, **way)
        for number, places in STACKED[name].items()
        for mode, per_token in product(("token_mean", "sample_mean"), (False, True))
    ]
    assert_exact(TOPOLOGIES[name], cases)
