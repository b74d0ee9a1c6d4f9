"""Cost: the same tensor operations for any number of samples, and no wait for the device.

Counted and not timed: a Python loop over samples or tokens shows as more operations, a wait
(``.item()``, ``bool(tensor)``, a data-dependent shape) as one of the operations in `WAITS`.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_loss_agg import (
    CPLayout,
    LossAggregation,
    Microbatch,
    StepPlan,
    predicting_mask,
    weighted_sum,
)

WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2"}
MODES = ["token_mean", "sample_mean", "rollout_mean", "prompt_mean", "microbatch_mean"]


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def microbatch(samples: int, layout: str) -> Microbatch:
    ids = {"prompt_ids": torch.arange(samples) // 2, "rollout_ids": torch.arange(samples)}
    if layout == "bshd":
        return Microbatch(torch.ones(samples, 6), **ids)
    real = torch.arange(samples + 1, dtype=torch.int32)
    mask = (torch.arange(4 * samples) % 4 < 1).float()
    return Microbatch(mask, cu_seqlens=real, cu_seqlens_padded=4 * real, **ids)


@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize("mode", MODES)
def test_planning_takes_the_same_operations_for_any_number_of_samples(mode, layout):
    def operations(samples: int) -> int:
        with Operations() as counted:
            StepPlan.build(LossAggregation(mode=mode), [microbatch(samples, layout)])
        return len(counted.names)

    assert operations(3) == operations(300)


@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize("mode", MODES)
def test_a_microbatch_takes_few_operations_and_no_wait(mode, layout):
    def operations(samples: int) -> list[str]:
        plan = StepPlan.build(LossAggregation(mode=mode), [microbatch(samples, layout)])
        loss = torch.ones_like(plan.microbatches[0].loss_mask)
        with Operations() as counted:
            weighted_sum(plan.weights(0), loss)
        return counted.names

    assert operations(3) == operations(300)
    assert not WAITS & set(operations(3))


@pytest.mark.parametrize("sequences", [2, 300])
def test_sharding_does_not_wait(sequences):
    layout = CPLayout.thd(8 * torch.arange(sequences + 1), 2, 1)
    x = torch.ones(8 * sequences)
    with Operations() as counted:
        layout.shard(x)
    assert not WAITS & set(counted.names)
    assert len(counted.names) <= 2


def test_layouts_take_the_same_operations_for_any_number_of_sequences():
    def operations(sequences: int) -> int:
        with Operations() as counted:
            CPLayout.thd(8 * torch.arange(sequences + 1), 2, 1)
        return len(counted.names)

    assert operations(2) == operations(300)


def test_moving_a_mask_takes_the_same_operations_for_any_number_of_sequences():
    def operations(sequences: int) -> int:
        with Operations() as counted:
            predicting_mask(torch.ones(4 * sequences), 4 * torch.arange(sequences + 1))
        return len(counted.names)

    assert operations(2) == operations(300)
