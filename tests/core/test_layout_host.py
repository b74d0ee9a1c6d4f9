"""CPLayout.bshd against Megatron's own get_batch_on_this_cp_rank."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_loss_agg import CPLayout
from tests.host.ranks import run_host_ranks

pytestmark = [
    pytest.mark.host,
    # Looked up and not imported: the import takes seconds, and only the ranks need it.
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs Megatron-Core"),
]


def batch_of(seq_len: int) -> dict[str, torch.Tensor]:
    rows = torch.arange(3 * seq_len).reshape(3, seq_len)
    return {"tokens": rows, "loss_mask": rows % 5 / 4, "labels": rows + 1}


def host_shards(seq_len: int) -> dict[str, Any]:
    """What Megatron gives this rank of the whole batch, with a CP group of all ranks."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    options: dict[str, Any] = {"is_hybrid_cp": False, "cp_group": dist.group.WORLD}
    known = inspect.signature(get_batch_on_this_cp_rank).parameters
    if "cp_group" not in known:
        parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    batch = get_batch_on_this_cp_rank(
        batch_of(seq_len), **{name: x for name, x in options.items() if name in known}
    )
    return {name: batch[name].tolist() for name in batch_of(seq_len)}


@pytest.mark.parametrize(("cp", "seq_len"), [(2, 8), (2, 20), (4, 16)])
def test_bshd_is_megatrons_split(cp, seq_len):
    for rank, theirs in enumerate(run_host_ranks(host_shards, cp, seq_len)):
        layout = CPLayout.bshd(seq_len, cp, rank)
        ours = {name: layout.shard(x).tolist() for name, x in batch_of(seq_len).items()}
        assert ours == theirs
