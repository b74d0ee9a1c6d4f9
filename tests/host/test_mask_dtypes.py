"""The loss mask may be of any dtype: no count is taken in one that cannot hold it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.host.ranks import run_host_ranks

pytestmark = pytest.mark.host

ROWS, LENGTH, STEPS = 2, 250, 3
DTYPES = (torch.bfloat16, torch.float16, torch.uint8, torch.bool, torch.int64, torch.float32)


def errors_on_host(mode: str, per_token: bool) -> list[float]:
    """One rank: the worst gradient error over some steps, for each dtype of the mask."""
    from functools import partial

    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_loss_agg import LossAggregation
    from megatron_loss_agg.mcore import LossHook
    from tests.host import gpt

    gpt.initialize()
    model = gpt.data_parallel(gpt.build(torch.float64, per_token))
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, 32, (ROWS, LENGTH + 1), generator=generator)
    # 475 active tokens: bf16 counts to 256 one by one, uint8 to 255.
    mask = torch.ones(ROWS, LENGTH, dtype=torch.float64)
    mask[:, :25] = torch.tensor([[0.0], [1.0]])

    def gradients(dtype: torch.dtype) -> list[Any]:
        batch = {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": mask.to(dtype)}

        def forward_step(data_iterator: Any, model: Any) -> Any:
            output, loss_func = gpt.forward_step(data_iterator, model)
            return output, partial(loss_func.func, mask.to(dtype))

        hook = LossHook(LossAggregation(mode=mode))
        found = []
        for _ in range(STEPS):
            schedule = hook.wrap(get_forward_backward_func())
            options = {"forward_step_func": forward_step}
            gpt.run_step(schedule, model, iter([batch] * 2), 2, ROWS, **options)
            found.append(gpt.gradient(model))
        return found

    exact = gradients(torch.float64)
    return [
        max(gpt.relative_error(g, e) for g, e in zip(gradients(dtype), exact, strict=True))
        for dtype in DTYPES
    ]


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("mode", ["token_mean", "sample_mean"])
def test_the_gradient_is_that_of_an_fp64_mask(mode: str, per_token: bool) -> None:
    (errors,) = run_host_ranks(errors_on_host, 1, mode, per_token)
    assert max(errors) <= 1e-12
