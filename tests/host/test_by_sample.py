"""Batches as data loaders make them, through the real host, against the fp64 reference.

Weights by sample and data sets; and Megatron's SFT data, whose loader stacks packs of one length:
their offsets are filled up with that length, and the last sample reaches to the pack's end.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_loss_agg.mcore import LossHook
from tests import oracle
from tests.host.cases import Batch, Case, run
from tests.host.harness import EXACT, TOPOLOGIES, Topology, run_host_ranks
from tests.host.reference import Gradient, reference
from tests.host.steps import MULTIPLE, PLACES, Weights, aggregation, sequences, weights_of

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


def expected_weights(mode: str, options: dict[str, Any]) -> Weights:
    def sample(i: int) -> oracle.Sample:
        weight = V[i] if "sample_weights" in options else 1.0
        return dataclasses.replace(sequences()[i].sample, dataset=DATASETS[i], weight=weight)

    step = [[[sample(i) for i in of_mb] for of_mb in rank] for rank in PLACES[2]]
    nested = oracle.step_weights(mode, step, **options)
    order = [i for rank in PLACES[2] for of_mb in rank for i in of_mb]
    return list(zip(order, [w for rank in nested for mb in rank for w in mb], strict=True))


def with_datasets(batch: Batch, of_mb: tuple[int, ...]) -> Batch:
    """As Megatron's loader collates its blended data sets; packs whose samples differ have our
    key.
    """
    ids = torch.tensor([DATASETS[i] for i in of_mb], dtype=torch.int16)
    packed = "cu_seqlens" in batch
    return batch | ({"dataset_ids": ids.long()} if packed else {"dataset_id": ids})


def with_weights(batch: Batch, of_mb: tuple[int, ...]) -> Batch:
    return with_datasets(batch, of_mb) | {"sample_weights": torch.tensor([V[i] for i in of_mb])}


@pytest.mark.parametrize("layout, per_token", [("bshd", False), ("thd", True)])
def test_weights_by_sample_and_data_sets_are_exact(layout: str, per_token: bool) -> None:
    cases = {
        name: Case(
            mode,
            options,
            layout=layout,
            per_token=per_token,
            batch=with_weights if "sample_weights" in options else with_datasets,
        )
        for name, (mode, options) in LOSSES.items()
    }
    expected = [reference().gradient(expected_weights(*of_loss)) for of_loss in LOSSES.values()]
    found = run(TOPOLOGIES["dp2-cp2"], list(cases.values()), expected)
    for name, case in cases.items():
        assert max(rank.error for rank in found[case]) <= EXACT, name


LENGTH = 40
PACKS = ((0, 1), (2, 3, 4), (5, 6, 7), (8, 9))


def pack(places: tuple[int, ...]) -> dict[str, Tensor]:
    """One item of the data set: samples one after another, padded for context parallelism."""
    chosen = [sequences()[i] for i in places]
    widths = [-(-len(s.tokens) // MULTIPLE) * MULTIPLE for s in chosen]
    widths[-1] += LENGTH - sum(widths)

    def flat(parts: list[Tensor]) -> Tensor:
        pad = torch.nn.functional.pad
        return torch.cat([pad(x, (0, w - len(x))) for x, w in zip(parts, widths, strict=True)])

    offsets = torch.full((LENGTH + 1,), LENGTH, dtype=torch.int32)
    offsets[: len(widths) + 1] = torch.tensor([0, *widths]).cumsum(0)
    return {
        "tokens": flat([s.tokens for s in chosen]),
        "labels": flat([s.labels for s in chosen]),
        "loss_mask": flat([torch.tensor(s.sample.mask) for s in chosen]).float(),
        "cu_seqlens": offsets,
    }


def forward_step(iterator: Any, model: Any) -> Any:
    """Several packs as the one long pack that the host calls its model with."""
    from tests.host import gpt

    batch = next(iterator)
    ends = [row[: row.tolist().index(LENGTH) + 1] for row in batch["cu_seqlens"]]
    starts = torch.cat([torch.zeros(1), *(row[1:] + k * LENGTH for k, row in enumerate(ends))])
    rows = {key: batch[key].reshape(1, -1) for key in ("tokens", "labels", "loss_mask")}
    return gpt.forward_step(iter([{**rows, "cu_seqlens_padded": starts.int()}]), model)


def errors_of_packs(
    topology: Topology, packs_per_batch: int, expected: dict[str, Gradient]
) -> dict[Any, float]:
    """Every rank: the gradient error of each (mode, per-token flag)."""
    from torch.utils.data import default_collate

    from tests.host import gpt, gradients

    gpt.initialize(**topology.sizes)
    mine = PACKS[gpt.data_rank() :: topology.data_parallel_size]
    groups = [mine[i : i + packs_per_batch] for i in range(0, len(mine), packs_per_batch)]
    options = {"forward_step_func": forward_step}
    errors = {}
    for per_token in (False, True):
        ddp = gpt.ddp_model(per_token)
        for mode, gradient in expected.items():
            data = iter([default_collate([pack(places) for places in group]) for group in groups])
            hook = LossHook(aggregation(mode))
            gpt.run_step(hook, ddp, data, len(groups), packs_per_batch, **options)
            errors[mode, per_token] = gradients.error(ddp, gradient)
    return errors


@pytest.mark.parametrize("name, packs_per_batch", [("dp2", 1), ("dp2", 2), ("cp2", 2)])
def test_stacked_packs_are_exact(name: str, packs_per_batch: int) -> None:
    modes = ("token_mean", "sample_mean")
    expected = {mode: reference().gradient(weights_of(mode, (PACKS,))) for mode in modes}
    given = TOPOLOGIES[name], packs_per_batch, expected
    for rank in run_host_ranks(errors_of_packs, 2, *given):
        assert len(rank) == 2 * len(modes)
        assert max(rank.values()) <= EXACT, rank
