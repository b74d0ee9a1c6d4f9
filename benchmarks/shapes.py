"""What is measured: shapes, seeds and goals, all of them here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_loss_agg import LossAggregation, Microbatch

SEED = 1234

MICROBATCHES = ((64, 1024), (1024, 256), (4096, 64))
"""Samples, and tokens of each on average, over all context-parallel ranks."""
CONTEXT_PARALLEL = (1, 2, 8)
LAYOUTS = ("bshd", "thd")

PLAN = (8192, 64, 8)  # samples, tokens of each, microbatches
LARGE_PLAN = (1_000_000, 100_000, 64)  # samples, prompts, ranks; of 4 tokens each


@dataclass(frozen=True)
class Gpt:
    layers: int
    hidden: int
    heads: int
    vocabulary: int


@dataclass(frozen=True)
class Step:
    """Of one rank: microbatches of so many rows, of so many tokens."""

    microbatches: int
    rows: int
    length: int


MODEL = Gpt(layers=4, hidden=256, heads=4, vocabulary=8192)
TRAINING_STEP = Step(microbatches=4, rows=2, length=256)
SMALL_MODEL = Gpt(layers=1, hidden=8, heads=1, vocabulary=32)
"""Whose steps are so short that what is added to one can be told from the noise."""
LOADER_STEP = Step(microbatches=4, rows=1, length=32)
LOADER_DELAY = 0.5  # of the time that a microbatch computes, for each batch
LOGITS = (2048, 8192)  # tokens, vocabulary
BROADCAST = (128, 1024, 16)  # samples, tokens of each, microbatches: 131,072 tokens of a rank

LOSS_FUNCTIONS = ((64, 1024), (8, 128))
"""Samples and tokens of each, of a microbatch; of the smaller one, fixed costs are all."""
GROWTH = {
    "microbatches": (1, 4, 16, 64, 256),
    "terms": (1, 2, 4, 8),
    "samples": (16, 128, 1024, 4096, 16384),
}
GROWTH_FROM = {"microbatches": 4, "terms": 1, "samples": 64}
GROWTH_TOKENS = 16  # of a sample

GOALS = {
    "hook": 1.5,  # of the floor
    "hook_on_gpu": 1.2,  # of the floor
    "metric": 1.0,  # of the floor
    "reduction": 2.0,  # of a plain sequence mean
    "small_reduction": 3.0,  # of one of 65,536 tokens, where fixed costs weigh
    "plan_ms": 5.0,
    "large_plan_s": 1.0,
    "payload_mb": 64.0,
    "growth": 1.2,  # of linear growth
    "kept_by_sample": 3.1,  # numbers of 8 bytes: coefficient, group's sum, own sum; 0.1 for groups
    "kept_vectors": 1.07,  # fp32 vectors of this rank's tokens, and two fp64 for each 64 tokens
    "loss_function": 2.0,  # of the script's own, in stock Megatron
    "added_ms": 2.0,
    "step": 0.02,  # of stock Megatron's step, added to it
    "slow_loader": 1.02,  # of stock Megatron's step over the same loader
    "loader_wait": 0.02,  # of a step without delay
    "sent": 1.05 * 4,  # bytes a token: weights of packs in fp32, and numbers of samples
    "message": 1.0,  # of the time of a pickle
    "policy_memory": 1.05,  # of Megatron's cross entropy
    "gpu_step": 1.005,  # of stock Megatron's step
    "gpu_memory": 1.001,  # of stock Megatron's peak
    "gpu_waits": 0,  # of the CPU for the GPU, a step, besides stock Megatron's
    "gpu_waits_of_masks": 1,  # the same where the masks are on the GPU
    "gpu_gradient": 2.0,  # of the error of one unsplit process
    "gpu_indices": 0,
    "import_s": 0.2,  # beyond torch's
}


def by_row(plan: object, i: int) -> Tensor:
    """A custom aggregation: the mean over each sample, by a function of the user."""
    mask = plan.microbatches[i].loss_mask  # type: ignore[attr-defined]
    if mask.dim() == 1:
        return mask / mask.sum()
    return mask / mask.sum(dim=1, keepdim=True).clamp(min=1)


AGGREGATIONS = {
    "token_mean": LossAggregation(mode="token_mean"),
    "prompt_mean": LossAggregation(mode="prompt_mean"),
    "custom": LossAggregation(mode="custom", function=by_row),
}
"""Modes differ in the coefficient of a sample alone; a custom one has none."""


@dataclass(frozen=True)
class Shape:
    """Of one microbatch; thd has as many tokens as bshd, in samples of heavy-tailed length."""

    samples: int
    length: int
    layout: str

    def microbatch(self) -> Microbatch:
        """Whole; with the first part of every sample masked, as a prompt is."""
        generator = torch.Generator().manual_seed(SEED)
        prompt = 0.2 + 0.4 * torch.rand(self.samples, 1, generator=generator)
        prompts = torch.arange(self.samples) // 8
        if self.layout == "bshd":
            mask = (torch.arange(self.length) >= prompt * self.length).float()
            return Microbatch(mask, prompt_ids=prompts)
        lengths = self.lengths(generator)
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        place = torch.arange(self.samples * self.length) - starts[:-1].repeat_interleave(lengths)
        first = (prompt.view(-1) * lengths).repeat_interleave(lengths)
        return Microbatch((place >= first).float(), starts.int(), prompts)

    def lengths(self, generator: torch.Generator) -> Tensor:
        """int64 [samples], Pareto-distributed (exponent 2) multiples of 16 (`2 * cp`, cp = 8)."""
        u = torch.rand(self.samples, generator=generator, dtype=torch.float64)
        tail = (1 - u) ** -0.5
        total = self.samples * self.length // 16 - self.samples  # beyond 16 tokens each
        lengths = 1 + (tail / tail.sum() * total).long()
        lengths[0] += self.samples * self.length // 16 - lengths.sum()
        return 16 * lengths


def many_microbatches(samples: int, length: int, number: int, layout: str) -> list[Microbatch]:
    """A rank's step, in microbatches of one shape."""
    return [Shape(samples // number, length, layout).microbatch() for _ in range(number)]


def rows_of_rank(rank: int) -> list[Microbatch]:
    """One rank's part of the `LARGE_PLAN`; a prompt's samples lie on any ranks."""
    samples, prompts, ranks = LARGE_PLAN
    generator = torch.Generator().manual_seed(SEED + rank)
    ids = torch.randint(prompts, (samples // ranks,), generator=generator)
    return [Microbatch(torch.ones(len(part), 4), prompt_ids=part) for part in ids.chunk(16)]


QUICK: dict[str, object] = {
    "MICROBATCHES": ((8, 64),),
    "PLAN": (64, 64, 8),
    "LARGE_PLAN": (1000, 100, 4),
    "MODEL": SMALL_MODEL,
    "TRAINING_STEP": Step(microbatches=2, rows=1, length=32),
    "LOGITS": (64, 256),
    "LOSS_FUNCTIONS": ((8, 128),),
    "GROWTH": dict.fromkeys(GROWTH, (1, 2)),
}
"""What ``--quick`` measures instead, of the names above."""
