"""Tensor-parallel ranks without data get what was planned, or hear that it failed."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.fake_groups import fake_groups
from megatron_loss_agg import LossAggregation, Microbatch, Term
from megatron_loss_agg.mcore import tensor_parallel
from megatron_loss_agg.mcore.host import ParallelGroups
from megatron_loss_agg.mcore.splits import Splits
from megatron_loss_agg.mcore.step_weights import StepWeights, Wanted
from megatron_loss_agg.mcore.tensor_parallel import on_group, packed
from tests.distributed import run_ranks

LENGTH, SAMPLES, MICROBATCHES = 4096, 8, 4  # 131,072 tokens
WANTED = Wanted(masks=False)
ON_NO_DEVICE = torch.ones(8, dtype=torch.uint8, device="meta")  # a message that cannot be copied


def planned(layout: str, groups: ParallelGroups) -> StepWeights:
    mask = (torch.arange(SAMPLES * LENGTH) % 3 > 0).float()
    starts = LENGTH * torch.arange(SAMPLES + 1, dtype=torch.int32)
    whole = Microbatch(mask, starts)
    if layout == "rows":
        whole = Microbatch(mask.view(SAMPLES, LENGTH))
    terms = {name: Term(LossAggregation(mode="sample_mean")) for name in ("policy", "kl")}
    terms["own"] = Term(LossAggregation(mode="token_mean"))
    return StepWeights.plan(lambda: [whole] * MICROBATCHES, terms, groups, Splits(), WANTED)


@pytest.mark.parametrize("layout, bound", [("rows", 0.02), ("packs", 2 * 1.05 * 4)])
def test_they_get_little_more_than_the_weights(layout: str, bound: float) -> None:
    """In bytes a token, for two different weights; of rows they get numbers of samples alone."""
    with fake_groups(1) as (groups,):
        message, _ = packed(planned(layout, groups))
    assert message.numel() <= bound * MICROBATCHES * SAMPLES * LENGTH


def on_two_ranks() -> dict[str, Any]:
    """What each hears of steps that fail on the rank that reads, and of a good one after them."""
    one = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    whole = dist.group.WORLD
    assert whole is not None
    groups = ParallelGroups(one, one, whole, one, last_stage=True)

    def failing() -> Any:
        raise OSError("disk")

    def heard(plan_here: Any) -> str | None:
        try:
            on_group(plan_here, groups)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    with mock.patch.object(tensor_parallel, "packed", return_value=(ON_NO_DEVICE, 1)):
        uncopied = heard(lambda: None)
    found: dict[str, Any] = {
        "read": heard(failing),
        "copy": uncopied,
        "pickle": heard(threading.Lock),  # cannot be sent
        "nothing": on_group(lambda: [None], groups),
    }
    for layout in ("rows", "packs"):
        weights, mask = planned(layout, groups), torch.ones(SAMPLES * LENGTH)
        found[layout] = (
            [
                [local.made_for(mask, torch.float64) for local in by_split.values()]
                + [local.checksum for local in by_split.values()]
                for of_term in weights.terms.values()
                for by_split in of_term
            ],
            weights.counts,
            [weights.terms["policy"][i] is weights.terms["kl"][i] for i in range(MICROBATCHES)],
        )
    return found


def test_they_get_what_was_planned_or_hear_that_it_failed() -> None:
    first, other = run_ranks(on_two_ranks, 2)
    assert first["read"] == "OSError: disk"
    assert first["pickle"].startswith("TypeError: ")
    assert first["copy"].startswith("NotImplementedError: ")
    for defect in ("read", "copy", "pickle"):
        assert other[defect].startswith("PeerError: the rank that reads the data of this tensor-")
    assert other["nothing"] == [None]
    for layout in ("rows", "packs"):
        (sent, counts, shared), (received, same_counts, still) = first[layout], other[layout]
        assert same_counts == counts
        assert still == shared
        for mine, theirs in zip(sent, received, strict=True):
            assert all(map(torch.equal, mine, theirs))
            assert mine[0].any()
