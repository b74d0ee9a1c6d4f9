"""Ranks without data get what was planned for them, or hear that it failed."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron_loss_agg import LossAggregation, Microbatch, Term
from megatron_loss_agg.collectives import handed_on
from megatron_loss_agg.mcore.host import ParallelGroups
from megatron_loss_agg.mcore.splits import Splits
from megatron_loss_agg.mcore.step import PlannedStep, Step, planned_step
from tests.distributed import run_ranks

LENGTH, SAMPLES, MICROBATCHES = 4096, 8, 4  # 131,072 tokens
TERMS = {
    "policy": Term(LossAggregation(mode="sample_mean")),
    "kl": Term(LossAggregation(mode="token_mean")),
}


def planned(layout: str, groups: ParallelGroups) -> PlannedStep:
    """On the ranks that do not read data, ``layout`` does not matter."""
    mask = (torch.arange(SAMPLES * LENGTH) % 3 > 0).float()
    starts = LENGTH * torch.arange(SAMPLES + 1, dtype=torch.int32)
    whole = Microbatch(mask, starts)
    if layout == "rows":
        whole = Microbatch(mask.view(SAMPLES, LENGTH))
    step = Step(MICROBATCHES, lambda: [whole] * MICROBATCHES)
    call: Any = SimpleNamespace(terms=TERMS, groups=groups, trains=True, splits=Splits())
    return planned_step(step, call, frozenset())


def numbers(plan: PlannedStep) -> dict[str, Any]:
    return {
        name: (
            [term.coefficients(i).tolist() for i in range(len(term.sizes))],
            [term.mask_sums(i).tolist() for i in range(len(term.sizes))],
            [None if s.starts is None else s.starts.tolist() for s in term.shapes],
            term.counts,
        )
        for name, term in plan.terms.items()
    }


def on_two_ranks() -> dict[str, Any]:
    """What each hears of steps that fail on the rank that reads, and of good ones after them."""
    one = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    whole = dist.group.WORLD
    assert whole is not None
    groups = ParallelGroups(one, one, whole, one, last_stage=True)

    def failing() -> Any:
        raise OSError("disk")

    def heard() -> str | None:
        try:
            handed_on(failing, whole, 0)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    found: dict[str, Any] = {"read": heard(), "again": heard()}
    for layout in ("rows", "packs"):
        plan = planned(layout if dist.get_rank() == 0 else "rows", groups)
        found[layout] = numbers(plan)
        found[f"bytes of {layout}"] = len(pickle.dumps(plan))
    return found


def test_they_get_what_was_planned_or_hear_that_it_failed() -> None:
    first, other = run_ranks(on_two_ranks, 2)
    for time in ("read", "again"):
        assert first[time] == "OSError: disk"
        assert other[time].startswith("PeerError: the rank that plans the step for this one failed")
    for layout in ("rows", "packs"):
        assert other[layout] == first[layout]
        coefficients, sums, starts, _ = other[layout]["policy"]
        assert all(map(all, coefficients)) and all(map(all, sums))
        assert (starts[0] is None) == (layout == "rows")
        # A few numbers a sample: less than a fiftieth of fp32 weights for each term.
        weights = 4 * MICROBATCHES * SAMPLES * LENGTH
        assert first[f"bytes of {layout}"] <= len(TERMS) * weights / 50
