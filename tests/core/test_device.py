"""Masks on a device: weights are there too, planning waits for it once, and weighing never.

Proved without a device, on that of `tests.device`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_loss_agg import (
    LossAggregation,
    Microbatch,
    StepPlan,
    token_weights,
    weighted_sum,
)
from tests import device
from tests.core.meaning import F64, aggregation
from tests.distributed import run_ranks

Place = Callable[[Tensor], Tensor]


def rows(place: Place) -> Microbatch:
    mask = torch.tensor([[1.0, 0.5, 0], [1, 1, 1]])
    return Microbatch(place(mask), prompt_ids=place(torch.tensor([7, 9])))


def pack(place: Place) -> Microbatch:
    mask = torch.tensor([1.0, 0, 1, 1, 0])
    starts = torch.tensor([0, 1, 3])
    return Microbatch(
        place(mask),
        place(starts),
        cu_seqlens_padded=place(torch.tensor([0, 2, 5])),
        prompt_ids=[7, 8],
        ids={"turn": place(torch.tensor([3, 4]))},
    )


def pairs(place: Place) -> Microbatch:
    """Whose sequences alone are on the device."""
    return Microbatch.of_samples(2, sequences=rows(place), ids={"turn": [1, 2]})


TURNS = aggregation("nested_mean", levels=("turn", "sample"))
STEPS: dict[str, tuple[Callable[[Place], Microbatch], LossAggregation]] = {
    "rows": (rows, aggregation("prompt_mean")),
    "pack": (pack, aggregation("prompt_mean")),
    "ids of another name": (pack, TURNS),
    "losses by sample": (pairs, TURNS),
}


def on_device(name: str) -> tuple[list[str], list[str]]:
    """The waits while planning, and while weighing."""
    make, agg = STEPS[name]
    expected = StepPlan.build(agg, [make(lambda x: x)] * 2)
    device.take()  # for good
    step = [make(lambda x: x.to(device.DEVICE))] * 2
    with device.Watch():
        device.waits.clear()
        plan = StepPlan.build(agg, step)
        planning = [*device.waits]
        device.waits.clear()
        weights = [plan.weights(i, F64) for i in range(2)]
        sums = [weighted_sum(w, torch.ones_like(w)) for w in weights]
        weighing = [*device.waits]
        for i, (w, total) in enumerate(zip(weights, sums, strict=True)):
            assert w.device == step[i].loss_mask.device
            wanted = expected.weights(i, F64)
            assert torch.equal(w.cpu(), wanted)
            assert total.cpu() == pytest.approx(float(wanted.sum()), rel=1e-15)
        for one, other in zip(plan.sequences, expected.sequences, strict=True):
            assert one is None or torch.equal(one.mask_sum, other.mask_sum)
        assert plan.counts == expected.counts
    return planning, weighing


@pytest.mark.parametrize("name", STEPS)
def test_planning_waits_once_and_weighing_never(name: str) -> None:
    ((planning, weighing),) = run_ranks(on_device, 1, name)
    assert (len(planning), weighing) == (1, [])


def weights_by_offsets_on_device() -> list[list[float]]:
    device.take()  # for good
    mask, starts = torch.ones(3), torch.tensor([0, 0, 3])
    with device.Watch():
        on_each = starts, starts.to(device.DEVICE)
        return [token_weights(aggregation("sample_mean"), mask, x).tolist() for x in on_each]


def test_offsets_alone_may_be_on_the_device() -> None:
    ((expected, weights),) = run_ranks(weights_by_offsets_on_device, 1)
    assert weights == expected
