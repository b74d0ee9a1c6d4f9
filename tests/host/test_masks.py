"""The loss mask may be of any dtype, and in any memory layout."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_loss_agg.mcore import LossHook
from tests.host.harness import EXACT, run_host_ranks
from tests.host.reference import relative_error
from tests.host.steps import aggregation

pytestmark = pytest.mark.host

ROWS, LENGTH, STEPS, N_MB = 2, 250, 3, 2
# 475 active tokens: bf16 counts to 256 one by one, uint8 to 255.
MASK = torch.ones(ROWS, LENGTH, dtype=torch.float64)
MASK[:, :25] = torch.tensor([[0.0], [1.0]])
DTYPES = (torch.bfloat16, torch.float16, torch.uint8, torch.bool, torch.int64, torch.float32)
MASKS = {
    "transposed in memory": lambda: MASK.t().contiguous().t(),
    **{str(dtype): partial(MASK.to, dtype) for dtype in DTYPES},
}


def errors_on_host() -> dict[Any, float]:
    """One rank: the worst gradient error over some steps, for each mode, flag and mask."""
    from tests.host import gpt, gradients

    gpt.initialize()
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, 32, (ROWS, LENGTH + 1), generator=generator)
    models = {per_token: gpt.ddp_model(per_token) for per_token in (False, True)}

    def train(mode: str, per_token: bool, mask: Tensor) -> list[Any]:
        batch = {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": mask}
        forward_step = gpt.forward_step_with(lambda stock, _: partial(stock, mask))
        # In the training loop, later steps of some modes are weighed by the rows alone.
        hook = LossHook(aggregation(mode), in_training_loop=True)
        model, found = models[per_token], []
        for _ in range(STEPS):
            options = {"forward_step_func": forward_step}
            gpt.run_step(hook, model, iter([batch] * N_MB), N_MB, ROWS, **options)
            found.append(gradients.of(model))
        return found

    errors = {}
    for mode, per_token in product(("token_mean", "sample_mean"), (False, True)):
        exact = train(mode, per_token, MASK)
        for name, mask in MASKS.items():
            pairs = zip(train(mode, per_token, mask()), exact, strict=True)
            errors[name, mode, per_token] = max(relative_error(*pair) for pair in pairs)
    return errors


def test_the_gradient_is_that_of_a_contiguous_fp64_mask() -> None:
    (errors,) = run_host_ranks(errors_on_host, 1)
    assert len(errors) == len(MASKS) * 2 * 2
    assert {case: error for case, error in errors.items() if not error <= EXACT} == {}
