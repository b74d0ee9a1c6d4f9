"""The shapes, seeds and goals of all measurements."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg import LossAggregation

SEED = 1234
LAYOUTS = ("rows", "packs")
MODE = LossAggregation(mode="prompt_mean")
"""One mode for all measurements, since modes differ only in one number per sample."""


class Gpt(NamedTuple):
    layers: int
    hidden: int
    heads: int
    vocabulary: int


class Step(NamedTuple):
    """A step of one rank: the numbers of microbatches, rows of each, and tokens of each row."""

    microbatches: int
    rows: int
    length: int


TINY = Gpt(layers=1, hidden=32, heads=2, vocabulary=64)
"""Steps of this model are so short that the time added by the hook exceeds the noise."""


class Shapes(NamedTuple):
    """Shapes of the measurements; pairs are a number of samples and the average tokens of each."""

    losses: tuple[tuple[int, int], ...] = ((8, 128), (64, 1024), (4096, 64))
    bool_mask: tuple[int, int] = (64, 1024)  # one of `losses`
    plan: tuple[int, int] = (8192, 64)  # in 8 microbatches
    samples: tuple[int, ...] = (65_536, 1_048_576)  # of a step, on all ranks
    ranks: tuple[int, ...] = (64, 512, 4096)
    model: Gpt = Gpt(layers=4, hidden=256, heads=4, vocabulary=8192)
    step: Step = Step(microbatches=4, rows=2, length=256)
    loader_step: Step = Step(microbatches=4, rows=1, length=32)
    growth: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("microbatches", (4, 16, 64, 256)),
        ("terms", (1, 2, 4, 8)),
        ("samples", (64, 1024, 4096, 16384)),  # per microbatch; each has 16 tokens
    )


SMALL = 2**14
"""A microbatch with fewer tokens is small: Python takes most of its time."""

FULL = Shapes()
QUICK = Shapes(
    losses=((8, 128),),
    bool_mask=(8, 128),
    plan=(64, 64),
    samples=(64,),
    ranks=(2, 4),
    model=TINY,
    step=Step(microbatches=2, rows=2, length=16),
    growth=(("microbatches", (1, 2)), ("terms", (1, 2)), ("samples", (1, 2))),
)

GPU_MODEL = Gpt(layers=24, hidden=1024, heads=16, vocabulary=32000)  # 336 million parameters
GPU_WAITS = Gpt(layers=2, hidden=256, heads=4, vocabulary=1024), Step(4, 2, 128)

GOALS = {
    # As a multiple of the time of stock Megatron's loss function. The hook runs that function, too.
    # In addition, a token's weight is written and read once; weights and masks are added up once,
    # for the checks after the step. Small rows pay only for Python; packs, for every token's index.
    "rows": 2.7,
    "small_rows": 2.9,
    "packs": 3.5,
    # As a multiple of masked means, forward and backward. Masks are counted in fp64, and the masks
    # of packs are copied for that.
    "weighed_rows": 5.0,
    "weighed_packs": 8.0,
    "plan_ms": 5.0,
    "exchange_ms_65536": 40.0,  # of one rank's time, with the samples of 4,096 ranks
    "exchange_ms_1048576": 250.0,
    "handed_on": 33.0,  # bytes per sample
    "launches_rows": 12,  # per microbatch, added to those of stock Megatron's loss
    "launches_packs": 20,
    "uploads": 0,  # added per microbatch
    "waits": 0,
    "calls": 60,  # of Python functions, by the loss function
    "step_waits": 1,
    "entered_files": 16,  # by an ordinary step
    "rare_lines": 0.55,  # share of these files' code that the step does not run
    "growth": 1.2,  # as a multiple of linear growth
    "added_ms": 3.3,
    "step": 0.0035,  # added, as a share of stock Megatron's step
    "slow_loader": 1.02,  # as a multiple of stock Megatron's step over the same loader
    "loader_wait": 0.02,  # as a share of a step without delay
    "import_s": 0.2,  # beyond the imports of torch and Megatron
    "gradient": 2.0,  # as a multiple of the error of one unsplit process
    "gpu_step": 1.005,  # as a multiple of stock Megatron's step
    "gpu_memory": 1.001,  # as a multiple of stock Megatron's peak
    "gpu_waits": 1,  # waits of the CPU for the GPU per step, added to stock Megatron's
    "gpu_waits_of_masks": 2,  # the same with masks on the GPU
}
COUNTS = ("launches_rows", "launches_packs", "uploads", "waits", "calls", "step_waits")
QUICK_GOALS = ("gradient", *COUNTS)
"""The goals that do not depend on shapes, which are also compared in a quick run."""


def microbatch(samples: int, length: int, layout: str) -> dict[str, Tensor]:
    """A batch as from a data loader, with the first part of every sample masked like a prompt.

    ``loss_mask`` is fp32: [samples, length] in rows; [tokens] in packs, with the same number of
    tokens in samples of heavy-tailed length (Pareto, exponent 2).
    """
    generator = torch.Generator().manual_seed(SEED)
    lengths = torch.full((samples,), length)
    if layout == "packs":
        tail = (1 - torch.rand(samples, generator=generator, dtype=torch.float64)) ** -0.5
        lengths = 1 + (tail / tail.sum() * samples * (length - 1)).long()
        lengths[0] += samples * length - lengths.sum()
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    prompt = 0.2 + 0.4 * torch.rand(samples, generator=generator)
    position = torch.arange(samples * length) - starts[:-1].repeat_interleave(lengths)
    mask = (position >= (prompt * lengths).repeat_interleave(lengths)).float()
    ids = {"prompt_ids": torch.arange(samples) // 8}
    if layout == "packs":
        return {"loss_mask": mask, "cu_seqlens": starts.int(), **ids}
    return {"loss_mask": mask.view(samples, length), **ids}
