"""The whole reduction of one microbatch, from mask to gradient, against a plain sequence mean.

Plan, weights and weighted sum, forward and backward, against the vectorised mean over a padded
matrix, forward and backward, with the mask in the same dtype. A pack is compared with the padded
matrix of the same losses, which is given; and with one that needs no padding for as many tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.results import Results, ratios
from benchmarks.shapes import MICROBATCHES, SEED
from megatron_loss_agg import LossAggregation, Microbatch, StepPlan, weighted_sum

DTYPES = (torch.float32, torch.bool, torch.int64)
SAMPLE_MEAN = LossAggregation(mode="sample_mean")


def measure(results: Results) -> None:
    for samples, length in MICROBATCHES:
        full = torch.full((samples,), length)
        uneven = _uneven(samples, length)
        goal = "reduction" if samples * length > 2**16 else "small_reduction"
        for dtype in DTYPES:
            rows, pack = _masks(full)[0].to(dtype), _masks(uneven)
            padded, packed = (mask.to(dtype) for mask in pack)
            starts = torch.nn.functional.pad(uneven.cumsum(0), (1, 0)).int()
            where = f"{samples} x {length}, {str(dtype).removeprefix('torch.')} mask"
            of_rows, of_pack = _ours(rows), _ours(packed, starts)
            _, found = ratios(_plain(rows), {"rows": of_rows, "pack": of_pack}, 150)
            _, of_padded = ratios(_plain(padded), {"pack": of_pack}, 150)
            results.add("reduction of rows", where, found["rows"], "of plain mean", goal)
            results.add("of a pack", where, of_padded["pack"], "of plain mean, padded", goal)
            results.add("of a pack", where, found["pack"], "of it without padding")


def _uneven(samples: int, length: int) -> Tensor:
    """int64 [samples]: lengths from 1 to ``2 * length - 1``, each as probable, of this mean."""
    generator = torch.Generator().manual_seed(SEED)
    half = torch.randint(1, 2 * length, (samples // 2,), generator=generator)
    return torch.cat([half, 2 * length - half])


def _masks(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [samples, longest] and [tokens]: without the first third of each sample, a prompt."""
    place = torch.arange(int(lengths.max()))
    inside = place < lengths.unsqueeze(1)
    mask = (inside & (3 * place >= lengths.unsqueeze(1))).float()
    return mask, mask[inside]


def _plain(mask: Tensor) -> Callable[[], None]:
    losses = torch.rand(mask.shape)

    def reduce() -> None:
        x = losses.detach().requires_grad_()
        ((x * mask).sum(1) / mask.sum(1).clamp(min=1)).mean().backward()

    return reduce


def _ours(mask: Tensor, starts: Tensor | None = None) -> Callable[[], None]:
    losses = torch.rand(mask.shape)

    def reduce() -> None:
        x = losses.detach().requires_grad_()
        plan = StepPlan.build(SAMPLE_MEAN, [Microbatch(mask, starts)])
        weighted_sum(plan.weights(0), x).backward()

    return reduce
