"""Which of a rank's tokens are of which sample."""

from __future__ import annotations

import pytest
import torch

from megatron_loss_agg.mcore.weigh import LocalWeights


def test_a_pack_of_many_equal_fractions_is_summed_exactly() -> None:
    starts = torch.tensor([0, 2**15])
    local = LocalWeights(torch.ones(1), starts, copies=1, layouts={}, custom=None)
    (found,) = local.sums(torch.full((1, 2**15), 0.1)).tolist()
    assert found == pytest.approx(0.1 * 2**15, rel=1e-7)  # added up in fp32, 3e-4 off
