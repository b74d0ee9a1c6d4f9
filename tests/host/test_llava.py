"""Megatron's own vision-language model, whose losses and reports are those of the formula."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.mcore import LossHook, read_samples
from tests.host.harness import EXACT, run_host_ranks
from tests.host.steps import aggregation
from tests.host.test_late_masks import MODES, OPTIONS

pytestmark = pytest.mark.host


def llava_step(per_token: bool, mode: str) -> tuple[float, float, float]:
    """The error of the gradient of a LLaVA, and of both reports, against the formula."""
    from tests.host import gpt, llava

    gpt.initialize()
    batches, number, (rank, ranks) = 4, 2, (dist.get_rank(), dist.get_world_size())
    model = llava.build(per_token)
    ddp = gpt.data_parallel(model)
    mine = range(rank * number, (rank + 1) * number)
    agg = aggregation(mode, **OPTIONS.get(mode, {}))
    with gpt.KeepDouble():
        reports = gpt.run_step(
            LossHook(agg, read_batch=read_samples),
            ddp,
            iter([llava.batch(i) for i in mine]),
            number,
            forward_step_func=llava.forward_step,
        )
        made = [llava.forward(model, llava.batch(i)) for i in range(batches)]
    assert ranks * number == batches
    expected = {name: formula(name, made) for name in (mode, "token_mean")}
    parameters = [p for p in model.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(expected[mode], parameters, materialize_grads=True)
    error, norm = (
        torch.cat([x.flatten() for x in grads]).norm()
        for grads in ([p.main_grad - g for p, g in zip(parameters, wanted, strict=True)], wanted)
    )
    shown = {"lm loss": "token_mean", f"{mode} loss": mode}
    errors = [gpt.reported(reports, k) / float(expected[name]) - 1 for k, name in shown.items()]
    return float(error / norm), *errors


def formula(mode: str, made: list[tuple[Tensor, Tensor]]) -> Any:
    """The loss of a step of whole microbatches, each with losses and mask [samples, seq]."""
    sums = [(losses * mask).sum(dim=1) for losses, mask in made]
    tokens = [mask.sum(dim=1) for _, mask in made]
    samples = sum(len(x) for x in tokens)
    if mode == "sample_mean":
        return sum((s / m.clamp(min=1)).sum() for s, m in zip(sums, tokens, strict=True)) / samples
    if mode == "microbatch_mean":
        return sum(s.sum() / m.sum().clamp(min=1) for s, m in zip(sums, tokens, strict=True)) / len(
            made
        )
    divisors = {
        "token_mean": sum(m.sum() for m in tokens),
        "sum": 3.0,
        "constant": 7.0 * samples,
        "sample_sum": samples,
    }
    return sum(s.sum() for s in sums) / divisors[mode]


LLAVA = [(False, mode) for mode in MODES] + [(True, mode) for mode in (*MODES, "token_mean")]


def llava_facts_of_rank() -> dict[Any, Any]:
    return {case: llava_step(*case) for case in LLAVA}


@functools.cache
def llava_facts() -> list[dict[Any, Any]]:
    return run_host_ranks(llava_facts_of_rank, 2)


@pytest.mark.parametrize("case", LLAVA, ids=lambda case: "-".join(map(str, case)))
def test_megatrons_llava_is_exact(case: Any) -> None:
    for rank in llava_facts():
        assert max(map(abs, rank[case])) <= EXACT
