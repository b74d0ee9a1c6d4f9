"""Megatron's own vision-language model, whose losses and reports are those of the formula."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_loss_agg.mcore import LossHook, read_samples
from tests.host.cases import reduced
from tests.host.harness import EXACT, run_host_ranks
from tests.host.steps import aggregation
from tests.host.test_late_masks import MODES, OPTIONS

pytestmark = pytest.mark.host

BATCHES, RANKS = 4, 2
CASES = [(False, mode) for mode in MODES] + [(True, mode) for mode in (*MODES, "token_mean")]


def errors_of(per_token: bool, mode: str) -> tuple[float, float, float]:
    """A rank: the error of a LLaVA's gradient, and of both reports, against the formula."""
    from tests.host import gpt, llava

    gpt.initialize()
    number = BATCHES // RANKS
    model = llava.build(per_token)
    ddp = gpt.data_parallel(model)
    mine = [llava.batch(gpt.data_rank() * number + i) for i in range(number)]
    hook = LossHook(aggregation(mode, **OPTIONS.get(mode, {})), read_batch=read_samples)
    with gpt.KeepDouble():
        step = {"forward_step_func": llava.forward_step}
        reports = reduced(gpt.run_step(hook, ddp, iter(mine), number, **step))
        made = [llava.forward(model, llava.batch(i)) for i in range(BATCHES)]
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradient = torch.autograd.grad(formula(mode, made), parameters, materialize_grads=True)
    wanted = torch.cat([g.flatten() for g in gradient])
    got = torch.cat([p.main_grad.flatten() for p in parameters])
    shown = {"lm loss": "token_mean", f"{mode} loss": mode}
    errors = [reports[key] / float(formula(name, made)) - 1 for key, name in shown.items()]
    return float((got - wanted).norm() / wanted.norm()), *errors


def formula(mode: str, made: list[tuple[Tensor, Tensor]]) -> Any:
    """The loss of a step of whole microbatches, each with losses and mask [samples, seq]."""
    sums = [(losses * mask).sum(dim=1) for losses, mask in made]
    tokens = [mask.sum(dim=1) for _, mask in made]
    pairs = list(zip(sums, tokens, strict=True))
    samples = sum(len(x) for x in tokens)
    if mode == "sample_mean":
        return sum((s / m.clamp(min=1)).sum() for s, m in pairs) / samples
    if mode == "microbatch_mean":
        return sum(s.sum() / m.sum().clamp(min=1) for s, m in pairs) / len(pairs)
    divisors = {
        "token_mean": sum(m.sum() for m in tokens),
        "sum": 3.0,
        "constant": 7.0 * samples,
        "sample_sum": samples,
    }
    return sum(s.sum() for s in sums) / divisors[mode]


def errors_on_host() -> list[tuple[float, float, float]]:
    return [errors_of(*case) for case in CASES]


@functools.cache
def errors() -> list[list[tuple[float, float, float]]]:
    return run_host_ranks(errors_on_host, RANKS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_megatrons_llava_is_exact(case: tuple[bool, str]) -> None:
    for rank in errors():
        assert max(map(abs, rank[CASES.index(case)])) <= EXACT
