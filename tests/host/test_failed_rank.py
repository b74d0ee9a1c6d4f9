"""An error of one rank's data or functions reaches the others before the schedule does."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from megatron_loss_agg import AggregationError, LossAggregation
from tests.host import rl
from tests.host.ranks import run_host_ranks
from tests.host.steps import sequences
from tests.host.topology import Topology, build_chunks

pytestmark = pytest.mark.host

TOPOLOGIES = {
    "dp2": Topology(2),
    "cp2": Topology(2, {"cp": 2}),
    "dp2 cp2": Topology(4, {"cp": 2}),
    "pp2": Topology(2, {"pipeline_model_parallel_size": 2}),
}


def mean_or_nan(fails: bool, plan: Any, i: int) -> Tensor:
    """A custom aggregation, which may fail."""
    mask = plan.microbatches[i].loss_mask
    return mask * math.nan if fails else mask / plan.counts.tokens


def failing_reader() -> Iterator[Any]:
    raise OSError("disk")
    yield


def odd_packs() -> Iterator[Any]:
    """A pack that two context-parallel ranks cannot split."""
    for batch in rl.packs(sequences(fractional=False), [[0, 1]]):
        mask = batch["loss_mask"][..., :-2]
        offsets = batch["cu_seqlens"].new_tensor([0, mask.shape[-1]])
        yield {"loss_mask": mask, "cu_seqlens": offsets, "prompt_ids": batch["prompt_ids"][:1]}


def answers(topology: Topology, defect: str) -> list[str]:
    """Every rank: what it hears of a step that is defective on the last ranks; then of a good."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_loss_agg.mcore import LossHook
    from tests.host import gpt

    gpt.initialize(**topology.sizes)
    chunks = build_chunks(topology, False)
    with_context = defect == "reader of one context-parallel rank"
    last = parallel_state.get_data_parallel_world_size(with_context_parallel=with_context) - 1
    fails = parallel_state.get_data_parallel_rank(with_context_parallel=with_context) == last
    terms: Any = rl.TERMS
    if defect == "function":
        custom = functools.partial(mean_or_nan, fails)
        terms = {**terms, "kl": LossAggregation(mode="custom", function=custom)}
    good = functools.partial(rl.packs, sequences(fractional=False), [[0, 1]])
    data = {
        "reader": failing_reader,
        "reader of one context-parallel rank": failing_reader,
        "split": odd_packs,
        "no iterator": lambda: None,
    }
    empty = functools.partial(rl.packs, sequences(fractional=False), [[]])
    hook = LossHook(terms, empty_step="error" if defect == "empty" else "step")

    def heard(hook: LossHook, batches: Any) -> str:
        try:
            gpt.run_step(
                hook.wrap(get_forward_backward_func()),
                chunks,
                batches,
                1,
                forward_step_func=rl.forward_step,
            )
        except (AggregationError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    found = []
    if defect == "empty":
        found.append(heard(hook, good()))
        found.append(heard(hook, empty()))
    else:
        found.append(heard(hook, data.get(defect, good)() if fails else good()))
    found.append(heard(LossHook(rl.TERMS), good()))
    return found


@functools.cache
def heard_by(topology: str, defect: str) -> list[list[str]]:
    world = TOPOLOGIES[topology].world_size
    return run_host_ranks(answers, world, TOPOLOGIES[topology], defect, timeout=90)


@pytest.mark.parametrize(
    "topology, defect, failed, error",
    [
        ("dp2", "reader", [1], "OSError: disk"),
        ("dp2", "no iterator", [1], "HostError: no data_iterator on a rank that reads data"),
        ("dp2", "function", [1], "FunctionError: the aggregation function returned weights that"),
        ("cp2", "reader of one context-parallel rank", [1], "OSError: disk"),
        ("dp2 cp2", "split", [2, 3], "LayoutError: sequence 0 has (padded) length"),
        ("pp2", "reader", [1], "OSError: disk"),
        ("pp2", "function", [1], "FunctionError: the aggregation function returned weights that"),
    ],
)
def test_no_rank_waits_for_one_that_failed(
    topology: str, defect: str, failed: list[int], error: str
) -> None:
    for rank, (said, afterwards) in enumerate(heard_by(topology, defect)):
        assert said.startswith(error if rank in failed else "PeerError: ")
        assert afterwards == "nothing"


def test_every_pipeline_stage_hears_of_an_empty_step() -> None:
    first, last = heard_by("pp2", "empty")
    assert first[0] == last[0] == first[2] == last[2] == "nothing"
    assert last[1].startswith("MaskError: no token of the whole step weighs anything")
    assert first[1].startswith("PeerError: the last pipeline stage, or another")
