"""Batches in the shape of Megatron's SFT data, through the real host, against the fp64 reference.

Its loader stacks packs of one length; their offsets are filled up with that length, and the last
sample reaches to the pack's end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_loss_agg.mcore import LossHook
from tests.host.harness import EXACT, run_host_ranks
from tests.host.reference import reference
from tests.host.steps import MULTIPLE, aggregation, sequences, weights_of

pytestmark = pytest.mark.host

LENGTH = 40
PACKS = ((0, 1), (2, 3, 4), (5, 6, 7), (8, 9))
MODES = ("token_mean", "sample_mean")


def pack(places: tuple[int, ...]) -> dict[str, Tensor]:
    """One item of the data set: samples one after another, padded for context parallelism."""
    chosen = [sequences()[i] for i in places]
    widths = [-(-len(s.tokens) // MULTIPLE) * MULTIPLE for s in chosen]
    widths[-1] += LENGTH - sum(widths)

    def flat(parts: list[Tensor]) -> Tensor:
        pad = torch.nn.functional.pad
        return torch.cat([pad(x, (0, w - len(x))) for x, w in zip(parts, widths, strict=True)])

    offsets = torch.full((LENGTH + 1,), LENGTH, dtype=torch.int32)
    offsets[: len(widths) + 1] = torch.tensor([0, *widths]).cumsum(0)
    return {
        "tokens": flat([s.tokens for s in chosen]),
        "labels": flat([s.labels for s in chosen]),
        "loss_mask": flat([torch.tensor(s.sample.mask) for s in chosen]).float(),
        "cu_seqlens": offsets,
    }


def merged(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Several packs as the one long pack that the host calls its model with."""
    ends = [row[: row.tolist().index(LENGTH) + 1] for row in batch["cu_seqlens"]]
    starts = torch.cat([torch.zeros(1), *(row[1:] + k * LENGTH for k, row in enumerate(ends))])
    rows = {key: batch[key].reshape(1, -1) for key in ("tokens", "labels", "loss_mask")}
    return {**rows, "cu_seqlens_padded": starts.int()}


def forward_step(iterator: Iterator[dict[str, Tensor]], model: Any) -> Any:
    from tests.host import gpt

    return gpt.forward_step(iter([merged(next(iterator))]), model)


def errors_on_host(cp: int, packs_per_batch: int, expected: dict[str, Any]) -> dict[Any, float]:
    """Every rank: the gradient error of each (per-token flag, mode)."""
    from megatron.core import parallel_state
    from torch.utils.data import default_collate

    from tests.host import gpt, gradients

    gpt.initialize(cp)
    size = parallel_state.get_data_parallel_world_size()
    mine = PACKS[gpt.data_rank() :: size]
    groups = [mine[i : i + packs_per_batch] for i in range(0, len(mine), packs_per_batch)]
    errors = {}
    for per_token in (False, True):
        ddp = gpt.ddp_model(per_token)
        for mode in MODES:
            data = iter([default_collate([pack(places) for places in group]) for group in groups])
            options = {"forward_step_func": forward_step}
            hook = LossHook(aggregation(mode))
            gpt.run_step(hook, ddp, data, len(groups), packs_per_batch, **options)
            errors[per_token, mode] = gradients.error(ddp, expected[mode])
    return errors


@pytest.mark.parametrize("cp, packs_per_batch", [(1, 1), (1, 2), (2, 2)])
def test_stacked_packs_are_exact(cp: int, packs_per_batch: int) -> None:
    expected = {mode: reference().gradient(weights_of(mode, (PACKS,))) for mode in MODES}
    for rank in run_host_ranks(errors_on_host, 2, cp, packs_per_batch, expected):
        assert len(rank) == 2 * len(MODES)
        assert max(rank.values()) <= EXACT, rank
