"""Process groups of any size in one process: only sizes and ranks are asked of them here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_loss_agg.mcore.host import Call, HostScale, ParallelGroups


@contextlib.contextmanager
def fake_groups(*context_parallel: int) -> Iterator[list[ParallelGroups]]:
    """Rank 0 of as many context-parallel ranks as each number says, and of no others."""
    world = max(context_parallel)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        one = dist.new_group([0])
        groups = [dist.new_group(list(range(size))) for size in context_parallel]
        yield [ParallelGroups(one, context, one, one, last_stage=True) for context in groups]
    finally:
        dist.destroy_process_group()


def fake_call(
    groups: ParallelGroups, model: Any, forward_step: Callable[..., Any], number: int
) -> Call:
    """A training call of ``number`` microbatches, of one data- and context-parallel rank."""
    return Call(
        arguments={},
        pg_collection=None,
        groups=groups,
        scale=HostScale(number, 1, 1, per_token=False),
        config=None,
        chunks=(model,),
        forward_step=forward_step,
        data_iterator=None,
        forward_only=False,
        collects_other_data=False,
    )
