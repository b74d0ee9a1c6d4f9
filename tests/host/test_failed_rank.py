"""An error of one rank's data or functions reaches the others before the schedule does."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.mcore import LossHook
from tests.host.harness import TOPOLOGIES, build_chunks, error_of, run_host_ranks
from tests.host.steps import aggregation

pytestmark = pytest.mark.host

PLACES = ((0, 1), (2,))
READER, FUNCTION = "OSError: disk", "FunctionError: the aggregation function returned weights that"
EMPTY = "MaskError: every token of the step is masked or rejected"
# What happens, on which ranks, and what these say: all others raise a PeerError.
DEFECTS = {
    ("dp2", "reader"): ([1], READER),
    ("dp2", "short reader"): ([1], "StepError: the data iterator ended after 1 of the 2 batches"),
    ("dp2", "no data"): ([1], "StopIteration: "),
    ("dp2", "interrupted"): ([1], "KeyboardInterrupt: "),
    ("dp2", "no iterator"): (
        [1],
        "HostError: data_iterator is a NoneType on a rank that reads data",
    ),
    ("dp2", "function"): ([1], FUNCTION),
    ("cp2", "reader"): ([1], READER),
    ("pp2", "reader"): ([1], READER),
    ("pp2", "function"): ([1], FUNCTION),
    ("pp2", "empty step"): ([1], EMPTY),
    ("tp2", "reader"): ([0], READER),
    ("tp2", "function"): ([0], FUNCTION),
}


def mean_or_nan(failing: tuple[int, ...], plan: Any, i: int) -> Tensor:
    """A custom aggregation, which fails on some ranks."""
    mask = plan.microbatches[i].loss_mask
    return mask * math.nan if dist.get_rank() in failing else mask / plan.counts.tokens


def failing_reader(good: Iterator[Any]) -> Iterator[Any]:
    """Fails at the second batch of the step."""
    yield next(good)
    raise OSError("disk")


def interrupted(good: Iterator[Any]) -> Iterator[Any]:
    yield next(good)
    raise KeyboardInterrupt


BAD_DATA = {
    "reader": failing_reader,
    "short reader": lambda good: iter([next(good)]),
    "no data": lambda good: iter([]),
    "interrupted": interrupted,
    "no iterator": lambda good: None,
}


def heard_on_host(name: str) -> dict[str, tuple[str | None, str | None]]:
    """Every rank, for each defect: what it hears of the step, and of a good one after it."""
    from tests.host import gpt, rl

    topology = TOPOLOGIES[name]
    gpt.initialize(**topology.sizes)
    chunks = build_chunks(topology, False)

    def heard(hook: LossHook, data: Any) -> str | None:
        options = {"forward_step_func": rl.forward_step}
        return error_of(gpt.run_step, hook, chunks, data, len(PLACES), **options)

    def good() -> Any:
        return rl.packs(*PLACES) if gpt.reads_data() else None

    found = {}
    for _, defect in (case for case in DEFECTS if case[0] == name):
        fails = dist.get_rank() in DEFECTS[name, defect][0]
        terms: Any = rl.TERMS
        if defect == "function":
            custom = functools.partial(mean_or_nan, tuple(DEFECTS[name, defect][0]))
            terms = {**terms, "kl": aggregation("custom", function=custom)}
        hook = LossHook(terms, empty_step="error" if defect == "empty step" else "step")
        data = good()
        if defect == "empty step":
            assert heard(hook, data) is None  # every stage hears of the first step in any case
            data = rl.packs((), ())
        elif fails and defect in BAD_DATA:
            data = BAD_DATA[defect](data)
        found[defect] = heard(hook, data), heard(LossHook(rl.TERMS), good())
    return found


@functools.cache
def heard(topology: str) -> list[dict[str, tuple[str | None, str | None]]]:
    world_size = TOPOLOGIES[topology].world_size
    return run_host_ranks(heard_on_host, world_size, topology, timeout=90)


@pytest.mark.parametrize("topology, defect", DEFECTS)
def test_no_rank_waits_for_one_that_failed(topology: str, defect: str) -> None:
    failed, error = DEFECTS[topology, defect]
    for rank, found in enumerate(heard(topology)):
        said, afterwards = found[defect]
        assert said is not None and said.startswith(error if rank in failed else "PeerError: ")
        assert afterwards is None


def test_the_others_hear_which_rank_failed_and_on_which_stage() -> None:
    assert "rank(s) [1]" in str(heard("dp2")[0]["reader"][0])
    first, _ = heard("pp2")[0]["empty step"]
    assert str(first).startswith("PeerError: a rank of the last pipeline stage")
