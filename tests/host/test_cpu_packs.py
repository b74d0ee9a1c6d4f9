"""How Megatron's data path splits packs over context-parallel ranks on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.host.harness import run_host_ranks

pytestmark = pytest.mark.host


def splits_on_host() -> dict[str, Any]:
    """One rank: what each context-parallel rank of two holds, and the error without offsets."""
    import torch
    from megatron.core import utils

    split = utils.tex.thd_get_partitioned_indices
    offsets = torch.tensor([0, 8, 12, 12], dtype=torch.int32)
    held: dict[str, Any] = {str(rank): split(offsets, 12, 2, rank).tolist() for rank in range(2)}
    try:
        split(None, 12, 2, 0)
    except ValueError as error:
        held["without"] = f"{type(error).__name__}: {error}"
    return held


def test_packs_are_split_in_zigzag_inside_every_sample() -> None:
    (held,) = run_host_ranks(splits_on_host, 1)
    # Chunks of 8 / 4 = 2 and of 4 / 4 = 1 token: rank 0 has the first and the last of each.
    assert held["0"] == [0, 1, 6, 7, 8, 11]
    assert held["1"] == [2, 3, 4, 5, 9, 10]
    assert held["without"].startswith("HostError: ")
    assert "'cu_seqlens_padded'" in held["without"]
    assert "--context-parallel-size at 1" in held["without"]
