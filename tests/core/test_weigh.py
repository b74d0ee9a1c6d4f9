"""`weigh`: a loop's own mean becomes the aggregated loss, by gradient."""

import pytest
import torch

from megatron_loss_agg import AggregationError, LossAggregation, StepPlan, weigh


@pytest.mark.parametrize("mode", ["sample_mean", "prompt_mean", "sample_sum"])
def test_a_token_mean_gets_the_gradient_of_the_mode(mode):
    mask = torch.tensor([[1.0, 1, 1, 0], [1, 0, 0, 0], [0, 1, 1, 0]])
    plan = StepPlan.from_mask_sums(
        LossAggregation(mode=mode), mask.sum(-1), prompt_ids=["a", "b", "a"]
    )
    output = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    w = plan.coefficients(0).unsqueeze(-1) * mask
    (expected,) = torch.autograd.grad((w * output.sin()).sum(), output)
    of_token = (plan.coefficients(0) * mask.sum()).unsqueeze(-1).expand_as(mask)
    loss = (mask * weigh(output, of_token).sin()).sum() / mask.sum()
    (gradient,) = torch.autograd.grad(loss, output)
    assert torch.equal(weigh(output, of_token), output)
    torch.testing.assert_close(gradient, expected, rtol=1e-14, atol=0)


def test_half_precision_is_weighed_in_the_wider_dtype():
    output = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    weighed = weigh(output, torch.tensor([1 + 2.0**-8, 3.0]))
    weighed.backward(torch.tensor([1 + 2.0**-7, 1.0]).bfloat16())
    assert output.grad.dtype == torch.bfloat16
    # The product is 1 + 2**-7 + 2**-8 + 2**-15, just above the middle of two numbers of bf16.
    assert output.grad.tolist() == [1 + 2.0**-6, 3.0]


@pytest.mark.parametrize("weights", [torch.ones(3), torch.ones(1), 2.0, torch.ones(2).cfloat()])
def test_another_shape_or_kind_is_refused(weights):
    with pytest.raises(AggregationError, match="weights must"):
        weigh(torch.ones(2), weights)
