"""Context-parallel groups of a sample's own (dynamic, hybrid): refused by name, and only those."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from tests.host.ranks import run_host_ranks
from tests.host.steps import batches, sequences

pytestmark = pytest.mark.host

PLACES = [[0, 1], [2]]


def errors_on_host() -> dict[str, str | None]:
    """Every rank, CP 2: the error of each case; None if it has none."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_loss_agg import AggregationError, LossAggregation
    from megatron_loss_agg.mcore import LossHook
    from tests.host import gpt

    gpt.initialize(cp=2)

    def error_of(local_cp_size: int | None, **config: Any) -> str | None:
        ddp = gpt.data_parallel(gpt.build(torch.float64, True))
        for name, value in config.items():
            setattr(ddp.config, name, value)

        def set_size(module: Any, args: Any, kwargs: Any) -> Any:
            packed = kwargs["packed_seq_params"]
            kwargs["packed_seq_params"] = dataclasses.replace(packed, local_cp_size=local_cp_size)
            return args, kwargs

        ddp.register_forward_pre_hook(set_size, with_kwargs=True)
        hook = LossHook(LossAggregation(mode="prompt_mean"))
        data = batches(sequences(fractional=False), PLACES, "thd")
        try:
            gpt.run_step(hook.wrap(get_forward_backward_func()), ddp, data, len(PLACES))
        except AggregationError as error:
            return f"{type(error).__name__}: {error}"
        return None

    return {
        "none": error_of(None),
        "group of all": error_of(2),
        "group of one": error_of(1),
        "config": error_of(None, hybrid_context_parallel=True),
    }


@functools.cache
def errors() -> list[dict[str, str | None]]:
    return run_host_ranks(errors_on_host, 2)


@pytest.mark.parametrize("case", ["none", "group of all"])
def test_the_group_of_all_is_not_refused(case: str) -> None:
    assert [rank[case] for rank in errors()] == [None, None]


@pytest.mark.parametrize(
    "case, texts",
    [
        ("group of one", ("local_cp_size=1", "one group of 2", "--hybrid-context-parallel")),
        ("config", ("hybrid_context_parallel", "one group for all", "turn it off")),
    ],
)
def test_groups_of_their_own_are_refused(case: str, texts: tuple[str, ...]) -> None:
    for rank in errors():
        assert rank[case] is not None and rank[case].startswith("HostError: ")
        for text in texts:
            assert text in rank[case]
