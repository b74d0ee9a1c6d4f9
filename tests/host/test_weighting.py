"""Weights of a microbatch, of masks in any memory layout; no host is needed."""

from __future__ import annotations

import torch

from megatron_loss_agg import LossAggregation
from megatron_loss_agg.mcore.scaling import HostScale
from megatron_loss_agg.mcore.weighting import Part, RowWeights

TRANSPOSED = torch.arange(120.0).view(40, 3).t()


def test_planned_weights_of_a_transposed_mask() -> None:
    coefficients = torch.tensor([[1.0], [2.0], [3.0]])
    sums = TRANSPOSED.sum(dim=1).double()
    part = Part((3, 40), 119, float(sums.sum()), sums, coefficients, None)
    weights = part.weights(TRANSPOSED, torch.float32)
    assert weights.tolist() == (TRANSPOSED * coefficients).flatten().tolist()


def test_row_weights_of_a_transposed_mask() -> None:
    rows = RowWeights(LossAggregation(mode="sample_mean"), HostScale(1, 1, 1, per_token=False), 3)
    weights = rows.weights("loss", 0, TRANSPOSED, torch.float64)
    expected = (TRANSPOSED / TRANSPOSED.sum(dim=1, keepdim=True) / 3).flatten()
    torch.testing.assert_close(weights, expected.double(), rtol=1e-6, atol=0)
