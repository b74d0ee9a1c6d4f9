"""One optimizer step of token sequences, for the real host and for the fp64 reference."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg import LossAggregation
from tests import oracle
from tests.oracle import Sample

VOCAB = 32
LONE_ROW = 24  # length of a row alone in its microbatch (bshd), and of the longest sequence
ROW = 72  # length of several rows
MULTIPLE = 4  # sequences are padded to 2 * cp for the largest cp here
LENGTHS = (24, 3, 9, 1, 17, 6, 12, 2, 20, 5)
PROMPTS = (7, 7, -3, 2**60, 7, -3, 2**60, 5, 5, -3)
ROLLOUTS = (0, 0, 1, 2, 3, 1, 2, 4, 5, 6)
EMPTY = 5  # a sample whose mask is all 0
SINGLE = (0, 4, 5)  # samples with one active token under the masks "single"

Places = tuple[tuple[tuple[int, ...], ...], ...]
"""Samples, by data-parallel rank and microbatch."""
Weights = list[tuple[int, list[float]]]
"""A sample of the step, and the weights of its tokens."""

# One step for each number of data-parallel ranks. The empty sample is a microbatch of its own.
PLACES: dict[int, Places] = {
    1: (((0, 1), (5,), (2, 3), (4, 6, 7, 8, 9)),),
    2: (((5,), (0, 1), (2,), (3,)), ((4,), (6, 7), (8,), (9,))),
}
N_MB = 4
# Two microbatches of two samples on each of two data-parallel ranks.
SHORT: Places = (((0, 1), (2, 3)), ((4, 5), (6, 7)))
NO_TOKENS: Places = (((EMPTY,), (EMPTY,)),) * 2
# One coefficient for all samples, and one for each of the groups that lie on several ranks:
# `test_gradients` has all aggregations.
MODES = ("token_mean", "prompt_mean")


@dataclass(frozen=True)
class Sequence:
    """A sample with its tokens; ``labels[t]`` is what position ``t`` predicts."""

    tokens: Tensor
    labels: Tensor
    sample: Sample


@functools.cache
def sequences(
    masks: str = "01", lengths: tuple[int, ...] = LENGTHS, vocab: int = VOCAB, seed: int = 1
) -> tuple[Sequence, ...]:
    """The samples of the step, heavy-tailed in length; by default those of `PLACES`.

    Args:
        masks: "01", "fractional", or "single": the last token of the samples `SINGLE`.
    """
    # The text is the same whatever the masks. The fractions of sample 3 sum to less than 1.
    generator, fractions = (torch.Generator().manual_seed(s) for s in (seed, 4))
    result = []
    groups = zip(cycle(PROMPTS), cycle(ROLLOUTS), strict=True)
    for i, (length, (prompt, rollout)) in enumerate(zip(lengths, groups, strict=False)):
        text = torch.randint(0, vocab, (length + 1,), generator=generator)
        # Of a fixed dtype: the same draw whatever the default dtype is.
        mask = (torch.rand(length, generator=generator, dtype=torch.float64) < 0.6).double()
        mask[-1] = 1
        if masks == "fractional":
            mask = mask * (torch.randint(1, 16, (length,), generator=fractions) / 8)
        if i == EMPTY:
            mask = torch.zeros(length)
        if masks == "single":
            mask = torch.zeros(length)
            mask[-1] = float(i in SINGLE)
        sample = Sample(tuple(mask.tolist()), prompt, rollout)
        result.append(Sequence(text[:-1], text[1:], sample))
    return tuple(result)


def deal(ranks: int, microbatches: int) -> Places:
    """All samples in unequal parts: the first ones are of one sample each."""
    parts = ranks * microbatches
    cuts = [*range(parts), len(LENGTHS)]
    places = [tuple(range(a, b)) for a, b in pairwise(cuts)]
    return tuple(tuple(places[r * microbatches : (r + 1) * microbatches]) for r in range(ranks))


def square_root_of_sum(samples: Any) -> Tensor:
    """A custom aggregation: ``c_s = 1 / (N sqrt(M_s))``, which no other mode computes."""
    return samples.mask_sum.rsqrt() / len(samples.mask_sum)


def aggregation(mode: str, **options: Any) -> LossAggregation:
    if mode == "custom":
        options.setdefault("function", square_root_of_sum)
    if mode == "constant":
        options.setdefault("divisor", 7.0)
    return LossAggregation(mode=mode, **options)


def weights_of(mode: str, places: Places, masks: str = "01", **options: Any) -> Weights:
    """The oracle's weights of ``aggregation(mode)`` over the step ``places``."""
    chosen = sequences(masks)
    if mode == "custom":
        order = [i for rank in places for of_mb in rank for i in of_mb]
        sums = {i: math.sqrt(sum(chosen[i].sample.mask)) * len(order) for i in order}
        return [(i, [m and m / sums[i] for m in chosen[i].sample.mask]) for i in order]
    if mode == "constant":
        options.setdefault("divisor", 7.0)
    return weights_with(mode, places, lambda i, _: chosen[i].sample, **options)


def weights_with(
    mode: str, places: Places, sample: Callable[[int, tuple[int, ...]], Sample], **options: Any
) -> Weights:
    """`weights_of` other samples: of the number of each and of all in its microbatch."""
    step = [[[sample(i, of_mb) for i in of_mb] for of_mb in rank] for rank in places]
    nested = oracle.step_weights(mode, step, **options)
    order = [i for rank in places for of_mb in rank for i in of_mb]
    return list(zip(order, [w for rank in nested for mb in rank for w in mb], strict=True))


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


def padding_microbatch() -> dict[str, Any]:
    """Padding that evens out the number of microbatches: tokens for the model, and no sample."""
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    mask = torch.zeros(1, 4, dtype=torch.float64)
    return {
        "tokens": tokens,
        "labels": tokens,
        "loss_mask": mask,
        "cu_seqlens": torch.tensor([0]),
        "cu_seqlens_padded": torch.tensor([0, 4]),
        "prompt_ids": torch.empty(0, dtype=torch.int64),
    }


def batches(
    places: tuple[tuple[int, ...], ...], layout: str, masks: str = "01"
) -> Iterator[dict[str, Any]]:
    """A data iterator over one rank's microbatches."""
    chosen = sequences(masks)
    return iter([batch_of([chosen[i] for i in place], layout) for place in places])
