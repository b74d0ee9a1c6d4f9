"""What is said of masks that were not read ahead; no host is needed."""

from __future__ import annotations

import pytest
import torch

from megatron_loss_agg import LossAggregation, Term
from megatron_loss_agg.errors import MaskError
from megatron_loss_agg.mcore.maskcheck import MaskChecks
from megatron_loss_agg.mcore.scaling import HostScale
from megatron_loss_agg.mcore.weighting import RowWeights

FRACTIONAL = "fractional loss masks with --calculate-per-token-loss.*drop that flag"
UNUSABLE = "negative, infinite or NaN values; expected finite values >= 0"


def finish(per_token: bool, *masks: torch.Tensor) -> None:
    scale = HostScale(len(masks), 1, 1, per_token)
    aggregation = LossAggregation(mode="token_mean" if per_token else "sum")
    checks = MaskChecks({"loss": Term(aggregation)}, RowWeights(aggregation, scale, 1), scale, 1)
    for i, mask in enumerate(masks):
        checks.check(i, {"loss": mask})
    checks.finish()


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_no_flag_is_blamed_for_values_that_no_mask_may_have(value: float, per_token: bool) -> None:
    # In a microbatch after one that is merely fractional.
    with pytest.raises(MaskError, match=UNUSABLE):
        finish(per_token, torch.tensor([[1.0, 0.5]]), torch.tensor([[1.0, value]]))


def test_fractions_are_refused_where_the_host_counts() -> None:
    masks = (torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.5]]))
    with pytest.raises(MaskError, match=FRACTIONAL):
        finish(True, *masks)
    finish(False, *masks)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float64])
def test_masks_of_0_and_1_pass(dtype: torch.dtype) -> None:
    finish(True, torch.tensor([[1, 0]]).to(dtype), torch.zeros(1, 2).to(dtype))
