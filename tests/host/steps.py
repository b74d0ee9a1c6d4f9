"""One optimizer step of token sequences, for the real host and for a single-process reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.oracle import Sample

VOCAB = 32
LONE_ROW = 24  # length of a row alone in its microbatch (bshd), and of the longest sequence
ROW = 72  # of several; a rank's half of it is no short row, which the hook weighs in another way
MULTIPLE = 4  # sequences are padded to 2 * cp for the largest cp here
LENGTHS = (24, 3, 9, 1, 17, 6, 12, 2, 20, 5)
PROMPTS = (7, 7, -3, 2**60, 7, -3, 2**60, 5, 5, -3)
ROLLOUTS = (0, 0, 1, 2, 3, 1, 2, 4, 5, 6)
EMPTY = 5  # a sample whose mask is all 0


@dataclass(frozen=True)
class Sequence:
    """A sample with its tokens; ``labels[t]`` is what position ``t`` predicts."""

    tokens: Tensor
    labels: Tensor
    sample: Sample


def sequences(fractional: bool) -> list[Sequence]:
    """The samples of the step, heavy-tailed in length; some of their tokens are masked."""
    generator = torch.Generator().manual_seed(1)
    result = []
    for i, (length, prompt, rollout) in enumerate(zip(LENGTHS, PROMPTS, ROLLOUTS, strict=True)):
        text = torch.randint(0, VOCAB, (length + 1,), generator=generator)
        # Of a fixed dtype: the same draw whatever the default dtype is.
        mask = (torch.rand(length, generator=generator, dtype=torch.float64) < 0.6).double()
        mask[-1] = 1
        if fractional:
            mask = mask * (torch.randint(1, 16, (length,), generator=generator) / 8)
        if i == EMPTY:
            mask = torch.zeros(length)
        sample = Sample(tuple(mask.tolist()), prompt, rollout)
        result.append(Sequence(text[:-1], text[1:], sample))
    return result


def deal(number: int, ranks: int, microbatches: int) -> list[list[list[int]]]:
    """Indices of ``number`` samples by rank and microbatch, in unequal parts."""
    parts = ranks * microbatches
    # The first parts are one sample each, so that counts differ over ranks and microbatches.
    cuts = [*range(parts), number]
    places = [list(range(a, b)) for a, b in pairwise(cuts)]
    return [places[r * microbatches : (r + 1) * microbatches] for r in range(ranks)]


def batch_of(chosen: list[Sequence], layout: str) -> dict[str, Any]:
    """A whole batch, before context parallelism, with the keys of a Megatron data loader."""
    if layout == "bshd":
        width = [LONE_ROW if len(chosen) == 1 else ROW] * len(chosen)
    else:
        width = [-(-len(s.tokens) // MULTIPLE) * MULTIPLE for s in chosen]

    def padded(values: list[Tensor]) -> Tensor:
        rows = [
            torch.nn.functional.pad(v, (0, w - len(v))) for v, w in zip(values, width, strict=True)
        ]
        return torch.stack(rows) if layout == "bshd" else torch.cat(rows).unsqueeze(0)

    batch = {
        "tokens": padded([s.tokens for s in chosen]),
        "labels": padded([s.labels for s in chosen]),
        "loss_mask": padded([torch.tensor(s.sample.mask, dtype=torch.float64) for s in chosen]),
        "prompt_ids": torch.tensor([s.sample.prompt for s in chosen]),
        "rollout_ids": torch.tensor([s.sample.rollout for s in chosen]),
    }
    if layout == "thd":
        real = torch.tensor([0, *(len(s.tokens) for s in chosen)])
        batch["cu_seqlens"] = real.cumsum(0).int()
        batch["cu_seqlens_padded"] = torch.tensor([0, *width]).cumsum(0).int()
    return batch


def batches(
    chosen: list[Sequence], places: list[list[int]], layout: str
) -> Iterator[dict[str, Any]]:
    """A data iterator over one rank's microbatches."""
    return iter([batch_of([chosen[i] for i in place], layout) for place in places])
