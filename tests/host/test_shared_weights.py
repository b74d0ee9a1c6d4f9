"""Terms that weigh a microbatch alike keep one vector of its tokens, and others do not."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from megatron_loss_agg import LossAggregation, Microbatch
from tests.host.ranks import run_host_ranks

pytestmark = pytest.mark.host

NAMES = ("policy", "kl", "entropy")
PROMPT_MEAN = LossAggregation(mode="prompt_mean")


def pack(*mask: float) -> Microbatch:
    """Two samples, of prompts that both ranks have."""
    starts = torch.tensor([0, 2, len(mask)])
    return Microbatch(torch.tensor(mask), starts, prompt_ids=torch.tensor([0, 1]))


def own_mask(plan: Any, i: int) -> torch.Tensor:
    return plan.microbatches[i].loss_mask


def cases(rank: int) -> dict[str, tuple[dict[str, LossAggregation], list[Any]]]:
    """Terms, and the microbatches of a data-parallel rank."""
    first, second, other = pack(1, 0, 1, 1, 1), pack(0, 1, 1, 0, 0), pack(1, 1, 1, 1, 1)
    alike = dict.fromkeys(NAMES, PROMPT_MEAN)
    apart = {"policy": second, "kl": other, "entropy": second}
    return {
        "alike": (alike, [first, second]),
        "other mode": ({**alike, "kl": LossAggregation(mode="token_mean")}, [first, second]),
        "own masks later": (alike, [first, apart]),
        "own masks on another rank": (alike, [first, apart if rank else second]),
        "custom": (
            dict.fromkeys(NAMES, LossAggregation(mode="custom", function=own_mask)),
            [first, second],
        ),
    }


def vectors_on_host() -> dict[str, tuple[list[int], list[int], bool]]:
    """Every rank, DP 2: vectors of each microbatch, made and as sent; and are they right?"""
    from megatron.core import parallel_state

    from megatron_loss_agg import StepPlan
    from megatron_loss_agg.mcore.ranks import Ranks
    from megatron_loss_agg.mcore.weighting import PlannedWeights
    from tests.host import gpt

    gpt.initialize()
    ranks = Ranks.of(None)

    def vectors(planned: PlannedWeights) -> list[int]:
        by_microbatch = zip(*planned.parts.values(), strict=True)
        return [len({part.weight_T.data_ptr() for part in parts}) for parts in by_microbatch]

    found = {}
    for name, (terms, step) in cases(parallel_state.get_data_parallel_rank()).items():
        plans = StepPlan.build_terms(terms, step, ranks.data)
        planned = PlannedWeights.of(plans, ranks)
        right = all(
            torch.equal(planned.parts[term][i].weight_T, plan.weights(i))
            for term, plan in plans.items()
            for i in range(len(step))
        )
        found[name] = (vectors(planned), vectors(pickle.loads(pickle.dumps(planned))), right)
    return found


def test_terms_share_weights_where_they_are_alike() -> None:
    first, second = run_host_ranks(vectors_on_host, 2)
    # Rank 1 has masks of its own for `kl` in its second microbatch, and these count in the
    # denominator of both ranks.
    expected = {
        "alike": [1, 1],
        "other mode": [2, 2],
        "own masks later": [2, 2],
        "own masks on another rank": [2, 2],
        "custom": [3, 3],
    }
    for found in (first, second):
        assert found == {name: (number, number, True) for name, number in expected.items()}
