"""Steps of the oracle, fixed and at random, and as tensors in the layouts of the package."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_loss_agg import CPLayout, LossAggregation
from tests import oracle
from tests.oracle import Sample, Step

F64 = torch.float64
LAYOUTS = ("thd", "thd_row", "thd_padded", "bshd")
MODES = sorted(oracle.INNER)
CONFIGS = [(mode, empty) for mode in MODES for empty in ("count", "skip")]


def divisor_of(mode: str, divisor: float = 4.0) -> float | None:
    return divisor if mode in ("constant", "sum") else None


def aggregation(mode: str, **options: Any) -> LossAggregation:
    return LossAggregation(**{"mode": mode, "divisor": divisor_of(mode), **options})


def expected_weights(mode: str, step: Step, **options: Any) -> list[Any]:
    """The oracle's, for ``aggregation(mode, **options)``."""
    return oracle.step_weights(mode, step, **{"divisor": divisor_of(mode), **options})


def flatten(nested: Any) -> list[float]:
    return [x for part in nested for x in flatten(part)] if isinstance(nested, list) else [nested]


def assert_weights(got: list[Any], expected: list[Any]) -> None:
    got, expected = (torch.tensor(flatten(x), dtype=F64) for x in (got, expected))
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=0)


def assert_counts(counts: Any, step: Step, mode: str) -> None:
    """Those of a plan in ``mode`` against loops over the step; of groups where the mode has any."""
    values = [m for _, sample in oracle.samples_of(step) for m in sample.mask]
    torch.testing.assert_close(counts.tokens, float(sum(values)), rtol=1e-13, atol=0)
    assert int(counts.active_tokens) == sum(1 for m in values if m)
    assert int(counts.samples) == oracle.number_of(step, "sample")
    assert int(counts.microbatches) == sum(len(rank) for rank in step)
    for unit in ("prompt", "rollout", "dataset"):
        if mode == f"{unit}_mean":
            assert int(getattr(counts, f"{unit}s")) == oracle.number_of(step, unit)


@dataclass(frozen=True)
class Laid:
    """One microbatch as keyword arguments of ``Microbatch``, and where each token went."""

    inputs: dict[str, Any]
    index: list[list[int]]  # position of every token of every sample in the flattened mask

    def samples(self, weights: torch.Tensor) -> list[list[float]]:
        """Weights per sample and token; anything at a position of no token must be 0."""
        assert weights.shape == self.inputs["loss_mask"].shape
        flat = weights.reshape(-1)
        padding = torch.ones(flat.numel(), dtype=torch.bool)
        padding[flatten(self.index)] = False
        assert not flat[padding].any(), "weight at a padding position"
        return [flat[positions].tolist() for positions in self.index]


def padded_length(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def lay(
    samples: list[Sample], layout: str, multiple: int = 1, dtype: torch.dtype = torch.float64
) -> Laid:
    """Tensors of one microbatch; every sequence is padded to a multiple of ``multiple``."""
    ids = {
        "prompt_ids": torch.tensor([s.prompt for s in samples], dtype=torch.int64),
        "rollout_ids": torch.tensor([s.rollout for s in samples], dtype=torch.int64),
        "dataset_ids": torch.tensor([s.dataset for s in samples], dtype=torch.int64),
    }
    if any(s.weight != 1 for s in samples):
        ids["sample_weights"] = torch.tensor([s.weight for s in samples], dtype=dtype)
    lengths = [len(s.mask) for s in samples]
    if layout == "bshd":
        width = padded_length(max(lengths, default=0) + 1, multiple)
        mask = torch.zeros(len(samples), width, dtype=dtype)
        index = [[s * width + t for t in range(n)] for s, n in enumerate(lengths)]
        offsets = {}
    else:
        gap = multiple if layout == "thd_padded" else 0
        padded = [padded_length(n, multiple) + gap for n in lengths]
        starts = [sum(padded[:s]) for s in range(len(samples) + 1)]
        mask = torch.zeros(starts[-1] + gap, dtype=dtype)
        index = [list(range(starts[s], starts[s] + n)) for s, n in enumerate(lengths)]
        real = [sum(lengths[:s]) for s in range(len(samples) + 1)]
        offsets = {"cu_seqlens": torch.tensor(real, dtype=torch.int32)}
        if starts != real or gap:
            offsets["cu_seqlens_padded"] = torch.tensor(starts, dtype=torch.int32)
    for sample, positions in zip(samples, index, strict=True):
        if positions:
            mask.reshape(-1)[positions] = torch.tensor(sample.mask, dtype=dtype)
    if layout == "thd_row":
        mask = mask.unsqueeze(0)
    return Laid({"loss_mask": mask, **offsets, **ids}, index)


def cp_layout(inputs: dict[str, Any], cp: int, rank: int, kind: str | None = None) -> CPLayout:
    """How a context-parallel rank sees a microbatch: by ``kind``, or as the host splits it."""
    kind = kind or ("thd" if "cu_seqlens" in inputs else "bshd")
    axis = inputs["loss_mask"].shape[-1]
    if kind == "thd":
        axis = inputs.get("cu_seqlens_padded", inputs["cu_seqlens"])
    return getattr(CPLayout, kind)(axis, cp, rank)


# Ids collide where a host rounds them through fp64 (2**53), fp32 (2**24), int32, or takes a
# sentinel (-1, 0, the ends of int64) for "no group".
IDS = (0, -1, 1, 2**24, 2**24 + 1, 2**31, 2**32, 2**53, 2**53 + 1, -(2**53) - 1)
IDS += (2**63 - 1, -(2**63))


def weighted(step: Step, seed: int = 0) -> Step:
    """``step`` with weights of its samples, and some 0."""
    rng = random.Random(seed)
    return [
        [[replace(s, weight=rng.choice((0.0, 0.3, 1.0, 2.5))) for s in mb] for mb in rank]
        for rank in step
    ]


def random_step(seed: int, ranks: int) -> Step:
    """Ranks with 0 to 3 microbatches of 0 to 3 samples; groups lie across ranks at random."""
    rng = random.Random(seed)
    prompts, rollouts = rng.sample(IDS, 3), rng.sample(IDS, 4)

    def sample() -> Sample:
        fill = rng.choice([[0.0, 1.0], [1.0], [0.0], [0.0, 0.3, 2.5]])
        mask = tuple(rng.choice(fill) for _ in range(rng.randrange(6)))
        return Sample(mask, rng.choice(prompts), rng.choice(rollouts), rng.choice(prompts))

    return [
        [[sample() for _ in range(rng.randrange(4))] for _ in range(rng.randrange(4))]
        for _ in range(ranks)
    ]


def fixed_step(ranks: int) -> Step:
    """Groups lie on several ranks; ranks differ in microbatches and samples."""
    return [
        [
            [Sample((1.0,) * (r + s + k), 7 if s == 0 else 2**53, 2**53 + s) for s in range(r + 1)]
            for k in range(1 + r % 3)
        ]
        for r in range(ranks)
    ]


FULL = Sample((1.0, 0.0, 1.0), prompt=1, rollout=-1)
EMPTY = Sample((0.0, 0.0), prompt=1, rollout=-1)
HOLES = [
    [[], [[FULL], [FULL, EMPTY]]],  # a rank without microbatches
    [[[FULL]], [[EMPTY], [EMPTY, EMPTY]]],  # a rank without active tokens
    [[[]], [[FULL, FULL]]],  # a microbatch without samples
    [[[EMPTY]], [[EMPTY]]],  # nobody has a token
    [[], []],  # nobody has anything
]
