"""No tensor-parallel rank waits for the one that reads the data and failed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.host.ranks import run_host_ranks
from tests.host.steps import batches, sequences

pytestmark = pytest.mark.host

PLACES = [[0, 1], [2]]


def bad_weights(plan: Any, i: int) -> Tensor:
    """A custom aggregation that returns what no weights can be."""
    return torch.full_like(plan.microbatches[i].loss_mask, torch.nan)


def error_on_host() -> str | None:
    """Every rank, TP 2."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_loss_agg import AggregationError, LossAggregation
    from megatron_loss_agg.mcore import LossHook
    from tests.host import gpt

    gpt.initialize(tensor_model_parallel_size=2)
    ddp = gpt.data_parallel(gpt.build(torch.float64, False))
    hook = LossHook(LossAggregation(mode="custom", function=bad_weights))
    reads = torch.distributed.get_rank() == 0
    data = batches(sequences(fractional=False), PLACES, "thd") if reads else None
    try:
        gpt.run_step(hook.wrap(get_forward_backward_func()), ddp, data, len(PLACES))
    except AggregationError as error:
        return f"{type(error).__name__}: {error}"
    return None


def test_weights_that_cannot_be_had_stop_every_rank() -> None:
    reader, other = run_host_ranks(error_on_host, 2, timeout=60)
    assert reader is not None and reader.startswith("FunctionError: ")
    assert other is not None and other.startswith("PeerError: ")
